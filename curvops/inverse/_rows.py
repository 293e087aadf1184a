"""Arithmetic of rows: every row of ``[K, N]`` is a vector of its own, with scalars of shape ``[K, 1]``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of rows, ``[K, 1]``."""
    return (a * b).sum(-1, keepdim=True)


def norm(a: Tensor) -> Tensor:
    """Return the norms of rows, ``[K, 1]``, also where squares overflow or vanish."""
    if a.dtype == torch.float32 and a.device.type != "mps":  # has no float64
        return torch.linalg.vector_norm(a, dim=-1, keepdim=True, dtype=torch.float64).float()
    if a.shape[-1] == 0:
        return a.new_zeros(len(a), 1)
    size = a.abs().amax(-1, keepdim=True)
    return size * torch.linalg.vector_norm(over(a, size), dim=-1, keepdim=True)


def over(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and zero where ``b`` is."""
    return torch.where(b == 0, torch.zeros_like(b), a / torch.where(b == 0, torch.ones_like(b), b))


def exponent(a: Tensor) -> Tensor:
    """Return exponents ``[K, 1]`` with which ``ldexp(a, -exponent)`` has entries of size one, without rounding."""
    if a.shape[-1] == 0:
        return a.new_zeros(len(a), 1)
    most = 120 if a.dtype == torch.float32 else 1000
    return torch.frexp(a.abs().amax(-1, keepdim=True)).exponent.clamp(-most, most)


def only(A: Rows, active: Tensor, V: Tensor) -> Tensor:
    """Return ``A(V)`` for the rows that are active ``[K, 1]``, and zero for others: products are what costs."""
    if active.all():
        return A(V)
    at = active[:, 0].nonzero()[:, 0]
    Y = A(V[at])
    return Y.new_zeros(len(V), Y.shape[1]).index_copy(0, at, Y)
