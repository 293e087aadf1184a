"""The Jacobian of all predictions in the parameters, its transpose, and their product, the neural tangent kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from curvops._matrix_free import Point, RiskOperator
from curvops._operator import LinearOperator
from curvops._params import Model, Params
from curvops._traceless import plain
from curvops.risk import EmpiricalRisk


class JacobianLinearOperator(RiskOperator):
    """The Jacobian of the predictions on all data, ``[outputs, parameters]``.

    Its range is one block ``[N, *output]``, data in order; where batches have outputs of different shapes, a flat one.

    Args:
        model, params, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords; targets are not looked at.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        check_deterministic: bool = False,
        **keywords: Any,
    ) -> None:
        # Of a loss, only its way to find the prediction in a model's answer is used.
        risk = EmpiricalRisk(model, nn.MSELoss(), params, data, **keywords)
        super().__init__(risk, check_deterministic=check_deterministic)
        self._shapes = self._output_shapes()
        rows, rests = sum(s[0] for s in self._shapes), {s[1:] for s in self._shapes}
        self._range = (rows, *rests.pop()) if len(rests) == 1 else (sum(torch.Size(s).numel() for s in self._shapes),)
        LinearOperator.__init__(
            self, risk.shapes, (self._range,), dtype=risk.dtype, device=risk.device, domain_names=risk.names
        )

    def _output_shapes(self) -> list[tuple[int, ...]]:
        shapes = []
        for X, _ in self._risk.batches():
            with self._risk.leaves() as leaves, torch.no_grad():
                output = self._risk.loss.prepare(self._risk.predict(leaves, X))
                shapes.append(tuple(output.shape))
        return shapes

    def _linearize(self, point: Point, output_of: Any, keep: bool) -> None:
        point.graph = self._jacobian(point, output_of, keep)

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        raise NotImplementedError

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        everything, K = list(range(len(V))), len(V[0])
        with torch.inference_mode(False), torch.enable_grad():
            V = [plain(v) for v in V]
            parts = [self._tangents(p, V, everything).detach().reshape(K, -1) for p in self._points()]
        return [torch.cat(parts, 1).reshape(K, *self._range)]

    def _pull(self, U: Tensor) -> list[Tensor]:
        """Multiply by the transpose: ``U [K, outputs]``."""
        K, everything = len(U), list(range(len(self.domain)))
        sizes = [torch.Size(s).numel() for s in self._shapes]
        with torch.inference_mode(False), torch.enable_grad():
            U, totals = plain(U), [U.new_zeros(K, *shape) for shape in self.domain]
            points = zip(self._points(), U.split(sizes, 1), self._shapes, strict=True)
            for point, u, shape in points:
                for total, share in zip(totals, point.graph.vjp(u.reshape(K, *shape), everything), strict=True):
                    total += share
        return totals

    def _adjoint(self) -> LinearOperator:
        return TransposedJacobianLinearOperator._of(self)

    def block_diagonal(self, partition: Any = "module") -> Any:
        raise NotImplementedError("A Jacobian is not square; restrict it to some parameters by its argument `params`.")


class TransposedJacobianLinearOperator(LinearOperator):
    """The transpose of :class:`JacobianLinearOperator`, with its arguments; ``op.T`` is that Jacobian."""

    def __init__(self, model: Model, params: Params, data: Iterable[tuple[Any, Any]], **keywords: Any) -> None:
        self._adopt(JacobianLinearOperator(model, params, data, **keywords))

    @classmethod
    def _of(cls, jacobian: JacobianLinearOperator) -> TransposedJacobianLinearOperator:
        self = cls.__new__(cls)
        self._adopt(jacobian)
        return self

    def _adopt(self, jacobian: JacobianLinearOperator) -> None:
        self._jacobian = jacobian
        super().__init__(
            jacobian.range,
            jacobian.domain,
            dtype=jacobian.torch_dtype,
            device=jacobian.device,
            range_names=jacobian.domain_names,
        )

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return self._jacobian._pull(V[0].flatten(1))

    def _adjoint(self) -> LinearOperator:
        return self._jacobian

    def cached(self, memory: float = 2**30) -> Any:
        """Keep the linearised graphs: see :meth:`HessianLinearOperator.cached`."""
        return self._jacobian.cached(memory)


class NTKLinearOperator(LinearOperator):
    """The empirical neural tangent kernel ``J J'`` on all data (Jacot et al. 2018, Neural Tangent Kernel).

    Args:
        model, params, data: See :class:`JacobianLinearOperator`, and there for other keywords.
    """

    def __init__(self, model: Model, params: Params, data: Iterable[tuple[Any, Any]], **keywords: Any) -> None:
        self.jacobian = JacobianLinearOperator(model, params, data, **keywords)
        J = self.jacobian
        super().__init__(J.range, J.range, dtype=J.torch_dtype, device=J.device, symmetric=True)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return self.jacobian._apply(self.jacobian._pull(V[0].flatten(1)))

    def cached(self, memory: float = 2**30) -> Any:
        """Keep the linearised graphs: see :meth:`HessianLinearOperator.cached`."""
        return self.jacobian.cached(memory)
