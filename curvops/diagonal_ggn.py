"""The exact GGN (or Fisher), cut down to what one entry, or one output unit, knows of itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor

from curvops._params import Model, Params
from curvops._scalars import accumulation_dtype
from curvops.kfac.estimate import Estimate
from curvops.kfac.estimated import EstimatedOperator, geometry
from curvops.kfac.options import Policy, choice, refuse_forward_only
from curvops.kfac.reading import reduced
from curvops.kfac.reducers import Squares, UnitBlocks
from curvops.kfac.statistics import Sums
from curvops.structured.placement import Placement


class _ExactParts(EstimatedOperator):
    """A part of the exact matrix; additive over data, so that it merges."""

    _policies: tuple[str, ...] = tuple(p.value for p in Policy)  #: for parameters that no rule covers

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        mc_samples: int = 0,
        fisher_type: str | None = None,
        seed: int = 2147483647,
        unsupported: str = "diagonal",
        num_per_example_loss_terms: int | None = None,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        check_deterministic: bool = False,
        progressbar: bool = False,
        reduction: str | None = None,
        class_dim: int | None = None,
        allow_train_mode: bool = False,
    ) -> None:
        if isinstance(mc_samples, bool) or not hasattr(mc_samples, "__index__") or mc_samples < 0:
            raise ValueError(f"mc_samples: found {mc_samples!r}, expected an integer >= 0 (0 is exact).")
        fisher_type = fisher_type or ("mc" if mc_samples else "type-2")
        refuse_forward_only(fisher_type)
        if choice("unsupported", unsupported, Policy) not in self._policies:
            raise ValueError(
                f"unsupported: found {unsupported!r}, which is more than a {self.kind} holds; expected one of "
                f"{', '.join(map(repr, self._policies))}."
            )
        super().__init__(
            model,
            loss,
            params,
            data,
            fisher_type=fisher_type,
            mc_samples=max(mc_samples, 1),
            seed=seed,
            unsupported=unsupported,
            num_per_example_loss_terms=num_per_example_loss_terms,
            num_data=num_data,
            batch_size_fn=batch_size_fn,
            check_deterministic=check_deterministic,
            progressbar=progressbar,
            reduction=reduction,
            class_dim=class_dim,
            allow_train_mode=allow_train_mode,
        )

    @staticmethod
    @abstractmethod
    def _reducer() -> Any:
        """Return an empty reducer."""

    @staticmethod
    @abstractmethod
    def _shape(placement: Placement) -> tuple[int, ...]:
        """Return the shape of its sum for a block."""

    def _observe(self, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int) -> Estimate:
        collector, reducer = reduced(self._risk, options, data, offset, self._reducer)
        shapes, like = geometry(self._risk)
        blocks = []
        for key, (placement, functions) in collector.statistic.blocks.items():
            total = self._sum(reducer.sums, key, placement, like)
            blocks.append(Sums(placement, functions, B=total, rows=collector.counts.num_data))
        return Estimate.from_pass(collector, blocks, shapes, like, options)

    def _sum(self, sums: dict[Hashable, Tensor], key: Hashable, placement: Placement, like: Tensor) -> Tensor:
        if key in sums:
            return sums[key]
        return like.new_zeros(self._shape(placement), dtype=accumulation_dtype(like.dtype))


class GGNDiagonalLinearOperator(_ExactParts):
    """The diagonal of the generalised Gauss-Newton matrix of an empirical risk, exact or by Monte Carlo.

    An entry is ``sum_k (sum_s g x)^2`` over the gradients of single output vectors. Where a weight is used at one position
    per datum that is ``sum g^2 x^2``, one matrix product; elsewhere gradients are formed for some data at a time. Weights that
    are used several times are exact, too: their cross terms are in the squares.

    Source: Dangel, Kunstner and Hennig (2020), BackPACK: Packing more into Backprop.

    Args:
        model, loss, params, data: See :class:`curvops.risk.EmpiricalRisk`.
        mc_samples: Draws per datum; 0 is the exact GGN.
        fisher_type: By name, instead: ``"type-2"``, ``"mc"``, ``"signs"``, ``"empirical"`` or ``"empirical-per-term"``.
        seed, check_deterministic: See :class:`curvops.KFACLinearOperator`.
        unsupported: For parameters that no rule covers: ``"diagonal"`` (exact, one backward pass for every datum and vector),
            ``"raise"`` or ``"zero"``.
        num_per_example_loss_terms, num_data, batch_size_fn, progressbar, reduction, class_dim, allow_train_mode: See
            :class:`curvops.risk.EmpiricalRisk`.

    Attributes:
        treatments: What became of every parameter.
    """

    kind = "GGNDiagonal"
    _reducer = staticmethod(Squares)
    _policies = ("diagonal", "raise", "zero")

    @staticmethod
    def _shape(placement: Placement) -> tuple[int, ...]:
        return placement.shape


class GGNUnitWiseLinearOperator(_ExactParts):
    """The exact GGN blocks of output units: for every row of a weight (with its bias) one dense block, nothing between rows.

    A layer of ``o`` units with ``i`` inputs has ``o`` blocks ``[i, i]``, hence ``o i^2`` numbers.

    Sources: Le Roux, Manzagol and Bengio (2007), Topmoumoute Online Natural Gradient Algorithm; Ollivier (2015), Riemannian
    metrics for neural networks I (there: unitwise natural gradient).

    Args:
        model, loss, params, data: See :class:`curvops.risk.EmpiricalRisk`.
        **options: Those of :class:`curvops.GGNDiagonalLinearOperator`; ``unsupported`` may be ``"exact"``, too.
    """

    kind = "GGNUnitWise"
    _reducer = staticmethod(UnitBlocks)

    @staticmethod
    def _shape(placement: Placement) -> tuple[int, ...]:
        return (*placement.shape, placement.shape[2])
