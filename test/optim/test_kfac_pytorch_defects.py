"""Every defect of kfac-pytorch that was verified, as far as one process goes: where it is tested, or why it cannot arise.

* scale of factors, batch size, positions, accumulation, identity in the average: ``test_R5_the_gradient_is...``,
  ``test_R5_the_running_average_has_no_identity_in_it``, ``test_R4_micro_batches_equal_the_batch``, and below;
* deadlocks: hooks add to local sums, nothing is sent from them;
* a double update of A under activation checkpointing: ``test_R9_activation_checkpoints``;
* ``torch.amp.GradScaler`` rejected: ``test_R7_the_preconditioner_between...``; A in bfloat16: ``test_R7_autocast``;
* a NaN batch poisons factors, a failed decomposition ends training: ``test_R7_a_preconditioner_leaves...``, and below;
* resume: ``test_R8_a_preconditioner_goes_on_bit_for_bit``; names and shapes: ``test_R8_states_that_do_not_fit...``;
* ``kl_clip=None``: ``test_R5_kl_clip``; names of methods as strings: ``test_bad_arguments``; "case-insensitive" skipping:
  ``test_R5_layers_that_are_skipped``; schedulers that compound: ``test_R5_schedules``;
* convolutions with groups, dilation, padding: ``test_R5_the_gradient_is...[conv]``, ``test_singd_defects``; memory formats,
  transposed inputs: below; keywords, in-place activations: ``test_singd_defects``;
* unused layers, frozen biases, tied weights, shared modules: ``test_every_parameter``, and below;
* hooks that stay, gradients of evaluation: ``test_observation``; parameter groups: ``KFAC``, ``test_R6_groups...``;
* no statistics of what it does: ``clip_scale``, ``operator``, ``memory_usage``, ``treatments``.
"""

from __future__ import annotations

import pytest
import torch
from optim.cases import F64
from torch import nn

from curvops import KFACLinearOperator
from curvops.optim import KFACPreconditioner

LOSS = nn.CrossEntropyLoss()


def net_and_data(n=8):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()
    return net, torch.randn(n, 2, 6, 6, dtype=F64), torch.randint(3, (n,))


def step(net, X, y, **options):
    preconditioner = KFACPreconditioner(net, kl_clip=None, **options)
    net.zero_grad()
    LOSS(net(X), y).backward()
    preconditioner.step()
    preconditioner.close()
    return preconditioner


def test_R11_convolutions_are_preconditioned():
    """Its normalisation made the direction of convolutional layers that of the gradient."""
    net, X, y = net_and_data()
    LOSS(net(X), y).backward()
    g = net[0].weight.grad.flatten().clone()
    step(net, X, y, damping=1e-3)
    assert torch.cosine_similarity(g, net[0].weight.grad.flatten(), dim=0) < 0.9


def test_R11_factors_do_not_know_the_batch_size():
    net, X, y = net_and_data()
    once = step(net, X, y)
    twice = step(net, torch.cat([X, X]), torch.cat([y, y]))
    torch.testing.assert_close(once.operator.to_dense(), twice.operator.to_dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "change", [lambda X: X.contiguous(memory_format=torch.channels_last), lambda X: X.mT.contiguous().mT]
)
def test_R11_memory_formats_and_transposed_inputs(change):
    net, X, y = net_and_data()
    a, b = step(net, X, y), step(net, change(X), y)
    torch.testing.assert_close(a.operator.to_dense(), b.operator.to_dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_R11_dead_layers_and_constant_inputs(method):
    """Factors of rank zero and one, and of size 1e-20 and 1e20."""
    for scale in (0.0, 1e-20, 1e20):
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
        with torch.no_grad():
            net[0].bias.fill_(-1e30)
        step(net, scale * torch.ones(6, 4, dtype=F64), torch.zeros(6, dtype=torch.long), compute_method=method)
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_R11_layers_that_are_never_used():
    net, X, y = net_and_data()
    net.extra = nn.Linear(2, 2)
    run = nn.Sequential.forward
    net.forward = lambda x: run(nn.Sequential(*list(net)[:4]), x)
    preconditioner = step(net, X, y)
    assert net.extra.weight.grad is None
    assert "extra.weight" not in preconditioner.treatments


def test_R11_a_frozen_bias_leaves_the_layer():
    net, X, y = net_and_data()
    net[3].bias.requires_grad_(False)
    params = {n: p for n, p in net.named_parameters() if p.requires_grad}
    K = KFACLinearOperator(net, LOSS, params, [(X, y)], fisher_type="empirical")
    preconditioner = step(net, X, y)
    assert net[3].bias.grad is None
    torch.testing.assert_close(preconditioner.operator.to_dense(), K.to_dense(), rtol=1e-11, atol=1e-13)


def test_R11_a_decomposition_that_fails_goes_on_in_another_way(monkeypatch):
    net, X, y = net_and_data()
    want = step(net, X, y, damping=0.1)
    g = [p.grad.clone() for p in net.parameters()]
    eigh, calls = torch.linalg.eigh, []

    def fails_once(M):
        calls.append(M.shape)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(M)

    monkeypatch.setattr(torch.linalg, "eigh", fails_once)
    step(net, X, y, damping=0.1)
    assert want.steps == 1
    for a, p in zip(g, net.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-9, atol=1e-11)


def test_R11_half_precision_parameters_keep_precise_factors():
    net = nn.Linear(6, 3).to(torch.bfloat16)
    X, y = torch.randn(40, 6).to(torch.bfloat16), torch.randint(3, (40,))
    preconditioner = step(net, X, y)
    rows = torch.cat([X.double(), torch.ones(40, 1, dtype=F64)], 1)
    found = preconditioner.operator.factors["weight"].input
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), rows.T @ rows / 40, rtol=1e-6, atol=1e-6)
