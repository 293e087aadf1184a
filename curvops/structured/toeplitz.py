"""Triangular Toeplitz matrices: products are convolutions, projections of products are correlations.

Both go by FFT: ``Π(M' X X' M)`` for d = 513, n = 2048 takes 7 ms on one thread, where convolutions and a dense product took
singd 2029 (see ``_convolutions``). Given ``X X'``, it takes the time of a look at it (see ``_strips``). Nothing is ``d x d``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from curvops._scalars import wide
from curvops.structured._batched import own
from curvops.structured._convolutions import convolved, correlated, diagonal_sums, diagonal_sums_filtered, filtered
from curvops.structured._strips import column_sums_of_skewed, diagonal_sums_through
from curvops.structured.matrix import StructuredMatrix

#: Larger matrices want rows, not their gram: FFTs are faster than the product, and nothing is ``d x d``.
MAX_GRAM = 2048


class _ToeplitzMatrix(StructuredMatrix):
    """What both triangles share: the numbers ``t_0, ..., t_{dim-1}`` on the diagonals, from the main one outwards."""

    MOMENT = "gram"
    LOWER: ClassVar[bool]

    def _lay_out(self, dim: int, batch: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super()._lay_out(dim, batch, dtype, device)
        if dim > MAX_GRAM:
            self.MOMENT = "rows"

    @property
    def _t(self) -> Tensor:
        return getattr(self, self.TENSORS[0])

    def _hold_diagonals(self, **named: Tensor) -> None:
        ((name, t),) = named.items()
        if not isinstance(t, Tensor) or t.ndim < 1:
            raise ValueError(f"Got {name}={t!r}, expected a tensor of shape (*batch, dim).")
        self._hold(t.shape[-1], t.shape[:-1], **named)

    def _of(self, t: Tensor) -> _ToeplitzMatrix:
        return self._like(**{self.TENSORS[0]: t})

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.TENSORS[0]: (self.dim,)}

    def _counts(self) -> Tensor:
        """Return the lengths ``dim, dim - 1, ..., 1`` of the diagonals."""
        return torch.arange(self.dim, 0, -1, dtype=wide(self._t).dtype, device=self.device)

    # Lower triangles convolve columns, and their transposes correlate; upper triangles do it the other way around.
    def _times(self, X: Tensor) -> Tensor:
        return filtered(X, self._t, correlate=not self.LOWER)

    def _adjoint_times(self, X: Tensor) -> Tensor:
        return filtered(X, self._t, correlate=self.LOWER)

    def _times_matrix(self, other: _ToeplitzMatrix) -> _ToeplitzMatrix:
        return self._of(own(convolved(self._t, other._t).to(self.torch_dtype)))

    def _averaged(self, sums: Tensor) -> _ToeplitzMatrix:
        """Return ``Π`` of a symmetric matrix, given the sums ``[*batch, dim]`` of its diagonals."""
        t = sums / torch.arange(self.dim / 2, 0, -0.5, dtype=sums.dtype, device=sums.device)
        t.narrow(-1, 0, min(self.dim, 1)).mul_(0.5)
        return self._of(t)

    def _project(self, S: Tensor) -> _ToeplitzMatrix:
        return self._averaged(column_sums_of_skewed(S))

    def _gram(self, X: Tensor) -> _ToeplitzMatrix:
        return self._averaged(diagonal_sums(X))

    def _gram_through(self, X: Tensor) -> _ToeplitzMatrix:
        return self._averaged(diagonal_sums_filtered(X, self._t, correlate=self.LOWER))

    def congruence(self, U: Tensor) -> _ToeplitzMatrix:
        """Return ``Π(M' U M)`` for symmetric ``U [*batch, dim, dim]``."""
        sums = diagonal_sums_through(wide(self._t), self._checked_gram(U), self.LOWER)
        return self._averaged(sums)._retyped(self.torch_dtype)

    def _self_gram(self) -> _ToeplitzMatrix:
        # The k-th diagonal of M' M sums to the sum over s of (dim - s) t_s t_{s-k}, for either triangle.
        return self._averaged(correlated(self._t, self._t * self._counts()))

    def _shifted(self, c: float | Tensor) -> _ToeplitzMatrix:
        t = own(self._t)
        t.narrow(-1, 0, min(self.dim, 1)).add_(c.unsqueeze(-1) if isinstance(c, Tensor) else c)
        return self._of(t)

    def diagonals(self) -> Tensor:
        return own(self._t.narrow(-1, 0, min(self.dim, 1)).expand(*self.batch, self.dim))

    def traces(self) -> Tensor:
        return self.dim * self.mean_trace()

    def mean_trace(self) -> Tensor:
        return wide(self._t.narrow(-1, 0, min(self.dim, 1))).sum(-1)

    def frobenius_norms(self) -> Tensor:
        return torch.linalg.vector_norm(wide(self._t) * self._counts().sqrt(), dim=-1)

    def _lower(self) -> Tensor:
        """Return the lower triangular matrices."""
        d = self.dim
        # The other way around: columns of numbers, read as rows that are one entry shorter, are a triangle.
        rows = pad(self._t, (0, 1)).unsqueeze(-2).expand(*self.batch, d, d + 1)
        return rows.reshape(*self.batch, d * (d + 1)).narrow(-1, 0, d * d).reshape(*self.batch, d, d).mT.tril()


class TrilToeplitzMatrix(_ToeplitzMatrix):
    """Lower triangular Toeplitz matrices; ``Π`` averages diagonals, and counts all but the main one twice.

    Args:
        column: The first columns ``[*batch, dim]``.
    """

    TENSORS = ("column",)
    LOWER = True
    column: Tensor

    def __init__(self, column: Tensor):
        self._hold_diagonals(column=column)

    def to_dense_blocks(self) -> Tensor:
        return self._lower().contiguous()


class TriuToeplitzMatrix(_ToeplitzMatrix):
    """Upper triangular Toeplitz matrices; ``Π`` averages diagonals, and counts all but the main one twice.

    Args:
        row: The first rows ``[*batch, dim]``.
    """

    TENSORS = ("row",)
    LOWER = False
    row: Tensor

    def __init__(self, row: Tensor):
        self._hold_diagonals(row=row)

    def to_dense_blocks(self) -> Tensor:
        return self._lower().mT.contiguous()
