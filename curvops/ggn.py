"""The generalized Gauss-Newton matrix, and what else has the form ``J' M J`` with ``M`` at the output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from curvops._matrix_free import Point, RiskOperator
from curvops._params import Model, Params
from curvops.losses import OutputView
from curvops.risk import EmpiricalRisk


class OutputMetric(RiskOperator):
    """``sum_batches J' M J``: ``J`` the Jacobian of the predictions, ``M`` a symmetric map at the output."""

    @abstractmethod
    def _metric(self, point: Point, U: Tensor) -> Tensor:
        """Return ``M u`` for ``U [K, *output.shape]``."""

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        U = self._multiply(point, lambda graph: graph.jvp(V, which))
        if point.view is None:
            point.view = self._risk.loss.view(point.graph.output.detach(), point.y)
        return point.graph.vjp(self._metric(point, U).to(U.dtype), which)


class GGNLinearOperator(OutputMetric):
    """The generalized Gauss-Newton matrix of an empirical risk (Schraudolph 2002, Fast Curvature Matrix-Vector Products).

    ``G = c sum_n J_n' H_n J_n``, where ``J_n`` is the Jacobian of the prediction and ``H_n`` the Hessian of the loss at it
    (for a Gaussian with learned variance: its expectation). With ``mc_samples`` it is estimated by draws of the loss's own
    likelihood, ``H_n = E[g g']``; a draw depends on the seed and on the index of its datum, so batches change nothing.

    Args:
        model, loss, params, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords.
        mc_samples: Number of draws; 0 is exact.
        seed: Seed of the draws.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        mc_samples: int = 0,
        seed: int = 2147483647,
        check_deterministic: bool = False,
        **keywords: Any,
    ) -> None:
        if isinstance(mc_samples, bool) or not hasattr(mc_samples, "__index__") or mc_samples < 0:
            raise ValueError(f"mc_samples: found {mc_samples!r}, expected an integer, 0 for the exact matrix.")
        self._samples, self._seed = int(mc_samples), int(seed)
        super().__init__(EmpiricalRisk(model, loss, params, data, **keywords), check_deterministic=check_deterministic)

    def _metric(self, point: Point, U: Tensor) -> Tensor:
        view = point.view
        assert view is not None
        if not self._samples:
            return view.product(U)
        index = torch.arange(point.start, point.start + view.N, device=view.layout.device)
        draws = (view.sample(self._seed, index, i) for i in range(self._samples))
        return sum((outer(view, g, U, "term") for g in draws), torch.zeros_like(U)) / self._samples


def outer(view: OutputView, g: Tensor, U: Tensor, per: str) -> Tensor:
    """Return ``g (g' u)`` for the part of ``g`` that belongs to each ``"term"``, or each ``"example"``."""
    split, columns = view.layout.split(g), view.layout.split_columns(U)
    axes = (-1,) if per == "term" else (-2, -1)
    return view.layout.join_columns(split * (split * columns).sum(axes, keepdim=True))
