"""The empirical Fisher, outer products of the gradients of the loss itself; and the Fisher by draws of the likelihood."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from curvops._matrix_free import Point
from curvops._params import Model, Params
from curvops.ggn import GGNLinearOperator, OutputMetric, outer
from curvops.risk import EmpiricalRisk


class EFLinearOperator(OutputMetric):
    """The empirical Fisher ``c sum g g'`` of an empirical risk (Kunstner et al. 2019, on its limits).

    ``g`` is the gradient of one loss term, or of one datum's loss terms together.

    Args:
        model, loss, params, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords.
        per: ``"term"``: every token or pixel is one gradient; ``"example"``: a datum's terms are summed before the outer
            product.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        per: str = "term",
        check_deterministic: bool = False,
        **keywords: Any,
    ) -> None:
        if per not in ("term", "example"):
            raise ValueError(f"per: found {per!r}, expected 'term' or 'example'.")
        self._per = per
        super().__init__(EmpiricalRisk(model, loss, params, data, **keywords), check_deterministic=check_deterministic)

    def _metric(self, point: Point, U: Tensor) -> Tensor:
        assert point.view is not None
        if self._per == "example" and self._risk.batch_size(point.X, point.view.layout.shape) != point.view.N:
            raise ValueError(
                f"per='example': found a prediction of shape {point.view.layout.shape}, whose first axis does not count the "
                "data; expected [N, ...], one row for every datum. Reshape it, say batch_size_fn=, or use per='term'."
            )
        return outer(point.view, point.view.gradient(), U, self._per)


class FisherMCLinearOperator(GGNLinearOperator):
    """The Fisher information matrix, estimated by draws of the loss's own likelihood.

    For the likelihoods of the losses here it is the generalized Gauss-Newton matrix (Martens 2020, section 9.2), so this is
    :class:`~curvops.GGNLinearOperator` with ``mc_samples``.

    Args:
        model, loss, params, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords.
        mc_samples: Number of draws, at least 1.
        **keywords: See :class:`~curvops.GGNLinearOperator`.
    """

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        mc_samples: int = 1,
        **keywords: Any,
    ) -> None:
        if not mc_samples:
            raise ValueError("mc_samples: found 0, expected at least 1; the exact matrix is GGNLinearOperator.")
        super().__init__(model, loss, params, data, mc_samples=mc_samples, **keywords)
