"""Diagonal operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvops import _linalg
from curvops._forms import Names, Shapes
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.structured._base import Decomposition, Structured


class Diagonal(Structured):
    """A diagonal operator on blocks of any shape.

    Args:
        d: The diagonal, of any shape and either sign.
        label: What messages call the block.
        dtype: Dtype of the vectors; by default that of ``d``.
        domain: Blocks of the vectors; by default one block shaped like ``d``.
        names: Names of the blocks.
    """

    def __init__(
        self,
        d: Tensor,
        *,
        label: str = "",
        dtype: torch.dtype | None = None,
        domain: Shapes | None = None,
        names: Names | None = None,
    ):
        held, dtype = accumulation_dtype(d.dtype), dtype or d.dtype
        domain = (tuple(d.shape),) if domain is None else domain
        array = 1, 1, d.numel()
        super().__init__(array, held, dtype=dtype, device=d.device, domain=domain, names=names, label=label)
        self.d = d.to(held).flatten()

    def _multiply(self, X: Tensor) -> Tensor:
        return X * self.d

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> Diagonal:
        return Diagonal(self.d.to(device, held), **{**self._place(), "dtype": dtype})

    def _data(self) -> dict:
        return {"d": self.d}

    def _map(self, f: Callable[[Tensor], Tensor]) -> Diagonal:
        return Diagonal(f(_linalg.check_finite(self.d, self.label, "diagonal")), **self._place())

    def _scale(self, s: float | Tensor) -> LinearOperator:
        return Diagonal(self.d * s, **self._place())

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``."""
        return Diagonal(self.d + self._scalar(c), **self._place())

    def eigendecomposition(self) -> Decomposition:
        return None, None, _linalg.check_finite(self.d, self.label, "diagonal")[None, None]

    def to_dense(self) -> Tensor:
        return self.d.diag().to(self.torch_dtype)

    def diagonal(self) -> Tensor:
        return self.d.to(self.torch_dtype)

    def trace(self) -> Tensor:
        return self.d.sum()

    def frobenius_norm(self) -> Tensor:
        return self.d.norm()
