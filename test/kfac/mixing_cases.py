"""Models that mix, share, permute and couple rows, and how the rows of their layers belong to data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

D, H, C = 4, 5, 2


class Net(nn.Module):
    """``l2(mix(tanh(l1 x)))`` on ``[N, T, D]``, batch-first; subclasses rearrange the rows."""

    def __init__(self, T: int = 6) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(D, H), nn.Linear(H, C)
        self.M = torch.randn(T, T)

    def mix(self, h: Tensor) -> Tensor:
        T = h.shape[1]
        return torch.einsum("ts,bsd->btd", self.M[:T, :T], h)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.mix(torch.tanh(self.l1(x))))


class NoMix(Net):
    def mix(self, h: Tensor) -> Tensor:
        return h


class FlatBT(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l1(x.reshape(-1, D))).reshape(*x.shape[:2], H)
        return self.l2(self.mix(h).reshape(-1, H)).reshape(*x.shape[:2], C)


class FlatTB(Net):
    def forward(self, x: Tensor) -> Tensor:
        N, T = x.shape[:2]
        h = torch.tanh(self.l1(x.transpose(0, 1).reshape(T * N, D))).reshape(T, N, H).transpose(0, 1)
        return self.l2(self.mix(h).transpose(0, 1).reshape(T * N, H)).reshape(T, N, C).transpose(0, 1)


class SequenceFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l1(x.transpose(0, 1)))
        return self.l2(self.mix(h.transpose(0, 1)).transpose(0, 1)).transpose(0, 1)


class Position(Net):
    """A position embedding of an ``arange``: rows that all data share."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(1, H)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1)
        return self.l2(self.mix(torch.tanh(self.l1(x) + self.position(t / 3))))


class Graph(nn.Module):
    """Two message-passing layers: every datum (a node) sees all others."""

    def __init__(self, nodes: int = 6) -> None:
        super().__init__()
        self.l1, self.l2, self.A = nn.Linear(D, H), nn.Linear(H, C), torch.rand(nodes, nodes)

    def forward(self, x: Tensor) -> Tensor:
        A = self.A[: len(x), : len(x)]
        return A @ self.l2(torch.tanh(A @ self.l1(x)))


class FirstToken(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.mix(torch.tanh(self.l1(x)))[:, 0])


class LastTokenSequenceFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(self.l1(x.transpose(0, 1)))[-1])


class Pooled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.tanh(self.l1(x)).mean(1))


class Recurrent(Net):
    """One cell, called once per token."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(D + H, H)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(len(x), H), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], 1)))
            outputs.append(self.l2(h) + self.l1(x[:, t])[:, :C])
        return torch.stack(outputs, 1)


class ClassBranches(Net):
    """Each branch serves one class only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.l1(x).tanh().sum(-1), self.l2(self.mix(self.l1(x).sin())).sum(-1)], -1)


class TokenBranches(Net):
    """``l1`` serves the first token only, and sees all of them; ``l2`` the others."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.mix(torch.tanh(self.l1(x)))[:, :1, :C]
        others = self.l2(torch.cat([x, x[..., :1]], -1))[:, 1:]
        return torch.cat([first, others], 1)


class Routed(nn.Module):
    """A mixture of experts: rows are flattened, permuted and cut by what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(D, H), nn.Linear(H, C), nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l1(x)).flatten(0, 1)
        order, first = (x[..., 0].flatten()).argsort(), x[..., 0].numel() // 2
        parts = torch.cat([self.l2(h[order[:first]]), self.l3(h[order[first:]])])
        return torch.zeros_like(parts).index_copy(0, order, parts).reshape(*x.shape[:2], C)


def flat_tb(t: Tensor, N: int) -> Tensor:
    return t.reshape(-1, N, t.shape[-1]).transpose(0, 1)


def shared(t: Tensor, N: int) -> Tensor:
    return t.reshape(1, -1, t.shape[-1])


@dataclass(frozen=True)
class Case:
    """A model, what its outputs look like, and how rows belong to data, by layer."""

    model: type[nn.Module]
    tokens: bool = True
    nodes: bool = False
    split: dict[str, Callable[[Tensor, int], Tensor]] = field(default_factory=dict)
    reduce: bool = True

    def data(self, sizes: Sequence[int], lengths: Sequence[int], target: Callable[..., Tensor]) -> list:
        X = [torch.randn(n, D) if self.nodes else torch.randn(n, T, D) for n, T in zip(sizes, lengths, strict=True)]
        outs = [(n, T, C) if self.tokens else (n, C) for n, T in zip(sizes, lengths, strict=True)]
        return [(x, target(*out)) for x, out in zip(X, outs, strict=True)]


CASES = [
    Case(Net),
    Case(NoMix),
    Case(FlatBT),
    Case(FlatTB, split={"l1": flat_tb, "l2": flat_tb}),
    Case(SequenceFirst, split={"l1": flat_tb, "l2": flat_tb}),
    Case(Position, split={"position": shared}),
    Case(Graph, tokens=False, nodes=True, split={"l1": shared, "l2": shared}),
    Case(FirstToken, tokens=False),
    Case(LastTokenSequenceFirst, tokens=False, split={"l1": flat_tb}),
    Case(Pooled, tokens=False),
    Case(Recurrent),
    Case(ClassBranches),
    Case(TokenBranches),
    Case(Routed, split={"l2": shared, "l3": shared}, reduce=False),
]
BY_MODEL = {c.model: c for c in CASES}
