"""Second moments of layer inputs and output gradients, seen through structured matrices: what SINGD consumes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops._gram import mirror_
from curvops._scalars import accumulation_dtype, wide
from curvops.kfac.sites import Site
from curvops.kfac.statistics import Observation, by_datum, input_means
from curvops.kfac.uses import Use
from curvops.structured import StructuredMatrix
from curvops.structured.pulled import Pulled, pulled, pulled_gram


@dataclass(frozen=True)
class Frame:
    """Through what a block is seen.

    Attributes:
        K, C: Matrices ``[G, d_in, d_in]`` and ``[G, d_out, d_out]``, in float32 or better.
        approx: ``"expand"`` or ``"reduce"``.
        owner: Whose frame it is.
    """

    K: StructuredMatrix
    C: StructuredMatrix
    approx: str
    owner: Any = None


class Moment:
    """``Π(M' (sum x x') M)``, in the cheapest way that ``M`` allows: of a gram, of squares, or of the rows themselves.

    Args:
        M: The structured matrix.
    """

    def __init__(self, M: StructuredMatrix) -> None:
        self.M = M
        self.gram: Tensor | None = None
        self.pulled: Pulled | None = None

    def wants(self, rows: int) -> str:
        """Return which sum of so many rows to add: ``"gram"``, ``"squares"`` or ``"rows"``."""
        # A gram costs d^3 once at the end, the rows d^2 n more on the way; and they are larger, if they are many.
        few = self.M.MOMENT == "gram" and rows <= self.M.dim
        return "rows" if few else self.M.MOMENT

    def add_rows(self, X: Tensor) -> None:
        """Add ``X [G, d, n]``."""
        new = pulled(self.M, X.to(self.M.torch_dtype))
        self.pulled = new if self.pulled is None else self.pulled.plus(new)

    def sums(self, size: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the gram or the squares, to add to."""
        if self.gram is None:
            self.gram = like.new_zeros(size, dtype=accumulation_dtype(like.dtype))
        return self.gram

    def add(self, other: Moment) -> None:
        """Add another sum, seen through the same matrix."""
        if other.gram is not None:
            self.gram = other.gram if self.gram is None else self.gram + other.gram
        if other.pulled is not None:
            self.pulled = other.pulled if self.pulled is None else self.pulled.plus(other.pulled)

    @property
    def fed(self) -> bool:
        """Whether anything was added."""
        return self.gram is not None or self.pulled is not None

    def value(self) -> Pulled:
        """Return what was added."""
        parts = [] if self.pulled is None else [self.pulled]
        if self.gram is not None:
            parts.append(pulled_gram(self.M, self.gram.to(self.M.torch_dtype)))
        return parts[0] if len(parts) == 1 else parts[0].plus(parts[1])


@dataclass(eq=False)
class Moments:
    """The moments of one block.

    Attributes:
        A: Of the inputs; of ones for a bias.
        B: Of the output gradients.
        rows: Rows that ``A`` sums over.
    """

    A: Moment
    B: Moment
    rows: float = 0.0

    def add(self, other: Moments) -> None:
        """Add the moments of other data."""
        self.A.add(other.A)
        self.B.add(other.B)
        self.rows += other.rows


