"""States of KFAC on other models, which are refused and change nothing, and in other dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from optim.cases import difference, mlp
from optim.kfac_cases import METHODS, Tied, close, flattened, gradients_of, problem, stream
from optim.kfac_training import MAKE, Trainer, equal, through_a_file
from torch import nn

from curvops.optim import KFAC, KFACPreconditioner


def wide():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def stepped(make, model, **options):
    X, y = next(stream("mlp", 1))
    optimizer = make(model, **options)
    gradients_of(optimizer, model, X, y)
    return optimizer


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (
            lambda: Tied().double(),
            r"block of \['(a|b|head)\.weight', '(a\.bias|b\.bias|head\.bias)'\]|block of \['a\.weight'\]",
        ),
        (wide, r"block of \['(0|2)\.weight', '(0|2)\.bias'\], which does not fit the parameters here"),
    ],
    ids=["other names", "other shapes"],
)
def test_R8_the_state_of_another_model_is_refused_by_name(other, error):
    """And leaves factors, decompositions, damping and the number of steps as they were."""
    preconditioner = stepped(KFACPreconditioner, mlp(), damping=0.3)
    before = copy.deepcopy(preconditioner.state_dict())
    state = stepped(KFACPreconditioner, other(), damping=0.7).state_dict()
    with pytest.raises(ValueError, match=error):
        preconditioner.load_state_dict({**state, "steps": 5})
    assert equal(preconditioner.state_dict(), before)


def test_R8_the_state_of_another_model_is_refused_by_kfac():
    optimizer = stepped(KFAC, mlp(), damping=0.3)
    before = copy.deepcopy(optimizer.state_dict())
    tied = stepped(KFAC, Tied().double(), damping=0.7).state_dict()
    with pytest.raises(ValueError, match=r"another model.*a\.bias"):
        optimizer.load_state_dict(tied)
    assert equal(optimizer.state_dict(), before)
    with pytest.raises(ValueError, match=r"block of \['(0|2)\.weight'.*does not fit the parameters here"):
        optimizer.load_state_dict(stepped(KFAC, wide(), damping=0.7).state_dict())
    for entry in ("preconditioner", "steps", "hyperparameters"):
        assert equal(optimizer.state_dict()[entry], before[entry])


def test_R8_a_factor_of_another_shape_is_refused_by_name():
    preconditioner = stepped(KFACPreconditioner, mlp())
    before = copy.deepcopy(preconditioner.state_dict())
    state = copy.deepcopy(before)
    state["preconditioner"]["factors"][1]["A"] = torch.eye(4, dtype=torch.float64)[None]
    label = preconditioner._engine.method.averages.of
    name = list(label)[1].label
    with pytest.raises(ValueError, match=rf"factor A \(1, 4, 4\) of '{name}', expected"):
        preconditioner.load_state_dict(state)
    assert equal(preconditioner.state_dict(), before)


@pytest.mark.parametrize(
    "state",
    [
        {"steps": 3, "damping": 0.1, "layers": {"0": {"A": torch.eye(6), "G": torch.eye(4)}}},
        torch.optim.SGD(mlp().parameters(), lr=1.0).state_dict(),
    ],
    ids=["kfac-pytorch", "SGD"],
)
def test_R8_states_of_other_kinds_are_refused(state):
    with pytest.raises(ValueError, match=r"found entries \[.*\], expected those of a KFACPreconditioner"):
        KFACPreconditioner(mlp()).load_state_dict(state)
    with pytest.raises(ValueError, match="state of another"):
        KFAC(mlp()).load_state_dict(state)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", MAKE)
def test_R8_another_dtype_afterwards(make, method):
    """``model.to`` between steps, and a state that was saved in another dtype."""
    data = list(stream("cnn", 8))
    trainer = Trainer(make, compute_method=method, inv_update_steps=3).train(data[:4])
    state = through_a_file(trainer.state())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        trainer.model.to(dtype)
        trainer.train(data[4:6])
        assert {p.dtype for p in trainer.model.parameters()} == {dtype}
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    resumed = Trainer(make, compute_method=method, inv_update_steps=3)
    resumed.model.float()
    resumed.load(state).train(data[4:])
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in resumed.model.parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", MAKE)
def test_R8_float32_goes_on_where_float64_was(make, method):
    """The same training to the precision of float32, with what was known before."""
    data, trainers = list(stream("cnn", 8)), [Trainer(make, compute_method=method, damping=0.1) for _ in range(2)]
    for trainer in trainers:
        trainer.train(data[:5])
    trainers[1].model.float()
    for trainer in trainers:
        trainer.train(data[5:])
    trainers[1].model.double()
    start = Trainer(make).model
    assert 0 < difference(*(t.model for t in trainers)) < 1e-5
    assert difference(trainers[0].model, start) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_R8_factors_of_float64_are_used_in_float32_at_once(method):
    """After ``model.float()``, without an update in between: the same inverse to the precision of float32."""
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(
        net, damping=0.1, kl_clip=None, compute_method=method, factor_update_steps=9, inv_update_steps=9
    )
    _, want = gradients_of(preconditioner, net, X, y)
    net.float()
    net.zero_grad()
    flattened(net(X.float()), y).backward()
    preconditioner.step()
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert found.dtype == torch.float32
    close(found.double(), want, 1e-5)
