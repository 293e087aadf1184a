"""What is saved is plain, and training goes on from it bit for bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from optim.cases import batches, difference, loss_of, mlp
from torch import nn

from curvops.optim import KFAC, SINGD, KFACPreconditioner, LevenbergMarquardt
from curvops.structured import STRUCTURES


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 3)).double()


def train(model, optimizer, data, also=None):
    loss = loss_of("mlp", "mean")
    for X, y in data:
        model.zero_grad()
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()
        loss(model(X.to(next(model.parameters()))), y).backward()
        optimizer.step()
        if also:
            also.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def frozen(state):
    """A deep copy to compare with, tensors included."""
    return copy.deepcopy(state)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


SINGDS = {s: (lambda m, s=s: SINGD(m, lr=1e-3, damping=1e-2, T=3, structures=(s, s))) for s in sorted(STRUCTURES)}
KFACS = {
    f"KFAC {m}": (lambda n, m=m: KFAC(n, lr=1e-3, inv_update_steps=4, compute_method=m))
    for m in ("eigen", "inverse", "ekfac")
}
KFACS["Levenberg-Marquardt"] = lambda n: KFAC(n, lr=1e-3, damping=LevenbergMarquardt(0.1))
OTHERS = {
    "IKFAC": lambda m: SINGD(m, lr=1e-3, damping=1e-2, kfac_like=True, alpha1=0.0, lr_cov=lambda t: 0.1 / (1 + t)),
    "sgd": lambda m: SINGD(m, lr=1e-3, fallback="sgd", T=2),
    "adam": lambda m: SINGD(m, lr=1e-3, fallback=lambda groups: torch.optim.Adam(groups), T=2),
}
MAKE = {**SINGDS, **KFACS, **OTHERS}


@pytest.mark.parametrize("kind", MAKE)
def test_R8_training_goes_on_bit_for_bit(kind):
    """Twenty steps after a checkpoint in the middle of an interval, in a file, read without pickled code."""
    data = list(batches("mlp", 27))
    model = net()
    optimizer = MAKE[kind](model)
    train(model, optimizer, data[:7])
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    before = frozen(saved["optimizer"])
    other = net()
    other.load_state_dict(saved["model"])
    resumed = MAKE[kind](other)
    resumed.load_state_dict(saved["optimizer"])
    assert equal(saved["optimizer"], before)
    train(model, optimizer, data[7:])
    train(other, resumed, data[7:])
    assert difference(model, other) == 0.0
    assert equal(saved["optimizer"], before)  # nothing of it is alive in the optimizer
    assert equal(optimizer.state_dict(), resumed.state_dict())
    resumed.load_state_dict(saved["optimizer"])  # and again
    assert resumed.steps == 7


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_R8_a_preconditioner_goes_on_bit_for_bit(method):
    def make(model):
        pre = KFACPreconditioner(model, inv_update_steps=4, compute_method=method, lr=lambda t: 0.1, damping=0.02)
        return pre, torch.optim.SGD(model.parameters(), lr=1e-2)

    data, model = list(batches("mlp", 26)), net()
    preconditioner, sgd = make(model)
    train(model, preconditioner, data[:6], sgd)
    saved = through_a_file(preconditioner.state_dict())
    before, other = frozen(saved), net()
    other.load_state_dict(model.state_dict())
    resumed, other_sgd = make(other)
    resumed.load_state_dict(saved)
    train(model, preconditioner, data[6:], sgd)
    train(other, resumed, data[6:], other_sgd)
    assert difference(model, other) == 0.0
    assert equal(saved, before)


def test_R8_parts_of_a_state():
    """Without decompositions they are made in the next step, or wait; without factors a warning says what follows."""
    data, model = list(batches("mlp", 4)), mlp()
    preconditioner = KFACPreconditioner(model, factor_update_steps=2, inv_update_steps=4, kl_clip=None)
    train(model, preconditioner, data[:3])
    X, y = data[3]

    def after(state, **options):
        fresh = KFACPreconditioner(model2 := mlp(), factor_update_steps=2, inv_update_steps=4, kl_clip=None)
        fresh.load_state_dict(through_a_file(state), **options)
        loss_of("mlp", "mean")(model2(X), y).backward()
        raw = torch.cat([p.grad.flatten() for p in model2.parameters()])
        fresh.step()
        return raw, torch.cat([p.grad.flatten() for p in model2.parameters()]), fresh

    raw, found, fresh = after(preconditioner.state_dict(include_inverses=False))
    torch.testing.assert_close(found, fresh.operator.inverse(0.001) @ raw, rtol=1e-9, atol=1e-11)
    raw, found, _ = after(preconditioner.state_dict(include_inverses=False), compute_inverses=False)
    assert torch.equal(raw, found)
    with pytest.warns(UserWarning, match="no factors"):
        raw, found, _ = after(preconditioner.state_dict(include_factors=False))
    assert torch.equal(raw, found)


def test_R8_hyperparameters_of_a_state():
    """Numbers are restored, functions stay the functions of here, also in parameter groups."""
    model = mlp()
    saved = KFACPreconditioner(model, damping=0.5, factor_decay=0.3, lr=lambda t: 1.0).state_dict()
    assert saved["hyperparameters"].keys() == {
        "damping", "factor_decay", "factor_update_steps", "inv_update_steps", "kl_clip",
    }  # fmt: skip
    other = KFACPreconditioner(mlp(), damping=lambda t: 0.25, lr=0.7)
    with pytest.warns(UserWarning, match="no factors"):
        other.load_state_dict(saved)
    assert other.hyperparameters.at("damping", 0) == 0.25
    assert other.hyperparameters.at("factor_decay", 0) == 0.3
    singd = SINGD(mlp(), lr=0.1, lr_cov=lambda t: 0.5)
    state = SINGD(mlp(), lr=0.3, lr_cov=0.1, T=7).state_dict()
    singd.load_state_dict(through_a_file(state))
    assert (singd.param_groups[0]["lr"], singd.param_groups[0]["T"]) == (0.3, 7)
    assert singd.param_groups[0]["lr_cov"] == 0.1
    scheduled = SINGD(mlp(), lr_cov=lambda t: 0.5)
    scheduled.load_state_dict(through_a_file(scheduled.state_dict()))
    assert scheduled.param_groups[0]["lr_cov"](0) == 0.5


@pytest.mark.parametrize("kind", ["dense", "triltoeplitz", "hierarchical15_15", "KFAC eigen", "KFAC ekfac", "sgd"])
def test_R8_another_dtype_afterwards(kind):
    """``model.to`` between steps, and a state that was saved in another dtype."""
    data, model = list(batches("mlp", 8)), net()
    optimizer = MAKE[kind](model)
    train(model, optimizer, data[:4])
    state = through_a_file(optimizer.state_dict())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        train(model, optimizer, data[4:5])
        assert all(p.dtype == dtype for p in model.parameters())
        assert all(torch.isfinite(p).all() for p in model.parameters())
    other = net().float()
    resumed = MAKE[kind](other)
    resumed.load_state_dict(state)
    train(other, resumed, data[4:])
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in other.parameters())


@pytest.mark.parametrize("kind", ["dense", "KFAC eigen"])
def test_R8_moving_to_float32_and_back_changes_little(kind):
    data, nets = list(batches("mlp", 8)), (mlp(), mlp())
    optimizers = [MAKE[kind](m) for m in nets]
    for m, o in zip(nets, optimizers, strict=True):
        train(m, o, data[:4])
    nets[1].float()
    train(nets[1], optimizers[1], data[4:])
    train(nets[0], optimizers[0], data[4:])
    nets[1].double()
    assert 0 < difference(*nets) < 1e-5


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def test_R8_states_that_do_not_fit_are_refused_by_name():
    data, model = list(batches("mlp", 2)), mlp()
    optimizer = SINGD(model, T=1)
    train(model, optimizer, data)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"another model.*a\.bias"):
        SINGD(Other().double()).load_state_dict(state)
    with pytest.raises(ValueError, match="another structure"):
        SINGD(mlp(), structures=("diagonal", "diagonal")).load_state_dict(
            {**state, "param_groups": [{"params": state["param_groups"][0]["params"]}]}
        )
    with pytest.raises(ValueError, match="another optimizer"):
        SINGD(mlp()).load_state_dict(
            torch.optim.SGD(mlp().parameters(), lr=1.0).state_dict() | {"names": state["names"]}
        )
    wide = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(ValueError, match="does not fit the parameters here"):
        SINGD(wide).load_state_dict(state)
    preconditioner = KFACPreconditioner(model2 := mlp())
    train(model2, preconditioner, data)
    with pytest.raises(ValueError, match=r"block of \['.\.weight', '.\.bias'\]"):
        KFACPreconditioner(Other().double()).load_state_dict(preconditioner.state_dict())
    with pytest.raises(ValueError, match="expected those of a KFACPreconditioner"):
        preconditioner.load_state_dict({"state": {}})


@pytest.mark.parametrize("kind", ["dense", "KFAC eigen"])
def test_R8_a_state_that_is_refused_changes_nothing(kind):
    data, model = list(batches("mlp", 3)), mlp()
    optimizer = MAKE[kind](model)
    train(model, optimizer, data)
    before = frozen(optimizer.state_dict())
    wide = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    other = MAKE[kind](wide)
    other.param_groups[0]["lr"] = 0.5
    train(wide, other, data)
    with pytest.raises(ValueError, match="does not fit the parameters here"):
        optimizer.load_state_dict(other.state_dict())
    assert equal(optimizer.state_dict(), before)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    resumed = MAKE[kind](twin)
    resumed.load_state_dict(before)
    for m, o in ((model, optimizer), (twin, resumed)):
        train(m, o, data)
    assert difference(model, twin) == 0.0