class Projected:
    """A statistic (see :class:`curvops.kfac.statistics.Statistic`) that holds no factor larger than its structure needs.

    Args:
        frame_of: Returns through what a block is seen; ``None``: the block is not asked for.
    """

    def __init__(self, frame_of: Callable[[Site], Frame | None]) -> None:
        self._frame_of = frame_of
        self._frames: dict[Hashable, Frame | None] = {}
        self.sums: dict[Hashable, Moments] = {}
        self._pending: dict[Use, Tensor] = {}

    def on_inputs(self, seen: Observation) -> None:
        """Add the inputs of a forward pass."""
        for site in seen.sites:
            frame = self._frame(site)
            if frame is None:
                continue
            moments = self._of(site, frame)
            if frame.approx == "reduce":
                moments.rows += seen.num_data
                mean = input_means(site, seen)
                if mean is None:  # a bias alone
                    mean = torch.ones(*frame.K.batch, 1, 1, dtype=frame.K.torch_dtype, device=frame.K.device)
                # A row that all data share counts for each of them.
                moments.A.add_rows(mean.mT * (seen.num_data / mean.shape[1]) ** 0.5)
            else:
                _add_inputs(site, moments)

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Add the output gradients of one use (expand), or keep their sums over positions until the pass is over (reduce)."""
        for site in seen.owners[use]:
            frame = self._frame(site)
            if frame is None:
                continue
            if frame.approx == "reduce":
                layout = seen.layouts.get(use)
                self._pending[use] = by_datum(use.form.output_sum(gradient), layout, seen.num_data)
            else:
                _add_outputs(use, gradient, self._of(site, frame).B)

    def on_pass_end(self, seen: Observation) -> None:
        """Add the output gradients of one backward pass (reduce): uses of a block are summed first."""
        for site in seen.sites if self._pending else ():
            parts = [self._pending[use] for use, _ in site.members if use in self._pending]
            frame = self._frame(site)
            if parts and frame is not None:
                self._of(site, frame).B.add_rows(sum(parts[1:], parts[0]).mT)
        self._pending.clear()

    def close(self, seen: Observation) -> None:
        """Nothing is left to do."""

    def merge(self, other: Projected) -> None:
        """Add the sums of other data."""
        for key, theirs in other.sums.items():
            self._frames.setdefault(key, other._frames[key])
            if key in self.sums:
                self.sums[key].add(theirs)
            else:
                self.sums[key] = theirs

    def block_of(self, key: Hashable) -> Any:
        """Return the owner of the frame of a block."""
        return self._frames[key].owner

    def _frame(self, site: Site) -> Frame | None:
        if site.key not in self._frames:
            self._frames[site.key] = self._frame_of(site)
        return self._frames[site.key]

    def _of(self, site: Site, frame: Frame) -> Moments:
        if site.key not in self.sums:
            self.sums[site.key] = Moments(Moment(frame.K), Moment(frame.C))
        return self.sums[site.key]


def _add_inputs(site: Site, moments: Moments) -> None:
    G, _, d = site.weight_shape
    mirror = False
    for use, column in site.members:
        M, S = use.form.extent(use.x)
        moments.rows += M * S
        x, kind = use.input() if d else use.x, moments.A.wants(M * S)
        at = None if column is None else d + column
        if kind == "gram":
            A = moments.A.sums((G, d + len(site.biases), d + len(site.biases)), x)
            if d:
                mirror |= use.form.add_input_gram_(A[:, :d, :d], x)
            if at is not None:
                A[:, at, at] += M * S
                if d:
                    A[:, :d, at] += use.form.input_sum(x).sum(1)
        elif kind == "squares":
            A = moments.A.sums((G, d + len(site.biases)), x)
            if d:
                A[:, :d] += use.form.input_squares(x)
            if at is not None:
                A[:, at] += M * S
        else:
            moments.A.add_rows(_rows(site, use, column))
    A = moments.A.gram
    if A is not None and A.ndim == 3:
        if mirror:
            mirror_(A[:, :d, :d])
        A[:, d:, :d] = A[:, :d, d:].mT


def _rows(site: Site, use: Use, column: int | None) -> Tensor:
    """Return the inputs of a use ``[G, d_in, rows]``, with a row of ones for its bias."""
    G, _, d = site.weight_shape
    M, S = use.form.extent(use.x)
    parts = []
    if d:
        parts.append(wide(use.form.inputs(use.input())).flatten(1, 2).mT)
    if site.biases:
        dtype = accumulation_dtype(use.x.dtype)
        ones = torch.zeros(len(site.biases), 1, dtype=dtype, device=use.x.device)
        if column is not None:
            ones[column] = 1.0
        parts.append(ones.expand(G, -1, M * S))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _add_outputs(use: Use, gradient: Tensor, B: Moment) -> None:
    rows = gradient.numel() // max(B.M.dim, 1) // max(use.form.groups, 1)
    kind = B.wants(rows)
    if kind == "rows":
        B.add_rows(wide(use.form.cotangents(gradient)).flatten(1, 2).mT)
    elif kind == "squares":
        B.sums((*B.M.batch, B.M.dim), gradient).add_(use.form.output_squares(gradient))
    else:
        total = B.sums((*B.M.batch, B.M.dim, B.M.dim), gradient)
        if use.form.add_output_gram_(total, gradient):
            mirror_(total)
