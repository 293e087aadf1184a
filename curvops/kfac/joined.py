"""One batch of one block, all its uses joined: inputs and gradients of outputs by unit, in chunks that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from curvops._scalars import accumulation_dtype, wide
from curvops.kfac.rules._base import Form
from curvops.kfac.schedule import Layout
from curvops.structured.placement import Placement

#: Numbers that a chunk may hold.
CHUNK = 2**21


@dataclass(frozen=True, eq=False)
class Source:
    """One use of a block in one batch.

    Attributes:
        form, x: The operation and its input.
        extent: Its rows ``M`` and positions ``S``.
        layout: How rows are made of units; ``None`` where all belong to one.
        column: The column of its bias, if it has one.
        turned: The operation uses the transpose: inputs and gradients of outputs change places.
        lent: The input was not made from parameters: its memory may be the user's, who may fill it anew for the next batch.
    """

    form: Form
    x: Tensor
    extent: tuple[int, int]
    layout: Layout | None
    column: int | None
    turned: bool
    lent: bool = False

    def inputs(self, start: int, stop: int, units: int) -> Tensor:
        """Return the inputs of some units, all their positions side by side: ``[G, n, S, d_in]``."""
        rows: slice | Tensor = slice(None)
        if self.layout is not None:
            rows = self._rows(start, stop, units)
        return self._joined(wide(self.form.rows(self.x, rows)), stop - start)

    def cotangents(self, c: Tensor, start: int, stop: int, units: int) -> Tensor:
        """Return the same units of gradients ``[G, M, S, d_out]`` as ``[G, n, S, d_out]``."""
        rows: slice | Tensor = slice(None)
        if self.layout is not None:
            rows = self._rows(start, stop, units)
        return self._joined(wide(c[:, rows]), stop - start)

    def _rows(self, start: int, stop: int, units: int) -> slice | Tensor:
        outer, inner = self.layout.outer, self.layout.inner
        if outer == 1:
            return slice(start * inner, stop * inner)
        numbers = torch.arange(outer * units * inner, device=self.x.device).reshape(outer, units, inner)
        return numbers[:, start:stop].flatten()

    def _joined(self, y: Tensor, n: int) -> Tensor:
        G, m, S, d = y.shape
        if self.layout is None or m == n:
            return y if self.layout is not None else y.reshape(G, 1, m * S, d)
        if self.layout.outer == 1:
            return y.reshape(G, n, -1, d)
        y = y.reshape(G, self.layout.outer, n, self.layout.inner, S, d)
        return y.transpose(1, 2).reshape(G, n, -1, d)


@dataclass(eq=False)
class Chunk:
    """Some units of a block, with some of their vectors: the straight uses joined along positions, the turned ones, too.

    Attributes:
        x: Inputs ``[G, n, S, d]`` of the straight uses, without columns of ones.
        ones: ``[S, biases]``, which position has which bias.
        c: Gradients of their outputs, ``[G, n, P, S, o]``.
        turned: Inputs ``[G, n, S, o]`` and gradients ``[G, n, P, S, i]`` of the turned uses.
    """

    x: Tensor | None
    ones: Tensor | None
    c: Tensor | None
    turned: tuple[Tensor, Tensor] | None = None

    @property
    def single(self) -> bool:
        """Whether every gradient is one outer product."""
        return self.turned is None and self.x.shape[2] == 1

    def inputs(self, Q: Tensor | None = None) -> Tensor:
        """Return the inputs of the straight uses with their ones, times ``Q [G, i, i]``: ``[G, n, S, i]``."""
        if Q is None:
            ones = self.ones.expand(*self.x.shape[:2], -1, -1)
            if self.x.shape[-1] == 0 or ones.shape[-1] == 0:
                return self.x if ones.shape[-1] == 0 else ones
            return torch.cat([self.x.mT, ones.mT], 2).mT
        d = self.x.shape[-1]
        bias = self.ones @ Q[:, d:]  # [G, S, i]
        return _right(self.x, Q[:, :d]) + bias[:, None] if self.ones.shape[-1] else _right(self.x, Q)

    def gradients(self, x: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        """Return ``sum_s g x'`` as ``[G, n, P, o, i]``; ``x`` and ``c`` replace inputs and gradients of outputs.

        Args:
            x: ``[G, n, S, i]``, with ones.
            c: ``[G, n, P, S, o]``.
        """
        total = None
        if self.c is not None:
            c = self.c if c is None else c
            G, n, P, _, o = c.shape
            left = c.mT.reshape(G, n, P * o, -1)
            if x is not None:
                total = left @ x
            elif self.ones.shape[-1] == 0:
                total = left @ self.x
            else:
                parts = [left @ self.x] if self.x.shape[-1] else []
                total = torch.cat([*parts, left @ self.ones], -1)
            total = total.reshape(G, n, P, o, -1)
        if self.turned is not None:
            x2, c2 = self.turned
            more = x2.mT.unsqueeze(2) @ c2
            total = more if total is None else total + more
        return total


def _right(x: Tensor, Q: Tensor) -> Tensor:
    """Return ``x Q`` for ``x [G, n, S, d]`` and ``Q [G, d, i]``, as it lies in memory."""
    G, n, S, d = x.shape
    if x.stride(-1) == 1 or d == 1:
        return (x.reshape(G, n * S, d) @ Q).reshape(G, n, S, Q.shape[-1])
    return (Q.mT.unsqueeze(1) @ x.mT).mT


@dataclass(eq=False)
class Block:
    """What one batch tells about one block: inputs, and gradients of outputs in several passes.

    Attributes:
        placement: Where its parameters sit.
        width: Columns of the weight; the others are biases.
        units: Data (or loss terms) that are told apart.
        sources: Its uses.
        passes: For every pass the gradients ``[G, M, S, d_out]`` of every use; ``None`` where it was not reached.
    """

    placement: Placement
    width: int
    units: int
    sources: list[Source]
    passes: list[list[Tensor | None]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(G, o, i)``."""
        return self.placement.shape

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        yield from (s.x for s in self.sources)
        yield from (c for p in self.passes for c in p if c is not None)

    def positions(self) -> int:
        """Positions of a unit, over all uses."""
        return sum(prod(s.extent) for s in self.sources) // max(self.units, 1)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all units with all vectors, as many at a time as fit; inputs are formed once for all their vectors."""
        G, o, i = self.shape
        S, P = self.positions(), len(self.passes)
        if S == 1 and all(not s.turned for s in self.sources):  # outer products are never formed
            per_vector, per_unit = G * o, G * i
        else:
            per_vector, per_unit = G * (2 * o * i + o * S), G * i * S
        few = max(1, min(P, CHUNK // per_vector))
        n = max(1, min(self.units, CHUNK // (few * per_vector + per_unit)))
        for start in range(0, self.units, n):
            stop = min(start + n, self.units)
            straight, turned = self._inputs(start, stop, False), self._inputs(start, stop, True)
            for p in range(0, P, few):
                yield self._chunk(straight, turned, start, stop, self.passes[p : p + few])

    def _inputs(self, start: int, stop: int, turned: bool) -> Tensor | None:
        parts = []
        for s in (s for s in self.sources if s.turned == turned):
            if self.width:
                parts.append(s.inputs(start, stop, self.units))
            else:
                like = accumulation_dtype(s.x.dtype)
                S = prod(s.extent) // self.units
                parts.append(s.x.new_empty(self.shape[0], stop - start, S, 0, dtype=like))
        return torch.cat(parts, 2) if len(parts) > 1 else (parts[0] if parts else None)

    def _chunk(self, x: Tensor | None, x2: Tensor | None, start: int, stop: int, passes: list) -> Chunk:
        ones = None if x is None else self._ones(x)
        turned = None if x2 is None else (x2, self._cotangents(passes, start, stop, True))
        return Chunk(x, ones, None if x is None else self._cotangents(passes, start, stop, False), turned)

    def _cotangents(self, passes: list, start: int, stop: int, turned: bool) -> Tensor:
        members = [(j, s) for j, s in enumerate(self.sources) if s.turned == turned]
        rows = []
        for p in passes:
            parts = [s.cotangents(self._reached(p[j], s), start, stop, self.units) for j, s in members]
            rows.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
        if len(rows) == 1:
            return rows[0].unsqueeze(2)
        # Positions last in memory, where they are many: what products of matrices ask for.
        return torch.stack([r.mT for r in rows], 2).mT if rows[0].shape[2] > 1 else torch.stack(rows, 2)

    def _reached(self, c: Tensor | None, s: Source) -> Tensor:
        if c is not None:
            return c
        G, _, width = self.placement.shape
        o = width if s.turned else self.placement.shape[1]
        return s.x.new_zeros(1, 1, 1, 1).expand(G, *s.extent, o)

    def _ones(self, x: Tensor) -> Tensor:
        ones = x.new_zeros(x.shape[2], self.shape[2] - self.width)
        start = 0
        for s in (s for s in self.sources if not s.turned):
            S = prod(s.extent) // self.units
            if s.column is not None:
                ones[start : start + S, s.column] = 1
            start += S
        return ones
