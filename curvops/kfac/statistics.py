"""Reducers over what a pass observes: layer inputs ``X`` and gradients ``G`` of layer outputs.

A statistic holds sums and counts, in float32 or better; means are formed once, at the end. So it is exact for uneven
batches, and statistics of disjoint data add up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from curvops._gram import mirror_
from curvops._scalars import accumulation_dtype, wide
from curvops.kfac.schedule import Layout
from curvops.kfac.sites import Site
from curvops.kfac.uses import Use
from curvops.structured.placement import Placement


@dataclass(eq=False)
class Observation:
    """What a statistic sees of one forward pass.

    Attributes:
        sites: The blocks and their uses.
        num_data: Data in the batch; 1 where nothing tells data apart.
        layouts: How the rows of a use are made of data; ``None`` for rows shared by the data.
        single: Every output vector belongs to one unit alone, so all rows it reaches belong together.
    """

    sites: list[Site]
    num_data: int
    layouts: dict[Use, Layout | None]
    single: bool = False

    @cached_property
    def leaders(self) -> dict[Site, Site]:
        """For every block, the first one with the same uses: a bias that stands alone has the factor of its weight."""
        first: dict[tuple[Use, ...], Site] = {}
        return {site: first.setdefault(tuple(use for use, _ in site.members), site) for site in self.sites}

    @cached_property
    def owners(self) -> dict[Use, list[Site]]:
        """For every use, the leading blocks that it belongs to."""
        owners: dict[Use, list[Site]] = {}
        for site in dict.fromkeys(self.leaders.values()):
            for use, _ in site.members:
                owners.setdefault(use, []).append(site)
        return owners


class Statistic(Protocol):
    """A reducer that :func:`curvops.kfac.collect.collect` feeds."""

    def on_inputs(self, seen: Observation) -> None:
        """Take in one forward pass."""

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Take in the gradient of the output of one use; it is gone afterwards."""

    def on_pass_end(self, seen: Observation) -> None:
        """Be told that the backward pass is over."""

    def close(self, seen: Observation) -> None:
        """Be told that the batch is over."""

    def merge(self, other: Any) -> None:
        """Add the sums of other data."""


@dataclass(eq=False)
class Sums:
    """Sums of one block: ``A`` over ``rows`` rows, and ``B``; a bias alone has no ``A``.

    Attributes:
        placement: Where the parameters sit in the block.
        uses: Operations that consume the block in one forward pass.
        partial: Only the upper triangle of ``B`` is filled.
        basis: Eigenvectors of ``B`` and ``A``, where eigenvalues are corrected.
        values: Corrected eigenvalues ``[G, d_out, d_in]``.
    """

    placement: Placement
    uses: tuple[str, ...]
    A: Tensor | None = None
    B: Tensor | None = None
    rows: float = 0.0
    partial: bool = False
    basis: tuple[Tensor | None, Tensor | None] | None = None
    values: Tensor | None = None


