"""Feed a statistic with as few backward passes as the model is proved to allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvops.kfac.recorder import Use
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
        layouts: For every use, how its rows are made of data, if they are.
        num_data: Data in the batch that proved it.
    """

    level: str
    layouts: tuple[Layout | None, ...]
    num_data: int

    def fits(self, batch: Batch) -> bool:
        """Whether a batch repeats the structure of the one that proved it."""
        if batch.num_data > self.num_data or len(batch.uses) != len(self.layouts):
            return False
        pairs = zip(batch.uses, self.layouts, strict=True)
        return all(lay is None or lay.rows(batch.num_data) == use.form.extent(use.x)[0] for use, lay in pairs)


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
                statistic.on_cotangents(seen, batch.backward(batch.vectors.at(index)), 1.0)
            return statistic
        if self.known.level == "terms" or self.fisher.unit == "datum":
            return _feed_all(statistic, seen, batch)
        statistic.on_inputs(seen)
        codes = plain_codes(batch.num_data, batch.terms * batch.vectors.count)
        for index in self._indices("data", codes, batch):
            statistic.on_cotangents(seen, batch.backward(batch.vectors.at(index)), 1.0)
        return statistic

    # ---- what is found out ---------------------------------------------------------------
    def _prove(self, batch: Batch, sites: list[Site], make: Callable[[], Statistic]) -> tuple[Statistic | None, Structure]:
        """Find what may share an output vector: from the cheapest hypothesis to the one that is always true."""
        nothing: tuple[Layout | None, ...] = (None,) * len(batch.uses)
        if self.fisher.unit == "term" and batch.terms > 1 and not self.by_datum:
            statistic, separate, _ = self._attempt("terms", batch, sites, make())
            if separate:
                return statistic, Structure("terms", nothing, batch.num_data)
        if self.by_datum:
            separate, layouts = self._probe(batch)
            statistic = None
        else:
            statistic, separate, layouts = self._attempt("data", batch, sites, make())
        return statistic if separate else None, Structure("data" if separate else "none", layouts, batch.num_data)

    def _attempt(
        self, level: str, batch: Batch, sites: list[Site], statistic: Statistic
    ) -> tuple[Statistic, bool, tuple[Layout | None, ...]]:
        """Feed the statistic in proving passes; say whether the proof held."""
        units = batch.num_data * (batch.terms if level == "terms" else 1)
        per_unit = batch.terms if level == "data" and self.fisher.unit == "term" else 1
        codes = proving_codes(units, per_unit * batch.vectors.count)
        seen = self._observation(batch, sites, (None,) * len(batch.uses), False)
        statistic.on_inputs(seen)
        reached: dict[Use, list[Tensor]] = {u: [] for u in batch.uses}
        for index in self._indices(level, codes, batch):
            gradients = batch.backward(batch.vectors.at(index))
            statistic.on_cotangents(seen, gradients, codes.scale**2)
            _note(reached, gradients, by_position=level == "terms")
        return statistic, *_verdict(reached, codes, batch, level)

    def _probe(self, batch: Batch) -> tuple[bool, tuple[Layout | None, ...]]:
        codes = proving_codes(batch.num_data, 1)
        reached: dict[Use, list[Tensor]] = {u: [] for u in batch.uses}
        for assign in codes.assign:
            index = assign.unsqueeze(1).expand(-1, batch.terms)
            _note(reached, batch.backward(batch.vectors.probe(index)), by_position=False)
        separate, layouts = _verdict(reached, codes, batch, "data")
        if separate and any(lay is None and rows for lay, rows in zip(layouts, reached.values(), strict=True)):
            irregular = [u.names for u, lay in zip(batch.uses, layouts, strict=True) if lay is None]
            raise NotImplementedError(
                f"The rows of the operations on {irregular} belong to single data, but in no regular order (routed or packed "
                "tokens), so they cannot be averaged by datum. Use kfac_approx='expand'."
            )
        return separate, layouts

    def _indices(self, level: str, codes: Codes, batch: Batch) -> Iterable[Tensor]:
        return term_indices(codes, batch.num_data, batch.terms, batch.vectors.count, level, self.fisher.unit)

    def _observation(self, batch: Batch, sites: list[Site], layouts: tuple, single: bool) -> Observation:
        return Observation(sites, batch.num_data, dict(zip(batch.uses, layouts, strict=True)), single)


def _feed_all(statistic: Statistic, seen: Observation, batch: Batch) -> Statistic:
    statistic.on_inputs(seen)
    for i in range(batch.vectors.count):
        statistic.on_cotangents(seen, batch.backward(batch.vectors.all(i)), 1.0)
    return statistic


def _note(reached: dict[Use, list[Tensor]], gradients: dict[Use, Tensor], *, by_position: bool) -> None:
    for use, passes in reached.items():
        M, S = use.form.extent(use.x)
        if use in gradients:
            rows = (use.form.cotangents(gradients[use]) != 0).any(3).any(0)  # [M, S]
        else:
            rows = torch.zeros(M, S, dtype=torch.bool, device=use.x.device)
        passes.append(rows.flatten() if by_position else rows.any(1))


def _verdict(
    reached: dict[Use, list[Tensor]], codes: Codes, batch: Batch, level: str
) -> tuple[bool, tuple[Layout | None, ...]]:
    """Whether no row is reached by two units, and the layouts of the rows."""
    separate, layouts = True, []
    for passes in reached.values():
        active = torch.stack(passes) if passes else codes.assign.new_zeros(0, 0, dtype=torch.bool)
        layout = find_layout(active, codes) if passes else None
        layouts.append(layout)
        if layout is None and passes:
            other = Codes(_swapped(codes.assign, batch), codes.scale) if level == "terms" else codes
            separate &= find_layout(active, other) is not None or is_owned(active, codes)
    return separate, tuple(layouts)


def _swapped(assign: Tensor, batch: Batch) -> Tensor:
    """Reorder units ``(n, t)`` to ``(t, n)``."""
    return assign.reshape(-1, batch.num_data, batch.terms).mT.reshape(len(assign), -1)
