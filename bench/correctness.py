"""Where KFAC should be exact: distance from the dense block-diagonal GGN, curvops beside curvlinops.

Every case is small enough for brute force: linear networks with a square loss, or data that share one input. There the
type-2 approximation equals the GGN's diagonal blocks, so that every difference is a mistake. Run ``make bench``, or
``python bench/correctness.py`` where curvlinops-for-pytorch is installed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version

import curvlinops
import torch
from _common import ROOT, markdown, write_section
from torch import Tensor, nn
from torch.func import hessian
from torch.utils.checkpoint import checkpoint

import curvops

PEER = f"curvlinops {version('curvlinops-for-pytorch')}"
Batches = list[tuple[Tensor, Tensor]]
Case = tuple[nn.Module, nn.Module, Batches]
CASES: dict[str, Callable[[], Case]] = {}


class Net(nn.Module):
    """Layers without bias, and what happens between them."""

    def __init__(self, forward: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self._function = nn.ModuleList(layers), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, *self.layers)


def linear(i: int, o: int) -> nn.Linear:
    return nn.Linear(i, o, bias=False)


def case(title: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[title] = make
        return make

    return register


def regression(x: Tensor, *output: int) -> Batches:
    y = torch.randn(len(x), *output)
    return [(x[:2], y[:2]), (x[2:], y[2:])]


@case("(B, T, D) flattened to (B T, D) before a linear layer")
def flattened() -> Case:
    net = Net(lambda x, a, b: b(a(x.flatten(0, 1))).unflatten(0, (len(x), 3)), linear(4, 3), linear(3, 2))
    return net, nn.MSELoss(), regression(torch.randn(5, 3, 4), 3, 2)


@case("several loss terms per datum, mixed by the network")
def mixed() -> Case:
    net = Net(lambda x, a, b: b(a(x)).unflatten(1, (3, 2)), linear(4, 5), linear(5, 6))
    return net, nn.MSELoss(), [(torch.randn(1, 4), torch.randn(1, 3, 2))]


@case("one linear layer called twice")
def twice() -> Case:
    net = Net(lambda x, a: torch.cat([a(x[:, 0]), a(x[:, 1])], 1), linear(4, 3))
    return net, nn.MSELoss(), regression(torch.randn(5, 2, 4), 6)


@case("convolution with circular padding")
def circular() -> Case:
    conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", bias=False)
    return Net(lambda x, c: c(x).movedim(1, -1), conv), nn.MSELoss(), regression(torch.randn(5, 2, 5, 4), 5, 4, 3)


@case("grouped convolution (2 groups)")
def grouped() -> Case:
    conv = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    return Net(lambda x, c: c(x).movedim(1, -1), conv), nn.MSELoss(), regression(torch.randn(5, 4, 5, 4), 3, 2, 6)


@case("`CrossEntropyLoss(weight=...)`")
def weighted() -> Case:
    x, y = torch.randn(1, 4).expand(5, 4), torch.tensor([0, 1, 2, 2, 1])
    return linear(4, 3), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), reduction="sum"), [(x, y)]


@case("`CrossEntropyLoss(ignore_index=...)`, `reduction='sum'`")
def ignored() -> Case:
    x, y = torch.randn(1, 4).expand(6, 4), torch.tensor([0, -100, 2, 2, 1, -100])
    return linear(4, 3), nn.CrossEntropyLoss(reduction="sum"), [(x[:4], y[:4]), (x[4:], y[4:])]


@case("`BCEWithLogitsLoss(pos_weight=...)`")
def positive() -> Case:
    x, y = torch.randn(1, 4).expand(5, 4), torch.randint(2, (5, 3)).float()
    return linear(4, 3), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.3, 4.0, 2.0])), [(x, y)]


@case("activation checkpointing (non-reentrant)")
def checkpointed() -> Case:
    net = Net(
        lambda x, a, b, c: c(checkpoint(lambda h: b(a(h)), x, use_reentrant=False)),
        *(linear(4, 3), linear(3, 3), linear(3, 2)),
    )
    return net, nn.MSELoss(), regression(torch.randn(5, 4), 2)


def reference(model: nn.Module, loss: nn.Module, data: Batches) -> Tensor:
    """Dense GGN of the loss over the whole data set, blocks between parameters zeroed."""
    X, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    output, params = model(X), list(model.parameters())
    H = hessian(lambda out: loss(out, y))(output.detach()).reshape(output.numel(), output.numel())
    rows = [torch.autograd.grad(entry, params, retain_graph=True) for entry in output.flatten()]
    jacobians = [torch.stack([g.flatten() for g in column]) for column in zip(*rows, strict=True)]
    return torch.block_diag(*(J.T @ H @ J for J in jacobians))


def ours(model: nn.Module, loss: nn.Module, data: Batches) -> Tensor:
    params = dict(model.named_parameters())
    return curvops.KFACLinearOperator(model, loss, params, data, fisher_type="type-2").to_dense()


def theirs(model: nn.Module, loss: nn.Module, data: Batches) -> Tensor:
    params = list(model.parameters())
    K = curvlinops.KFACLinearOperator(model, loss, params, data, fisher_type="type-2", separate_weight_and_bias=False)
    return K @ torch.eye(K.shape[1])


def error(dense: Callable[..., Tensor], case_: Case, truth: Tensor) -> str:
    try:
        found = dense(*case_).detach()
    except Exception as problem:
        return f"raises {type(problem).__name__}"
    distance = float((found - truth).norm() / truth.norm())
    return "exact" if distance < 1e-9 else f"**{distance:.2f}**"


def rows() -> Iterator[list[str]]:
    for title, make in CASES.items():
        torch.manual_seed(0)
        setting = make()
        truth = reference(*setting)
        yield [title, error(theirs, setting, truth), error(ours, setting, truth)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    text = markdown(["error of the matrix, relative to the exact one", PEER, "curvops"], list(rows()))
    print(text)
    if args.write:
        write_section(ROOT / "README.md", "correctness", text)


if __name__ == "__main__":
    main()