class Factors:
    """Sums of the Kronecker factors: ``A = sum x x'`` and ``B = sum g g'`` (expand), or of means and sums over positions.

    Args:
        approx: ``"expand"`` or ``"reduce"`` (Eschenhagen et al. 2023, Kronecker-Factored Approximate Curvature for Modern
            Neural Network Architectures).
    """

    def __init__(self, approx: str) -> None:
        self.approx = approx
        self.sums: dict[Hashable, Sums] = {}
        self._by_datum: dict[Use, Tensor] = {}  # of the current pass

    def on_inputs(self, seen: Observation) -> None:
        """Add the input factors of one forward pass."""
        for site in seen.sites:
            if self.approx == "expand":
                _expand_inputs(site, self._of(site))
            else:
                _reduce_inputs(site, self._of(site), seen)

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Add the output factor of one use (expand), or keep its sum over positions until the pass is over (reduce)."""
        if self.approx == "reduce":
            layout = None if seen.single else seen.layouts[use]
            self._by_datum[use] = by_datum(use.form.output_sum(gradient), layout, seen.num_data)
            return
        for site in seen.owners[use]:
            sums = self._of(site)
            if sums.B is None:
                G, o, _ = site.weight_shape
                sums.B = gradient.new_zeros(G, o, o, dtype=accumulation_dtype(gradient.dtype))
            sums.partial |= use.form.add_output_gram_(sums.B, gradient)

    def on_pass_end(self, seen: Observation) -> None:
        """Add the output factors of one backward pass (reduce): uses of a block are summed first."""
        for site in dict.fromkeys(seen.leaders.values()) if self._by_datum else ():
            parts = [self._by_datum[use] for use, _ in site.members if use in self._by_datum]
            if parts:
                total = sum(parts[1:], parts[0])
                sums = self._of(site)
                sums.B = _plus(sums.B, total.mT @ total)
        self._by_datum.clear()

    def close(self, seen: Observation) -> None:
        """Complete output factors, of which passes fill the upper triangle only, and share them with lone biases."""
        for site, leader in seen.leaders.items():
            sums = self._of(leader)
            if sums.partial and sums.B is not None:
                mirror_(sums.B)
                sums.partial = False
            self._of(site).B = sums.B

    def merge(self, other: Factors) -> None:
        """Add the sums of other data, which must be closed."""
        for key, theirs in other.sums.items():
            ours = self.sums.setdefault(key, Sums(theirs.placement, theirs.uses))
            ours.rows += theirs.rows
            ours.A, ours.B = _plus(ours.A, theirs.A), _plus(ours.B, theirs.B)

    def _of(self, site: Site) -> Sums:
        # Not the site itself: its uses hold the graph of their batch.
        if site.key not in self.sums:
            self.sums[site.key] = Sums(site.placement, tuple(use.function for use, _ in site.members))
        return self.sums[site.key]


def _expand_inputs(site: Site, sums: Sums) -> None:
    G, _, d = site.weight_shape
    partial = False
    for use, column in site.members:
        M, S = use.form.extent(use.x)
        sums.rows += M * S
        if site.weight is None:
            continue
        x = use.input()
        if sums.A is None:
            size = d + len(site.biases)
            sums.A = x.new_zeros(G, size, size, dtype=accumulation_dtype(x.dtype))
        partial |= use.form.add_input_gram_(sums.A[:, :d, :d], x)
        if column is not None:
            j = d + column
            sums.A[:, :d, j] += use.form.input_sum(x).sum(1)
            sums.A[:, j, j] += M * S
    if sums.A is not None:
        if partial:
            mirror_(sums.A[:, :d, :d])
        sums.A[:, d:, :d] = sums.A[:, :d, d:].mT


def _reduce_inputs(site: Site, sums: Sums, seen: Observation) -> None:
    sums.rows += seen.num_data
    mean = input_means(site, seen)
    if mean is not None:
        # A row that all data share counts for each of them.
        sums.A = _plus(sums.A, mean.mT @ mean * (seen.num_data / mean.shape[1]))


def input_means(site: Site, seen: Observation) -> Tensor | None:
    """Return the inputs of a block, averaged over the positions of every datum: ``[G, N, d_in]``; one row if data share it."""
    G = site.weight_shape[0]
    total, positions = None, 0
    for use, column in site.members:
        layout = seen.layouts[use]
        M, S = use.form.extent(use.x)
        count = M * S // (1 if layout is None else seen.num_data)
        positions += count
        if site.weight is None:
            continue
        x = by_datum(use.form.input_sum(use.input()), layout, seen.num_data)
        ones = x.new_zeros(len(site.biases))
        if column is not None:
            ones[column] = count
        x = torch.cat([x, ones.expand(G, x.shape[1], -1)], 2)
        total = x if total is None else total + x
    return None if total is None else total / positions


def by_datum(sums: Tensor, layout: Layout | None, num_data: int) -> Tensor:
    """Sum rows ``[G, M, d]`` by datum ``[G, N, d]``, or over everything ``[G, 1, d]`` where the data share them."""
    return sums.sum(1, keepdim=True) if layout is None else layout.group(sums, num_data)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


class DenseBlocks:
    """Exact blocks, or their diagonals, of parameters that no rule covers: sums of ``g g'`` over single output vectors.

    Args:
        kind: ``"exact"`` or ``"diagonal"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sums: dict[str, Tensor] = {}

    def add(self, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """Add the gradients of the parameters for one output vector."""
        for name, g in gradients:
            if g is not None:
                g = wide(g.detach().flatten())
                square = torch.outer(g, g) if self.kind == "exact" else g * g
                self.sums[name] = self.sums[name] + square if name in self.sums else square
