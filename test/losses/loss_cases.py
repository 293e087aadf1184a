"""Every loss, option, output shape: a table that the tests of losses walk through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BATCHES = (3, 1, 2)  # uneven on purpose
N = sum(BATCHES)


@dataclass(frozen=True)
class Case:
    """One loss on a data set: ``make(reduction)``, outputs, targets, torch's own value on the whole data set."""

    name: str
    make: Callable[[str], Any]
    output: Tensor
    target: Any
    value: Callable[[Any, Tensor, Any], Tensor] = lambda loss, x, y: loss(x, y)
    options: tuple[tuple[str, Any], ...] = ()
    second: Any = None  # targets whose Hessian averages with that of ``target`` (expectations)
    reductions: tuple[str, ...] = ("mean", "sum")

    def batches(self) -> list[tuple[Tensor, Any]]:
        return list(zip(self.output.split(BATCHES), split(self.target), strict=True))


def split(target: Any) -> list[Any]:
    if isinstance(target, tuple):
        return list(zip(*map(split, target), strict=True))
    return list(target.split(BATCHES))


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def kw(cls: Callable[..., Any], **options: Any) -> Callable[[str], Any]:
    return lambda reduction: cls(reduction=reduction, **options)


def elementwise() -> list[Case]:
    cases = []
    for shape in [(), (1,), (3,), (2, 3), (2, 1, 3)]:
        x, y, u = rand(N, *shape, scale=1.5), rand(N, *shape, seed=5), unit(N, *shape)
        table: dict[str, tuple[Callable[[str], Any], Tensor, Tensor]] = {
            "mse": (kw(nn.MSELoss), x, y),
            "l1": (kw(nn.L1Loss), x, y),
            "smooth": (kw(nn.SmoothL1Loss, beta=0.7), x, y),
            "huber": (kw(nn.HuberLoss, delta=1.3), x, y),
            "poisson": (kw(nn.PoissonNLLLoss, full=True), x, 3 * u),
            "bce soft": (kw(nn.BCEWithLogitsLoss), x, u),
            "bce hard": (kw(nn.BCEWithLogitsLoss), x, u.round()),
        }
        cases += [Case(f"{k} {shape}", *v) for k, v in table.items()]
    x, u = rand(N, 2, 3), unit(N, 2, 3)
    w, pw = unit(2, 3, seed=3) + 0.1, unit(3, seed=4) * 3
    zero = torch.tensor([[0.0], [1.5]], dtype=torch.float64)
    table = {
        "mse int": (kw(nn.MSELoss), x, classes(4, N, 2, 3)),
        "smooth beta=0": (kw(nn.SmoothL1Loss, beta=0.0), x, u),
        "poisson int": (kw(nn.PoissonNLLLoss), x, classes(5, N, 2, 3)),
        "poisson rates": (kw(nn.PoissonNLLLoss, log_input=False, eps=0.05, full=True), unit(N, 2, 3) + 0.1, 2 * u),
        "bce weight": (kw(nn.BCEWithLogitsLoss, weight=w), x, u),
        "bce weight zero": (kw(nn.BCEWithLogitsLoss, weight=zero), x, u),
        "bce weight scalar": (kw(nn.BCEWithLogitsLoss, weight=torch.tensor(0.3)), x, u),
        "bce pos_weight": (kw(nn.BCEWithLogitsLoss, pos_weight=pw), x, u),
        "bce pos_weight hard": (kw(nn.BCEWithLogitsLoss, pos_weight=pw), x, u.round()),
        "bce pos_weight [2, 1]": (kw(nn.BCEWithLogitsLoss, pos_weight=pw[:2, None]), x, u),
        "bce both": (kw(nn.BCEWithLogitsLoss, weight=w, pos_weight=pw), x, u),
    }
    cases += [Case(k, *v) for k, v in table.items()]
    for reduction in ("mean", "sum", "batchmean"):
        probabilities = unit(N, 3, 2).softmax(1)
        for log in (False, True):
            target = probabilities.log() if log else probabilities
            make = kw(nn.KLDivLoss, log_target=log)
            cases.append(Case(f"kl log_target={log} {reduction}", make, rand(N, 3, 2), target, reductions=(reduction,)))
    return cases


