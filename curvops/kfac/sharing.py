"""Feed a statistic with as few backward passes as the model is proved to allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import prod

import torch
from torch import Tensor

from curvops.kfac.recorder import Use
from curvops.kfac.rotation import Consistency, Rotations
from curvops.kfac.schedule import (
    Codes,
    Layout,
    find_layout,
    is_owned,
    plain_codes,
    proving_codes,
    single_indices,
    term_indices,
)
from curvops.kfac.sites import Site
from curvops.kfac.statistics import Observation, Statistic
from curvops.kfac.vectors import Batch, Fisher


@dataclass(frozen=True)
class Structure:
    """What a batch proved.

    Attributes:
        level: What may share an output vector: ``"terms"`` (everything), ``"data"`` (one loss term of every datum), or
            ``"none"``.
        layouts: For every use, how its rows are made of data, if they are regular.
        extents: For every use, its rows and positions.
        num_data, terms: Size of the batch that proved it.
    """

    level: str
    layouts: tuple[Layout | None, ...]
    extents: tuple[tuple[int, int], ...]
    num_data: int
    terms: int

    def fits(self, batch: Batch) -> bool:
        """Whether a batch repeats the structure of the one that proved it."""
        if batch.num_data > self.num_data or batch.terms != self.terms or len(batch.uses) != len(self.layouts):
            return False
        if self.level == "terms" and self.terms > 1:
            return False  # whether tokens mix may depend on the data (masks, gates, routes): every batch proves it anew
        return all(map(self._same, batch.uses, self.layouts, self.extents, repeat(batch)))

    def _same(self, use: Use, layout: Layout | None, extent: tuple[int, int], batch: Batch) -> bool:
        found = use.form.extent(use.x)
        if layout is None or self.level == "none":
            return found == extent and batch.num_data == self.num_data
        if self.level == "terms" and self.terms > 1:
            return layout.rows(batch.num_data * batch.terms) == prod(found)
        return layout.rows(batch.num_data) == found[0]


@dataclass
class Sharing:
    """The policy of a pass over the data.

    Args:
        fisher: The kind of Fisher.
        by_datum: Whether the statistic needs to know which rows belong to which datum.

    Attributes:
        known: What earlier batches proved.
        levels: What shared an output vector, batch by batch.
    """

    fisher: Fisher
    by_datum: bool
    known: Structure | None = None
    levels: list[str] = field(default_factory=list)

    def feed(self, batch: Batch, sites: list[Site], make: Callable[[], Statistic]) -> Statistic:
        """Return a fresh statistic fed with the batch."""
        if self.fisher.mixes_freely and not self.by_datum:
            statistic = make()
            self.levels.append("free")
            return _feed_all(statistic, Observation(sites, batch.num_data, dict.fromkeys(batch.uses)), batch)
        if self.known is None or not self.known.fits(batch):
            statistic, self.known = self._prove(batch, sites, make)
            self.levels.append(self.known.level)
            if statistic is not None:
                return statistic
        else:
            self.levels.append(self.known.level)
        return self._feed_known(batch, sites, make())

    # ---- what is known already ---------------------------------------------------------
    def _feed_known(self, batch: Batch, sites: list[Site], statistic: Statistic) -> Statistic:
        assert self.known is not None
        seen = self._observation(batch, sites, self.known.layouts, self.known.level == "none")
        if self.known.level == "none":
            statistic.on_inputs(seen)
            for index in single_indices(batch.num_data, batch.terms, batch.vectors.count, self.fisher.unit):
                statistic.on_cotangents(seen, batch.backward(batch.vectors.at(index)))
            return statistic
        if self.known.level == "terms" or self.fisher.unit == "datum":
            return _feed_all(statistic, seen, batch)
        statistic.on_inputs(seen)
        codes = plain_codes(batch.num_data, batch.terms * batch.vectors.count)
        for index in self._indices("data", codes, batch):
            statistic.on_cotangents(seen, batch.backward(batch.vectors.at(index)))
        return statistic

    # ---- what is found out ---------------------------------------------------------------
    def _prove(self, batch: Batch, sites: list[Site], make: Callable[[], Statistic]) -> tuple[Statistic | None, Structure]:
        """Find what may share an output vector: from the cheapest hypothesis to the one that is always true."""
        by_term = self.fisher.unit == "term" and not self.by_datum
        if by_term and self.fisher.kind == "type-2":
            statistic, structure = self._feed_proving(batch, sites, make())
            if structure is not None:
                return statistic, structure
        if by_term and (found := self._probe("terms", batch)).separate:
            return None, found.structure("terms", batch)
        found = self._probe("data", batch)
        if self.by_datum:
            _check_regular(found, batch)
        return None, found.structure("data" if found.separate else "none", batch)

    def _feed_proving(self, batch: Batch, sites: list[Site], statistic: Statistic) -> tuple[Statistic, Structure | None]:
        """Feed the statistic in passes that prove, on the way, that loss terms may share them; or do not."""
        rotations = Rotations(batch.num_data * batch.terms, batch.vectors.count, self.fisher.seed, batch.output.device)
        consistency = Consistency(batch.uses, batch.terms > 1, self.fisher.seed)
        seen = self._observation(batch, sites, (None,) * len(batch.uses), False)
        statistic.on_inputs(seen)
        generic = True
        for p in range(rotations.passes):
            vector = batch.vectors.combined(rotations.row(p))
            generic &= batch.vectors.is_full(vector)
            gradients = batch.backward(vector)
            statistic.on_cotangents(seen, gradients)
            consistency.note(gradients)
        layouts = consistency.layouts(rotations)
        if layouts is None:
            return statistic, None
        # Terms without curvature here (ignored, linear) say nothing about what they reach in other batches.
        proven = batch.num_data if generic and consistency.evidence else 0
        return statistic, Verdict(True, layouts, proven).structure("terms", batch)

    def _probe(self, level: str, batch: Batch) -> Verdict:
        """Find out with generic vectors whether units share rows."""
        codes = proving_codes(batch.num_data * (batch.terms if level == "terms" else 1), 1)
        reached = Reached(batch, by_position=level == "terms")
        for assign in codes.assign:
            index = assign.reshape(batch.num_data, -1).expand(-1, batch.terms)
            reached.note(batch.backward(batch.vectors.probe(index)))
        return reached.verdict(codes)

    def _indices(self, level: str, codes: Codes, batch: Batch) -> Iterable[Tensor]:
        return term_indices(codes, batch.num_data, batch.terms, batch.vectors.count, level, self.fisher.unit)

    def _observation(self, batch: Batch, sites: list[Site], layouts: tuple, single: bool) -> Observation:
        return Observation(sites, batch.num_data, dict(zip(batch.uses, layouts, strict=True)), single)


def _feed_all(statistic: Statistic, seen: Observation, batch: Batch) -> Statistic:
    statistic.on_inputs(seen)
    for i in range(batch.vectors.count):
        statistic.on_cotangents(seen, batch.backward(batch.vectors.all(i)))
    return statistic


@dataclass(frozen=True)
class Verdict:
    """Whether no row is reached by two units; the layouts of the rows; on how many data this was seen of every use."""

    separate: bool
    layouts: tuple[Layout | None, ...]
    proven: int

    def structure(self, level: str, batch: Batch) -> Structure:
        """Return what later batches may rely on."""
        extents = tuple(u.form.extent(u.x) for u in batch.uses)
        return Structure(level, self.layouts, extents, self.proven, batch.terms)


class Reached:
    """Notes which rows of which use receive a gradient in which pass.

    Args:
        batch: The batch.
        by_position: Tell the positions of a row apart, too (units are loss terms).
    """

    def __init__(self, batch: Batch, *, by_position: bool) -> None:
        self._batch, self._by_position = batch, by_position
        self._passes: list[list[Tensor]] = [[] for _ in batch.uses]

    def note(self, gradients: dict[Use, Tensor]) -> None:
        """Take in one backward pass."""
        axes = (0, 3) if self._by_position else (0, 2, 3)
        for use, passes in zip(self._batch.uses, self._passes, strict=True):
            if use in gradients:
                # Not any(): it is 3x slower. Not a signed sum: it cancels.
                passes.append(use.form.cotangents(gradients[use]).abs().sum(axes).flatten() != 0)
            else:
                rows, positions = use.form.extent(use.x)
                n = rows * positions if self._by_position else rows
                passes.append(torch.zeros(n, dtype=torch.bool, device=use.x.device))

    def verdict(self, codes: Codes) -> Verdict:
        """Conclude."""
        separate, layouts, evidence = True, [], True
        for passes in self._passes:
            active = torch.stack(passes)
            evidence &= bool(active.any())  # a use that is silent here may speak in another batch
            layout = find_layout(active, codes)
            if layout is None:
                separate &= self._irregular(active, codes)
            layouts.append(layout)
        return Verdict(separate, tuple(layouts), self._batch.num_data if evidence else 0)

    def _irregular(self, active: Tensor, codes: Codes) -> bool:
        """Whether the rows are in the order (term, datum), or in none but still separate."""
        if self._by_position:
            grid = codes.assign.reshape(-1, self._batch.num_data, self._batch.terms)
            if find_layout(active, Codes(grid.mT.reshape(len(grid), -1), codes.scale)) is not None:
                return True
        return is_owned(active, codes)


def _check_regular(found: Verdict, batch: Batch) -> None:
    irregular = [list(u.names) for u, lay in zip(batch.uses, found.layouts, strict=True) if lay is None]
    if found.separate and irregular:
        raise NotImplementedError(
            f"The rows of the operations on {irregular} belong to single data, but in no regular order (routed or packed "
            "tokens), so they cannot be averaged by datum. Use kfac_approx='expand'."
        )
