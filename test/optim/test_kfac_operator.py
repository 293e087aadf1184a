"""Optimizers are operators: they start from one, and are one."""

from __future__ import annotations

import pytest
import torch
from optim.kfac_cases import (
    HOW,
    LOSS,
    METHODS,
    close,
    flat_gradient,
    flat_parameters,
    flattened,
    gradients_of,
    mixed,
    oracle_factors,
    problem,
)
from scipy.sparse.linalg import eigsh
from torch import nn

from curvops import EKFACLinearOperator, KFACLinearOperator
from curvops.optim import KFAC, SINGD, KFACPreconditioner


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["mlp", "conv", "tied"])
def test_R5_a_preconditioner_starts_from_an_operator(kind, method):
    net, X, y = problem(kind)
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type="type-2")
    preconditioner = KFACPreconditioner(
        net, curvature=K, damping=0.02, factor_decay=1.0, kl_clip=None, compute_method=method
    )
    g, found = gradients_of(preconditioner, net, X, y)  # with this decay its own batch counts nothing
    if method != "ekfac":
        close(preconditioner.operator.to_dense(), K.to_dense())
    close(found, K.inverse(0.02, how=HOW[method]) @ g)


@pytest.mark.parametrize("method", METHODS)
def test_R5_kfac_starts_from_an_operator(method):
    net, X, y = problem("conv")
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type="type-2")
    optimizer = KFAC(
        net, lr=0.5, momentum=0.0, curvature=K, damping=0.02, factor_decay=1.0, kl_clip=None, compute_method=method
    )
    before = flat_parameters(net)
    flattened(net(X), y).backward()
    optimizer.step()
    close(before - flat_parameters(net), 0.5 * (K.inverse(0.02, how=HOW[method]) @ flat_gradient(net)))


def test_R5_the_start_is_averaged_with_what_comes():
    net, X, y = problem("mlp")
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type="type-2")
    preconditioner = KFACPreconditioner(net, curvature=K, factor_decay=0.6)
    gradients_of(preconditioner, net, X, y)
    start = [(K.factors[f"{k}.weight"].input[None], K.factors[f"{k}.weight"].output[None]) for k in (0, 2)]
    for k, (A, B) in zip((0, 2), mixed(start, oracle_factors(problem("mlp")[0], X, y), 0.6), strict=True):
        found = preconditioner.operator.factors[f"{k}.weight"]
        close(found.input, A[0])
        close(found.output, B[0])


def test_R5_an_operator_of_some_parameters_starts_those():
    net, X, y = problem("mlp")
    some = {n: p for n, p in net.named_parameters() if n.startswith("2")}
    K = KFACLinearOperator(net, LOSS, some, [(X, y)], fisher_type="type-2")
    preconditioner = KFACPreconditioner(net, curvature=K, factor_decay=1.0)
    gradients_of(preconditioner, net, X, y)
    factors, own = preconditioner.operator.factors, oracle_factors(problem("mlp")[0], X, y)
    close(factors["2.weight"].output, K.factors["2.weight"].output)
    close(factors["0.weight"].output, own[0][1][0])


def test_R5_singd_starts_from_an_operator():
    net, X, y = problem("mlp")
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type="type-2")
    optimizer = SINGD(net, lr=1.0, momentum=0.0, damping=0.02, curvature=K, lr_cov=0.0, T=1)
    flattened(net(X), y).backward()
    g, before = flat_gradient(net), flat_parameters(net)
    optimizer.step()
    want = K.inverse(0.02, how="factors") @ g
    close(before - flat_parameters(net), want)
    close(optimizer.preconditioner @ g, want)


@pytest.mark.parametrize("make", [KFACPreconditioner, KFAC, SINGD])
def test_R5_the_curvature_must_fit(make):
    net, X, y = problem("mlp")
    for cls, options, error in (
        (EKFACLinearOperator, {}, "curvature: found EKFACLinearOperator, expected a KFACLinearOperator"),
        (KFACLinearOperator, {"kfac_approx": "reduce"}, "found kfac_approx='reduce', expected 'expand'"),
    ):
        K = cls(net, LOSS, None, [(X, y)], **options)
        with pytest.raises((TypeError, ValueError), match=error):
            make(net, curvature=K)
        assert not net._forward_hooks


@pytest.mark.parametrize("make", [KFACPreconditioner, KFAC, SINGD])
def test_R5_the_curvature_of_another_model_is_refused(make):
    """By name, before any step."""
    net, X, y = problem("mlp")
    wide = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for other, error in (
        (wide, r"curvature: found '0.weight' with shape \(6, 5\), expected \(4, 5\)"),
        (problem("tied")[0], "curvature: found the parameters .*'a.bias'.*expected some of .*'0.bias'"),
    ):
        K = KFACLinearOperator(other, LOSS, None, [(X, y)])
        with pytest.raises(ValueError, match=error):
            make(net, curvature=K)
        assert not net._forward_hooks


@pytest.mark.parametrize("method", METHODS)
def test_R5_a_preconditioner_and_kfac_are_operators(method):
    net, X, y = problem("conv")
    for make in (KFACPreconditioner, KFAC):
        with make(net, damping=0.01, compute_method=method) as optimizer:
            gradients_of(optimizer, net, X, y)
            _check(optimizer)


def test_R5_singd_is_operators():
    net, X, y = problem("mlp")
    optimizer = SINGD(net, T=1, lr=0.0)
    flattened(net(X), y).backward()
    optimizer.step()
    _check(optimizer)


def _check(optimizer):
    """The end of the spectrum that is apart from the rest: what has no curvature makes ``1 / λ`` a multiple eigenvalue."""
    for op, end in ((optimizer.operator, "LA"), (optimizer.preconditioner, "SA")):
        dense = op.to_dense()
        close(dense, dense.T)
        values = torch.linalg.eigvalsh(dense)
        want = values[-1] if end == "LA" else values[0]
        (found,) = eigsh(op, k=1, which=end, return_eigenvectors=False)
        assert found == pytest.approx(want.item(), rel=1e-12, abs=1e-12 * values[-1].item())


def test_R5_the_undamped_operator_of_singd_is_what_its_factors_stand_for():
    """After many small steps of IKFAC on one batch the operator is that batch's KFAC."""
    net, X, y = problem("mlp")
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type="empirical")
    optimizer = SINGD(net, lr=0.0, momentum=0.0, damping=0.1, T=1, kfac_like=True, alpha1=0.0, lr_cov=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        LOSS(net(X), y).backward()
        optimizer.step()
    close(optimizer.operator.to_dense(), K.to_dense(), 1e-7)