def categorical() -> list[Case]:
    cases = []
    for C, inner in [(1, ()), (2, ()), (4, ()), (3, (2,)), (3, (2, 1, 2))]:
        x, y = rand(N, C, *inner, scale=1.5), classes(C, N, *inner)
        p = rand(N, C, *inner, seed=9).softmax(1)
        w = unit(C, seed=6) + 0.2
        ignored = y.masked_fill(unit(N, *inner, seed=7) < 0.4, -100)
        shape = (C, *inner)
        for smoothing in (0.0, 0.3):
            for weight in (None, w):
                options = {"label_smoothing": smoothing, "weight": weight}
                label = f"{shape} smoothing={smoothing} weight={weight is not None}"
                make = kw(nn.CrossEntropyLoss, **options)
                cases += [
                    Case(f"ce {label}", make, x, y),
                    Case(f"ce ignored {label}", make, x, ignored),
                    Case(f"ce probabilities {label}", make, x, p),
                ]
                if C > 1:
                    make = kw(nn.CrossEntropyLoss, ignore_index=0, **options)
                    cases.append(Case(f"ce ignore_index=0 {label}", make, x, y))
        for weight in (None, w):
            make = kw(nn.NLLLoss, weight=weight)
            cases.append(Case(f"nll {shape} weight={weight is not None}", make, x, ignored))
    # torch has the classes on axis 1, many models on the last
    options = {"weight": unit(3, seed=6), "label_smoothing": 0.1, "ignore_index": 1}
    moved = lambda loss, x, y: loss(x.movedim(-1, 1).contiguous(), y)  # noqa: E731
    moved_both = lambda loss, x, y: loss(x.movedim(-1, 1), y.movedim(-1, 1))  # noqa: E731
    x, y, last = rand(N, 2, 2, 3), classes(3, N, 2, 2), (("class_dim", -1),)
    cases += [
        Case("ce class_dim=-1", kw(nn.CrossEntropyLoss, **options), x, y, moved, last),
        Case("nll class_dim=-1", kw(nn.NLLLoss, weight=options["weight"]), x, y, moved, last),
        Case("ce class_dim=-1 p", kw(nn.CrossEntropyLoss), x, x.softmax(-1).flip(0), moved_both, last),
        Case("ce class_dim=2", kw(nn.CrossEntropyLoss), rand(N, 2, 3), classes(3, N, 2), moved, (("class_dim", 2),)),
        Case("ce uint8", kw(nn.CrossEntropyLoss), rand(N, 3), classes(3, N).to(torch.uint8)),
    ]
    return cases


def given(loss: Any, x: Tensor, y: Any) -> Tensor:
    return loss(x, *y)


def learned(loss: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss(x[..., 0], y, x[..., 1])


def gaussian() -> list[Case]:
    make, full = kw(nn.GaussianNLLLoss), kw(nn.GaussianNLLLoss, full=True, eps=0.5)
    x, y, v = rand(N, 2, 3), rand(N, 2, 3, seed=5), unit(N, 2, 3) + 0.1
    cases = [
        Case("gauss given", make, x, (y, v), given),
        Case("gauss given full eps", full, x, (y, v), given),
        Case("gauss given [.., 1]", make, x, (y, v[..., :1]), given),
        Case("gauss given [..]", make, x, (y, v[..., 0]), given),
        Case("gauss given 1-D", make, x[:, 0, 0], (y[:, 0, 0], v[:, 0, 0]), given),
    ]
    for name, mean, variance, how in [("learned", x, v, make), ("learned 1-D", x[:, 0, 0], v[:, 0, 0], make)]:
        stacked = torch.stack([mean, variance], -1)
        # The Hessian is quadratic in y: its mean over y = mean +- sd is its expectation under N(mean, variance).
        low, high = mean - variance.sqrt(), mean + variance.sqrt()
        cases.append(Case(f"gauss {name}", how, stacked, low, learned, second=high))
    return cases


def square(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(tuple(range(1, x.ndim))).mean()


def coupled_entries(x: Tensor, y: Tensor, reduce: Any = torch.mean) -> Tensor:
    """Entries of a datum meet (log-sum-exp, a full precision matrix), data do not."""
    r = (x - y).reshape(len(x), -1)
    A = rand(r.shape[1], r.shape[1], seed=8)
    return reduce((r @ A).square().sum(1) + r.logsumexp(1) + (x**4).reshape(r.shape).sum(1))


class OwnCrossEntropy(nn.CrossEntropyLoss):
    """A subclass that computes something else."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(2 * input, target) + input.square().sum() / len(input)


def callables() -> list[Case]:
    x, y = rand(N, 2, 2), rand(N, 2, 2, seed=5)
    as_sum, mean = (("reduction", "sum"),), ("mean",)
    return [
        Case("callable", lambda _: square, x, y, reductions=mean),
        Case("callable 1-D", lambda _: coupled_entries, x[:, 0, 0], y[:, 0, 0], reductions=mean),
        Case("callable dense", lambda _: coupled_entries, x, y, reductions=mean),
        Case(
            "callable sum",
            lambda _: partial(coupled_entries, reduce=torch.sum),
            x,
            y,
            options=as_sum,
            reductions=("sum",),
        ),
        Case("subclass", lambda r: OwnCrossEntropy(reduction=r), rand(N, 3), classes(3, N), reductions=mean),
        Case("soft margin", kw(nn.SoftMarginLoss), x, classes(2, N, 2, 2) * 2.0 - 1),
        Case("bce of probabilities", kw(nn.BCELoss), unit(N, 2), unit(N, 2, seed=4)),
    ]


CASES = {case.name: case for case in elementwise() + categorical() + gaussian() + callables()}
PARAMS = [(name, r) for name, case in CASES.items() for r in case.reductions]
