"""R1: where theory says that KFAC is exact, it is; against dense curvature, in float64."""

from __future__ import annotations

import io
from collections import UserDict
from itertools import product
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from kfac.oracle import (
    batches,
    block_diagonal,
    dense_ef,
    dense_ggn,
    joint_groups,
    relative_error,
    shifted,
    term_factors,
)
from torch import Tensor, nn

from curvops import FisherType, KFACLinearOperator, KFACType
from curvops.structured.kronecker import Kronecker

LOSSES = {"mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss, "ce": nn.CrossEntropyLoss}
FISHERS = ("type-2", "mc", "signs", "empirical", "empirical-per-term", "forward-only")
TOL = 1e-11
every_loss = pytest.mark.parametrize("loss", [LOSSES[k](reduction=r) for k in LOSSES for r in ("mean", "sum")], ids=repr)
every_mse = pytest.mark.parametrize("loss", [nn.MSELoss(reduction=r) for r in ("mean", "sum")], ids=lambda m: m.reduction)
joint_or_separate = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


class Then(nn.Module):
    """A function of the output of a net."""

    def __init__(self, net: nn.Module, f) -> None:
        super().__init__()
        self.net, self.f = net, f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.net(x))


class Keywords(nn.Module):
    """Takes the entries of a batch as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5, 4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.net(x * scale)


class Whole(Keywords):
    """Takes the batch as one argument."""

    def forward(self, batch) -> Tensor:
        return super().forward(batch["x"], batch["scale"])


class Tied(nn.Module):
    """One weight for both halves of the input: one layer called twice, or two layers that share it."""

    def __init__(self, merge, modules: int) -> None:
        super().__init__()
        self.first, self.merge = nn.Linear(3, 2), merge
        self.second = self.first
        if modules == 2:
            self.second = nn.Linear(3, 2)
            self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.merge([self.first(x[:, :3]), self.second(x[:, 3:])])


class Mixing(nn.Module):
    """Two layers on tokens ``[N, T, U, 4]`` around a non-linearity, and a fixed mixing of the tokens between them."""

    def __init__(self, tokens: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("mix", torch.randn(tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.einsum("st,ntud->nsud", self.mix, self.a(x).tanh()))


class UNet(nn.Module):
    """Convolutions at two resolutions; the output has the higher one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.out = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.down(x).relu(), 2)
        return self.out(F.interpolate(self.inner(h).relu(), scale_factor=2))


def mlp(*sizes: int, act=None) -> nn.Sequential:
    """Linear layers, with ``act`` in between."""
    layers = [nn.Linear(i, o) for i, o in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*(m for layer in layers for m in ([act(), layer] if act else [layer]))[1 if act else 0 :])


def cnn(act=nn.Tanh) -> nn.Sequential:
    """Two convolutions and a linear layer for inputs ``[N, 2, 5, 4]``."""
    convs = nn.Conv2d(2, 3, (3, 2), padding=(1, 0)), nn.Conv2d(3, 2, 2, stride=(2, 1))
    return nn.Sequential(convs[0], act(), convs[1], act(), nn.Flatten(), nn.Linear(8, 3))


def kfac(model, loss, params, data, **options) -> KFACLinearOperator:
    return KFACLinearOperator(model, loss, params, data, **{"fisher_type": "type-2", **options})


def ggn_blocks(model, loss, params, data, separate: bool) -> Tensor:
    groups = [[n] for n in params] if separate else joint_groups(params)
    return block_diagonal(dense_ggn(model, loss, params, data), params, groups)


def records(kind: type) -> list:
    return [kind({"x": torch.randn(n, 5), "scale": 1 + torch.rand(n, 1)}) for n in (2, 3)]


LINEAR = {
    "6-3-1": lambda: (mlp(6, 3, 1), torch.randn(2, 6), torch.randn(3, 6)),
    "5-4-3": lambda: (mlp(5, 4, 3), torch.randn(2, 5), torch.randn(3, 5)),
    "keywords": lambda: (Keywords(), *records(dict)),
    "mapping": lambda: (Whole(), *records(UserDict)),
}


@pytest.mark.parametrize("drop", ["nothing", "weight", "bias", "1.weight", "0.bias"])
@pytest.mark.parametrize("net", LINEAR)
@joint_or_separate
@every_mse
def test_R1_type2_is_the_ggn_of_linear_nets(loss: nn.Module, separate: bool, net: str, drop: str) -> None:
    model, *inputs = LINEAR[net]()
    data, values = batches(model, loss, *inputs), shifted(model)
    names = [n for n in values if drop not in n]
    params = {names[i]: values[names[i]] for i in torch.randperm(len(names))}
    K = kfac(model, loss, params, data, separate_weight_and_bias=separate)
    assert K.domain_names == tuple(params)
    assert relative_error(K.to_dense(), ggn_blocks(model, loss, params, data, separate)) < TOL


@every_mse
def test_R1_params_as_a_list_or_none_are_the_modules_own(loss: nn.Module) -> None:
    model = mlp(5, 4, 3)
    data, own = batches(model, loss, torch.randn(2, 5)), dict(model.named_parameters())
    G = ggn_blocks(model, loss, own, data, False)
    for params in (None, list(own.values()), own):
        assert relative_error(kfac(model, loss, params, data).to_dense(), G) < TOL
    backwards = dict(reversed(own.items()))
    K = kfac(model, loss, list(backwards.values()), data)
    assert relative_error(K.to_dense(), ggn_blocks(model, loss, backwards, data, False)) < TOL


