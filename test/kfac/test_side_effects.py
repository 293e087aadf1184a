"""Nothing of the user's is changed: not by a pass, not by one that fails in the middle, in no context."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kfac.oracle import relative_error
from kfac.photograph import state
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from curvops import KFACLinearOperator, explain

D = 4


class Boom(Exception):
    """What tests raise in the middle."""


class Failing(torch.autograd.Function):
    """An identity whose backward pass may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise Boom
        return g, None


class Net(nn.Module):
    """Everything that keeps state: statistics, a counter, ties, attention, chance, frozen parameters."""

    def __init__(self, fail: str = "") -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(D, D), nn.BatchNorm1d(D, affine=False), nn.Dropout(0.5)
        self.attention, self.b, self.frozen = nn.MultiheadAttention(D, 2), nn.Linear(D, D, bias=False), nn.Linear(D, 3)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(D), persistent=False)
        self.fail = fail
        self.eval()
        self.drop.train()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.mean(0)  # replaces the buffer
        h = self.drop(self.norm(self.a(x)).relu_()) + torch.randn(D, dtype=x.dtype) * random.random() * np.random.rand()
        h = self.attention(h[None], h[None], h[None], need_weights=False)[0][0].to(x.dtype)
        if self.fail == "model" and len(x) == 2:
            raise Boom
        return Failing.apply(self.frozen(self.b(h)), self.fail == "backward")


class Pairs(Dataset):
    """Draws noise from every generator, as augmentations do; may fail at a datum."""

    def __init__(self, fail: str = "") -> None:
        self.X, self.y, self.fail = torch.rand(6, D), torch.rand(6, 3).round(), fail

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.fail == "data" and i == 5:
            raise Boom
        return self.X[i] + torch.rand_like(self.X[i]) + random.random() + np.random.rand(), self.y[i]


