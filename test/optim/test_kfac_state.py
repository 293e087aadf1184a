"""States of KFACPreconditioner and KFAC: plain, complete, shared with nobody; training goes on from them bit for bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from optim.cases import difference, mlp
from optim.kfac_cases import HOW, METHODS, close, gradients_of, oracle_factors, oracle_gradient, stream
from optim.kfac_training import MAKE, Trainer, equal, through_a_file

from curvops.optim import KFACPreconditioner, LevenbergMarquardt

OPTIONS = {
    **{m: {"compute_method": m} for m in METHODS},
    **{f"{m}, seldom": {"compute_method": m, "inv_update_steps": 4, "factor_update_steps": 3} for m in METHODS},
    "eigenvalues": {
        "compute_eigenvalue_outer_product": False,
        "inv_update_steps": 4,
        "damping": lambda t: 0.1 / (1 + t),
    },
    "reduce, no clip": {"kfac_approx": "reduce", "kl_clip": None, "inv_update_steps": 2},
    "bfloat16": {"factor_dtype": torch.bfloat16, "inv_update_steps": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", MAKE)
def test_R8_training_goes_on_bit_for_bit(make, options):
    """Twenty steps after a checkpoint in the middle of all intervals; what was loaded belongs to the user."""
    data = list(stream("cnn", 26))
    trainer = Trainer(make, **options).train(data[:6])
    state = trainer.state()["method"]
    saved = through_a_file(trainer.state())
    before = copy.deepcopy(saved)
    assert equal(state, before["method"])
    resumed = Trainer(make, **options).load(saved)
    assert equal(resumed.method.state_dict(), before["method"])
    trainer.train(data[6:])
    resumed.train(data[6:])
    assert difference(trainer.model, resumed.model) == 0.0
    assert equal(trainer.method.state_dict(), resumed.method.state_dict())
    assert equal(saved["method"], before["method"])  # not mutated, and nothing of it is alive
    assert equal(state["preconditioner"], before["method"]["preconditioner"])  # nor does training change what it gave
    assert resumed.load(saved).method.steps == 6


@pytest.mark.parametrize("make", MAKE)
def test_R8_a_loaded_state_is_not_aliased(make):
    data = list(stream("cnn", 4))
    saved = copy.deepcopy(Trainer(make).train(data[:2]).state())
    resumed, copied = Trainer(make).load(saved), Trainer(make).load(copy.deepcopy(saved))
    for entry in saved["method"]["preconditioner"]["factors"]:
        entry["B"].fill_(float("nan"))
    for tensors in saved["method"]["preconditioner"]["solutions"].values():
        for t in tensors.values():
            t.fill_(float("nan"))
    resumed.train(data[2:])
    copied.train(data[2:])
    assert difference(resumed.model, copied.model) == 0.0


@pytest.mark.parametrize("make", MAKE)
def test_R8_adaptive_damping_goes_on(make):
    data = list(stream("cnn", 26))
    trainer = Trainer(make, damping=LevenbergMarquardt(0.5)).train(data[:6])
    saved = through_a_file(trainer.state())
    damping = LevenbergMarquardt(0.5)
    resumed = Trainer(make, damping=damping).load(saved).train(data[6:])
    trainer.train(data[6:])
    assert difference(trainer.model, resumed.model) == 0.0
    assert float(damping.damping) not in (0.5, float(saved["method"]["levenberg_marquardt"]["damping"]))


@pytest.mark.parametrize("first", [True, False], ids=["made before loading", "made after loading"])
@pytest.mark.parametrize("make", MAKE)
def test_R8_schedules_go_on(make, first):
    """What a schedule had reached is restored, and is no new beginning for it."""
    data = list(stream("cnn", 26))
    trainer = Trainer(make, scheduled=True).train(data[:6])
    resumed = Trainer(make, scheduled=first).load(through_a_file(trainer.state()))
    resumed.scheduler = resumed.scheduler or resumed.schedule()
    trainer.train(data[6:])
    resumed.train(data[6:])
    assert difference(trainer.model, resumed.model) == 0.0
    assert resumed.method.hyperparameters.at("damping", 0) == 0.02 * 0.9**26


@pytest.mark.parametrize("make", MAKE)
def test_R8_hyperparameters_are_restored_as_numbers(make):
    """Functions of here stay functions; numbers of numpy do not get in the way of ``weights_only=True``."""
    saved = make(mlp(), damping=np.float64(0.5), inv_update_steps=np.int64(7), factor_decay=0.3, kl_clip=lambda t: 1.0)
    state = through_a_file(saved.state_dict())
    assert state["hyperparameters"].keys() >= {"damping", "factor_decay", "factor_update_steps", "inv_update_steps"}
    assert "kl_clip" not in state["hyperparameters"]
    other = make(mlp(), damping=lambda t: 0.25, kl_clip=None)
    with pytest.warns(UserWarning, match="no factors") if make is KFACPreconditioner else nullcontext():
        other.load_state_dict(state)
    now = other.hyperparameters.at
    assert (now("damping", 0), now("factor_decay", 0), now("inv_update_steps", 0)) == (0.25, 0.3, 7)
    assert now("kl_clip", 0) is None


# ---- parts of a state, of KFACPreconditioner ------------------------------------------------------
def after(state, X, y, steps=1, **options):
    """Load a state into a preconditioner of the same network, make steps on one batch; return the last gradients."""
    model = mlp()
    loading = {k: options.pop(k) for k in ("compute_inverses",) if k in options}
    preconditioner = KFACPreconditioner(model, kl_clip=None, factor_update_steps=2, inv_update_steps=4, **options)
    preconditioner.load_state_dict(through_a_file(state), **loading)
    for _ in range(steps):
        g, found = gradients_of(preconditioner, model, X, y)
    return g, found, preconditioner


@pytest.fixture
def seen():
    """A preconditioner after three steps (factors at 0 and 2, inverses at 0), and one batch more."""
    data = list(stream("mlp", 4))

    def make(**options):
        model = mlp()
        made = KFACPreconditioner(model, kl_clip=None, factor_update_steps=2, inv_update_steps=4, **options)
        for X, y in data[:3]:
            gradients_of(made, model, X, y)
        return made

    return make, *data[3]


@pytest.mark.parametrize("method", METHODS)
def test_R8_without_inverses_they_are_made_at_once(seen, method):
    make, X, y = seen
    options = {"compute_method": method, "damping": 0.05}
    state = make(**options).state_dict(include_inverses=False)
    assert "solutions" not in state["preconditioner"]
    _, found, resumed = after(state, X, y, **options)
    factors = resumed.operator.factors
    pairs = [(factors[f"{k}.weight"].input[None], factors[f"{k}.weight"].output[None]) for k in (0, 2)]
    model = mlp()
    oracle_factors(model, X, y)  # for its gradients
    close(found, oracle_gradient(model, pairs, 0.05, HOW[method]))


@pytest.mark.parametrize("method", METHODS)
def test_R8_inverses_may_wait_for_their_schedule(seen, method):
    """``compute_inverses=False``: gradients stay as they are until step 4; decompositions that are there are used."""
    make, X, y = seen
    made = make(compute_method=method)
    state = made.state_dict(include_inverses=False)
    g, found, _ = after(state, X, y, compute_method=method, compute_inverses=False)
    assert torch.equal(g, found)
    g, late, _ = after(state, X, y, steps=2, compute_method=method, compute_inverses=False)
    assert not torch.equal(g, late)
    _, with_own, _ = after(made.state_dict(), X, y, compute_method=method, compute_inverses=False)
    _, want, _ = after(made.state_dict(), X, y, compute_method=method)
    assert torch.equal(with_own, want)


@pytest.mark.parametrize("method", METHODS)
def test_R8_without_factors_the_average_begins_anew(seen, method):
    make, X, y = seen
    state = make(compute_method=method).state_dict(include_factors=False)
    assert "preconditioner" not in state
    with pytest.warns(UserWarning, match="no factors"):
        g, found, _ = after(state, X, y, compute_method=method)
    assert torch.equal(g, found)
    with pytest.warns(UserWarning, match="no factors"):
        _, found, resumed = after(state, X, y, steps=2, compute_method=method)
    assert resumed.steps == 5
    model = mlp()
    _, want = gradients_of(KFACPreconditioner(model, kl_clip=None, compute_method=method), model, X, y)
    close(found, want)


@pytest.mark.parametrize("saved", [*METHODS, "eigenvalues"])
@pytest.mark.parametrize("here", [*METHODS, "eigenvalues"])
def test_R8_another_method_takes_the_factors_and_decomposes_anew(seen, saved, here):
    make, X, y = seen
    options = {m: {"compute_method": m} for m in METHODS}
    options["eigenvalues"] = {"compute_eigenvalue_outer_product": False}
    made = make(**options[saved])
    _, found, _ = after(made.state_dict(), X, y, **options[here])
    _, want, _ = after(made.state_dict(include_inverses=saved == here), X, y, **options[here])
    assert torch.equal(found, want)
