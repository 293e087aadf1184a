"""The linear map that a model, or its gradient, is near one batch: Jacobian products from as few passes as possible.

Two ways lead to ``J v``. *Forward mode* carries tangents along a forward pass whose graph then gives ``J' u``: one pass for
both, but a pass for every ``v``. *Double backward* differentiates ``u -> J' u``, which is linear, once more: it works with
every operation that has second derivatives, and on one graph for any number of vectors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Columns from which double backward on one graph is cheaper than a forward pass with tangents for each.
FEW_COLUMNS = 2


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
        return torch.stack([_grad(outputs, [u], [v[k] for _, v in live])[0] for k in range(len(V[0]))])

    def vjp(self, U: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Return ``J' u`` for cotangents ``U [K, *output.shape]``: ``[K, *shape]`` for the leaves ``which``."""
        leaves = [self.leaves[i] for i in which]
        if not self.output.requires_grad:
            return [leaf.new_zeros(len(U), *leaf.shape) for leaf in leaves]
        rows = [_grad([self.output], leaves, [u]) for u in U]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def bytes(self) -> int:
        """Return the memory that the graph holds."""
        return saved_bytes(self.output, *self._pulled()[1])

    def _pulled(self) -> tuple[Tensor, list[Tensor | None]]:
        """``J' u`` as a function of ``u``, to be differentiated; ``None`` where it does not depend on ``u``."""
        if self._transposed is None:
            u = torch.zeros_like(self.output, requires_grad=True)
            pulled: Sequence[Tensor | None] = [None] * len(self.leaves)
            if self.output.requires_grad:
                pulled = torch.autograd.grad(self.output, self.leaves, u, create_graph=True, allow_unused=True)
            self._transposed = u, [p if p is not None and p.requires_grad else None for p in pulled]
        return self._transposed


class Dual(Graph):
    """Forward mode: every product with the Jacobian is a forward pass, and one graph gives the adjoint.

    Args:
        run: Computes the output from tensors in the place of the leaves.
        leaves: What to differentiate with respect to.
        output: Attached to its graph, if that exists already; else the first product makes it on the way.
    """

    def __init__(
        self, run: Callable[[list[Tensor]], Tensor], leaves: Sequence[Tensor], output: Tensor | None = None
    ) -> None:
        self.run, self.leaves, self._graph = run, list(leaves), output
        self._transposed = None

    @property
    def output(self) -> Tensor:  # type: ignore[override]
        """The output on its graph."""
        if self._graph is None:
            self._graph = self.run(self.leaves)
        return self._graph

    def jvp(self, V: Sequence[Tensor], which: Sequence[int]) -> Tensor:
        load_forward_mode()
        return torch.stack([self._tangent(dict(zip(which, column, strict=True))) for column in zip(*V, strict=True)])

    def _tangent(self, tangents: dict[int, Tensor]) -> Tensor:
        with torch.set_grad_enabled(self._graph is None), forward_ad.dual_level():
            inputs = [forward_ad.make_dual(p, tangents[i]) if i in tangents else p for i, p in enumerate(self.leaves)]
            primal, tangent = forward_ad.unpack_dual(self.run(inputs))
        if self._graph is None:
            self._graph = primal
        return torch.zeros_like(primal).detach() if tangent is None else tangent.detach()

    def bytes(self) -> int:
        return saved_bytes(self.output)


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
        return [torch.stack(column) for column in zip(*rows, strict=True)]


@cache
def load_forward_mode() -> None:
    """Load the decompositions of forward mode here: torch does it at first use, with a warning about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.zeros(1, 2), torch.ones(1, 2))
            torch.nn.functional.layer_norm(torch.log_softmax(x, 1), (2,))


def _grad(outputs: Any, inputs: Any, cotangents: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def has_convolutions(output: Tensor) -> bool:
    """Whether a graph has convolutions: torch's second derivative of one always computes all three of its terms."""
    return any("ConvolutionBackward" in node.name() for node in _nodes(output))


def saved_bytes(*outputs: Tensor | None) -> int:
    """Return how much memory a graph holds in what its nodes saved, every storage counted once."""
    sizes: dict[int, int] = {}
    for node in _nodes(*outputs):
        for name in dir(node):
            if name.startswith("_saved_"):
                for t in _tensors(getattr(node, name, None)):
                    storage = t.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


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
