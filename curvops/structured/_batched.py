"""Arithmetic of batches of matrices that keeps precision, and small conveniences for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from curvops import _gram
from curvops._scalars import accumulation_dtype, wide


def mm(A: Tensor, B: Tensor) -> Tensor:
    """Return ``A @ B`` of batches with the same leading axes, in their own dtype."""
    if _autocasts(A):
        with no_autocast(A):
            return mm(A, B)
    # A batch of one goes through the same kernel as one matrix: faster, and equal to the last bit.
    if A.ndim > 2 and A.shape[:-2].numel() == 1:
        return (A.reshape(A.shape[-2:]) @ B.reshape(B.shape[-2:])).reshape(*A.shape[:-1], B.shape[-1])
    return A @ B


def outer(X: Tensor, Y: Tensor | None = None) -> Tensor:
    """Return ``X X'`` of ``X [*batch, d, L]``; or ``X Y'``, where that is symmetric: from 256 on half of it is multiplied."""
    if X.shape[-2] < 256:
        return mm(X, (X if Y is None else Y).mT)
    with no_autocast(X):
        return _gram.outer(X, Y)


def no_autocast(t: Tensor) -> AbstractContextManager:
    """Autocast is for models: matrices keep their precision."""
    return torch.autocast(t.device.type, enabled=False) if _autocasts(t) else nullcontext()


def _autocasts(t: Tensor) -> bool:
    kind = t.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def plus_mm(C: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0) -> Tensor:
    """Return ``C + alpha A @ B`` of batches with the same leading axes, in one kernel where there are none."""
    if _autocasts(A):
        with no_autocast(A):
            return plus_mm(C, A, B, alpha)
    if A.ndim > 2 and A.shape[:-2].numel() == 1:
        C2, A2, B2 = (t.reshape(t.shape[-2:]) for t in (C, A, B))
        return torch.addmm(C2, A2, B2, alpha=alpha).reshape(C.shape)
    return torch.add(C, A @ B, alpha=alpha) if A.ndim > 2 else torch.addmm(C, A, B, alpha=alpha)


def spread(s: Tensor, t: Tensor) -> Tensor:
    """Append axes to ``s [*batch]`` until it multiplies ``t [*batch, ...]``; one number stays one."""
    return s.reshape(s.shape + (1,) * (t.ndim - s.ndim)) if s.ndim else s


def scaled(t: Tensor, s: float | Tensor) -> Tensor:
    """Return ``s t`` with one scalar or one per batch member, rounded once."""
    return (wide(t) * spread(s, t)).to(t.dtype) if isinstance(s, Tensor) else t * s


def plus(t: Tensor, other: Tensor, alpha: float | Tensor) -> Tensor:
    """Return ``t + alpha other`` with one scalar or one per batch member, rounded once."""
    if isinstance(alpha, Tensor):  # not `alpha=`: torch would ask the device for its value
        return torch.addcmul(wide(t), wide(other), spread(alpha, t)).to(t.dtype)
    return torch.add(t, other, alpha=alpha)


def diagonal(M: Tensor) -> Tensor:
    """Return the diagonals ``[..., n]`` of ``M [..., n, n]`` as a view."""
    return M.diagonal(dim1=-2, dim2=-1)


def on_diagonal(M: Tensor, c: float | Tensor) -> Tensor:
    """Return ``M + c I`` for ``M [*batch, ..., n, n]`` and ``c [*batch]`` or one number."""
    M = own(M)
    diagonal(M).add_(spread(c, diagonal(M)) if isinstance(c, Tensor) else c)
    return M


def own(t: Tensor) -> Tensor:
    """Return a contiguous copy: it can be reduced in place, and saving it saves nothing else."""
    return t.clone(memory_format=torch.contiguous_format)


def square_sums(X: Tensor) -> Tensor:
    """Return the sums of squares along the last axis, where possible without a tensor of the squares."""
    if X.device.type == "cpu" and X.stride(-1) != 1:  # norms over columns of rows [n, d] are two to four times slower
        return wide(X).square().sum(-1)
    return torch.linalg.vector_norm(X, dim=-1, dtype=accumulation_dtype(X.dtype)).square()


def norms(t: Tensor, axes: int, order: float = 2.0) -> Tensor:
    """Return the norm of all entries behind the first ``axes`` axes, in float32 or better."""
    dtype = accumulation_dtype(t.dtype)
    if t.ndim == axes:
        return t.abs().to(dtype)
    if t.numel() == 0:  # torch has no largest entry of nothing
        return t.new_zeros(t.shape[:axes], dtype=dtype)
    behind = tuple(range(axes, t.ndim))
    if order == torch.inf:  # as a norm it takes twenty times longer
        return t.abs().amax(behind).to(dtype)
    return torch.linalg.vector_norm(t, order, dim=behind, dtype=dtype)
