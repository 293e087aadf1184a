"""Running averages, when they are decomposed, damping and clipping, against formulas in loops."""

from __future__ import annotations

import math

import pytest
import torch
from optim.cases import NETS, batches, mlp, observed, rows
from optim.kfac_cases import (
    HOW,
    METHODS,
    close,
    flattened,
    gradients_of,
    layers,
    mixed,
    oracle_factors,
    oracle_gradient,
    problem,
    stream,
)
from torch import nn

from curvops import KFACLinearOperator
from curvops.optim import KFACPreconditioner, LambdaParamScheduler, exp_decay_factor_averaging


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("decay", [0.95, 0.0, 1.0, exp_decay_factor_averaging(0.8)], ids=["0.95", "0", "1", "schedule"])
def test_R5_the_running_average_has_no_identity_in_it(kind, decay, approx):
    net, averages = NETS[kind](), None
    preconditioner = KFACPreconditioner(
        net, factor_decay=decay, factor_update_steps=2, inv_update_steps=4, kl_clip=None, kfac_approx=approx
    )
    for t, (X, y) in enumerate(batches(kind, 9)):
        if t % 2 == 0:
            averages = mixed(
                averages, oracle_factors(NETS[kind](), X, y, approx), decay(t) if callable(decay) else decay
            )
        gradients_of(preconditioner, net, X, y)  # the weights stay: nothing moves them
    factors, names = preconditioner.operator.factors, {id(m): n for n, m in net.named_modules()}
    for layer, (A, B) in zip(layers(net), averages, strict=True):
        found = factors[f"{names[id(layer)]}.weight"]
        close(found.input.reshape(A.shape), A)
        close(found.output.reshape(B.shape), B)


