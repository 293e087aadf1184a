"""The linear map that a model, or its gradient, is near one batch: Jacobian products from as few passes as possible.

Two ways lead to ``J v``. *Forward mode* carries tangents along the forward pass whose graph then gives ``J' u``; what it does
to them is recorded and replayed for further vectors. *Double backward* differentiates ``u -> J' u``, which is linear, once
more: it works with every operation that has second derivatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from curvops._tape import Tape


@contextmanager
def differentiable_kernels(device: torch.device) -> Iterator[None]:
    """Choose kernels that have all derivatives: fused attention and fused recurrent layers do not."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


class Graph:
    """A tensor as a function of leaves, on one autograd graph: products with its Jacobian by double backward.

    Args:
        output: Attached to the graph, or not if it depends on no leaf.
        leaves: What to differentiate with respect to.
    """

    def __init__(self, output: Tensor, leaves: Sequence[Tensor]) -> None:
        self.output, self.leaves = output, list(leaves)
        self._transposed: tuple[Tensor, list[Tensor | None]] | None = None

    def jvp(self, V: Sequence[Tensor], which: Sequence[int]) -> Tensor:
        """Return ``J v`` as ``[K, *output.shape]`` for tangents ``V[i] [K, *shape]`` of the leaves ``which``."""
        u, pulled = self._pulled()
        live = [(pulled[i], v) for i, v in zip(which, V, strict=True) if pulled[i] is not None]
        if not live:
            return self.output.new_zeros(len(V[0]), *self.output.shape)
        outputs = [p for p, _ in live]
        return stacked([_grad(outputs, [u], [v[k] for _, v in live])[0] for k in range(len(V[0]))], self.output)

    def vjp(self, U: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Return ``J' u`` for cotangents ``U [K, *output.shape]``: ``[K, *shape]`` for the leaves ``which``."""
        leaves = [self.leaves[i] for i in which]
        if not self.output.requires_grad:
            return [leaf.new_zeros(len(U), *leaf.shape) for leaf in leaves]
        rows = [_grad([self.output], leaves, [u]) for u in U]
        return [stacked([row[i] for row in rows], leaf) for i, leaf in enumerate(leaves)]

    def bytes(self) -> int:
        """Return the memory that the graph holds."""
        return saved_bytes(self.output, *self._pulled()[1])

    def backward(self) -> Graph | None:
        """Return the same without forward mode, if this is with."""
        return None

    def _pulled(self) -> tuple[Tensor, list[Tensor | None]]:
        """``J' u`` as a function of ``u``, to be differentiated; ``None`` where it does not depend on ``u``."""
        if self._transposed is None:
            u = torch.zeros_like(self.output, requires_grad=True)
            pulled: Sequence[Tensor | None] = [None] * len(self.leaves)
            if self.output.requires_grad:
                pulled = torch.autograd.grad(self.output, self.leaves, u, create_graph=True, allow_unused=True)
            self._transposed = u, [p if p is not None and p.requires_grad else None for p in pulled]
        return self._transposed


class Tangents:
    """Tangents of what ``run`` returns, for any number of vectors: those after the first are replayed where that is valid.

    Args:
        run: Maps tensors in the place of the leaves to tangents of outputs (``None`` for zero).
        leaves: What to differentiate with respect to.
        keep: Whether more products will come.
    """

    def __init__(
        self, run: Callable[[list[Tensor]], list[Tensor | None]], leaves: Sequence[Tensor], keep: bool
    ) -> None:
        self.tape: Tape | None = None
        self._run, self._leaves, self._keep = run, leaves, keep
        self._tried = False

    def of(self, V: Sequence[Tensor], which: Sequence[int]) -> Iterator[list[Tensor | None]]:
        """Yield tangents of the outputs for every column of tangents ``V[i] [K, *shape]`` of the leaves ``which``."""
        columns = list(zip(*V, strict=True))
        for column in columns:
            if self.tape is not None:
                yield self.tape.replay(column)
            else:
                record = not self._tried and (self._keep or len(columns) > 1)
                self._tried |= record
                yield [None if t is None else t.detach() for t in self._pass(column, which, record)]

    def _pass(self, column: Sequence[Tensor], which: Sequence[int], record: bool) -> list[Tensor | None]:
        load_forward_mode()
        given = dict(zip(which, column, strict=True))
        with forward_ad.dual_level():
            inputs = [forward_ad.make_dual(p, given[i]) if i in given else p for i, p in enumerate(self._leaves)]
            if not record:
                return self._run(inputs)
            with Tape([forward_ad.unpack_dual(inputs[i]).tangent for i in which]) as tape:
                tangents = self._run(inputs)
            if tape.finish(tangents, column):
                self.tape = tape
        return tangents


class Dual(Graph):
    """Forward mode: one forward pass carries tangents and makes the graph of the adjoint.

    Args:
        run: Computes the output from tensors in the place of the leaves.
        leaves: What to differentiate with respect to.
        keep: Whether more products will come.
    """

    def __init__(self, run: Callable[[list[Tensor]], Tensor], leaves: Sequence[Tensor], keep: bool) -> None:
        self.run, self.leaves = run, list(leaves)
        self._graph: Tensor | None = None
        self._tangents = Tangents(self._primal_and_tangent, self.leaves, keep)

    @property
    def output(self) -> Tensor:  # type: ignore[override]
        """The output on its graph."""
        if self._graph is None:
            self._graph = self.run(self.leaves)
        return self._graph

    def jvp(self, V: Sequence[Tensor], which: Sequence[int]) -> Tensor:
        rows = [tangent for (tangent,) in self._tangents.of(V, which)]
        return stacked([torch.zeros_like(self.output).detach() if r is None else r for r in rows], self.output)

    def _primal_and_tangent(self, inputs: list[Tensor]) -> list[Tensor | None]:
        with torch.set_grad_enabled(self._graph is None):
            primal, tangent = forward_ad.unpack_dual(self.run(inputs))
        if self._graph is None:
            self._graph = primal
        return [tangent]

    def vjp(self, U: Tensor, which: Sequence[int]) -> list[Tensor]:
        try:
            return super().vjp(U, which)
        except CheckpointError:
            # Checkpoints recompute without tangents, and miss what the rules for tangents saved for backward passes.
            self._graph = self.run(self.leaves)
            return super().vjp(U, which)

    def bytes(self) -> int:
        return saved_bytes(self.output, tape=self._tangents.tape)

    def backward(self) -> Graph:
        return Graph(self.output, self.leaves)


class Slope(Graph):
    """The gradient of a scalar on its graph: its Jacobian is the Hessian, reverse over reverse."""

    def __init__(self, value: Tensor, leaves: Sequence[Tensor]) -> None:
        super().__init__(value, leaves)
        slopes: Sequence[Tensor | None] = [None] * len(self.leaves)
        if value.requires_grad:
            slopes = torch.autograd.grad(value, self.leaves, create_graph=True, allow_unused=True)
        self._slopes = [s if s is not None and s.requires_grad else None for s in slopes]

    def bytes(self) -> int:
        return saved_bytes(self.output, *self._slopes)

    def hvp(self, V: Sequence[Tensor], which: Sequence[int]) -> list[Tensor]:
        """Return ``H v``: the rows and columns ``which`` of the Hessian times ``V[i] [K, *shape]``."""
        leaves = [self.leaves[i] for i in which]
        live = [(self._slopes[i], v) for i, v in zip(which, V, strict=True) if self._slopes[i] is not None]
        if not live:
            return [torch.zeros_like(v) for v in V]
        slopes = [s for s, _ in live]
        rows = [_grad(slopes, leaves, [v[k] for _, v in live]) for k in range(len(V[0]))]
        return [stacked([row[i] for row in rows], leaf) for i, leaf in enumerate(leaves)]


class DualSlope(Graph):
    """The Hessian of a scalar, forward over reverse: tangents go through the forward and the backward pass.

    torch's second derivative of a convolution takes detours; this way every term is one convolution.

    Args:
        value: Computes the scalar from tensors in the place of the leaves.
        leaves: What to differentiate with respect to.
        keep: Whether more products will come.
    """

    def __init__(self, value: Callable[[list[Tensor]], Tensor], leaves: Sequence[Tensor], keep: bool) -> None:
        self.value, self.leaves = value, list(leaves)
        self._tangents = Tangents(self._slopes_of, self.leaves, keep)

    def hvp(self, V: Sequence[Tensor], which: Sequence[int]) -> list[Tensor]:
        """Return ``H v`` for ``V[i] [K, *shape]``, one for every leaf."""
        rows = list(self._tangents.of(V, which))
        return [
            stacked([torch.zeros_like(leaf).detach() if row[i] is None else row[i] for row in rows], leaf)
            for i, leaf in enumerate(self.leaves)
        ]

    def _slopes_of(self, inputs: list[Tensor]) -> list[Tensor | None]:
        value = self.value(inputs)
        if not value.requires_grad:
            return [None] * len(inputs)
        slopes = torch.autograd.grad(value, inputs, allow_unused=True)
        return [None if s is None else forward_ad.unpack_dual(s).tangent for s in slopes]

    def bytes(self) -> int:
        return saved_bytes(tape=self._tangents.tape)

    def backward(self) -> Graph:
        return Slope(self.value(self.leaves), self.leaves)


@cache
def load_forward_mode() -> None:
    """Load the decompositions of forward mode here: torch does it at first use, with a warning about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.zeros(1, 2), torch.ones(1, 2))
            torch.nn.functional.layer_norm(torch.log_softmax(x, 1), (2,))


def stacked(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return rows, which are shaped ``like`` something, on a new first axis; a single one without a copy."""
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.stack(list(rows)) if rows else like.new_empty(0, *like.shape)


def _grad(outputs: Any, inputs: Any, cotangents: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def lacks_forward_mode(error: Exception) -> bool:
    """Whether autograd complains about an operation, or a function of the user's, that has no rule for tangents."""
    return isinstance(error, CheckpointError) or "forward AD" in str(error) or "forward mode AD" in str(error)


def has_convolutions(model: Any) -> bool:
    """Whether a module has convolutional layers."""
    return isinstance(model, nn.Module) and any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())


def saved_bytes(*outputs: Tensor | None, tape: Tape | None = None) -> int:
    """Return how much memory a graph holds in what its nodes saved, and a tape, every storage counted once."""
    saved = [] if tape is None else tape.constants()
    for node in _nodes(*outputs):
        for name in dir(node):
            if name.startswith("_saved_"):
                saved += _tensors(getattr(node, name, None))
    storages = (t.untyped_storage() for t in saved)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _nodes(*outputs: Tensor | None) -> set[Any]:
    stack = [t.grad_fn for t in outputs if t is not None and t.grad_fn is not None]
    seen: set[Any] = set(stack)
    while stack:
        new = {source for source, _ in stack.pop().next_functions if source is not None} - seen
        seen |= new
        stack += new
    return seen


def _tensors(saved: Any) -> Iterator[Tensor]:
    if isinstance(saved, Tensor):
        yield saved
    elif isinstance(saved, list | tuple):
        for s in saved:
            yield from _tensors(s)
