"""The Hessian of an empirical risk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from curvops._compiled import Compiled, at_output
from curvops._linearize import DualSlope, Slope, has_convolutions, lacks_forward_mode
from curvops._matrix_free import Point, RiskOperator
from curvops._params import Model, Params
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

    def _linearize(self, point: Point, output_of: Any, keep: bool) -> None:
        leaves = list(point.leaves.values())
        if self._pieces is not None:
            point.graph = Compiled(self._pieces, leaves, point.X)
            return

        def value(tensors: list[Tensor]) -> Tensor:
            """Return the batch's loss; the view tells what a mean divides by, and checks the targets."""
            output = output_of(tensors)
            point.view = self._risk.loss.view(output.detach(), point.y)
            return self._risk.loss.total(output, point.y)

        if self.linearization == "forward" and len(self._blocks) == 1:
            point.graph = DualSlope(value, leaves, keep)
        else:
            point.graph = Slope(value(leaves), leaves)

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        if self._pieces is not None:
            return self._assembled(point, V, which)
        try:
            return point.graph.hvp(V, which)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(point.graph, DualSlope) or not lacks_forward_mode(error):
                raise
        self.linearization = "backward"
        point.graph = Slope(point.graph.value(point.graph.leaves), point.graph.leaves)
        return point.graph.hvp(V, which)

    def _assembled(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        """Add what the loss bends at the output to what the model bends in its parameters."""
        U = point.graph.jvp(V, which)
        output = point.graph.output.detach()
        point.view = self._risk.loss.view(output, point.y)
        r, HU = at_output(lambda o: self._risk.loss.total(o, point.y), output, U)
        shares = zip(point.graph.bend(r, V, which), point.graph.vjp(HU, which), strict=True)
        return [model + loss for model, loss in shares]
