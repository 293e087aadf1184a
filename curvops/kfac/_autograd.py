"""The few private or subtle corners of autograd that observation stands on, each wrapped once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def sequence_number() -> int:
    """Return the number that the next autograd node of this thread will carry."""
    return torch.autograd._get_sequence_nr()


def node_number(node: Any) -> int:
    """Return the sequence number of an autograd node."""
    return node._sequence_nr()


def backward_pass() -> int:
    """Return a number that identifies the backward pass that is running; -1 if none is."""
    return torch._C._current_graph_task_id()


def is_functorch(t: Tensor) -> bool:
    """Whether a tensor is a wrapper of a functorch transform (``vmap``, ``grad``, ``jvp``, ...)."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def stable_edge(out: Tensor) -> GradientEdge:
    """Return an edge whose gradient is the gradient of ``out``, up to a reshape, whatever happens to ``out`` later.

    An in-place activation rewrites the history of a *view*; the operation's own node is then only reached through
    the base. Linear layers with bias on 3-D inputs and unbatched convolutions return such views.
    """
    base = out._base if out._is_view() else None
    return get_gradient_edge(out if base is None or base.numel() != out.numel() else base)


def result_nodes(results: Iterable[Tensor]) -> set[Any]:
    """Return the autograd nodes of results and, as an in-place operation rewrites those of views, of their bases."""
    both = (t for r in results for t in (r, r._base) if t is not None)
    return {t.grad_fn for t in both if t.grad_fn is not None}


def graph_edges(output: Tensor) -> list[tuple[Any, Any]]:
    """Return ``(source, target)`` for every edge of the graph that leads from ``output`` towards the leaves."""
    root = output.grad_fn
    if root is None:
        return []
    stack, seen, edges = [root], {root}, []
    while stack:
        source = stack.pop()
        for target, _ in source.next_functions:
            if target is None:
                continue
            edges.append((source, target))
            if target not in seen:
                seen.add(target)
                stack.append(target)
    return edges
