"""Which output vectors share a backward pass, and how to find out, to the bit, that they may.

A *unit* is a loss term or a datum: the part of the output whose gradients must not mix with those of other units. One
backward pass serves many units if no row of any layer is reached by two of them. A probe establishes that in passes that
each unit takes part in, or sits out, in a pattern that no other unit's pattern contains. A row that receives a gradient in
a pass which its owner sits out is reached by somebody else; a row whose pattern fits no owner is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

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


def antichain(units: int) -> Tensor:
    """Return the fewest passes in which no unit's active set contains another's (Sperner's theorem).

    Returns:
        ``[P, U]``, whether a unit takes part in a pass.
    """
    passes = 1
    while comb(passes, passes // 2) < units:
        passes += 1
    few = passes // 2
    # Two sets of one size do not contain each other; those sat out are the smaller half.
    out = list(islice(combinations(range(passes), few), units))
    index = torch.tensor(out, dtype=torch.long).reshape(units, few)
    return torch.ones(units, passes, dtype=torch.bool).scatter_(1, index, False).T.contiguous()


def find_layout(active: Tensor, takes: Tensor) -> Layout | None:
    """Return the regular layout that explains which rows were reached in which pass.

    Args:
        active: ``[P, R]``, whether a row received a gradient.
        takes: ``[P, U]``, whether a unit took part.
    """
    units = takes.shape[1]
    out = ~takes.to(active.device)
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


def is_owned(active: Tensor, takes: Tensor) -> bool:
    """Whether every row was reached by one unit at most, wherever it is (routed tokens, ragged rows)."""
    rows, units = active.shape[1], takes.shape[1]
    if rows * units > _MAX_PAIRS:
        return False
    out = (~takes.to(active.device)).float()
    return bool(((active.T.float() @ out) == 0).any(1).all())


def _divisors(n: int) -> list[int]:
    return [b for b in range(1, n + 1) if n % b == 0] if n <= 4096 else [n, 1]


def vector_indices(num_data: int, terms: int, vectors: int, *, each_datum: bool, each_term: bool) -> Iterator[Tensor]:
    """Yield for each pass the vector ``[N, T]`` that every loss term takes (-1: none).

    Args:
        num_data, terms, vectors: ``N`` data with ``T`` loss terms each, and the vectors of a unit.
        each_datum: One datum at a time: data share no pass.
        each_term: One loss term of a datum at a time.
    """
    for n in range(num_data) if each_datum else (slice(None),):
        for t in range(terms) if each_term else (slice(None),):
            for v in range(vectors):
                index = torch.full((num_data, terms), -1, dtype=torch.long)
                index[n, t] = v
                yield index
