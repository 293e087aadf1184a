"""Curvature of the risk in an activation of the model: what flows out of a module, or into it, on all data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvops._linearize import Graph, Slope
from curvops._matrix_free import Point, RiskOperator
from curvops._operator import LinearOperator
from curvops._traceless import plain
from curvops.risk import EmpiricalRisk

Activation = str | tuple[str, str]


@contextmanager
def shifted(model: nn.Module, activation: Activation, use: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the activation by ``use(activation)`` while the model runs."""
    name, side = (activation, "output") if isinstance(activation, str) else activation
    modules = dict(model.named_modules())
    if name not in modules or side not in ("input", "output"):
        raise ValueError(
            f"activation: found {activation!r}, expected the name of a module, or (name, 'input' or 'output'); the model "
            f"has the modules {[n for n in modules if n]}."
        )

    def at_output(module: nn.Module, args: Any, out: Any) -> Any:
        return (use(out[0]), *out[1:]) if isinstance(out, tuple) else use(out)

    def at_input(module: nn.Module, args: Any) -> Any:
        return (use(args[0]), *args[1:])

    register = modules[name].register_forward_hook if side == "output" else modules[name].register_forward_pre_hook
    handle = register(at_output if side == "output" else at_input)
    try:
        yield
    finally:
        handle.remove()


class _ActivationOperator(RiskOperator):
    """The Hessian, or one like it, in an activation; no entries between batches, as they share no activation."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        activation: Activation,
        data: Iterable[tuple[Any, Any]],
        **keywords: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: found {type(model).__name__}, expected a module: activations go by module names.")
        self._activation = activation
        # All parameters, trained or not: only their dtype and device are asked for.
        risk = EmpiricalRisk(model, loss, dict(model.named_parameters()), data, **keywords)
        super().__init__(risk)
        self.linearization = "backward"
        self._shapes = [self._observe(X)[1].shape for X, _ in risk.batches()]
        rests = {s[1:] for s in self._shapes}
        rows = sum(s[0] if s else 1 for s in self._shapes)
        shape = (rows, *rests.pop()) if len(rests) == 1 else (sum(s.numel() for s in self._shapes),)
        LinearOperator.__init__(self, (shape,), (shape,), dtype=risk.dtype, device=risk.device, symmetric=True)

    def _observe(self, X: Any) -> tuple[Any, Tensor]:
        """Run the model with a leaf added to the activation: prediction and leaf."""
        leaves: list[Tensor] = []

        def use(value: Tensor) -> Tensor:
            if leaves:
                raise ValueError(
                    f"activation: {self._activation!r} is computed more than once in a forward pass; name one that is not."
                )
            leaves.append(torch.zeros_like(value, requires_grad=True))
            return value.detach() + leaves[0]

        with shifted(self._risk.model, self._activation, use):  # type: ignore[arg-type]
            raw = self._risk.predict({}, X)
        if not leaves:
            raise ValueError(f"activation: the forward pass does not call the module of {self._activation!r}.")
        return raw, leaves[0]

    def _linearized(self, point: Point, keep: bool) -> Point:
        with torch.autocast(self.device.type, enabled=False):
            raw, leaf = self._observe(point.X)
            output = self._risk.loss.prepare(raw)
            point.view = self._risk.loss.view(output.detach(), point.y)
            point.graph = self._graph(point, output, leaf)
        return point

    def _linearize(self, point: Point, output_of: Any, keep: bool) -> None:
        raise NotImplementedError

    def _graph(self, point: Point, output: Tensor, leaf: Tensor) -> Graph:
        raise NotImplementedError

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        K, parts = len(V[0]), []
        normalizer = 0.0
        with torch.inference_mode(False), torch.enable_grad():
            pieces = plain(V[0]).flatten(1).split([s.numel() for s in self._shapes], 1)
            for point, v, shape in zip(self._points(), pieces, self._shapes, strict=True):
                parts.append(self._times(point, [v.reshape(K, *shape)], [0])[0].detach().reshape(K, -1))
                assert point.view is not None
                normalizer += float(point.view.normalizer)
        result = torch.cat(parts, 1).reshape(V[0].shape)
        if self._risk.loss.reduction == "sum":
            return [result]
        return [result / normalizer if normalizer else torch.zeros_like(result)]

    def block_diagonal(self, partition: Any = "module") -> Any:
        raise NotImplementedError("An activation is one block; batches have no entries in common anyway.")


class ActivationHessianLinearOperator(_ActivationOperator):
    """The Hessian of an empirical risk in an activation on all data, ``[N, *activation]``.

    Args:
        model: A module.
        loss, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords.
        activation: Name of a module whose output it is, or ``(name, "input")``.

    Raises:
        ValueError: If no module has the name, or the forward pass computes the activation several times or never.
    """

    def _graph(self, point: Point, output: Tensor, leaf: Tensor) -> Graph:
        return Slope(self._risk.loss.total(output, point.y), [leaf])

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        return point.graph.hvp(V, which)


class ActivationGGNLinearOperator(_ActivationOperator):
    """The generalized Gauss-Newton matrix of a risk in an activation; arguments as for the Hessian in it."""

    def _graph(self, point: Point, output: Tensor, leaf: Tensor) -> Graph:
        return Graph(output, [leaf])

    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        assert point.view is not None
        U = point.graph.jvp(V, which)
        return point.graph.vjp(point.view.product(U).to(U.dtype), which)
