"""Second moments of gradients in eigenvectors, for EKFAC: what a step observed is kept until the eigenvectors are there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from curvops._scalars import accumulation_dtype
from curvops.kfac.gradients import Gradients
from curvops.kfac.reducers import Kept, Squares
from curvops.kfac.statistics import Observation
from curvops.kfac.uses import Use
from curvops.optim.decompositions import Solution


class EachPass:
    """The statistic that keeps blocks with their gradients, one backward pass at a time.

    Args:
        kept: Where they are kept.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self._gradients: list[tuple[Use, Tensor]] = []

    def on_inputs(self, seen: Observation) -> None:
        """Do nothing: inputs are taken with the gradients."""

    def on_cotangent(self, seen: Observation, use: Use, gradient: Tensor) -> None:
        """Hold the gradient of one use."""
        self._gradients.append((use, gradient))

    def on_pass_end(self, seen: Observation) -> None:
        """Keep what the pass brought."""
        blocks = Gradients(self.kept)
        blocks.on_inputs(seen)
        for use, gradient in self._gradients:
            blocks.on_cotangent(seen, use, gradient)
        blocks.on_pass_end(seen)
        blocks.close(seen)
        self._gradients = []

    def close(self, seen: Observation) -> None:
        """Do nothing: passes are complete."""

    def memory(self) -> tuple[int, int]:
        """Return bytes of the inputs and of the gradients that are kept; what several blocks share counts once."""
        blocks = [block for _, block in self.kept.blocks or []]
        inputs = {(s.x.data_ptr(), s.x.shape): s.x for b in blocks for s in b.sources}
        gradients = [c for b in blocks for p in b.passes for c in p if c is not None]
        return sum(x.nbytes for x in inputs.values()), sum(c.nbytes for c in gradients)

    def merge(self, other: EachPass) -> None:
        """Keep the blocks of other data."""
        self.kept.merge(other.kept)


def second_moments(batches: list[Any], scale: Tensor | float, found: Solution) -> Tensor:
    """Return the second moments of gradients in eigenvectors."""
    held = next(t.dtype for block in batches for t in block.tensors())
    basis = (Q if Q is None else Q.to(accumulation_dtype(held)) for Q in (found.B, found.A))
    squares = Squares({None: tuple(basis)})  # type: ignore[dict-item]
    for block in batches:
        squares.add(None, block)
    return scale * squares.sums[None]
