"""Awkward nets, and gradients of single output vectors by one backward pass each: what every reducer is judged by."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kfac.nets import Mixing, Then, Tied, cnn, mlp
from kfac.oracle import output_vectors, predictor
from torch import Tensor, nn

from curvops.losses import output_loss

SEED = 3


class Turned(nn.Module):
    """An autoencoder with one weight, used as itself and as its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.last = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(F.linear(x, self.W)) @ self.W)


class SequenceFirst(nn.Module):
    """Works on ``[T, N, d]`` inside, and mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.transpose(0, 1)).tanh()
        return self.b(h.cumsum(0)).transpose(0, 1)


class Flattened(nn.Module):
    """Joins data and tokens before its layers; the second one again apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        N, T, _ = x.shape
        h = self.a(x.flatten(0, 1)).tanh().reshape(N, T, 3)
        return self.b((h - h.mean(1, keepdim=True)).flatten(0, 1)).reshape(N, T, 2)


class Coupled(nn.Module):
    """Every prediction depends on all data of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h - 0.5 * h.mean(0))


class Positions(nn.Module):
    """A layer on position codes, which all data share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.pos, self.b = nn.Linear(4, 3), nn.Linear(2, 3), nn.Linear(3, 2)
        self.register_buffer("codes", torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) + self.pos(self.codes)).tanh())


class Routed(nn.Module):
    """The rows of the first layer are in no regular order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        order = torch.arange(len(rows)).roll(1)
        order[[0, -1]] = order[[-1, 0]]
        back = order.argsort()
        return self.b(self.a(rows[order])[back].tanh().reshape(len(x), -1, 3))


class OneBias(nn.Module):
    """Two weights share one bias, so that it stands alone; the second has no other."""

    def __init__(self) -> None:
        super().__init__()
        self.U, self.W, self.b = (nn.Parameter(torch.randn(*s)) for s in ((3, 4), (3, 3), (3,)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.U, self.b).tanh(), self.W, self.b)


def grouped() -> nn.Sequential:
    """Grouped, strided, dilated and depthwise convolutions."""
    return nn.Sequential(
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(1, 0), groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 6, 2, groups=6, dilation=(2, 1)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, 2, bias=False),
    )


#: Nets and the shape of a datum.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(5, 4, 3, act=nn.Tanh), (5,)),
    "tokens, mixed": (Mixing, (3, 2, 4)),
    "tokens, apart": (lambda: mlp(4, 3, 2, act=nn.Tanh), (3, 4)),
    "cnn": (cnn, (2, 5, 4)),
    "grouped cnn": (grouped, (4, 5, 4)),
    "cnn, a loss per pixel": (
        lambda: Then(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1)), lambda y: y.movedim(1, -1)),
        (2, 4, 3),
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)), (2, 4)),
    "called twice": (lambda: Tied(lambda parts: parts[0].tanh() * parts[1], 1), (6,)),
    "tied": (lambda: Tied(lambda parts: torch.stack(parts, 1).tanh(), 2), (6,)),
    "both orientations": (Turned, (4,)),
    "both orientations, tokens": (Turned, (3, 4)),
    "sequence first": (SequenceFirst, (3, 4)),
    "flattened": (Flattened, (3, 4)),
    "coupled": (Coupled, (4,)),
    "positions": (Positions, (3, 4)),
    "routed": (Routed, (3, 4)),
    "one bias": (OneBias, (4,)),
}


def single_gradients(model, loss, params: dict[str, Tensor], data, fisher: str = "type-2", samples: int = 1) -> Tensor:
    """Return ``[K, D]``: the gradients of single output vectors, whose squares sum to the curvature of the risk."""
    rows, normalizer, seen = [], 0.0, 0
    room = output_loss(loss)
    for X, y in data:
        leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        out = predictor(model)(leaves, X)
        view = room.view(room.prepare(out).detach(), y)
        normalizer += float(view.normalizer)
        if fisher in ("mc", "signs"):
            index = torch.arange(seen, seen + len(out))
            draw = view.sample if fisher == "mc" else view.signs
            one = torch.eye(len(out)).reshape(len(out), -1, *[1] * (out.ndim - 1))
            vectors = [m * draw(SEED, index, s) / samples**0.5 for s in range(samples) for m in one]
        else:
            vectors = output_vectors(loss, out, y, fisher)
        seen += len(out)
        for v in vectors:
            grads = torch.autograd.grad(out, list(leaves.values()), v, retain_graph=True, allow_unused=True)
            pairs = zip(grads, leaves.values(), strict=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(rows) / (normalizer if room.reduction == "mean" else 1.0) ** 0.5


def positions(op, part) -> Tensor:
    """Say for every entry ``[G, o, i]`` of a part which entry of the flat vector sits there."""
    at, offset = {}, 0
    for name, shape in zip(op.domain_names, op.domain, strict=True):
        n = torch.Size(shape).numel()
        at[name], offset = torch.arange(offset, offset + n, dtype=torch.float64).reshape(1, *shape), offset + n
    return part.placement.gather(at)[0].long()


def blocks(op, J: Tensor):
    """Yield every part with its gradients ``[K, G, o, i]``."""
    for part in op.parts:
        yield part, J[:, positions(op, part)]
