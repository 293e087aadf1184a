"""The linear map of a model as pure functions that ``torch.compile`` takes whole: no hooks, no state, no graph break."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from curvops._linearize import Graph, load_forward_mode, stacked
from curvops.risk import EmpiricalRisk

Tensors = tuple[Tensor, ...]


class Pieces:
    """Compiled products with a model's Jacobian, and with how the Jacobian itself changes.

    Args:
        risk: Model and parameters; the loss is evaluated eagerly between the pieces.
        options: For ``torch.compile``.
    """

    def __init__(self, risk: EmpiricalRisk, options: dict[str, Any]) -> None:
        model, names = risk.model, risk.names

        def run(params: Tensors, X: Any) -> Tensor:
            named = dict(zip(names, params, strict=True))
            if not isinstance(model, nn.Module):
                return risk.loss.prepare(model(named, X))
            return risk.loss.prepare(functional_call(model, named, *risk.arguments(X)))

        def push(params: Tensors, X: Any, V: Tensors) -> tuple[Tensor, Tensor]:
            output, tangent = jvp(lambda *p: run(p, X), params, V)[:2]
            return output, tangent

        def pull(params: Tensors, X: Any, u: Tensor) -> Tensors:
            return vjp(lambda *p: run(p, X), *params)[1](u)

        def bend(params: Tensors, X: Any, r: Tensor, V: Tensors) -> Tensors:
            """Multiply by ``sum_i r_i d^2 output_i``: how ``J' r`` changes with the parameters."""
            return jvp(lambda *p: vjp(lambda *q: run(q, X), *p)[1](r), params, V)[1]

        load_forward_mode()
        self.run = run
        self.push, self.pull, self.bend = (torch.compile(f, fullgraph=True, **options) for f in (push, pull, bend))


class Compiled(Graph):
    """A batch, multiplied by compiled functions: every product runs the model anew."""

    def __init__(self, pieces: Pieces, leaves: Sequence[Tensor], X: Any) -> None:
        self.pieces, self.leaves, self.X = pieces, list(leaves), X
        self.params = tuple(p.detach() for p in leaves)
        self._output: Tensor | None = None

    @property
    def output(self) -> Tensor:  # type: ignore[override]
        """The output, without a graph."""
        if self._output is None:
            self._output = self.pieces.run(self.params, self.X)
        return self._output

    def jvp(self, V: Sequence[Tensor], which: Sequence[int]) -> Tensor:
        rows = []
        for k in range(len(V[0])):
            self._output, row = self.pieces.push(self.params, self.X, self._tangents(V, which, k))
            rows.append(row)
        return stacked(rows, self.output)

    def vjp(self, U: Tensor, which: Sequence[int]) -> list[Tensor]:
        return self._stacked((self.pieces.pull(self.params, self.X, u) for u in U), which)

    def bend(self, r: Tensor, V: Sequence[Tensor], which: Sequence[int]) -> list[Tensor]:
        """Multiply by ``sum_i r_i d^2 output_i``."""
        columns = (self._tangents(V, which, k) for k in range(len(V[0])))
        return self._stacked((self.pieces.bend(self.params, self.X, r, c) for c in columns), which)

    def bytes(self) -> int:
        return 0  # nothing is kept

    def _tangents(self, V: Sequence[Tensor], which: Sequence[int], k: int) -> Tensors:
        given = dict(zip(which, V, strict=True))
        return tuple(given[i][k] if i in given else torch.zeros_like(p) for i, p in enumerate(self.params))

    def _stacked(self, rows: Iterable[Tensors], which: Sequence[int]) -> list[Tensor]:
        rows = list(rows)
        return [stacked([row[i] for row in rows], self.params[i]) for i in which]
