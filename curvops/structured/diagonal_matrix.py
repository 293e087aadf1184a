"""Diagonal matrices, in a family that is closed under products."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops._scalars import wide
from curvops.structured._batched import own, square_sums
from curvops.structured.matrix import StructuredMatrix


class DiagonalMatrix(StructuredMatrix):
    """Diagonal matrices; ``Π`` keeps the diagonal.

    Args:
        d: The diagonals ``[*batch, dim]``.
    """

    TENSORS = ("d",)
    SYMMETRIC = True
    MOMENT = "squares"
    d: Tensor

    def __init__(self, d: Tensor):
        if not isinstance(d, Tensor) or d.ndim < 1:
            raise ValueError(f"Got d={d!r}, expected a tensor of shape (*batch, dim).")
        self._hold(d.shape[-1], d.shape[:-1], d=d)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"d": (self.dim,)}

    def _times(self, X: Tensor) -> Tensor:
        return self.d.unsqueeze(-1) * X

    def _adjoint_times(self, X: Tensor) -> Tensor:
        return self.d.unsqueeze(-1) * X

    def _times_matrix(self, other: DiagonalMatrix) -> DiagonalMatrix:
        return self._like(d=self.d * other.d)

    def _project(self, S: Tensor) -> DiagonalMatrix:
        return self._like(d=own(S.diagonal(dim1=-2, dim2=-1)))

    def _gram(self, X: Tensor) -> DiagonalMatrix:
        return self._like(d=square_sums(X))

    def _self_gram(self) -> DiagonalMatrix:
        return self._like(d=self.d.square())

    def _gram_through(self, X: Tensor) -> DiagonalMatrix:
        return self._like(d=self.d.square() * square_sums(X))

    def _congruent(self, S: DiagonalMatrix) -> DiagonalMatrix:
        """Return ``Π(M' S M)``, given ``Π(S)``."""
        return self._like(d=self.d.square() * S.d)

    def _symmetric(self, P: Tensor, Q: Tensor) -> DiagonalMatrix:
        """Return ``Π(P Q' + Q P')``."""
        return self._like(d=(P * Q).sum(-1).mul_(2))

    def congruence(self, U: Tensor) -> DiagonalMatrix:
        """Return ``diag(M' X X' M)`` for the diagonal ``U [*batch, dim]`` of ``X X'``."""
        U = wide(self._checked_columns(U.unsqueeze(-1)).squeeze(-1))
        return self._like(d=(wide(self.d).square() * U).to(self.torch_dtype))

    def _shifted(self, c: float | Tensor) -> DiagonalMatrix:
        return self._like(d=(self.d + (c.unsqueeze(-1) if isinstance(c, Tensor) else c)).to(self.torch_dtype))

    def diagonals(self) -> Tensor:
        return own(self.d)

    def to_dense_blocks(self) -> Tensor:
        return torch.diag_embed(self.d)
