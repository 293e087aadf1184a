"""One Kronecker product for a weight that is used in both orientations."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops.structured.placement import Placement


def is_turned(a: Placement, b: Placement) -> bool:
    """Whether two blocks of weights hold the same weight alone, once as ``W`` and once as its transpose."""
    if len(a.slots) > 1 or len(b.slots) > 1:
        return False
    (s,), (t,) = a.slots, b.slots
    whole = s.index is None and t.index is None and a.shape[0] == b.shape[0] == 1
    return whole and s.name == t.name and s.transposed != t.transposed


def nearest_kronecker(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the Kronecker product ``B ⊗ A`` nearest to ``B1 ⊗ A1 + B2 ⊗ A2`` in Frobenius norm, as ``(B, A)``.

    The rearranged sum has rank two, so its best rank-one approximation (Van Loan and Pitsianis, 1993) is found among the
    combinations of the given factors. Inner products of positive semidefinite matrices are not negative, hence neither are
    the coefficients, and the result is positive semidefinite.

    Args:
        first, second: ``(B, A)``, all ``[1, d, d]``.
    """
    Bs, As = (torch.cat(pair).double() for pair in zip(first, second, strict=True))
    B_inner, A_inner = (torch.einsum("iab,jab->ij", F, F) for F in (Bs, As))
    root = _root(B_inner)
    _, vectors = torch.linalg.eigh(root @ A_inner @ root)
    # B = sum_i c_i B_i with B_inner^{1/2} c the top eigenvector; A follows by projection.
    c = (torch.linalg.pinv(root, hermitian=True) @ vectors[:, -1]).abs()
    B = torch.einsum("i,iab->ab", c, Bs)
    A = torch.einsum("i,iab->ab", B_inner @ c, As)
    norm = (c @ B_inner @ c).clamp(min=torch.finfo(c.dtype).tiny)
    dtype = first[0].dtype
    return B.unsqueeze(0).to(dtype), (A / norm).unsqueeze(0).to(dtype)


def _root(M: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp(min=0).sqrt() @ vectors.mT
