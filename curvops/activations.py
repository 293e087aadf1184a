"""Curvature of the risk in an activation of the model: what flows out of a module, or into it, on all data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from curvops._linearize import Graph, Slope
from curvops._matrix_free import BatchOperator, Counts, Point, side_by_side, undisturbed
from curvops._traceless import plain
from curvops.risk import EmpiricalRisk

Activation = str | nn.Module | tuple[str | nn.Module, str]


def named(model: nn.Module, activation: Activation) -> tuple[str, str]:
    """Return the name of a module and the side of it, ``"input"`` or ``"output"``, or raise."""
    module, side = activation if isinstance(activation, tuple) and len(activation) == 2 else (activation, "output")
    names: dict[Any, str] = {known: name for name, known in model.named_modules()}
    name = names.get(module) if isinstance(module, nn.Module) else module
    if name not in names.values() or side not in ("input", "output"):
        raise ValueError(
            f"activation: found {activation!r}, expected a module of the model or its name, or a pair of that and 'input' or "
            f"'output'; the model has the modules {[n for n in names.values() if n]}."
        )
    return str(name), side


@contextmanager
def shifted(model: nn.Module, activation: Activation, use: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the activation by ``use(activation)`` while the model runs."""
    name, side = named(model, activation)
    modules = dict(model.named_modules())

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


class _ActivationOperator(BatchOperator):
    """The Hessian, or one like it, in an activation; no entries between batches, as they share no activation."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        activation: Activation,
        data: Iterable[tuple[Any, Any]],
        *,
        check_deterministic: bool = False,
        **keywords: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: found {type(model).__name__}, expected a module: activations go by module names.")
        # All parameters, trained or not: only their dtype and device are asked for.
        risk = EmpiricalRisk(model, loss, dict(model.named_parameters()), data, **keywords)
        if check_deterministic:
            risk.check_deterministic()
        self._activation = named(model, activation)
        self._shapes = self._activation_shapes(risk)
        shape = side_by_side(self._shapes)
        super().__init__(risk, (shape,), (shape,), symmetric=True)

    def _activation_shapes(self, risk: EmpiricalRisk) -> list[tuple[int, ...]]:
        shapes = []
        with undisturbed(risk.device):
            for X, _ in risk.batches():
                with risk.leaves() as leaves:
                    shapes.append(tuple(self._observe(risk, leaves, X)[1].shape))
        return shapes

    def _observe(self, risk: EmpiricalRisk, leaves: dict[str, Tensor], X: Any) -> tuple[Any, Tensor]:
        """Run the model with a leaf added to the activation: prediction and leaf."""
        found: list[Tensor] = []

        def use(value: Tensor) -> Tensor:
            if found:
                raise ValueError(
                    f"activation: {self._activation!r} is computed more than once in a forward pass; name one that is not."
                )
            found.append(torch.zeros_like(value, requires_grad=True))
            return value.detach() + found[0]

        with shifted(risk.model, self._activation, use):  # type: ignore[arg-type]
            raw = risk.predict(leaves, X)
        if not found:
            raise ValueError(
                f"activation: the forward pass does not call the module of {self._activation!r}; name one that it calls."
            )
        return raw, found[0]

    def _linearized(self, point: Point, keep: bool) -> Point:
        raw, leaf = self._observe(self._risk, point.leaves, point.X)
        output = self._risk.loss.prepare(raw)
        point.view = self._risk.loss.view(output.detach(), point.y)
        point.graph = self._graph(point, output, leaf)
        return point

    @abstractmethod
    def _graph(self, point: Point, output: Tensor, leaf: Tensor) -> Graph:
        """Return the prediction, or the loss, as a function of the leaf."""

    @abstractmethod
    def _times(self, point: Point, V: Tensor) -> Tensor:
        """Return the batch's product, in units of the loss's total."""

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False):
            pieces = plain(V[0]).flatten(1).split([prod(s) for s in self._shapes], 1)
        parts, counts = [], Counts(self._risk)
        for point, v, shape in zip(self._points(), pieces, self._shapes, strict=True):
            parts.append(self._times(point, v.reshape(len(v), *shape)).detach().flatten(1))
            counts.add(point)
        return [torch.cat(parts, 1).reshape(V[0].shape) * counts.scale()]


class ActivationHessianLinearOperator(_ActivationOperator):
    """The Hessian of an empirical risk in an activation on all data, ``[N, *activation]``.

    Args:
        model: A module.
        loss, data: See :class:`~curvops.EmpiricalRisk`, and there for other keywords.
        activation: Name of a module whose output it is, or ``(name, "input")``.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.

    Raises:
        ValueError: If no module has the name, or the forward pass computes the activation several times or never.
    """

    def _graph(self, point: Point, output: Tensor, leaf: Tensor) -> Graph:
        return Slope(self._risk.loss.total(output, point.y), [leaf])

    def _times(self, point: Point, V: Tensor) -> Tensor:
        return point.graph.hvp([V], [0])[0]


class ActivationGGNLinearOperator(_ActivationOperator):
    """The generalized Gauss-Newton matrix of a risk in an activation; arguments as for the Hessian in it."""

    def _graph(self, point: Point, output: Tensor, leaf: Tensor) -> Graph:
        return Graph(output, [leaf])

    def _times(self, point: Point, V: Tensor) -> Tensor:
        assert point.view is not None
        U = point.graph.jvp([V], [0])
        return point.graph.vjp(point.view.product(U).to(U.dtype), [0])[0]
