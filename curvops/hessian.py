"""The Hessian of an empirical risk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from curvops._compiled import Compiled, at_output
from curvops._linearize import Slope
from curvops._matrix_free import Point, RiskOperator
from curvops._params import Model, Params
from curvops.risk import EmpiricalRisk


class HessianLinearOperator(RiskOperator):
    """The Hessian of an empirical risk, by reverse over reverse (Pearlmutter 1994, Fast Exact Multiplication by the Hessian).

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
        self.linearization = "backward"

    def _linearize(self, point: Point, output_of: Any, columns: int, keep: bool) -> None:
        leaves = list(point.leaves.values())
        if self._pieces is not None:
            point.graph = Compiled(self._pieces, leaves, point.X)
            return
        output = output_of(leaves)
        # The view tells what a mean divides by; it checks the targets, too.
        point.view = self._risk.loss.view(output.detach(), point.y)
        point.graph = Slope(self._risk.loss.total(output, point.y), leaves)

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        return self._assembled(point, V, which) if self._pieces is not None else point.graph.hvp(V, which)

    def _assembled(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        """Add what the loss bends at the output to what the model bends in its parameters."""
        U = point.graph.jvp(V, which)
        output = point.graph.output.detach()
        point.view = self._risk.loss.view(output, point.y)
        r, HU = at_output(lambda o: self._risk.loss.total(o, point.y), output, U)
        shares = zip(point.graph.bend(r, V, which), point.graph.vjp(HU, which), strict=True)
        return [model + loss for model, loss in shares]
