"""Block-diagonal matrices with blocks of one size, in a family that is closed under products."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from curvops.structured._batched import diagonal, mm, on_diagonal, own
from curvops.structured.dense_matrix import sandwiched, through
from curvops.structured.matrix import StructuredMatrix


class BlockDiagonalMatrixTemplate(StructuredMatrix):
    """Matrices with ``N = dim // BLOCK_DIM`` equal blocks and a last smaller one; ``Π`` keeps the blocks.

    Subclasses say ``BLOCK_DIM``; ``curvops.structured.structure("block7diagonal")`` makes one of any size.

    Args:
        blocks: The equal blocks ``[*batch, N, BLOCK_DIM, BLOCK_DIM]``.
        last: The last block ``[*batch, rest, rest]`` with ``rest = dim % BLOCK_DIM``, which may be 0.
    """

    BLOCK_DIM: ClassVar[int]
    TENSORS = ("blocks", "last")
    blocks: Tensor
    last: Tensor

    def __init__(self, blocks: Tensor, last: Tensor):
        if blocks.ndim < 3 or last.ndim < 2 or last.shape[-1] >= self.BLOCK_DIM:
            raise ValueError(
                f"Got blocks {tuple(blocks.shape)} and last {tuple(last.shape)}, expected (*batch, N, {self.BLOCK_DIM}, "
                f"{self.BLOCK_DIM}) and (*batch, rest, rest) with rest < {self.BLOCK_DIM}."
            )
        dim = blocks.shape[-3] * self.BLOCK_DIM + last.shape[-1]
        self._hold(dim, last.shape[:-2], blocks=blocks, last=last)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        b = self.BLOCK_DIM
        N, rest = divmod(self.dim, b)
        return {"blocks": (N, b, b), "last": (rest, rest)}

    def _cut(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Cut ``[*batch, dim, n]`` into ``[*batch, N, BLOCK_DIM, n]`` and ``[*batch, rest, n]`` (views)."""
        N, rest = divmod(self.dim, self.BLOCK_DIM)
        head = X.narrow(-2, 0, self.dim - rest)
        return head.unflatten(-2, (N, self.BLOCK_DIM)), X.narrow(-2, self.dim - rest, rest)

    def _cut_matrix(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """Return the diagonal blocks of ``S [*batch, dim, dim]`` as views."""
        N, rest = divmod(self.dim, self.BLOCK_DIM)
        at = self.dim - rest
        head = (
            S.narrow(-2, 0, at).narrow(-1, 0, at).unflatten(-1, (N, self.BLOCK_DIM)).unflatten(-3, (N, self.BLOCK_DIM))
        )
        return head.diagonal(dim1=-4, dim2=-2).movedim(-1, -3), S.narrow(-2, at, rest).narrow(-1, at, rest)

    def _columns(self, f: Callable[[Tensor, Tensor], Tensor], X: Tensor) -> Tensor:
        """Apply ``f`` to each block and its rows of ``X``."""
        if self.dim < self.BLOCK_DIM:
            return f(self.last, X)
        head, tail = self._cut(X)
        Y = f(self.blocks, head).flatten(-3, -2)
        return torch.cat([Y, f(self.last, tail)], -2) if tail.shape[-2] else Y

    def _blocks(self, f: Callable[..., Tensor], *pairs: tuple[Tensor, Tensor]) -> BlockDiagonalMatrixTemplate:
        """Return the matrix with the blocks ``f(...)``."""
        return self._like(blocks=f(*[p[0] for p in pairs]), last=f(*[p[1] for p in pairs]))

    def _times(self, X: Tensor) -> Tensor:
        return self._columns(mm, X)

    def _adjoint_times(self, X: Tensor) -> Tensor:
        return self._columns(lambda M, x: mm(M.mT, x), X)

    def _times_matrix(self, other: BlockDiagonalMatrixTemplate) -> BlockDiagonalMatrixTemplate:
        return self._from(mm, self, other)

    def _project(self, S: Tensor) -> BlockDiagonalMatrixTemplate:
        return self._blocks(own, self._cut_matrix(S))

    def _gram(self, X: Tensor) -> BlockDiagonalMatrixTemplate:
        return self._blocks(lambda x: mm(x, x.mT), self._cut(X))

    def _self_gram(self) -> BlockDiagonalMatrixTemplate:
        return self._from(lambda M: mm(M.mT, M), self)

    def _gram_through(self, X: Tensor) -> BlockDiagonalMatrixTemplate:
        return self._blocks(through, (self.blocks, self.last), self._cut(X))

    def congruence(self, U: Tensor) -> BlockDiagonalMatrixTemplate:
        """Return ``Π(M' U M)`` for symmetric ``U [*batch, dim, dim]``."""
        M = self._wide()
        blocks, last = (S.to(M.torch_dtype) for S in self._cut_matrix(self._checked_gram(U)))
        return M._blocks(sandwiched, (M.blocks, M.last), (blocks, last))._retyped(self.torch_dtype)

    def _shifted(self, c: float | Tensor) -> BlockDiagonalMatrixTemplate:
        return self._from(lambda M: on_diagonal(M, c), self)

    def diagonals(self) -> Tensor:
        return torch.cat([diagonal(self.blocks).flatten(-2), diagonal(self.last)], -1)

    def to_dense_blocks(self) -> Tensor:
        dense = self.last.new_zeros(*self.batch, self.dim, self.dim)
        for at, M in zip(self._cut_matrix(dense), (self.blocks, self.last), strict=True):
            at.copy_(M)
        return dense


class Block30DiagonalMatrix(BlockDiagonalMatrixTemplate):
    """Block-diagonal matrices with blocks of 30."""

    BLOCK_DIM = 30
