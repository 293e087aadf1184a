"""The canonical form of a layer, and the registry of the operations that have one.

Every operation that consumes a weight is written as ``y[g, m, s] = W[g] x[g, m, s]``:

======================  ====================  =====================  ======================
operation               ``X [G, M, S, d_in]``  ``Y [G, M, S, d_out]``  ``W [G, d_out, d_in]``
======================  ====================  =====================  ======================
``linear``, ``matmul``  ``[1, M, 1, in]``      ``[1, M, 1, out]``      ``W`` or its transpose
``conv1d/2d/3d``        patches per group     ``[G, N, O, out/G]``    ``[G, out/G, in/G * K]``
======================  ====================  =====================  ======================

``G`` independent groups, ``M`` rows (the batch axis of the operation: data, or data and tokens), ``S`` weight-sharing
positions within a row. A rule turns one call of an operation into an :class:`Operation`; its :class:`Form` knows the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from curvops._gram import add_outer_, mirror_
from curvops._scalars import accumulation_dtype as accumulation_dtype
from curvops._scalars import wide as wide


def gram(X: Tensor) -> Tensor:
    """Return ``sum_{m, s} x x'`` of ``[G, M, S, d]`` as ``[G, d, d]``."""
    X = wide(X).flatten(1, 2)
    A = X.new_zeros(X.shape[0], X.shape[2], X.shape[2])
    return mirror_(A) if add_outer_(A, X.mT) else A


class Form(ABC):
    """The canonical form of one operation: hyperparameters, no tensors (a frozen dataclass).

    Results are in float32 or better. The sums have defaults in terms of ``inputs`` and ``cotangents``; a form
    overrides them where something cheaper than the full canonical tensor gives the same numbers.
    """

    groups: int = 1
    transposed: bool = False  #: the weight is stored as [.., d_in, d_out]

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """Map the operation's input to ``X [G, M, S, d_in]``."""

    @abstractmethod
    def cotangents(self, g: Tensor) -> Tensor:
        """Map the gradient of the operation's output to ``[G, M, S, d_out]``."""

    @abstractmethod
    def extent(self, x: Tensor) -> tuple[int, int]:
        """Return ``(M, S)`` of an input."""

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return ``(G, d_out, d_in)`` for a weight of this shape."""
        if self.transposed:
            return 1, prod(shape[1:]), shape[0]
        return self.groups, shape[0] // self.groups, prod(shape[1:])

    def arrangement(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return where the entries of ``[G, d_out, d_in]`` lie in a weight of this shape; ``None``: one after the other."""
        return None

    def rows(self, x: Tensor, index: slice | Tensor) -> Tensor:
        """Map the input to some rows of ``X``, in any order of memory: ``[G, m, S, d_in]``."""
        return self.inputs(x)[:, index]

    def input_gram(self, x: Tensor) -> Tensor:
        """Return ``sum_{m, s} x x'`` as ``[G, d_in, d_in]``."""
        return gram(self.inputs(x))

    def input_sum(self, x: Tensor) -> Tensor:
        """Return ``sum_s x`` as ``[G, M, d_in]``."""
        return wide(self.inputs(x)).sum(2)

    def input_squares(self, x: Tensor) -> Tensor:
        """Return ``sum_{m, s} x^2`` as ``[G, d_in]``: the diagonal of the gram."""
        return wide(self.inputs(x)).square().sum((1, 2))

    def output_squares(self, g: Tensor) -> Tensor:
        """Return ``sum_{m, s} g^2`` as ``[G, d_out]``."""
        return wide(self.cotangents(g)).square().sum((1, 2))

    def add_input_gram_(self, A: Tensor, x: Tensor) -> bool:
        """Add ``sum_{m, s} x x'`` to ``A [G, d_in, d_in]``; say whether ``mirror_`` must complete it."""
        A += self.input_gram(x)
        return False

    def add_output_gram_(self, B: Tensor, g: Tensor) -> bool:
        """Add ``sum_{m, s} g g'`` to ``B [G, d_out, d_out]``; say whether ``mirror_`` must complete it."""
        B += self.output_gram(g)
        return False

    def output_gram(self, g: Tensor) -> Tensor:
        """Return ``sum_{m, s} g g'`` as ``[G, d_out, d_out]``."""
        return gram(self.cotangents(g))

    def output_sum(self, g: Tensor) -> Tensor:
        """Return ``sum_s g`` as ``[G, M, d_out]``."""
        return wide(self.cotangents(g)).sum(2)


@dataclass(frozen=True, eq=False)
class Operation:
    """One call, as a rule reads it: ``out = form(weight) x + bias``; operands are the very tensors of the call."""

    form: Form
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None = None


Rule = Callable[..., Operation]
_RULES: dict[Any, Rule] = {}
_MODULES: dict[type[nn.Module], str] = {}


def register(*functions: Any, modules: tuple[type[nn.Module], ...] = ()) -> Callable[[Rule], Rule]:
    """Register a rule for operations.

    A rule is called with the arguments of the operation and the keyword ``tracked``, a predicate that tells which tensors
    are tracked parameters. It returns an :class:`Operation`, or raises ``NotImplementedError`` with the reason.

    Args:
        *functions: Functions as a ``TorchFunctionMode`` sees them, for example ``torch.nn.functional.linear``.
        modules: Module types whose own parameters are consumed by this operation; only ``explain`` without data asks.
    """

    def decorate(rule: Rule) -> Rule:
        for function in functions:
            _RULES[function] = rule
        for module in modules:
            _MODULES[module] = getattr(functions[0], "__name__", str(functions[0]))
        return rule

    return decorate


def rule_for(function: Any) -> Rule | None:
    """Return the rule of an operation, or ``None``."""
    return _RULES.get(function)


def supported() -> list[str]:
    """Name the operations that have a rule."""
    return sorted({getattr(f, "__name__", str(f)).strip("_") for f in _RULES})


def assumed_operation(module: nn.Module) -> str | None:
    """Return the operation that a module of this type is expected to run on its parameters, or ``None``."""
    return next((_MODULES[t] for t in type(module).__mro__ if t in _MODULES), None)
