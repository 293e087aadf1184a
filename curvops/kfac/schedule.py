"""Which output vectors go into which backward pass, and the proof that they may share one.

A *unit* is a loss term or a datum: the part of the output whose gradients must not mix with those of other units. One
backward pass serves many units if no row of any layer is reached by two of them. That is established, not assumed: each
unit sits out some passes, in a pattern (a code) that no other unit's pattern contains. A row that receives a gradient in a
pass which its owner sits out is reached by somebody else; a row whose pattern fits no owner is shared. The passes are the
ones that the statistics need anyway, plus the few in which units sit out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb, sqrt

import torch
from torch import Tensor

#: Above this many (row, unit) pairs ownership is only looked for among regular layouts.
_MAX_PAIRS = 1 << 24


@dataclass(frozen=True)
class Layout:
    """Rows of a use as ``[outer, N, inner]``: ``(1, T)`` is batch-first, ``(T, 1)`` is batch-last."""

    outer: int
    inner: int

    def rows(self, num_data: int) -> int:
        """Return the number of rows of so many data."""
        return self.outer * num_data * self.inner

    def group(self, sums: Tensor, num_data: int) -> Tensor:
        """Sum rows ``[G, outer * N * inner, d]`` by datum: ``[G, N, d]``."""
        G, _, d = sums.shape
        return sums.reshape(G, self.outer, num_data, self.inner, d).sum((1, 3))


@dataclass(frozen=True)
class Codes:
    """Passes ``P`` of units ``U`` with ``L`` vectors each.

    Attributes:
        assign: ``[P, U]``, the vector a unit takes in a pass; -1 where it sits out.
        scale: Factor of every vector (each is used ``1 / scale**2`` times).
    """

    assign: Tensor
    scale: float


def plain_codes(units: int, vectors: int) -> Codes:
    """Every unit takes part in every pass: no proof."""
    return Codes(torch.arange(vectors).unsqueeze(1).expand(vectors, units), 1.0)


def proving_codes(units: int, vectors: int) -> Codes:
    """Return the fewest passes in which no unit's active set contains another's (an antichain, Sperner's theorem)."""
    passes, repeats = min((*_passes(units, vectors * m), m) for m in range(1, 9))[::2]
    active = vectors * repeats
    # Enumerate the smaller of the two: the passes taken, or those sat out.
    few = min(active, passes - active)
    chosen = torch.tensor(list(islice(combinations(range(passes), few), units)), dtype=torch.long).reshape(units, few)
    takes = torch.zeros(units, passes, dtype=torch.bool).scatter_(1, chosen, True)
    if few != active:
        takes = ~takes
    rank = takes.long().cumsum(1) - 1
    assign = torch.where(takes, rank % vectors, torch.full_like(rank, -1))
    return Codes(assign.T.contiguous(), 1 / sqrt(repeats))


def _passes(units: int, active: int) -> tuple[int, int]:
    """Fewest passes with enough sets of ``active`` of them, and how many of these are extra."""
    extra = 0
    while comb(active + extra, extra) < units:
        extra += 1
    return active + extra, extra


def find_layout(active: Tensor, codes: Codes) -> Layout | None:
    """Return the regular layout that explains which rows were reached in which pass.

    Args:
        active: ``[P, R]``, whether a row received a gradient.
        codes: The codes of the units in these passes.
    """
    units = codes.assign.shape[1]
    out = codes.assign.to(active.device) < 0  # [P, U]
    for layout in layouts_of(active.shape[1], units):
        rearranged = active.reshape(len(active), layout.outer, units, layout.inner).any(3).any(1)
        if not (rearranged & out).any():
            return layout
    return None


def layouts_of(rows: int, units: int) -> Iterator[Layout]:
    """Yield the regular layouts of so many rows: first units first, then units last, then the others."""
    if rows % units == 0:
        per_unit = rows // units
        for inner in sorted(_divisors(per_unit), key=lambda b: (b != per_unit, b != 1, b)):
            yield Layout(per_unit // inner, inner)


def is_owned(active: Tensor, codes: Codes) -> bool:
    """Whether every row was reached by one unit at most, wherever it is (routed tokens, ragged rows)."""
    rows, units = active.shape[1], codes.assign.shape[1]
    if rows * units > _MAX_PAIRS:
        return False
    out = (codes.assign.to(active.device) < 0).float()
    return bool(((active.T.float() @ out) == 0).any(1).all())


def _divisors(n: int) -> list[int]:
    return [b for b in range(1, n + 1) if n % b == 0] if n <= 4096 else [n, 1]


def term_indices(codes: Codes, num_data: int, terms: int, vectors: int, level: str, unit: str) -> Iterator[Tensor]:
    """Yield for each pass the vector ``[N, T]`` that every loss term takes (-1: none).

    Args:
        codes: Codes of the units of ``level``.
        num_data, terms: ``N`` and ``T``.
        vectors: Vectors per unit of the definition: a loss term (``unit="term"``) or a datum (``unit="datum"``).
        level: What shares a pass: all ``"terms"``, or all ``"data"`` with one term of each at a time.
        unit: The unit of the definition.
    """
    for assign in codes.assign:
        if level == "terms" or unit == "datum":
            yield assign.reshape(num_data, -1).expand(num_data, terms)
            continue
        index = torch.full((num_data, terms), -1, dtype=torch.long)
        busy = assign >= 0
        term = (assign // vectors).clamp(min=0)
        index[torch.arange(num_data)[busy], term[busy]] = (assign % vectors)[busy]
        yield index


def single_indices(num_data: int, terms: int, vectors: int, unit: str) -> Iterator[Tensor]:
    """Yield one unit and vector at a time: nothing shares a pass."""
    for n in range(num_data):
        for t in range(terms) if unit == "term" else (slice(None),):
            for v in range(vectors):
                index = torch.full((num_data, terms), -1, dtype=torch.long)
                index[n, t] = v
                yield index
