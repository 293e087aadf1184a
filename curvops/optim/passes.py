"""One forward pass that was observed, what the user says of it, and what is counted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from curvops.kfac._autograd import backward_pass
from curvops.kfac.schedule import Layout
from curvops.kfac.sites import Site, find_sites
from curvops.kfac.statistics import Observation, Statistic
from curvops.kfac.uses import Use
from curvops.kfac.vectors import Fisher


@dataclass(frozen=True)
class Hints:
    """What the user says of a forward pass.

    Attributes:
        loss_terms: How many terms the loss averages over; ``None``: what the optimizer concludes from the prediction.
        fisher: Vectors to send back instead of the training loss's own gradient, of the loss ``loss`` with targets ``y``.
    """

    loss_terms: int | None = None
    fisher: Fisher | None = None
    loss: Any = None
    y: Any = None


@dataclass
class Counts:
    """What was counted since the last step.

    Attributes:
        data: Rows on the first axis of the predictions.
        positions: Entries of the predictions' axes but the last.
        given: Loss terms that the user told of.
        passes: Forward passes.
        told: Passes among them whose loss terms the user told.
        normalizer: What the loss of passes with a Fisher of their own divides by; ``None``: gradients were the user's.
    """

    data: int = 0
    positions: int = 0
    given: int = 0
    passes: int = 0
    told: int = 0
    normalizer: float | None = None


class ForwardPass:
    """One observed forward pass, and the gradients that came back to it. It lives as long as its graph.

    Args:
        separate: Every bias is a block of its own.
        trained: Parameters that get a gradient.
    """

    def __init__(self, separate: bool, trained: Collection[str]) -> None:
        self.counts = Counts()
        self.counted = False
        self.layouts: dict[Use, Layout | None] = {}
        self._separate, self._trained = separate, trained
        self._uses: list[Use] = []
        self._sites: dict[str, list[Site]] | None = None
        self._fed: set[Site] = set()
        self._staged: dict[Use, tuple[int, Tensor]] = {}

    def note(self, use: Use) -> None:
        """Take in a use, and wait for the gradient of its output."""
        # Whatever the graph holds of us must not hold the graph.
        use.x = use.x.detach()
        node, position = use.edge.node, use.edge.output_nr
        node.register_prehook(partial(_arrived, self, use, position))
        self._uses.append(use)
        self._sites = None

    def keep(self, uses: list[Use]) -> None:
        """Settle which uses count."""
        for use in (*self._uses, *uses):
            use.edge = None  # nodes hold uses by their hooks: a circle that nobody would ever collect
        self._uses, self._sites = uses, None

    def forget(self) -> None:
        """Let go of all tensors: the graph may live on, for as long as the user keeps its loss."""
        self.keep([])
        self.layouts, self._fed = {}, set()
        self._staged.clear()

    def stage(self, use: Use, gradient: Tensor) -> None:
        """Hold the gradient of an output until it is known what for."""
        self._staged[use] = backward_pass(), gradient.detach().reshape(use.shape)

    def waits_for(self, name: str) -> bool:
        """Whether gradients of this backward pass have come for a parameter."""
        now = backward_pass()
        return any(name in use.names and pass_ == now for use, (pass_, _) in self._staged.items())

    def sites_of(self, name: str) -> list[Site]:
        """Return the blocks that are complete once the gradient of a parameter is: the first one that gets some."""
        if self._sites is None:
            self._sites = {}
            for site in find_sites(self._uses, self._separate):
                trigger = next((n for n, _ in site.key if n in self._trained), site.name)
                self._sites.setdefault(trigger, []).append(site)
        return self._sites.get(name, [])

    def _assumed(self, use: Use) -> Layout | None:
        """Return the layout of a use that nobody asked for, or that was hidden by a checkpoint: data come first."""
        rows, N = use.form.extent(use.x)[0], self.counts.data
        return Layout(1, rows // N) if N and rows % N == 0 else None

    def commit(self, name: str, statistic: Statistic) -> bool:
        """Feed what this backward pass brought to the blocks of a parameter; say whether there was anything."""
        found, now = False, backward_pass()
        for site in self.sites_of(name):
            uses = [use for use, _ in site.members if self._staged.get(use, (None,))[0] == now]
            if not uses:
                continue
            found = True
            layouts = {use: self.layouts[use] if use in self.layouts else self._assumed(use) for use, _ in site.members}
            seen = Observation([site], self.counts.data, layouts)
            if site not in self._fed:
                self._fed.add(site)
                statistic.on_inputs(seen)
            for use in uses:
                statistic.on_cotangent(seen, use, self._staged.pop(use)[1])
            statistic.on_pass_end(seen)
            statistic.close(seen)
        return found


def _arrived(seen: ForwardPass, use: Use, position: int, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[position] is not None:
        seen.stage(use, gradients[position])


def count(output: Tensor | None, hints: Hints) -> Counts:
    """Count one forward pass."""
    told = hints.loss_terms is not None
    data, positions = (0, 0) if output is None else (len(output), max(1, output.numel() // max(1, output.shape[-1])))
    if output is not None and output.ndim == 1:
        positions = data
    return Counts(data, positions, hints.loss_terms or 0, 1, int(told))


def loss_scale(average: Any, counts: Counts, scale: Tensor | float) -> Tensor | float:
    """Return what ``sum g g'`` of the observed gradients is multiplied by: the number of loss terms, over the squared scale.

    Args:
        average: ``loss_average`` of :class:`curvops.optim.SINGD`.
        counts: What was observed.
        scale: What the gradients were multiplied by.
    """
    if counts.normalizer is not None:  # vectors of the loss's own
        return 1.0 / counts.normalizer if counts.normalizer else 1.0
    return loss_terms(average, counts) / scale**2


def loss_terms(average: Any, counts: Counts) -> float:
    """Return how many terms a loss averages over, in all observed passes together; 1 for a sum."""
    if counts.told and counts.told < counts.passes:
        raise ValueError("Some forward passes of this step said loss_terms and some did not; expected all or none.")
    if average is None:
        return 1.0
    if counts.told:
        return float(counts.given)
    if isinstance(average, int):
        return float(average)
    terms = counts.data if average == "batch" else counts.positions
    if not terms:
        raise ValueError(
            f"loss_average={average!r}: found no loss terms, in an empty batch or an answer without tensors; say how many with "
            "loss_terms= in observe()."
        )
    return float(terms)
