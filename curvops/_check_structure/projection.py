"""The projection law of structured matrices, and the basis of a space of them."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops._check_structure.compare import F64, close
from curvops.structured.matrix import StructuredMatrix

#: Classes of so few tensors are compared with the least squares solution of least norm, too.
_FEW = 100


def check_projection(cls: type[StructuredMatrix], dim: int, *, rtol: float = 1e-12, seed: int = 0) -> None:
    """Check the projection law: the symmetric part of ``Π(S)`` is the projection of ``S`` onto symmetric parts.

    That is so if and only if what it leaves of ``S`` is orthogonal to the symmetric part of every basis element. Of all such
    elements ``Π(S)`` is the one of least norm: small classes are compared with the pseudoinverse.
    """
    S = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
    S = S + S.mT
    before = S.clone()
    found = cls.from_dense(S)
    m = found.to_dense_blocks()
    elements = basis(cls, dim)
    symmetric = (elements + elements.mT) / 2
    left = S - (m + m.mT) / 2
    inner = symmetric.flatten(1) @ left.flatten()
    close(inner, torch.zeros_like(inner), S.norm().reshape(1), rtol, "projection law: what from_dense(S) leaves of S")
    if len(elements) <= _FEW:
        weights = elements.flatten(1).norm(dim=1).clamp(min=1e-300)
        theta = torch.linalg.pinv((symmetric.flatten(1) / weights[:, None]).T) @ S.flatten() / weights
        expected = (theta @ elements.flatten(1)).reshape(dim, dim)
        close(m, expected, S, rtol, "from_dense(S) against least squares")
    for t in found.named_tensors().values():
        t.add_(1.0)
    assert torch.equal(S, before), "from_dense shares memory with its argument"


def basis(cls: type[StructuredMatrix], dim: int) -> Tensor:
    """Return what one unit in each stored number adds to the zero matrix, ``[numbers, dim, dim]``."""
    zeros = cls.zeros(dim, dtype=F64)
    tensors = zeros.named_tensors()
    total = sum(t.numel() for t in tensors.values())
    stacked, start = {}, 0
    for name, t in tensors.items():
        units = torch.zeros(total, t.numel(), dtype=t.dtype)
        units[start : start + t.numel()].fill_diagonal_(1.0)
        stacked[name] = units.reshape(total, *t.shape) + t
        start += t.numel()
    return cls.from_tensors(stacked).to_dense_blocks() - zeros.to_dense_blocks()
