"""The Hessian of an empirical risk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from curvops._compiled import Compiled
from curvops._linearize import DualSlope, Graph, Slope, has_convolutions
from curvops._matrix_free import Point, RiskOperator
from curvops._params import Model, Params
from curvops.losses import by_autograd
from curvops.risk import EmpiricalRisk


class HessianLinearOperator(RiskOperator):
    """The Hessian of an empirical risk (Pearlmutter 1994, Fast Exact Multiplication by the Hessian).

    By reverse over reverse; forward over reverse for models with convolutional layers, whose second derivatives are slow.

    Args:
        model, loss, params, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        check_deterministic: bool = False,
        **keywords: Any,
    ) -> None:
        super().__init__(EmpiricalRisk(model, loss, params, data, **keywords), check_deterministic=check_deterministic)
        self.linearization = "forward" if has_convolutions(model) else "backward"

    def _graph(self, point: Point, output_of: Any, leaves: list[Tensor], keep: bool) -> Graph:
        if self._pieces is not None:
            return Compiled(self._pieces, leaves, point.X)

        def value(tensors: list[Tensor]) -> Tensor:
            """Return the batch's loss; the view tells what a mean divides by, and checks the targets."""
            output = output_of(tensors)
            point.view = self._risk.loss.view(output.detach(), point.y)
            return self._risk.loss.total(output, point.y)

        return DualSlope(value, leaves, keep) if self._forward else Slope(value(leaves), leaves)

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        if self._pieces is not None:
            return self._assembled(point, V, which)
        return self._multiply(point, lambda graph: graph.hvp(V, which))

    def _assembled(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        """Add what the loss bends at the output to what the model bends in its parameters."""
        U = point.graph.jvp(V, which)
        output, loss = point.graph.output.detach(), self._risk.loss
        point.view = loss.view(output, point.y)
        exact = by_autograd(loss, output, point.y)  # a view may expect instead
        of_model, of_loss = point.graph.bend(exact.gradient(), V, which), point.graph.vjp(exact.product(U), which)
        return [a + b for a, b in zip(of_model, of_loss, strict=True)]