SHARED = {
    "positions": ("expand", lambda: mlp(5, 4, 3), (4, 8, 5)),
    "mean over positions": ("reduce", lambda: Then(mlp(5, 4, 3), lambda y: y.mean((1, 2))), (4, 8, 5)),
    "mean between layers": (
        "reduce",
        lambda: nn.Sequential(Then(mlp(5, 4, 3), lambda y: y.mean((1, 2))), nn.Linear(3, 2)),
        (4, 8, 5),
    ),
    "pixels": ("expand", lambda: nn.Conv2d(3, 2, 4, padding=2), (3, 6, 5)),
    "pixels, channels last": ("expand", lambda: Then(nn.Conv2d(3, 2, 4, padding=2), lambda y: y.movedim(1, -1)), (3, 6, 5)),
    "pooled pixels": ("reduce", lambda: Then(nn.Conv2d(3, 2, 4, padding=2), lambda y: y.mean((2, 3))), (3, 6, 5)),
}


@pytest.mark.parametrize("case", SHARED)
@joint_or_separate
@every_mse
def test_R1_expand_and_reduce_are_exact_where_theory_says(loss: nn.Module, separate: bool, case: str) -> None:
    approx, make, shape = SHARED[case]
    model = make()
    data, params = batches(model, loss, torch.randn(2, *shape), torch.randn(3, *shape)), shifted(model)
    K = kfac(model, loss, params, data, kfac_approx=approx, separate_weight_and_bias=separate)
    G = ggn_blocks(model, loss, params, data, separate)
    assert relative_error(K.to_dense(), G) < TOL
    other = {"expand": "reduce", "reduce": "expand"}[approx]
    wrong = kfac(model, loss, params, data, kfac_approx=other, separate_weight_and_bias=separate)
    assert relative_error(wrong.to_dense(), G) > 0.1


@pytest.mark.parametrize("act", [nn.Identity, nn.Tanh])
@joint_or_separate
@every_loss
def test_R1_one_datum(loss: nn.Module, separate: bool, act: type) -> None:
    model = mlp(5, 4, 3, act=act)
    data, params = batches(model, loss, torch.randn(1, 5)), shifted(model)
    groups = [[n] for n in params] if separate else joint_groups(params)
    for fisher, reference in (("type-2", dense_ggn), ("empirical", dense_ef)):
        K = kfac(model, loss, params, data, fisher_type=fisher, separate_weight_and_bias=separate)
        assert relative_error(K.to_dense(), block_diagonal(reference(model, loss, params, data), params, groups)) < TOL


@pytest.mark.parametrize("fisher", ["mc", "signs"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("net", ["mlp", "tokens", "cnn"])
@every_loss
def test_R1_draws_converge(loss: nn.Module, net: str, approx: str, fisher: str) -> None:
    model, shape = {"mlp": (mlp(5, 4, 3, act=nn.Tanh), (5,)), "tokens": (Mixing(2), (2, 2, 4)), "cnn": (cnn(), (2, 5, 4))}[net]
    model = Then(model, lambda y: y.movedim(-1, 1))
    data = batches(model, loss, torch.randn(1, *shape), torch.randn(2, *shape))
    want = kfac(model, loss, None, data, kfac_approx=approx).to_dense()
    got = kfac(model, loss, None, data, kfac_approx=approx, fisher_type=fisher, mc_samples=3000).to_dense()
    torch.testing.assert_close(got / want.abs().max(), want / want.abs().max(), rtol=1e-1, atol=1.5e-2)


@pytest.mark.parametrize("modules", [1, 2], ids=["one layer twice", "two layers, one weight"])
@pytest.mark.parametrize("sizes", [(1,), (2, 3)], ids=["one datum", "more data"])
@joint_or_separate
@every_mse
def test_R1_tied_weights(loss: nn.Module, separate: bool, sizes: tuple, modules: int) -> None:
    for approx, merge in (("expand", lambda parts: torch.cat(parts, 1)), ("reduce", lambda parts: (parts[0] + parts[1]) / 2)):
        model = Tied(merge, modules)
        data, params = batches(model, loss, *(torch.randn(n, 6) for n in sizes)), shifted(model)
        K = kfac(model, loss, params, data, kfac_approx=approx, separate_weight_and_bias=separate)
        assert relative_error(K.to_dense(), ggn_blocks(model, loss, params, data, separate)) < TOL


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@every_loss
def test_R1_flattened_outputs_change_nothing(loss: nn.Module, approx: str, fisher: str) -> None:
    # The draws differ, as they are keyed by rows of the output: their law is the same.
    net, random = Mixing(), fisher in ("mc", "signs")
    flat = Then(net, lambda y: y.flatten(0, 2))
    whole = Then(net, lambda y: y.movedim(-1, 1) if isinstance(loss, nn.CrossEntropyLoss) else y)
    data = batches(whole, loss, torch.randn(3, 3, 2, 4), torch.randn(2, 3, 2, 4))
    rows = [(X, y.flatten() if isinstance(loss, nn.CrossEntropyLoss) else y.flatten(0, 2)) for X, y in data]
    options = {"fisher_type": fisher, "kfac_approx": approx, "mc_samples": 1500 if random else 1}
    want = kfac(whole, loss, shifted(whole), data, **options).to_dense()
    torch.manual_seed(0)
    assert want.norm() > 0
