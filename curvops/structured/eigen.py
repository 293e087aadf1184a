"""Operators given by their eigendecomposition in a Kronecker basis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvops import _linalg
from curvops._forms import Names, Shapes
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.structured._base import Decomposition, Structured, sandwich


class Eigen(Structured):
    """``(Q_B ⊗ Q_A) diag(values) (Q_B ⊗ Q_A)'`` on arrays ``[G, o, i]``: EKFAC, and inverses of Kronecker products.

    Args:
        QB: Orthogonal ``[G, o, o]``; None is the identity.
        QA: Orthogonal ``[G, i, i]``; None is the identity.
        values: Eigenvalues ``[G, o, i]``, of either sign.
        label: What messages call the block.
        dtype: Dtype of the vectors; by default that of the values.
        domain: Blocks of the vectors; by default the array as one block.
        names: Names of the blocks.
    """

    def __init__(
        self,
        QB: Tensor | None,
        QA: Tensor | None,
        values: Tensor,
        *,
        label: str = "",
        dtype: torch.dtype | None = None,
        domain: Shapes | None = None,
        names: Names | None = None,
    ):
        held = accumulation_dtype(values.dtype)
        if values.ndim != 3:
            raise ValueError(f"Got values {tuple(values.shape)} for {_linalg.named(label)}, expected shape (G, o, i).")
        G, o, i = values.shape
        for Q, n, what in ((QB, o, "QB"), (QA, i, "QA")):
            if Q is not None and Q.shape != (G, n, n):
                raise ValueError(
                    f"Got {what} of shape {tuple(Q.shape)} for {_linalg.named(label)}, expected {(G, n, n)}."
                )
        super().__init__(
            (G, o, i),
            held,
            dtype=dtype or values.dtype,
            device=values.device,
            domain=domain,
            names=names,
            label=label,
        )
        self.QB, self.QA = (Q if Q is None else Q.to(held) for Q in (QB, QA))
        self.values = values.to(held)

    def _multiply(self, X: Tensor) -> Tensor:
        if self.QB is None and self.QA is None:
            return self.values * X
        QBt, QAt = (Q if Q is None else Q.mT for Q in (self.QB, self.QA))
        return sandwich(self.QB, self.values * sandwich(QBt, X, QAt), self.QA)

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> Eigen:
        QB, QA = (Q if Q is None else Q.to(device, held) for Q in (self.QB, self.QA))
        return Eigen(QB, QA, self.values.to(device, held), **{**self._place(), "dtype": dtype})

    def _data(self) -> dict:
        return {"QB": self.QB, "QA": self.QA, "values": self.values}

    def _with(self, values: Tensor) -> Eigen:
        return Eigen(self.QB, self.QA, values, **self._place())

    def _map(self, f: Callable[[Tensor], Tensor]) -> Eigen:
        return self._with(f(_linalg.check_finite(self.values, self.label, "eigenvalues")))

    def _scale(self, s: float | Tensor) -> LinearOperator:
        return self._with(self.values * s)

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``."""
        return self._with(self.values + self._scalar(c))

    def eigendecomposition(self) -> Decomposition:
        return self.QB, self.QA, _linalg.check_finite(self.values, self.label, "eigenvalues")

    def diagonal(self) -> Tensor:
        QB, QA = (Q if Q is None else Q.square() for Q in (self.QB, self.QA))
        return sandwich(QB, self.values.unsqueeze(0), QA).flatten().to(self.torch_dtype)

    def trace(self) -> Tensor:
        return self.values.sum()

    def frobenius_norm(self) -> Tensor:
        return self.values.norm()
