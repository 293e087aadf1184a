"""KFAC is KFACPreconditioner and SGD in one; its damping may follow the loss; it trains."""

from __future__ import annotations

import pytest
import torch
from optim.cases import difference, mlp
from optim.kfac_cases import (
    METHODS,
    flat_gradient,
    flat_parameters,
    flattened,
    gradients_of,
    problem,
    stream,
)
from sklearn.datasets import load_digits
from torch import nn

from curvops.optim import KFAC, KFACPreconditioner, LevenbergMarquardt


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.9, 0.01), (0.0, 0.0)])
@pytest.mark.parametrize("method", METHODS)
def test_R5_kfac_is_the_preconditioner_and_sgd(method, momentum, weight_decay):
    nets, start = (mlp(), mlp()), mlp()
    options = {"damping": 0.03, "kl_clip": 1e-3, "inv_update_steps": 3, "factor_decay": 0.8, "compute_method": method}
    ours = KFAC(nets[0], lr=0.1, momentum=momentum, weight_decay=weight_decay, **options)
    sgd = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    preconditioner = KFACPreconditioner(nets[1], lr=0.1, **options)
    for X, y in stream("mlp", 20):
        ours.zero_grad()
        flattened(nets[0](X), y).backward()
        ours.step()
        sgd.zero_grad()
        flattened(nets[1](X), y).backward()
        preconditioner.step()
        sgd.step()
    assert difference(*nets) < 1e-12
    assert difference(nets[0], start) > 1e-2


def predicted(operator, g, delta, damping):
    """``∇'δ + δ'(F + λI)δ / 2`` with a dense matrix."""
    F = operator.to_dense() + damping * torch.eye(len(g), dtype=g.dtype)
    return g @ delta + 0.5 * delta @ F @ delta


def follows(damping, want, rho, worse):
    """The rule, in plain numbers."""
    want *= 1 / 0.8 if rho < 0.25 or worse else (0.8 if rho > 0.75 else 1.0)
    assert float(damping.damping) == pytest.approx(want, rel=1e-12)
    return want


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("lr", [0.05, 0.9, 30.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_R5_levenberg_marquardt(momentum, lr, method):
    """The ratio of reductions, with the quadratic model written densely; the damping follows it."""
    net, X, y = problem("mlp")
    damping = LevenbergMarquardt(0.3, factor=0.8)
    optimizer = KFAC(net, lr=lr, momentum=momentum, damping=damping, kl_clip=None, compute_method=method)
    want = 0.3
    for _ in range(6):
        optimizer.zero_grad()
        before = flattened(net(X), y)
        before.backward()
        g, start = flat_gradient(net), flat_parameters(net)
        optimizer.step()
        change = predicted(optimizer.operator, g, flat_parameters(net) - start, want)
        after = flattened(net(X), y).detach()
        damping.update(before, after)
        rho = (after - before.detach()) / change
        torch.testing.assert_close(damping.ratio, rho, rtol=1e-9, atol=0)  # differences of nearby numbers
        want = follows(damping, want, rho, after > before)


@pytest.mark.parametrize("clip", [None, 1e-4])
def test_R5_levenberg_marquardt_of_a_preconditioner(clip):
    """Its step is ``-lr`` times the clipped gradient that it leaves."""
    net, X, y = problem("mlp")
    damping, lr, want = LevenbergMarquardt(0.3, factor=0.8), 0.4, 0.3
    preconditioner = KFACPreconditioner(net, lr=lr, damping=damping, kl_clip=clip)
    sgd = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(4):
        before = flattened(net(X), y).detach()
        g, P = gradients_of(preconditioner, net, X, y)
        change = predicted(preconditioner.operator, g, -lr * P, want)
        sgd.step()
        after = flattened(net(X), y).detach()
        damping.update(before, after)
        torch.testing.assert_close(damping.ratio, (after - before) / change, rtol=1e-9, atol=0)
        want = follows(damping, want, damping.ratio, after > before)


@pytest.mark.parametrize(
    ("expected", "before", "after", "factor"),
    [
        (-1.0, 1.0, 0.1, 0.8),
        (-1.0, 1.0, 0.24, 0.8),  # just above 3/4
        (-1.0, 1.0, 0.26, 1.0),
        (-1.0, 1.0, 0.74, 1.0),
        (-1.0, 1.0, 0.76, 1.25),  # just below 1/4
        (-1.0, 1.0, 0.9, 1.25),
        (-1.0, 1.0, 2.0, 1.25),
        (1.0, 0.0, 1.0, 1.25),  # an increase, as expected of a step of momentum
        (-1.0, 1.0, float("nan"), 1.25),
        (0.0, 1.0, 1.0, 1.25),  # a step that was skipped
    ],
)
def test_R5_levenberg_marquardt_in_all_cases(expected, before, after, factor):
    damping = LevenbergMarquardt(2.0, factor=0.8)
    damping.expect(torch.tensor(expected, dtype=torch.float64))
    damping.update(before, torch.tensor(after))
    assert float(damping.damping) == pytest.approx(2.0 * factor, rel=1e-12)
    with pytest.raises(RuntimeError, match="no step"):
        damping.update(1.0, 1.0)


def test_R5_levenberg_marquardt_has_bounds_and_refuses_bad_ones():
    damping = LevenbergMarquardt(2.0, factor=0.5, least=1.5, most=3.0)
    for after, want in ((0.0, 1.5), (2.0, 3.0)):
        damping.expect(torch.tensor(-1.0))
        damping.update(1.0, after)
        assert float(damping.damping) == want
    for bad in ({"damping": 0.0}, {"factor": 1.0}, {"damping": 1.0, "most": 0.5}):
        with pytest.raises(ValueError, match="expected"):
            LevenbergMarquardt(**bad)


def test_R5_levenberg_marquardt_before_there_are_factors():
    """Nothing is preconditioned yet: there is no model to compare with, and the damping becomes safer."""
    net, X, y = problem("mlp")
    damping = LevenbergMarquardt(0.5)
    preconditioner = KFACPreconditioner(net, damping=damping, factor_update_steps=2)
    gradients_of(preconditioner, net, X, y)
    state = preconditioner.state_dict(include_factors=False)
    preconditioner.close()
    resumed = KFACPreconditioner(net, damping=damping, factor_update_steps=2)
    with pytest.warns(UserWarning, match="no factors"):
        resumed.load_state_dict(state)
    g, found = gradients_of(resumed, net, X, y)
    assert torch.equal(g, found)
    damping.update(1.0, 0.9)
    assert float(damping.damping) > 0.5


@pytest.mark.parametrize(("method", "damping"), [("eigen", 0.01), ("ekfac", 0.01), ("inverse", 0.1)])
def test_R5_kfac_trains_digits(method, damping):
    """93 % of held-out images after three epochs. ``"inverse"`` damps each factor, so 0.1² there is 0.01 elsewhere."""
    torch.manual_seed(0)
    digits = load_digits()
    X, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding="same"), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(144, 10)),
    )
    train, test = torch.randperm(len(X)).tensor_split([1500])
    optimizer = KFAC(net, lr=0.1, damping=damping, inv_update_steps=5, compute_method=method)
    for epoch in range(3):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(X[batch]), y[batch])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    with torch.no_grad():
        accuracy = (net(X[test]).argmax(1) == y[test]).double().mean().item()
    print(f"held-out accuracy: {accuracy:.1%}")
    assert accuracy > 0.93
