"""Small nets, losses and settings that tests of KFAC share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops import KFACLinearOperator

FISHERS = ("type-2", "mc", "signs", "empirical", "empirical-per-term", "forward-only")
LOSSES = {"mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss, "ce": nn.CrossEntropyLoss}
_REDUCED = {f"{k}-{r}": LOSSES[k](reduction=r) for k in LOSSES for r in ("mean", "sum")}
every_loss = pytest.mark.parametrize("loss", _REDUCED.values(), ids=_REDUCED)
every_mse = pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction=r) for r in ("mean", "sum")], ids=lambda m: m.reduction
)
joint_or_separate = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
every_approx = pytest.mark.parametrize("approx", ["expand", "reduce"])


def kfac(model, loss, params, data, **options) -> KFACLinearOperator:
    return KFACLinearOperator(model, loss, params, data, **{"fisher_type": "type-2", **options})


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
        self.down, self.inner, self.out = (
            nn.Conv2d(2, 3, 3, padding=1),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.down(x).relu(), 2)
        return self.out(F.interpolate(self.inner(h).relu(), scale_factor=2))


def mlp(*sizes: int, act=None) -> nn.Sequential:
    """Linear layers, with ``act`` in between."""
    net = nn.Sequential()
    for i, o in pairwise(sizes):
        if act and len(net):
            net.append(act())
        net.append(nn.Linear(i, o))
    return net


def cnn(act=nn.Tanh) -> nn.Sequential:
    """Two convolutions and a linear layer for inputs ``[N, 2, 5, 4]``."""
    convs = nn.Conv2d(2, 3, (3, 2), padding=(1, 0)), nn.Conv2d(3, 2, 2, stride=(2, 1))
    return nn.Sequential(convs[0], act(), convs[1], act(), nn.Flatten(), nn.Linear(8, 3))


#: Non-linear nets, and the shape of a datum.
NETS = {"mlp": (lambda: mlp(5, 4, 3, act=nn.Tanh), (5,)), "tokens": (Mixing, (3, 2, 4)), "cnn": (cnn, (2, 5, 4))}


def setting(net: str, *sizes: int) -> tuple:
    """Return a net and a batch of inputs for every size."""
    make, shape = NETS[net]
    return make(), *(torch.randn(n, *shape) for n in sizes)
