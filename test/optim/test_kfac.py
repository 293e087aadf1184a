"""The gradient of KFACPreconditioner is that of the operators' inverses on the same batch."""

from __future__ import annotations

import pytest
import torch
from optim.cases import F64
from optim.kfac_cases import HOW, LOSS, PROBLEMS, close, flattened, gradients_of, problem
from torch import nn

from curvops import EKFACLinearOperator, KFACLinearOperator
from curvops.optim import KFACPreconditioner

#: Methods, with and without reciprocals kept.
WAYS = [("eigen", True), ("eigen", False), ("inverse", True), ("ekfac", True), ("ekfac", False)]


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize(("method", "prediv"), WAYS)
@pytest.mark.parametrize("kind", [k for k in PROBLEMS if k != "tokens"])
def test_R5_the_gradient_is_that_of_the_operators_inverse(kind, method, prediv, approx):
    net, X, y = problem(kind)
    cls = EKFACLinearOperator if method == "ekfac" else KFACLinearOperator
    K = cls(net, LOSS, None, [(X, y)], fisher_type="empirical", kfac_approx=approx)
    with KFACPreconditioner(
        net,
        damping=0.03,
        kl_clip=None,
        compute_method=method,
        compute_eigenvalue_outer_product=prediv,
        kfac_approx=approx,
    ) as preconditioner:
        g, found = gradients_of(preconditioner, net, X, y)
    want = K.inverse(0.03, how=HOW[method]) @ g
    close(found, want)
    close(preconditioner.preconditioner @ g, want)
    v = torch.randn_like(g)
    close(preconditioner.operator @ v, K @ v)
    assert torch.linalg.vector_norm(want - g) > torch.linalg.vector_norm(g)  # it does something


@pytest.mark.parametrize("terms", ["batch+sequence", 90])
@pytest.mark.parametrize(
    ("fisher_type", "approx"), [("empirical", "expand"), ("empirical-per-term", "expand"), ("empirical", "reduce")]
)
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_R5_a_prediction_for_every_token(method, fisher_type, approx, terms):
    net, X, y = problem("tokens")
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type=fisher_type, class_dim=-1, kfac_approx=approx)
    preconditioner = KFACPreconditioner(
        net, damping=0.03, kl_clip=None, compute_method=method, kfac_approx=approx, loss_average=terms
    )
    g, found = gradients_of(preconditioner, net, X, y)
    close(found, K.inverse(0.03, how=HOW[method]) @ g)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_R5_a_sum_of_losses(method):
    net, X, y = problem("conv")
    loss = nn.CrossEntropyLoss(reduction="sum")
    K = KFACLinearOperator(net, loss, None, [(X, y)], fisher_type="empirical")
    preconditioner = KFACPreconditioner(net, damping=0.03, kl_clip=None, compute_method=method, loss_average=None)
    loss(net(X), y).backward()
    g = torch.cat([p.grad.flatten() for p in net.parameters()])
    preconditioner.step()
    close(torch.cat([p.grad.flatten() for p in net.parameters()]), K.inverse(0.03, how=HOW[method]) @ g)


@pytest.mark.parametrize("fisher_type", ["type-2", "mc"])
def test_R5_other_fishers_by_observe(fisher_type):
    net, X, y = problem("mlp")
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type=fisher_type, mc_samples=3, seed=5)
    preconditioner = KFACPreconditioner(net, damping=0.03, kl_clip=None)
    with preconditioner.observe(fisher_type=fisher_type, loss=LOSS, target=y, mc_samples=3, seed=5):
        out = net(X)
    flattened(out, y).backward()
    g = torch.cat([p.grad.flatten() for p in net.parameters()])
    preconditioner.step()
    close(torch.cat([p.grad.flatten() for p in net.parameters()]), K.inverse(0.03) @ g)


@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, 0), (2, 1, 1), (1, 2, "same")])
@pytest.mark.parametrize("bias", [True, False])
def test_R5_the_block_of_a_single_convolution_is_its_fisher(bias, stride, dilation, padding):
    """One layer, a squared error for every position: ``B`` is a multiple of the identity, and ``B ⊗ A`` is the Fisher block."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2, stride, padding, dilation, bias=bias), nn.Flatten(2)).double()
    X, loss = torch.randn(6, 2, 5, 4, dtype=F64), nn.MSELoss(reduction="sum")
    target = torch.randn_like(net(X))
    K = KFACLinearOperator(net, loss, None, [(X, target)], fisher_type="type-2")
    preconditioner = KFACPreconditioner(net, damping=0.1, kl_clip=None, loss_average=None)
    with preconditioner.observe(fisher_type="type-2", loss=loss, target=target):
        out = net(X)
    loss(out, target).backward()
    g = torch.cat([p.grad.flatten() for p in net.parameters()])
    preconditioner.step()
    params = {n: p.detach() for n, p in net.named_parameters()}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, X).flatten())(params)
    J = torch.cat([j.flatten(1) for j in J.values()], 1)
    fisher = 2 * J.T @ J
    close(preconditioner.operator.to_dense(), fisher)
    close(K.to_dense(), fisher)
    want = torch.linalg.solve(fisher + 0.1 * torch.eye(len(fisher), dtype=F64), g)
    close(torch.cat([p.grad.flatten() for p in net.parameters()]), want)
