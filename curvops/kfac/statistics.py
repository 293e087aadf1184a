"""Reducers over what a pass observes: layer inputs ``X`` and gradients ``G`` of layer outputs.

A statistic holds sums and counts, in float32 or better; means are formed once, at the end. So it is exact for uneven
batches, and statistics of disjoint data add up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from curvops.kfac.recorder import Use
from curvops.kfac.rules._base import wide
from curvops.kfac.schedule import Layout
from curvops.kfac.sites import Site
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


class Statistic(Protocol):
    """A reducer that :func:`curvops.kfac.collect.collect` feeds."""

    def on_inputs(self, seen: Observation) -> None:
        """Take in one forward pass."""

    def on_cotangents(self, seen: Observation, gradients: dict[Use, Tensor], weight: float) -> None:
        """Take in one backward pass: gradients of the outputs of the uses, to be squared and weighted."""

    def merge(self, other: Any) -> None:
        """Add the sums of other data."""


@dataclass(eq=False)
class Sums:
    """Sums of one block: ``A`` over ``rows`` rows, and ``B``; a bias alone has no ``A``.

    Attributes:
        placement: Where the parameters sit in the block.
        uses: Operations that consume the block in one forward pass.
    """

    placement: Placement
    uses: tuple[str, ...]
    A: Tensor | None = None
    B: Tensor | None = None
    rows: float = 0.0


class Factors:
    """Sums of the Kronecker factors: ``A = sum x x'`` and ``B = sum g g'`` (expand), or of means and sums over positions.

    Args:
        approx: ``"expand"`` or ``"reduce"`` (Eschenhagen et al. 2023, Kronecker-Factored Approximate Curvature for Modern
            Neural Network Architectures).
    """

    def __init__(self, approx: str) -> None:
        self.approx = approx
        self.sums: dict[Hashable, Sums] = {}

    def on_inputs(self, seen: Observation) -> None:
        """Add the input factors of one forward pass."""
        cache: dict[Use, tuple[Tensor, Tensor]] = {}
        for site in seen.sites:
            sums = self._of(site)
            if self.approx == "expand":
                self._expand_inputs(site, sums, cache)
            else:
                self._reduce_inputs(site, sums, seen)

    def on_cotangents(self, seen: Observation, gradients: dict[Use, Tensor], weight: float) -> None:
        """Add the output factors of one backward pass."""
        contribute = _expand_outputs if self.approx == "expand" else _reduce_outputs
        cache: dict[Use, Tensor] = {}
        for site in seen.sites:
            B = contribute(site, gradients, seen, cache)
            if B is not None:
                sums = self._of(site)
                sums.B = B.mul(weight) if sums.B is None else sums.B.add_(B, alpha=weight)

    def merge(self, other: Factors) -> None:
        """Add the sums of other data."""
        for key, theirs in other.sums.items():
            ours = self.sums.setdefault(key, Sums(theirs.placement, theirs.uses))
            ours.rows += theirs.rows
            ours.A, ours.B = _plus(ours.A, theirs.A), _plus(ours.B, theirs.B)

    def _of(self, site: Site) -> Sums:
        # Not the site itself: its uses hold the graph of their batch.
        if site.key not in self.sums:
            self.sums[site.key] = Sums(site.placement, tuple(use.function for use, _ in site.members))
        return self.sums[site.key]

    def _expand_inputs(self, site: Site, sums: Sums, cache: dict[Use, tuple[Tensor, Tensor]]) -> None:
        for use, column in site.members:
            M, S = use.form.extent(use.x)
            sums.rows += M * S
            if site.weight is None:
                continue
            if use not in cache:
                x = use.input()
                cache[use] = use.form.input_gram(x), use.form.input_sum(x).sum(1)
            xx, x1 = cache[use]
            sums.A = _augmented_(sums.A, site, xx, x1, column, M * S)

    def _reduce_inputs(self, site: Site, sums: Sums, seen: Observation) -> None:
        G, _, d = site.weight_shape
        total, positions = None, 0
        for use, column in site.members:
            layout = seen.layouts[use]
            M, S = use.form.extent(use.x)
            count = M * S // (1 if layout is None else seen.num_data)
            positions += count
            if site.weight is None:
                continue
            x = _by_datum(use.form.input_sum(use.input()), layout, seen.num_data)
            one_hot = x.new_zeros(len(site.biases))
            if column is not None:
                one_hot[column] = count
            x = torch.cat([x, one_hot.expand(G, x.shape[1], -1)], 2)
            total = x if total is None else total + x
        # A row that all data share counts for each of them.
        sums.rows += seen.num_data
        if total is not None:
            mean = total / positions
            sums.A = _plus(sums.A, mean.mT @ mean * (seen.num_data / mean.shape[1]))


def _augmented_(A: Tensor | None, site: Site, xx: Tensor, x1: Tensor, column: int | None, rows: int) -> Tensor:
    """Add the Gram matrix of ``(x, one-hot of the bias)`` in place."""
    G, d = x1.shape
    if A is None:
        size = d + len(site.biases)
        A = xx.new_zeros(G, size, size)
    A[:, :d, :d] += xx
    if column is not None:
        j = d + column
        A[:, :d, j] += x1
        A[:, j, :d] += x1
        A[:, j, j] += rows
    return A


def _expand_outputs(site: Site, gradients: dict[Use, Tensor], seen: Observation, cache: dict[Use, Tensor]) -> Tensor | None:
    B = None
    for use, _ in site.members:
        if use in gradients:
            if use not in cache:
                cache[use] = use.form.output_gram(gradients[use])
            B = cache[use] if B is None else B + cache[use]
    return B


def _reduce_outputs(site: Site, gradients: dict[Use, Tensor], seen: Observation, cache: dict[Use, Tensor]) -> Tensor | None:
    total = None
    for use, _ in site.members:
        if use in gradients:
            if use not in cache:
                layout = None if seen.single else seen.layouts[use]
                cache[use] = _by_datum(use.form.output_sum(gradients[use]), layout, seen.num_data)
            total = cache[use] if total is None else total + cache[use]
    return None if total is None else total.mT @ total


def _by_datum(sums: Tensor, layout: Layout | None, num_data: int) -> Tensor:
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