def test_R5_the_running_average_is_that_of_the_operator():
    net = mlp()
    preconditioner = KFACPreconditioner(net, factor_decay=0.7, kl_clip=None)
    data = list(batches("mlp", 5))
    K = KFACLinearOperator(net, nn.CrossEntropyLoss(), None, data[:1], fisher_type="empirical")
    for t, (X, y) in enumerate(data):
        gradients_of(preconditioner, net, X, y)
        if t:
            K.update([(X, y)], 0.7)
    close(preconditioner.operator.to_dense(), K.to_dense())


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_R5_factors_and_inverses_follow_their_schedules(method, kind):
    """Between inverse updates gradients are multiplied by the inverse of older averages."""
    net, averages, held = NETS[kind](), None, None
    factors_every, inverses_every = (lambda t: 1 if t < 3 else 2), (lambda t: 2 if t < 4 else 3)
    preconditioner = KFACPreconditioner(
        net,
        damping=0.05,
        factor_decay=0.6,
        factor_update_steps=factors_every,
        inv_update_steps=inverses_every,
        kl_clip=None,
        compute_method=method,
    )
    for t, (X, y) in enumerate(stream(kind, 10)):
        twin = NETS[kind]()
        new = oracle_factors(twin, X, y)
        if t % factors_every(t) == 0:
            averages = mixed(averages, new, 0.6)
        if t % inverses_every(t) == 0:
            held = averages
        _, found = gradients_of(preconditioner, net, X, y)
        close(found, oracle_gradient(twin, held, 0.05, HOW[method]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prediv", [True, False])
def test_R5_when_damping_takes_effect(method, prediv):
    """At once for eigenvalues that are kept, with the next inverse update for what holds the damping."""
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(
        net,
        damping=lambda t: 0.1 if t == 0 else 0.5,
        inv_update_steps=2,
        factor_update_steps=3,
        kl_clip=None,
        compute_method=method,
        compute_eigenvalue_outer_product=prediv,
    )
    found = [gradients_of(preconditioner, net, X, y) for _ in range(3)]
    old, new = (preconditioner.operator.inverse(d, how=HOW[method]) @ found[0][0] for d in (0.1, 0.5))
    late = method == "inverse" or (method == "eigen" and prediv)
    for (_, P), want in zip(found, (old, old if late else new, new), strict=True):
        close(P, want)


@pytest.mark.parametrize("skip", [None, ["^2$"]], ids=["all", "some"])
@pytest.mark.parametrize("clip", [1e-6, 1e3, None])
def test_R5_kl_clip(clip, skip):
    """``min(1, sqrt(κ / sum lr² <P, g>))``, of the layers that are preconditioned."""
    net, X, y = problem("mlp")
    lr = 0.3
    preconditioner = KFACPreconditioner(net, damping=0.01, kl_clip=clip, lr=lambda _: lr, skip_layers=skip)
    g, found = gradients_of(preconditioner, net, X, y)
    own = sum(p.numel() for p in net[0].parameters()) if skip else len(g)
    P = preconditioner.preconditioner @ g[:own]
    nu = 1.0 if clip is None else min(1.0, math.sqrt(clip / (lr**2 * float(P @ g[:own]))))
    assert (nu < 1) == (clip == 1e-6)
    close(found, torch.cat([nu * P, g[own:]]))
    if clip is None:
        assert preconditioner.clip_scale is None
    else:
        assert preconditioner.clip_scale.item() == pytest.approx(nu, rel=1e-12)


def test_R5_kl_clip_of_nothing():
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(net)
    (0.0 * flattened(net(X), y)).backward()
    preconditioner.step()
    assert all(p.grad.abs().max() == 0 for p in net.parameters())
    assert preconditioner.clip_scale == 1
    preconditioner.close()
    still = KFACPreconditioner(net, lr=0.0, kl_clip=lambda t: 1e-9 if t == 0 else None)
    gradients_of(still, net, X, y)
    assert still.clip_scale == 1
    gradients_of(still, net, X, y)
    assert still.clip_scale is None


def test_R5_ekfac_between_and_at_inverse_updates():
    """Second moments average in the eigenvectors; new eigenvectors see the old matrix's diagonal."""
    net, twin = mlp(), mlp()  # nothing observes the passes of the twin, and weights stay
    decay, every, damping = 0.6, 3, 0.01
    preconditioner = KFACPreconditioner(
        net, damping=damping, factor_decay=decay, inv_update_steps=every, kl_clip=None, compute_method="ekfac"
    )
    averages, states = None, [None, None]
    for t, (X, y) in enumerate(stream("mlp", 8)):
        averages = mixed(averages, oracle_factors(twin, X, y), decay)
        want = []
        for k, (layer, x, g) in enumerate(observed(twin, lambda X=X, y=y: flattened(twin(X), y))):
            a, b = rows(layer, x, g, "expand")
            state = states[k]
            if t % every == 0:
                QA, QB = (torch.linalg.eigh(F[0]).eigenvectors for F in averages[k])
                if state is not None:
                    old = torch.einsum("oi,po,qi->pq", state[2], (QB.T @ state[0]) ** 2, (QA.T @ state[1]) ** 2)
            else:
                QB, QA, old = state
            D = torch.einsum("no,ni->noi", b[0], a[0])
            squares = len(X) * torch.einsum("noi,op,iq->npq", D, QB, QA).square().sum(0)
            values = squares if state is None else decay * old + (1 - decay) * squares
            states[k] = QB, QA, values
            G = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            P = QB @ ((QB.T @ G @ QA) / (values + damping)) @ QA.T
            want += [P[:, :-1].flatten(), P[:, -1]]
        _, found = gradients_of(preconditioner, net, X, y)
        close(found, torch.cat(want))


@pytest.mark.parametrize("later", [False, True], ids=["at once", "after a while"])
def test_R5_schedules(later):
    """Absolute: a factor of 1/2 from some step on does not become 1/4, 1/8, ..."""
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(
        net, factor_update_steps=lambda t: 2, inv_update_steps=4, damping=0.1, lr=1.0, factor_decay=0.5
    )
    lambdas = {
        "damping_lambda": lambda t: 0.5 ** (t // 2),
        "factor_decay_lambda": lambda t: 0.5,
        "kl_clip_lambda": lambda t: 1.0 + t,
        "lr_lambda": lambda t: 1 / (1 + t),
        "inv_update_steps_lambda": lambda t: 0.1 if t < 3 else 2.0,
    }
    scheduler = LambdaParamScheduler(preconditioner, **lambdas)
    now = preconditioner.hyperparameters.at
    for t in range(1, 7):
        gradients_of(preconditioner, net, X, y)
        if later and t == 3:  # what was set before counts nothing
            scheduler = LambdaParamScheduler(preconditioner, **lambdas)
        scheduler.step()
        assert (now("damping", 0), now("lr", 0)) == (0.1 * 0.5 ** (t // 2), 1 / (1 + t))
        assert (now("factor_decay", 0), now("kl_clip", 0)) == (0.25, 0.001 * (1 + t))
        assert now("inv_update_steps", 0) == (1 if t < 3 else 8)
    scheduler.step(100)
    assert now("lr", 0) == 1 / 101
    for bad, error in (
        ({"factor_update_steps_lambda": lambda t: 1}, "factor_update_steps: found <function"),
        ({"lr_lambda": lambda t: -1.0}, "lr: found -1.0"),
    ):
        with pytest.raises(ValueError, match=error):
            LambdaParamScheduler(preconditioner, **bad).step()
    with pytest.raises(TypeError, match="momentum_lambda"):
        LambdaParamScheduler(preconditioner, momentum_lambda=lambda t: 1)
    preconditioner.close()
    unclipped = KFACPreconditioner(net, kl_clip=None)
    with pytest.raises(ValueError, match="kl_clip: found None"):
        LambdaParamScheduler(unclipped, kl_clip_lambda=lambda t: 1)


def test_R5_the_decay_of_martens_and_grosse():
    decay = exp_decay_factor_averaging(0.95)
    assert [decay(k) for k in (0, 1, 5, 10, 100)] == [0.0, 0.0, 0.8, 0.9, 0.95]
    with pytest.raises(ValueError, match="min_value: found 0"):
        exp_decay_factor_averaging(0)
    with pytest.raises(ValueError, match="step: found -1"):
        decay(-1)
