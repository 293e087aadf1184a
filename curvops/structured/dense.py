"""A symmetric matrix with all its entries, or a batch of them."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops import _linalg
from curvops._forms import Names, Shapes
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.structured._base import Decomposition, Structured, sandwich


class Dense(Structured):
    """A symmetric positive semidefinite matrix, or a block-diagonal batch ``[G, n, n]``, on blocks of any shape.

    Args:
        M: The matrix; never modified.
        label: What messages call the block.
        dtype: Dtype of the vectors; by default that of the matrix.
        domain: Blocks of the vectors; by default one flat block, ``(n,)`` or ``(G, n)``.
        names: Names of the blocks.
    """

    def __init__(
        self,
        M: Tensor,
        *,
        label: str = "",
        dtype: torch.dtype | None = None,
        domain: Shapes | None = None,
        names: Names | None = None,
    ):
        if M.ndim not in (2, 3) or M.shape[-1] != M.shape[-2]:
            raise ValueError(f"Got shape {tuple(M.shape)} for {_linalg.named(label)}, expected (n, n) or (G, n, n).")
        domain = (tuple(M.shape[:-1]),) if domain is None else domain
        held, dtype = accumulation_dtype(M.dtype), dtype or M.dtype
        M = M.reshape(-1, *M.shape[-2:]).to(held)
        array = len(M), 1, M.shape[-1]
        super().__init__(array, held, dtype=dtype, device=M.device, domain=domain, names=names, label=label)
        self.M = M
        self._spectrum: tuple | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_spectrum": None}

    def _multiply(self, X: Tensor) -> Tensor:
        return sandwich(None, X, self.M)

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> Dense:
        return Dense(self.M.to(device, held), **{**self._place(), "dtype": dtype})

    def _data(self) -> dict:
        return {"M": self.M}

    def _scale(self, s: float | Tensor) -> LinearOperator:
        if isinstance(s, Tensor) or s < 0:
            return super()._scale(s)
        return Dense(self.M * s, **self._place())

    def eigendecomposition(self) -> Decomposition:
        if self._spectrum is None:
            self._spectrum = _linalg.eigh_psd(self.M.detach(), self.label)
        values, Q = self._spectrum
        return None, Q, values.unsqueeze(1)

    def to_dense(self) -> Tensor:
        return torch.block_diag(*self.M).to(self.torch_dtype)

    def diagonal(self) -> Tensor:
        return self.M.diagonal(dim1=-2, dim2=-1).flatten().to(self.torch_dtype)

    def trace(self) -> Tensor:
        return self.M.diagonal(dim1=-2, dim2=-1).sum()

    def frobenius_norm(self) -> Tensor:
        return self.M.norm()
