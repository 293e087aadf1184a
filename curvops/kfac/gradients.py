"""Gradients of single output vectors, ``G_k = sum_s g x'`` for every datum and vector ``k``: joined, in chunks, reduced.

What a pass observes is kept block by block: the inputs, and the gradients of the outputs in a few passes, within a memory
budget. A reducer (``reducers``) then goes through a block in chunks of data and vectors, and forms ``G_k`` for a chunk at
most. So everything that is made of gradients of single vectors exists once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from curvops._scalars import wide
from curvops.kfac.joined import Block, Source
from curvops.kfac.sites import Site
from curvops.kfac.statistics import Observation
from curvops.kfac.tied import is_turned
from curvops.kfac.uses import Use
from curvops.structured.placement import Placement

#: Bytes of gradients that wait for more passes, so that a chunk of inputs is formed once for many vectors.
WAITING = 2**26


class Reducer(Protocol):
    """Takes in blocks; sums over data and vectors."""

    def add(self, key: Hashable, block: Block) -> None:
        """Take in a block; its gradients are gone afterwards."""

    def merge(self, other: Any) -> None:
        """Add the sums of other data."""


class Gradients:
    """The statistic that hands a reducer every block of a batch, with the gradients of as many passes as may wait.

    Args:
        reducer: What takes them in.

    Attributes:
        blocks: Placement and operations of every block that was seen.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.blocks: dict[Hashable, tuple[Placement, tuple[str, ...]]] = {}
        self._current: dict[Hashable, Block] = {}
        self._members: dict[Use, list[tuple[Block, int]]] = {}
        self._waiting = 0

    def on_inputs(self, seen: Observation) -> None:
        """Take note of the inputs of one forward pass."""
        self._current, self._members, self._waiting = {}, {}, 0
        for leader, followers in _paired(seen.sites):
            functions = [use.function for site in (leader, *followers) for use, _ in site.members]
            self.blocks[leader.key] = leader.placement, tuple(functions)
            sources = [s for site in (leader, *followers) for s in _sources(site, site is not leader, seen)]
            width = leader.weight_shape[2]
            block = Block(leader.placement, width, 1 if seen.single else seen.num_data, sources)
            self._current[leader.key] = block
            uses = [use for site in (leader, *followers) for use, _ in site.members]
            for j, use in enumerate(uses):
                self._members.setdefault(use, []).append((block, j))
        self._begin()

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Keep the gradient of one use until enough passes wait."""
        c = use.form.cotangents(gradient)
        for block, j in self._members[use]:
            block.passes[-1][j] = c
        self._waiting += c.numel() * c.element_size()

    def on_pass_end(self, seen: Observation) -> None:
        """Hand the blocks over if too much waits."""
        if self._waiting > WAITING:
            self._flush()
        self._begin()

    def close(self, seen: Observation) -> None:
        """Hand the blocks over."""
        self._flush()
        self._current, self._members = {}, {}

    def merge(self, other: Gradients) -> None:
        """Add the sums of other data."""
        self.reducer.merge(other.reducer)
        self.blocks = {**self.blocks, **other.blocks}

    def _begin(self) -> None:
        for block in self._current.values():
            if not block.passes or any(c is not None for c in block.passes[-1]):
                block.passes.append([])
            block.passes[-1] = [None] * len(block.sources)

    def _flush(self) -> None:
        for key, block in self._current.items():
            passes = [p for p in block.passes if any(c is not None for c in p)]
            if passes:
                self.reducer.add(key, replace(block, passes=passes))
            block.passes = []
        self._waiting = 0


def _paired(sites: list[Site]) -> Iterator[tuple[Site, list[Site]]]:
    """Yield every block with the one that holds its transpose, if there is one: they have the same gradient."""
    taken: set[Site] = set()
    for site in sites:
        if site in taken:
            continue
        turned = []
        if site.weight is not None:
            turned = [t for t in sites if t.weight is not None and is_turned(site.placement, t.placement)]
        taken.update(turned)
        yield site, turned


def _sources(site: Site, turned: bool, seen: Observation) -> list[Source]:
    sources = []
    for use, column in site.members:
        layout = None if seen.single else seen.layouts[use]
        lent = use.x.grad_fn is None
        sources.append(Source(use.form, use.input(), use.form.extent(use.x), layout, column, turned, lent))
    return sources


class Fingerprints:
    """The statistic that tells batches from other batches, and from other orders of their data, up to rounding.

    Gradients enter by the sum of their squares, which does not depend on how vectors are spread over passes.

    Attributes:
        batches: For every batch ``[uses, 3]``: a generic projection of every input, the norm of that input, and the sum of
            squares of its gradients.
    """

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self._inputs: dict[Use, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[Use, Tensor] = {}

    def on_inputs(self, seen: Observation) -> None:
        """Take note of the inputs of one forward pass."""
        uses = dict.fromkeys(use for site in seen.sites for use, _ in site.members)
        self._inputs = {use: _projected(use.input()) for use in uses}
        self._gradients = {use: size.new_zeros(()) for use, (_, size) in self._inputs.items()}

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Take note of the gradient of one use."""
        self._gradients[use] += _norm(gradient).square()

    def on_pass_end(self, seen: Observation) -> None:
        """Do nothing: passes add up."""

    def close(self, seen: Observation) -> None:
        """Be told that the batch is over."""
        rows = [torch.stack([*self._inputs[use], self._gradients[use]]) for use in self._inputs]
        self.batches.append(torch.stack(rows).cpu() if rows else torch.zeros(0, 3, dtype=torch.float64, device="cpu"))
        self._inputs, self._gradients = {}, {}

    def merge(self, other: Fingerprints) -> None:
        """Append the batches of other data."""
        self.batches += other.batches

    def first_difference(self, other: Fingerprints) -> int | None:
        """Return the number of the first batch that differs from the one of another reading of as many batches."""
        for i, (a, b) in enumerate(zip(self.batches, other.batches, strict=True)):
            if a.shape != b.shape or ((a - b).abs() > 1e-4 * a[:, [1, 1, 2]]).any():
                return i
        return None


def _projected(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a projection that tells data, and entries of a datum, apart; and the norm of what is projected."""
    x = wide(x).reshape(len(x), prod(x.shape[1:]))
    rows, entries = (torch.arange(1, n + 1, dtype=torch.float64, device=x.device) for n in x.shape)
    rows, entries = torch.cos(rows * rows), torch.cos(entries * entries * 2**0.5)
    return (x @ entries.to(x.dtype)).double() @ rows, _norm(x)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(wide(x)).double()


class Together:
    """Several statistics of one pass."""

    def __init__(self, *statistics: Any) -> None:
        self.statistics = statistics

    def on_inputs(self, seen: Observation) -> None:
        """Take in one forward pass."""
        for s in self.statistics:
            s.on_inputs(seen)

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Take in one gradient."""
        for s in self.statistics:
            s.on_cotangent(seen, use, gradient)

    def on_pass_end(self, seen: Observation) -> None:
        """Be told that the backward pass is over."""
        for s in self.statistics:
            s.on_pass_end(seen)

    def close(self, seen: Observation) -> None:
        """Be told that the batch is over."""
        for s in self.statistics:
            s.close(seen)

    def merge(self, other: Together) -> None:
        """Add the sums of other data."""
        for ours, theirs in zip(self.statistics, other.statistics, strict=True):
            ours.merge(theirs)