def dressed(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Fill ``.grad`` and hang hooks on everything; return, too, where hooks of parameters write that they fired."""
    fired: list[str] = []
    for i, (name, p) in enumerate(model.named_parameters()):
        if p.requires_grad:
            p.grad = torch.full_like(p, float(i))
            p.register_hook(lambda g, n=name: fired.append(f"{n} tensor hook"))
            p.register_post_accumulate_grad_hook(lambda p, n=name: fired.append(f"{n} accumulated"))
    model.a.register_forward_hook(lambda m, x, y: None)
    model.a.register_forward_pre_hook(lambda m, x: None)
    model.b.register_full_backward_hook(lambda m, gx, gy: None)
    model.a.register_state_dict_pre_hook(lambda m, prefix, keep: None)
    return model, fired


def loader(fail: str = "") -> DataLoader:
    return DataLoader(Pairs(fail), batch_size=4, shuffle=True)


def loss_that(fail: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fail == "loss" and len(output) == 2:
            raise Boom
        return (output - target).square().mean()

    return loss


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


class Transparent(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[], AbstractContextManager]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("cpu"),
    "function mode": Transparent,
}
OPTIONS = {"unsupported": "exact", "allow_train_mode": True}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("fail", ["", "model", "data", "loss", "backward"])
def test_R11_state_is_as_before(fail: str, context: str) -> None:
    model, fired = dressed(Net(fail))
    data, loss = loader(fail), loss_that(fail)
    with CONTEXTS[context]():
        before = state(model)
        with pytest.raises(Boom) if fail else contextlib.nullcontext():
            KFACLinearOperator(model, loss, None, data, fisher_type="type-2", kfac_approx="reduce", **OPTIONS)
        after = state(model)
    assert not fired
    assert before.keys() == after.keys()
    assert {k: (before[k], after[k]) for k in before if before[k] != after[k]} == {}


def test_R11_the_photograph_shows_what_a_training_step_changes() -> None:
    model, fired = dressed(Net())
    before = state(model)
    X, y = next(iter(loader()))
    loss_that("")(model(X), y).backward()
    changed = {k for k, v in state(model).items() if v != before[k]}
    calls, grads = ({k for k in before if k.endswith(e)} for e in (" .calls", "a.weight.grad"))
    assert {"torch", "python", "numpy"} | calls | grads <= changed
    assert any("last" in k for k in changed)
    assert "a.weight tensor hook" in fired
    assert "a.weight accumulated" in fired


@pytest.mark.parametrize("method", ["update", "explain", "check_deterministic", "inverse", "merge"])
def test_R11_other_calls_leave_the_state_as_it_was(method: str) -> None:
    model, fired = dressed(Net())
    model.drop.eval()
    data = loader()
    K = KFACLinearOperator(model, loss_that(""), None, data, **OPTIONS)
    before = state(model)
    if method == "explain":
        explain(model, None, data, **OPTIONS)
    elif method == "check_deterministic":
        with pytest.raises(ValueError, match="first batch differs between two readings"):
            KFACLinearOperator(model, loss_that(""), None, data, check_deterministic=True, **OPTIONS)
    else:
        {
            "update": lambda: K.update(data, 0.5),
            "inverse": lambda: K.inverse(0.1).sample(2) @ K,
            "merge": lambda: K.merge(K),
        }[method]()
    assert {k for k, v in state(model).items() if v != before[k]} == set()
    assert not fired


def test_R11_a_model_that_draws_is_refused_without_a_trace() -> None:
    model = Net()
    data = [(torch.randn(3, D), torch.rand(3, 3).round())]
    before = state(model)
    for options in ({}, {"check_deterministic": True}):
        with pytest.raises(ValueError, match=r"model draws random numbers|is in train mode"):
            KFACLinearOperator(model.eval(), nn.MSELoss(), None, data, **options)
    with pytest.raises(ValueError, match="model draws random numbers"):
        explain(model.eval(), None, data)
    model.drop.train()
    assert {k for k, v in state(model).items() if v != before[k]} == set()


def plain(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list]:
    net = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return net, [(torch.randn(n, D, dtype=dtype), torch.randn(n, 3, dtype=dtype)) for n in (4, 2)]


@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "device", "function mode", "default dtype"])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_R11_the_context_changes_no_number(fisher: str, context: str) -> None:
    net, data = plain()
    make = lambda: KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type=fisher)  # noqa: E731
    want = make().to_dense()
    with CONTEXTS[context]():
        K = make()
        inside = [(X.clone(), y.clone()) for X, y in data]
        assert relative_error(K.to_dense(), want) < 1e-12
        other = KFACLinearOperator(net, nn.MSELoss(), None, inside, fisher_type=fisher)
    # What was made inside must be good outside, too.
    assert relative_error(other.to_dense(), want) < 1e-12
    v = torch.randn(len(want), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((K @ v).square().sum(), v)
    assert relative_error(gradient, 2 * want @ want @ v.detach()) < 1e-12
    damped = want + 0.1 * torch.eye(len(want), dtype=want.dtype)
    assert relative_error(K.inverse(0.1).to_dense(), torch.linalg.inv(damped)) < 1e-9
    if fisher != "mc":
        assert relative_error(K.update(inside, 0.3).merge(other).to_dense(), want) < 1e-12


def test_R11_models_made_in_inference_mode_work() -> None:
    with torch.inference_mode():
        net, data = plain()
    K = KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type="type-2")
    twin = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin.load_state_dict(net.state_dict())
    want = KFACLinearOperator(twin, nn.MSELoss(), None, [(X.clone(), y.clone()) for X, y in data], fisher_type="type-2")
    assert relative_error(K.to_dense(), want.to_dense()) < 1e-12


def test_R11_autocast_around_the_call_changes_rounding_only() -> None:
    net, data = plain(torch.float32)
    want = KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type="type-2").to_dense()
    with torch.autocast("cpu", torch.bfloat16):
        K = KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type="type-2")
    assert K.to_dense().dtype == torch.float32
    assert 0 < relative_error(K.to_dense(), want) < 3e-2


def test_R11_batches_are_not_changed() -> None:
    net, data = plain()
    before = [(id(t), t.tolist(), t._version, t.requires_grad) for batch in data for t in batch]
    KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type="mc")
    assert [(id(t), t.tolist(), t._version, t.requires_grad) for batch in data for t in batch] == before


class Record(MutableMapping):
    """A mapping around a dictionary: a shallow copy of it shares the dictionary."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Input(NamedTuple):
    """An input with named parts."""

    scale: float
    x: Tensor


def test_R11_batches_that_must_be_converted_are_not_changed() -> None:
    with torch.inference_mode():  # such tensors are cloned
        x = torch.randn(3, D)
    record, pair, y = Record(x=x), Input(2.0, x), torch.randn(3, 2)
    for batch in (record, pair):
        K = KFACLinearOperator(Whole(), nn.MSELoss(), None, [(batch, y)], fisher_type="type-2")
        assert K.trace() > 0
    assert record["x"] is x
    assert pair.x is x


class Whole(nn.Linear):
    """Takes a whole batch of either kind."""

    def __init__(self) -> None:
        super().__init__(D, 2)

    def forward(self, batch: Record | Input) -> Tensor:
        return super().forward(batch["x"] if isinstance(batch, Record) else batch.x * batch.scale)


def test_R11_full_backward_hooks_that_log_change_nothing() -> None:
    net, data = plain()
    want = KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type="type-2").to_dense()
    handle = net[1].register_full_backward_hook(lambda m, gx, gy: None)
    found = KFACLinearOperator(net, nn.MSELoss(), None, data, fisher_type="type-2").to_dense()
    assert relative_error(found, want) < 1e-12
    assert handle.id in net[1]._backward_hooks


class Remembering(nn.Module):
    """Keeps tensors as plain attributes: a cache, the last activation, a weight that a hook makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cache = nn.Linear(D, D), torch.ones(D)
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(self.a)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x)
        self.cache = self.cache * 2
        return self.last


def test_R11_tensors_that_are_plain_attributes_are_as_before() -> None:
    model = Remembering()
    weight, cache = model.a.weight, model.cache
    KFACLinearOperator(model, nn.MSELoss(), None, [(torch.randn(3, D), torch.randn(3, D))], unsupported="exact")
    assert model.a.weight is weight
    assert model.cache is cache
    assert not hasattr(model, "last")
