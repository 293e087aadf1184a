"""A diagonal plus a matrix of low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops import _linalg
from curvops._forms import Names, Shapes
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.structured._base import Decomposition, Structured, check_damping, check_how, draw, sandwich


class DiagonalPlusLowRank(Structured):
    """``diag(d) + sign U U'`` with positive ``d``: closed forms without any ``N x N`` matrix.

    The inverse is of the same form with the opposite sign (Woodbury), the determinant is that of an ``r x r`` matrix. Only
    eigenvalues and powers decompose all of it.

    Args:
        d: The positive diagonal ``[N]``.
        U: Columns ``[N, r]``.
        sign: 1 or -1; with -1 the whole must be positive definite.
        label: What messages call the operator.
        dtype: Dtype of the vectors; by default that of ``U``.
        domain: Blocks of the vectors; by default one flat block.
        names: Names of the blocks.
    """

    def __init__(
        self,
        d: Tensor,
        U: Tensor,
        sign: int = 1,
        *,
        label: str = "",
        dtype: torch.dtype | None = None,
        domain: Shapes | None = None,
        names: Names | None = None,
    ):
        if U.ndim != 2 or d.shape != U.shape[:1]:
            raise ValueError(
                f"Got d {tuple(d.shape)} and U {tuple(U.shape)} for {_linalg.named(label)}, expected (N,) and (N, r)."
            )
        if (d.dtype, d.device) != (U.dtype, U.device):
            raise TypeError(f"Got d in {d.dtype} on {d.device} and U in {U.dtype} on {U.device}, expected the same.")
        if sign not in (1, -1):
            raise ValueError(f"Got sign={sign!r} for {_linalg.named(label)}, expected 1 or -1.")
        if not (d > 0).all():
            raise ValueError(f"Found entries of d that are not positive for {_linalg.named(label)}; add damping to d.")
        held, dtype = accumulation_dtype(U.dtype), dtype or U.dtype
        domain = ((len(U),),) if domain is None else domain
        super().__init__((1, 1, len(U)), held, dtype=dtype, device=U.device, domain=domain, names=names, label=label)
        self.d, self.U, self.sign = d.to(held), U.to(held), int(sign)

    @property
    def rank(self) -> int:
        """The number of columns of ``U``."""
        return self.U.shape[1]

    def _multiply(self, X: Tensor) -> Tensor:
        U = self.U[None]
        return self.d * X + self.sign * sandwich(None, sandwich(None, X, U.mT), U)

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> DiagonalPlusLowRank:
        d, U = self.d.to(device, held), self.U.to(device, held)
        return DiagonalPlusLowRank(d, U, self.sign, **{**self._place(), "dtype": dtype})

    def _data(self) -> dict:
        return {"d": self.d, "U": self.U, "sign": self.sign}

    def _with(self, d: Tensor, U: Tensor, sign: int) -> DiagonalPlusLowRank:
        return DiagonalPlusLowRank(d, U, sign, **self._place())

    def _scale(self, s: float | Tensor) -> LinearOperator:
        if isinstance(s, Tensor) or s <= 0:
            return super()._scale(s)
        return self._with(self.d * s, self.U * s**0.5, self.sign)

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``, of the same form as long as the diagonal stays positive."""
        d = self.d + self._scalar(c)
        return self._with(d, self.U, self.sign) if (d > 0).all() else super().shift(c)

    def _capacitance(self, d: Tensor) -> Tensor:
        """Return the Cholesky factor of ``I + sign U' diag(d)^-1 U``."""
        small = self.U.mT @ (self.U / d.unsqueeze(-1)) * self.sign
        small.diagonal().add_(1)
        L, info = torch.linalg.cholesky_ex(small)
        if info or not torch.isfinite(L).all():
            raise ValueError(f"Found a matrix that is not positive definite for {_linalg.named(self.label)}.")
        return L

    def inverse(self, damping: float | Tensor = 0.0, how: str = "exact") -> LinearOperator:
        """Return ``(op + damping I)^-1``, of the same form; other ``how`` differ for Kronecker products only."""
        check_how(how)
        d = self.d + check_damping(damping, self.label)
        V = torch.linalg.solve_triangular(self._capacitance(d), (self.U / d.unsqueeze(-1)).mT, upper=False).mT
        return self._with(_linalg.reciprocal(d, self.label), V, -self.sign)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return the sign of the determinant and the logarithm of its size."""
        size = self.d.log().sum() + 2 * self._capacitance(self.d).diagonal().log().sum()
        return torch.ones_like(size), size

    def eigendecomposition(self) -> Decomposition:
        """Return all ``N`` eigenvectors; the other closed forms do without."""
        values, Q = _linalg.eigh_psd(self._dense(), self.label)
        return None, Q[None], values[None, None]

    def _dense(self) -> Tensor:
        return torch.addmm(self.d.diag(), self.U, self.U.T, alpha=self.sign)

    def to_dense(self) -> Tensor:
        return self._dense().to(self.torch_dtype)

    def diagonal(self) -> Tensor:
        return (self.d + self.sign * self.U.square().sum(-1)).to(self.torch_dtype)

    def trace(self) -> Tensor:
        return self.d.sum() + self.sign * self.U.square().sum()

    def frobenius_norm(self) -> Tensor:
        cross = self.d @ self.U.square().sum(-1)
        square = self.d.square().sum() + 2 * self.sign * cross + (self.U.mT @ self.U).square().sum()
        return square.clamp(min=0).sqrt()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[n, D]`` from N(0, op); without a generator, a fresh one is seeded by the operating system."""
        # op = R (I + sign W W') R with R = diag(d)^(1/2): outside of the span of W the middle is the identity.
        root = self.d.sqrt()
        Q, s, _ = torch.linalg.svd(self.U / root.unsqueeze(-1), full_matrices=False)
        Z = draw((n, self.shape[0]), self.U, generator)
        stretch = (1 + self.sign * s.square()).clamp(min=0).sqrt() - 1
        return ((Z + (Z @ Q * stretch) @ Q.mT) * root).to(self.torch_dtype)
