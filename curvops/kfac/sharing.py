"""Feed a statistic with as few backward passes as the model is proved to allow, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvops.kfac.rotation import Combinations, Consistency, Rotations
from curvops.kfac.schedule import Layout, antichain, find_layout, is_owned, vector_indices
from curvops.kfac.sites import Site
from curvops.kfac.statistics import Observation, Statistic
from curvops.kfac.uses import Use
from curvops.kfac.vectors import Batch, Fisher

Layouts = tuple[Layout | None, ...]
Feeding = Callable[[], Statistic]


@dataclass
class Sharing:
    """What may share an output vector: ``"terms"`` (everything), ``"data"`` (one loss term of every datum), or ``"none"``.

    Every batch starts from what the last one was found to allow, and proves it anew: whether data or tokens mix may depend
    on the data.

    Args:
        fisher: The kind of Fisher.
        by_datum: Whether the statistic needs to know which rows belong to which datum.
        regular: Whether it also needs to know the rows that no gradient reaches, in a regular order; if not, it does with
            one unit at a time where rows are in no regular order.

    Attributes:
        level: What the last batch allowed.
        layouts: How the rows of its uses were made of data; ``None`` where they are not.
        levels: What every batch allowed; ``"free"`` where nothing needed to be known.
    """

    fisher: Fisher
    by_datum: bool
    regular: bool = True
    level: str = ""
    layouts: Layouts | None = None
    levels: list[str] = field(default_factory=list)
    _guessed: set[int] = field(default_factory=set)

    def feed(self, batch: Batch, sites: list[Site], make: Feeding) -> Statistic:
        """Return a fresh statistic fed with the batch."""
        seen = Observation(sites, batch.num_data, dict.fromkeys(batch.uses))
        if self.fisher.mixes_freely and not self.by_datum:
            self.levels.append("free")
            return _feed_and_forget(make(), seen, batch, self._count(batch))
        for level in self._hypotheses(batch):
            statistic = self._try(level, batch, seen, make)
            if statistic is not None:
                return self._settle(level, statistic)
        return self._settle("none", self._feed_singly(batch, seen, make()))

    def _settle(self, level: str, statistic: Statistic) -> Statistic:
        self.level = level
        self.levels.append(level)
        return statistic

    def _hypotheses(self, batch: Batch) -> list[str]:
        """From the cheapest to the safest; ``"none"`` is always true."""
        by_term = self.fisher.unit == "term" and not (self.by_datum and self.regular)
        levels = ["terms", "data"] if by_term and batch.terms > 1 else ["data"]
        if self.level == "none":
            return []
        return levels[levels.index(self.level) :] if self.level in levels else levels

    def _try(self, level: str, batch: Batch, seen: Observation, make: Feeding) -> Statistic | None:
        """Feed a statistic under a hypothesis; return ``None`` if it proves wrong."""
        if self.by_datum:
            seen.num_data = _units(level, batch)
            if not self._assume(level, batch):
                return None
            seen.layouts = self._by_use(batch)
        statistic, consistent = self._feed_rotated(level, batch, seen, make())
        if consistent:
            return statistic
        if self.by_datum and level == "terms":
            self.layouts = None
            return None
        # Wrong, or too irregular or too coarse in precision for that proof: look closer.
        if not self._look(level, batch):
            return None
        if self.by_datum:
            seen.layouts = self._by_use(batch)
        by_term = level == "data" and self.fisher.unit == "term"
        return self._feed_at(batch, seen, make(), each_datum=False, each_term=by_term)

    def _assume(self, level: str, batch: Batch) -> bool:
        """Take layouts for granted until they are proved: those of the last batch, units first, or what a probe finds."""
        units = _units(level, batch)
        if self.layouts is None or not _fit(self.layouts, batch, units):
            self.layouts = None if self.regular else _units_first(batch, units)
        return self.layouts is not None or (level == "data" and self._look(level, batch))

    def _look(self, level: str, batch: Batch) -> bool:
        """Probe whether units share rows; where the statistic needs to know, take note of the layouts."""
        separate, self.layouts, silent = _probe(level, batch)
        if separate and self.by_datum and not self.regular:
            return None not in self.layouts
        if separate and self.by_datum:
            _check_regular(self.layouts, batch)
            self._check_guesses(batch, silent)
        return separate

    def _check_guesses(self, batch: Batch, silent: list[bool]) -> None:
        """Without a gradient, rows are taken to be batch-first; refuse if another batch tells better."""
        for i, (use, layout) in enumerate(zip(batch.uses, self.layouts, strict=True)):
            batch_first = layout.outer == 1
            if silent[i] and batch.num_data > 1 and layout.inner > 1:
                self._guessed.add(i)
            elif not silent[i] and i in self._guessed and not batch_first:
                raise NotImplementedError(
                    f"In an earlier batch the operation on {list(use.names)} had no gradient, so its rows were taken to be "
                    "batch-first; this batch shows that they are not. Begin with a batch that reaches it, or use "
                    "kfac_approx='expand'."
                )

    def _by_use(self, batch: Batch) -> dict[Use, Layout | None]:
        return dict(zip(batch.uses, self.layouts, strict=True))

    def _feed_rotated(
        self, level: str, batch: Batch, seen: Observation, statistic: Statistic
    ) -> tuple[Statistic, bool]:
        """Feed the statistic in passes that prove on the way what they assume; say whether they did."""
        vectors, seed = batch.vectors, self.fisher.seed
        kind = Combinations if self.by_datum else Rotations
        rotations = kind(_units(level, batch), self._per_unit(level, batch), seed, batch.output.device)
        by_position = level == "terms" and batch.terms > 1 and not self.by_datum
        consistency = Consistency(batch.uses, by_position, seed, rotations.vectors)
        statistic.on_inputs(seen)
        for p in range(rotations.passes):
            fed = statistic if self._count(batch) and p < rotations.fed else None
            if self.by_datum and p < rotations.fed:
                vector = self._plain(p, level, batch)
            else:
                rows = rotations.row(p).reshape(batch.num_data, -1, vectors.count)
                vector = vectors.combined(rows.expand(-1, batch.terms, -1))
            consistency.begin()
            _pass(batch, vector, seen, fed, consistency.note)
        statistic.close(seen)
        assumed = tuple(seen.layouts[u] for u in batch.uses) if self.by_datum else None
        return statistic, consistency.holds(rotations, assumed)

    def _plain(self, p: int, level: str, batch: Batch) -> Tensor:
        """Return the ``p``-th vector of every unit."""
        term, v = divmod(p, batch.vectors.count)
        if self._per_unit(level, batch) == batch.vectors.count:
            return batch.vectors.all(v)
        index = torch.full((batch.num_data, batch.terms), -1, dtype=torch.long)
        index[:, term] = v
        return batch.vectors.at(index)

    def _feed_singly(self, batch: Batch, seen: Observation, statistic: Statistic) -> Statistic:
        """Feed the statistic one unit and vector at a time."""
        seen.single, seen.num_data = True, batch.num_data
        if self.by_datum and self.regular:
            if self.layouts is None or not _fit(self.layouts, batch, batch.num_data):
                _, self.layouts, _ = _probe("data", batch)
            seen.layouts = self._by_use(batch)
        return self._feed_at(batch, seen, statistic, each_datum=True, each_term=self.fisher.unit == "term")

    def _feed_at(self, batch: Batch, seen: Observation, statistic: Statistic, **apart: bool) -> Statistic:
        indices = vector_indices(batch.num_data, batch.terms, self._count(batch), **apart)
        return _feed(statistic, seen, batch, map(batch.vectors.at, indices))

    def _count(self, batch: Batch) -> int:
        """Vectors per unit that the statistic takes in."""
        return batch.vectors.count if self.fisher.back_propagates else 0

    def _per_unit(self, level: str, batch: Batch) -> int:
        """Vectors of a unit of ``level``: a datum has those of all its terms."""
        spread = level == "data" and self.fisher.unit == "term"
        return batch.vectors.count * (batch.terms if spread else 1)


def _feed(statistic: Statistic, seen: Observation, batch: Batch, vectors: Iterable[Tensor]) -> Statistic:
    statistic.on_inputs(seen)
    for vector in vectors:
        _pass(batch, vector, seen, statistic)
    statistic.close(seen)
    return statistic


def _feed_and_forget(statistic: Statistic, seen: Observation, batch: Batch, count: int) -> Statistic:
    """Feed a statistic for good: inputs and graph go as soon as they are used, as they do in training."""
    statistic.on_inputs(seen)
    for use in batch.uses:
        use.forget_input()
    for i in range(count):
        _pass(batch, batch.vectors.all(i), seen, statistic, keep=i < count - 1)
    statistic.close(seen)
    return statistic


def _pass(
    batch: Batch,
    vector: Tensor,
    seen: Observation,
    statistic: Statistic | None,
    note: Callable[[Use, Tensor], None] | None = None,
    *,
    keep: bool = True,
) -> None:
    """Send one vector back and hand every gradient, as it comes, to the statistic and to ``note``."""

    def visit(use: Use, gradient: Tensor) -> None:
        if note is not None:
            note(use, gradient)
        if statistic is not None:
            statistic.on_cotangent(seen, use, gradient)

    batch.backward(vector, visit, keep=keep)
    if statistic is not None:
        statistic.on_pass_end(seen)


def _units(level: str, batch: Batch) -> int:
    """Units that share a pass."""
    return batch.num_data * (batch.terms if level == "terms" else 1)


def _units_first(batch: Batch, units: int) -> Layouts | None:
    """Return the layouts of a model that keeps units on the first axis, if sizes allow."""
    rows = [u.form.extent(u.x)[0] for u in batch.uses]
    return None if any(M % units for M in rows) else tuple(Layout(1, M // units) for M in rows)


def _fit(layouts: Layouts, batch: Batch, units: int) -> bool:
    """Whether the layouts of another batch are possible here."""
    if len(layouts) != len(batch.uses):
        return False
    extents = (u.form.extent(u.x) for u in batch.uses)
    return all(lay is not None and lay.rows(units) == M for lay, (M, _) in zip(layouts, extents, strict=True))


def _probe(level: str, batch: Batch) -> tuple[bool, Layouts, list[bool]]:
    """Find out with generic vectors, and to the bit, whether no row is reached by two units.

    Returns:
        Whether it is so, how the rows of every use are laid out, and which uses were not reached at all.
    """
    by_position = level == "terms"
    takes = antichain(batch.num_data * (batch.terms if by_position else 1))
    reached: dict[Use, list[Tensor]] = {u: [] for u in batch.uses}
    for units in takes:
        terms = units.reshape(batch.num_data, -1).expand(-1, batch.terms)
        for use, passes in reached.items():
            passes.append(_no_rows(use, by_position))
        batch.backward(batch.vectors.probe(terms), lambda use, g: _note_rows(reached[use], use, g, by_position))
    separate, layouts, silent = True, [], []
    for passes in reached.values():
        active = torch.stack(passes)
        silent.append(not active.any())
        layouts.append(find_layout(active, takes))
        separate &= layouts[-1] is not None or _is_irregular(active, takes, batch, by_position)
    return separate, tuple(layouts), silent


def find_layouts(uses: list[Use], output: Tensor, seed: int = 0) -> Layouts:
    """Find out in a few backward passes where the data (the first axis of the output) are in the rows of every use.

    Returns:
        A layout for every use; ``None`` where data share rows, or rows are in no regular order.
    """
    batch = Batch(uses, output, _Rows(output, seed), len(output), 1)  # type: ignore[arg-type]
    return _probe("data", batch)[1]


class _Rows:
    """Generic vectors on the rows of an output, for lack of a loss."""

    count = 1

    def __init__(self, output: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)

    def probe(self, terms: Tensor) -> Tensor:
        """Return a vector on some rows (bool ``[N, 1]``)."""
        chosen = terms.reshape(-1, *(1 for _ in self._noise.shape[1:])).to(self._noise.device)
        return torch.where(chosen, self._noise, 0.0)


def _no_rows(use: Use, by_position: bool) -> Tensor:
    rows, positions = use.form.extent(use.x)
    return torch.zeros(rows * positions if by_position else rows, dtype=torch.bool, device=use.x.device)


def _note_rows(passes: list[Tensor], use: Use, gradient: Tensor, by_position: bool) -> None:
    # Not any(): it is 3x slower. Not a signed sum: it cancels.
    passes[-1] = use.form.cotangents(gradient).abs().sum((0, 3) if by_position else (0, 2, 3)).flatten() != 0


def _is_irregular(active: Tensor, takes: Tensor, batch: Batch, by_position: bool) -> bool:
    """Whether the rows are in the order (term, datum), or in none, and still belong to one unit each."""
    if by_position:
        turned = takes.reshape(-1, batch.num_data, batch.terms).mT.reshape(takes.shape)
        if find_layout(active, turned) is not None:
            return True
    return is_owned(active, takes)


def _check_regular(layouts: Layouts, batch: Batch) -> None:
    irregular = [list(u.names) for u, lay in zip(batch.uses, layouts, strict=True) if lay is None]
    if irregular:
        raise NotImplementedError(
            f"The rows of the operations on {irregular} belong to single data, but in no regular order (routed or packed "
            "tokens), so they cannot be averaged by datum. Use kfac_approx='expand'."
        )
