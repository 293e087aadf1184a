"""The data of an operator, read as often as reducers of gradients ask; from memory where they fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from numbers import Real
from typing import Any, TypeVar

from curvops.kfac.collect import Collector
from curvops.kfac.estimate import Estimate
from curvops.kfac.estimated import geometry
from curvops.kfac.gradients import Fingerprints, Gradients, Reducer, Together
from curvops.kfac.reducers import Kept
from curvops.kfac.statistics import Factors, Sums
from curvops.kfac.tied import is_turned
from curvops.kfac.vectors import Fisher
from curvops.risk import EmpiricalRisk

R = TypeVar("R", bound=Reducer)
Data = Iterable[tuple[Any, Any]] | None

#: Bytes of inputs and gradients of outputs that are kept rather than computed again.
BUDGET = 2**29


def checked_budget(budget: float) -> float:
    """Return a number of bytes, or raise."""
    if not (isinstance(budget, Real) and budget >= 0):
        raise ValueError(f"memory_budget: found {budget!r}, expected a number of bytes, 0 or more.")
    return float(budget)


class Reading:
    """A first pass over the data, for the Kronecker factors, and further ones for reducers of gradients.

    Inputs and gradients are kept while they fit into a budget; then no further pass calls the model.

    Args:
        risk, options, data, offset: As for :meth:`EstimatedOperator._observe`.
        budget: Bytes that may be kept.

    Attributes:
        sums: Factors of every block, by the key that reducers know.
        estimate: KFAC of the data.
    """

    def __init__(self, risk: EmpiricalRisk, options: dict[str, Any], data: Data, offset: int, budget: float) -> None:
        self._risk, self._options, self._data, self._offset = risk, options, data, offset
        approx = options["kfac_approx"]
        collector = self._collector(
            lambda: Together(Factors(approx), Gradients(Kept(budget)), Fingerprints()),
            regular=approx == "reduce",
            policy=options["unsupported"],
        ).run(data)
        factors, self._gradients, self._prints = collector.statistic.statistics
        self.sums: dict[Hashable, Sums] = factors.sums
        self.estimate = Estimate.from_pass(collector, list(self.sums.values()), *geometry(risk), options)

    @property
    def kept(self) -> bool:
        """Whether everything fits into the budget."""
        return self._gradients.reducer.blocks is not None

    def check_orientations(self) -> None:
        """Refuse a weight that some batches use in both orientations, and others in the second only."""
        check_orientations(self._gradients)

    def reduce(self, make: Callable[[], R]) -> R:
        """Return a reducer that has taken in all blocks of all data.

        Raises:
            ValueError: If the data are not those of the first pass.
        """
        if self.kept:
            reducer = make()
            for key, block in self._gradients.reducer.blocks:
                reducer.add(key, block)
            return reducer
        policy = "raise" if self._options["unsupported"] == "raise" else "zero"  # their blocks are known already
        collector = self._collector(lambda: Together(Gradients(make()), Fingerprints()), regular=False, policy=policy)
        gradients, prints = collector.run(self._data).statistic.statistics
        self._check_same(prints)
        return gradients.reducer

    def _check_same(self, prints: Fingerprints) -> None:
        first, second = len(self._prints.batches), len(prints.batches)
        if first != second:
            raise ValueError(f"data: found {second} batches in a second reading, {first} in the first.")
        i = self._prints.first_difference(prints)
        if i is not None:
            raise ValueError(
                f"Batch {i} differs between two readings of the data, but all readings must be of the same data, targets and "
                "draws; turn shuffling and augmentation off, or raise memory_budget so that one reading is enough."
            )

    def _collector(self, make: Callable[[], Any], *, regular: bool, policy: str) -> Collector[Any]:
        return _collector(self._risk, self._options, make, self._offset, regular, policy)


def reduced(
    risk: EmpiricalRisk, options: dict[str, Any], data: Data, offset: int, make: Callable[[], R]
) -> tuple[Collector[Gradients], R]:
    """Go through the data once; return what was collected and the reducer that took in all blocks."""
    policy = options["unsupported"]
    collector = _collector(risk, options, lambda: Gradients(make()), offset, False, policy).run(data)
    check_orientations(collector.statistic)
    return collector, collector.statistic.reducer


def check_orientations(gradients: Gradients) -> None:
    """Refuse a weight that some batches use in both orientations, and others in the second only."""
    placements = [place for place, _ in gradients.blocks.values() if len(place.slots) == 1]
    for i, a in enumerate(placements):
        if any(is_turned(a, b) for b in placements[:i]):
            raise NotImplementedError(
                f"Parameter {a.names[0]!r} is used as a weight and as its transpose, but not in all batches; use larger "
                "batches, or leave it out of params."
            )


def _collector(
    risk: EmpiricalRisk, options: dict[str, Any], make: Callable[[], Any], offset: int, regular: bool, policy: str
) -> Collector[Any]:
    return Collector(
        risk,
        Fisher(options["fisher_type"], options["mc_samples"], options["seed"]),
        make,
        by_datum=True,
        regular=regular,
        separate=options["separate_weight_and_bias"],
        policy=policy,
        offset=offset,
    )
