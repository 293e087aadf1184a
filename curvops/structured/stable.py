"""Dense matrices whose size is kept beside them, so that half precision neither over- nor underflows."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops._scalars import accumulation_dtype, wide
from curvops.structured._batched import diagonal, mm, norms, on_diagonal, spread
from curvops.structured._checks import check_tensor
from curvops.structured.dense_matrix import sandwiched, through
from curvops.structured.matrix import StructuredMatrix


class DenseStableMatrix(StructuredMatrix):
    """``factor * M``, with the largest entry of every ``M`` in [1/2, 1) and a factor in float32 or better.

    Numbers of any size keep the relative precision of the dtype of ``M``: float16 holds 1e6 and 1e-7, and sums of them.
    Results are computed wide and normalised once, by powers of two, which round nothing. Two of these add up by
    :meth:`add`, not tensor by tensor; :meth:`to` changes their dtype. :meth:`to_dense_blocks` and :meth:`diagonals` answer
    in the dtype of the factor.

    Args:
        M: The matrices ``[*batch, dim, dim]``, of any size.
        factor: Their sizes ``[*batch]``; one by default.
    """

    TENSORS = ("M", "factor")
    MOMENT = "gram"
    M: Tensor
    factor: Tensor

    def __init__(self, M: Tensor, factor: Tensor | None = None):
        check_tensor(M, "M", "(*batch, dim, dim)")
        self._hold(M.shape[-1], M.shape[:-2], M=M)
        held = accumulation_dtype(M.dtype)
        factor = torch.ones(self.batch, dtype=held, device=self.device) if factor is None else factor
        if tuple(factor.shape) != self.batch or factor.device != self.device:
            raise ValueError(
                f"Got factor {tuple(factor.shape)} on {factor.device}, expected {self.batch} on {self.device}."
            )
        self.factor = factor.to(held)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"M": (self.dim, self.dim)}

    def _zeros(self) -> DenseStableMatrix:
        M = torch.zeros(*self.batch, self.dim, self.dim, dtype=self.torch_dtype, device=self.device)
        return self._like(M=M, factor=torch.ones(self.batch, dtype=wide(M).dtype, device=self.device))

    def _normalised(self, M: Tensor, factor: Tensor | None = None) -> DenseStableMatrix:
        """Return ``factor M`` in the dtype of ``self``, given wide ``M``."""
        size = norms(M, len(self.batch), torch.inf)
        unit = torch.where(size > 0, size / torch.frexp(size).mantissa, 1.0)
        return self._like(
            M=(M / spread(unit, M)).to(self.torch_dtype), factor=unit if factor is None else factor * unit
        )

    def _convert(self, device: torch.device, dtype: torch.dtype) -> DenseStableMatrix:
        if (device, dtype) == (self.device, self.torch_dtype):
            return self
        held = accumulation_dtype(dtype)
        return DenseStableMatrix(self.M.to(device, dtype), self.factor.to(device, held))

    def _retyped(self, dtype: torch.dtype) -> DenseStableMatrix:
        return self._like(torch_dtype=dtype, M=self.M.to(dtype))

    def _value(self) -> Tensor:
        return wide(self.M) * spread(self.factor, self.M)

    def _times(self, X: Tensor) -> Tensor:
        return (mm(wide(self.M), wide(X)) * spread(self.factor, X)).to(X.dtype)

    def _adjoint_times(self, X: Tensor) -> Tensor:
        return (mm(wide(self.M).mT, wide(X)) * spread(self.factor, X)).to(X.dtype)

    def _times_matrix(self, other: DenseStableMatrix) -> DenseStableMatrix:
        return self._normalised(mm(wide(self.M), wide(other.M)), self.factor * other.factor)

    def _project(self, S: Tensor) -> DenseStableMatrix:
        return self._normalised(S)

    def _gram(self, X: Tensor) -> DenseStableMatrix:
        return self._normalised(mm(X, X.mT))

    def _self_gram(self) -> DenseStableMatrix:
        return self._normalised(mm(self.M.mT, self.M), self.factor.square())

    def _gram_through(self, X: Tensor) -> DenseStableMatrix:
        return self._normalised(through(self.M, X), self.factor.square())

    def congruence(self, U: Tensor) -> DenseStableMatrix:
        """Return ``M' U M`` for symmetric ``U [*batch, dim, dim]``."""
        return self._normalised(sandwiched(wide(self.M), wide(self._checked_gram(U))), self.factor.square())

    def add(self, other: DenseStableMatrix, alpha: float | Tensor = 1.0) -> DenseStableMatrix:
        """Return ``self + alpha other``; ``alpha`` is a number, or a tensor with one for each batch member."""
        other, alpha = self._checked(other, "add"), self._factor(alpha)
        weight = spread(other.factor * alpha, other.M)
        return self._normalised(torch.addcmul(self._value(), wide(other.M), weight))

    def scale(self, s: float | Tensor) -> DenseStableMatrix:
        """Return ``s M``; ``s`` is a number, or a tensor with one for each batch member."""
        return self._like(factor=self.factor * self._factor(s))

    def _shifted(self, c: float | Tensor) -> DenseStableMatrix:
        return self._normalised(on_diagonal(self._value(), c))

    def diagonals(self) -> Tensor:
        return wide(diagonal(self.M)) * self.factor.unsqueeze(-1)

    def frobenius_norms(self) -> Tensor:
        return norms(self.M, len(self.batch)) * self.factor.abs()

    def max_abs(self) -> Tensor:
        return norms(self.M, len(self.batch), torch.inf) * self.factor.abs()

    def to_dense_blocks(self) -> Tensor:
        return self._value()
