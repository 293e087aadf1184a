"""The Jacobian of all predictions in the parameters, its transpose, and their product, the neural tangent kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from curvops._matrix_free import ParameterOperator, side_by_side, undisturbed
from curvops._operator import LinearOperator
from curvops._params import Model, Params
from curvops._traceless import plain
from curvops.risk import EmpiricalRisk


class JacobianLinearOperator(ParameterOperator):
    """The Jacobian of the predictions on all data, ``[outputs, parameters]``.

    Its range is one block ``[N, *output]``, data in order; where batches have outputs of different shapes, a flat one.

    Args:
        model, params, data, num_data, batch_size_fn, progressbar, allow_train_mode: See :class:`~curvops.EmpiricalRisk`;
            targets are not looked at.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        check_deterministic: bool = False,
        progressbar: bool = False,
        allow_train_mode: bool = False,
    ) -> None:
        # Of a loss, only its way to find the prediction in a model's answer is used.
        risk = EmpiricalRisk(
            model,
            nn.MSELoss(),
            params,
            data,
            num_data=num_data,
            batch_size_fn=batch_size_fn,
            progressbar=progressbar,
            allow_train_mode=allow_train_mode,
        )
        if check_deterministic:
            risk.check_deterministic()
        self._shapes = _output_shapes(risk)
        super().__init__(risk, risk.shapes, (side_by_side(self._shapes),))
        self._everything = list(range(len(risk.names)))

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False):
            V = [plain(v) for v in V]
        product = lambda graph: graph.jvp(V, self._everything)  # noqa: E731
        parts = [self._multiply(point, product).detach().flatten(1) for point in self._points()]
        return [torch.cat(parts, 1).reshape(len(V[0]), *self.range[0])]

    def _pull(self, U: Tensor) -> list[Tensor]:
        """Multiply by the transpose: ``U [K, outputs]``."""
        with torch.inference_mode(False):
            U, totals = plain(U), [U.new_zeros(len(U), *shape) for shape in self.domain]
        pieces = U.split([prod(s) for s in self._shapes], 1)
        for point, u, shape in zip(self._points(), pieces, self._shapes, strict=True):
            shares = point.graph.vjp(u.reshape(len(U), *shape), self._everything)
            totals = [total + share.detach() for total, share in zip(totals, shares, strict=True)]
        return totals

    def _adjoint(self) -> LinearOperator:
        return TransposedJacobianLinearOperator._of(self)


def _output_shapes(risk: EmpiricalRisk) -> list[tuple[int, ...]]:
    """Run the model on all data for the shapes of its predictions."""
    shapes, count = [], 0
    with undisturbed(risk.device):
        for X, _ in risk.batches():
            with risk.leaves() as leaves, torch.no_grad():
                shapes.append(tuple(risk.loss.prepare(risk.predict(leaves, X)).shape))
            count += risk.batch_size(X, shapes[-1]) or shapes[-1][0]
    risk.check_counts(count, count)
    return shapes


class TransposedJacobianLinearOperator(LinearOperator):
    """The transpose of :class:`JacobianLinearOperator`, with its arguments; ``op.T`` is that Jacobian."""

    _PASSES_ON = (JacobianLinearOperator,)

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

    _PASSES_ON = (JacobianLinearOperator,)

    def __init__(self, model: Model, params: Params, data: Iterable[tuple[Any, Any]], **keywords: Any) -> None:
        self.jacobian = JacobianLinearOperator(model, params, data, **keywords)
        J = self.jacobian
        super().__init__(J.range, J.range, dtype=J.torch_dtype, device=J.device, symmetric=True)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return self.jacobian._apply(self.jacobian._pull(V[0].flatten(1)))

    def cached(self, memory: float = 2**30) -> Any:
        """Keep the linearised graphs: see :meth:`HessianLinearOperator.cached`."""
        return self.jacobian.cached(memory)
