"""A matrix of low rank plus a multiple of the identity."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvops import _linalg
from curvops._forms import Names, Shapes
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.structured._base import Decomposition, Structured, draw, sandwich


class LowRank(Structured):
    """``U diag(values) U' + rest (I - U U')`` with orthonormal ``U``: all closed forms, without any ``N x N`` matrix.

    On the span of ``U`` the eigenvalues are ``values``, everywhere else they are ``rest``. So inverses, powers and shifts
    have the same form, and small eigenvalues lose no digits to large multiples of the identity.

    Args:
        U: Orthonormal columns ``[N, r]``, ``r <= N``.
        values: Eigenvalues ``[r]``, of either sign.
        rest: Eigenvalue on the complement.
        label: What messages call the operator.
        dtype: Dtype of the vectors; by default that of ``U``.
        domain: Blocks of the vectors; by default one flat block.
        names: Names of the blocks.
    """

    def __init__(
        self,
        U: Tensor,
        values: Tensor,
        rest: float | Tensor = 0.0,
        *,
        label: str = "",
        dtype: torch.dtype | None = None,
        domain: Shapes | None = None,
        names: Names | None = None,
    ):
        if U.ndim != 2 or U.shape[1] > U.shape[0] or values.shape != U.shape[1:]:
            raise ValueError(
                f"Got U {tuple(U.shape)} and values {tuple(values.shape)} for {_linalg.named(label)}, expected (N, r) and "
                "(r,) with r <= N."
            )
        held, dtype = accumulation_dtype(U.dtype), dtype or U.dtype
        domain = ((len(U),),) if domain is None else domain
        super().__init__((1, 1, len(U)), held, dtype=dtype, device=U.device, domain=domain, names=names, label=label)
        self.U, self.values = U.to(held), values.to(held)
        self.rest = torch.as_tensor(rest, dtype=held, device=U.device)

    @property
    def rank(self) -> int:
        """The number of columns of ``U``."""
        return self.U.shape[1]

    def _complement(self) -> int:
        return self.shape[0] - self.rank

    def _multiply(self, X: Tensor) -> Tensor:
        U = self.U[None]
        return sandwich(None, sandwich(None, X, U.mT) * (self.values - self.rest), U) + self.rest * X

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> LowRank:
        U, values, rest = (t.to(device, held) for t in (self.U, self.values, self.rest))
        return LowRank(U, values, rest, **{**self._place(), "dtype": dtype})

    def _data(self) -> dict:
        return {"U": self.U, "values": self.values, "rest": self.rest}

    def _with(self, values: Tensor, rest: Tensor) -> LowRank:
        return LowRank(self.U, values, rest, **self._place())

    def _spectrum(self) -> Tensor:
        """Return ``values``, and after them ``rest`` if there is a complement."""
        values = torch.cat([self.values, self.rest[None]]) if self._complement() else self.values
        return _linalg.check_finite(values, self.label, "eigenvalues")

    def _map(self, f: Callable[[Tensor], Tensor]) -> LowRank:
        values = f(self._spectrum())
        return self._with(values[: self.rank], values[self.rank] if self._complement() else self.rest)

    def _scale(self, s: float | Tensor) -> LinearOperator:
        return self._with(self.values * s, self.rest * s)

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``."""
        c = self._scalar(c)
        return self._with(self.values + c, self.rest + c)

    def eigendecomposition(self) -> Decomposition:
        """Return all ``N`` eigenvectors; the other closed forms do without."""
        basis = torch.linalg.qr(self.U, mode="complete").Q[:, self.rank :]
        values = torch.cat([self.values, self.rest.expand(self._complement())])
        return None, torch.cat([self.U, basis], 1)[None], values[None, None]

    def eigenvalues(self) -> Tensor:
        return torch.cat([self.values, self.rest.expand(self._complement())]).sort().values

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return the sign of the determinant and the logarithm of its size."""
        sign, size = self.values.sign().prod(), self.values.abs().log().sum()
        if n := self._complement():
            sign, size = sign * self.rest.sign() ** n, size + n * self.rest.abs().log()
        return sign, size

    def trace(self) -> Tensor:
        return self.values.sum() + self._complement() * self.rest

    def frobenius_norm(self) -> Tensor:
        return torch.hypot(self.values.norm(), self.rest.abs() * self._complement() ** 0.5)

    def diagonal(self) -> Tensor:
        return (self.U.square() @ (self.values - self.rest) + self.rest).to(self.torch_dtype)

    def to_dense(self) -> Tensor:
        dense = (self.U * (self.values - self.rest)) @ self.U.T
        dense.diagonal().add_(self.rest)
        return dense.to(self.torch_dtype)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[n, D]`` from N(0, op); without a generator, a fresh one is seeded by the operating system."""
        root = self.power(0.5)
        Z = draw((n, 1, 1, self.shape[0]), self.U, generator)
        return root._multiply(Z).reshape(n, self.shape[0]).to(self.torch_dtype)
