"""Small problems for KFAC, its formulas written in loops, and how close is close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from optim.cases import F64, batches, mlp, observed, rows
from torch import Tensor, nn

from curvops.optim import KFACPreconditioner

LOSS = nn.CrossEntropyLoss()
METHODS = ("eigen", "inverse", "ekfac")
#: What every method multiplies gradients by, in the words of ``inverse(damping, how)``.
HOW = {"eigen": "exact", "inverse": "factors", "ekfac": "exact"}
LAYERS = nn.Linear | nn.Conv2d
Pair = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """One weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).tanh()).tanh())


class Shared(Tied):
    """One layer twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.a


class Pooled(nn.Module):
    """Sequences with one label each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().mean(1))


def convolutions(mode: Any = "zeros", padding: Any = 1) -> nn.Sequential:
    """Groups, stride, dilation, padding by word and by number, with and without bias."""
    first = nn.Conv2d(2, 4, 3, padding="same", padding_mode=mode, groups=2)
    second = nn.Conv2d(4, 3, (2, 3), stride=2, dilation=(1, 2), padding=padding, padding_mode=mode, bias=False)
    width = second(first(torch.zeros(1, 2, 6, 5))).numel()
    return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(width, 3))


#: By name: a network, and the kind of its data.
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "mlp"),
    "biasless": (lambda: mlp(bias=False), "mlp"),
    "tied": (Tied, "mlp"),
    "shared": (Shared, "mlp"),
    "pooled": (Pooled, "tokens"),
    "conv": (convolutions, "cnn"),
    "valid": (lambda: convolutions(padding="valid"), "cnn"),
    "reflect": (lambda: convolutions("reflect"), "cnn"),
    "replicate": (lambda: convolutions("replicate"), "cnn"),
    "circular": (lambda: convolutions("circular"), "cnn"),
    "tokens": (mlp, "tokens"),
}


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """More data than inputs of any layer: in the null space of a factor EKFAC has no eigenvectors of its own."""
    torch.manual_seed(3)
    make, data = PROBLEMS[kind]
    net = make().double()
    X, y = next(batches(data, 1, (30,)))
    return net, X, y[:, 0] if kind == "pooled" else y


def flattened(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, a mean over all labels."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def flat_gradient(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def flat_parameters(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def gradients_of(preconditioner: Any, net: nn.Module, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Make a step; return the gradient before and after."""
    net.zero_grad()
    flattened(net(X), y).backward()
    g = flat_gradient(net)
    preconditioner.step()
    return g, flat_gradient(net)


def net_and_data(n: int = 8) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A convolution and a linear layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()
    return net, torch.randn(n, 2, 6, 6, dtype=F64), torch.randint(3, (n,))


def step(net: nn.Module, X: Tensor, y: Tensor, **options: Any) -> KFACPreconditioner:
    """Make one step without clipping; return the preconditioner, which is off the model again."""
    with KFACPreconditioner(net, kl_clip=None, **options) as preconditioner:
        net.zero_grad()
        LOSS(net(X), y).backward()
        preconditioner.step()
    return preconditioner


def close(found: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    """Insist on a small error relative to the norm."""
    error = torch.linalg.vector_norm(found - want) / torch.linalg.vector_norm(want)
    assert error <= tolerance, f"relative error {error:.1e}"


# ---- formulas -----------------------------------------------------------------------------------
def layers(net: nn.Module) -> list[Any]:
    return [m for m in net.modules() if isinstance(m, LAYERS)]


def oracle_factors(net: nn.Module, X: Tensor, y: Tensor, approx: str = "expand") -> list[Pair]:
    """``A`` and ``B`` of every layer, for the mean loss of one batch; leaves the gradients of ``net``."""
    found = []
    for layer, x, g in observed(net, lambda: flattened(net(X), y)):
        a, b = rows(layer, x, g, approx)
        found.append((a.mT @ a / a.shape[1], len(X) * b.mT @ b))
    return found


def mixed(old: list[Pair] | None, new: list[Pair], decay: float) -> list[Pair]:
    """``decay old + (1 - decay) new``; the first ones as they are."""
    if old is None:
        return new
    both = zip(old, new, strict=True)
    return [(decay * A + (1 - decay) * a, decay * B + (1 - decay) * b) for (A, B), (a, b) in both]


def oracle_gradient(net: nn.Module, factors: list[Pair], damping: float, how: str) -> Tensor:
    """Multiply the gradients of a network by dense inverses, group by group."""
    found = []
    for layer, (A, B) in zip(layers(net), factors, strict=True):
        W, bias = layer.weight.grad, None if layer.bias is None else layer.bias.grad
        G = len(A)
        g = W.reshape(G, len(W) // G, -1)
        g = g if bias is None else torch.cat([g, bias.reshape(G, -1, 1)], -1)
        P = torch.stack([_solve(A[k], B[k], g[k], damping, how) for k in range(G)])
        if bias is not None:
            found += [P[..., :-1].flatten(), P[..., -1].flatten()]
        else:
            found.append(P.flatten())
    return torch.cat(found)


def _solve(A: Tensor, B: Tensor, g: Tensor, damping: float, how: str) -> Tensor:
    I, J = torch.eye(len(A), dtype=F64), torch.eye(len(B), dtype=F64)
    if how == "factors":
        return torch.linalg.solve(B + damping * J, g) @ torch.linalg.inv(A + damping * I)
    F_ = torch.kron(B, A)
    return torch.linalg.solve(F_ + damping * torch.eye(len(F_), dtype=F64), g.flatten()).reshape(g.shape)


def stream(kind: str, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Uneven batches, each with more data than inputs of any layer."""
    yield from batches(kind, steps, (30, 27, 41))
