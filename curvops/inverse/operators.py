"""Thin operators over the solvers: a product with one of them solves a system for all columns at once."""

from __future__ import annotations

import warnings
from abc import abstractmethod

import torch
from torch import Tensor

from curvops._forms import join, split
from curvops._operator import LinearOperator
from curvops.inverse._solvers import Rows, SolveInfo, cg, dot, lsmr, minres, norm, over

#: Relative residuals that a dtype can reach without a fight.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


class IterativeInverse(LinearOperator):
    """The inverse of an operator, by an iteration that stops at a relative residual.

    Args:
        A: The operator; square, unless said otherwise.
        tol: Relative residual ``|b - A x| / |b|`` to reach for every column; by default 1e-8 in float64, 1e-4 in float32.
        maxiter: Most iterations; by default ten times the number of unknowns.
        preconditioner: An operator near the inverse of ``A``, such as ``kfac.inverse(damping)``; symmetric positive definite.

    Attributes:
        last: :class:`SolveInfo` of the last product.

    Raises:
        TypeError: For half precision, in which residuals mean nothing.
        ValueError: From a product whose iteration cannot work with the operator. One that stops too early only warns.
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        tol: float | None = None,
        maxiter: int | None = None,
        preconditioner: LinearOperator | None = None,
    ) -> None:
        if not isinstance(A, LinearOperator):
            raise TypeError(
                f"A: found {type(A).__name__}, expected an operator of curvops; wrap a matrix as structured.Dense."
            )
        if A.torch_dtype not in _TOLERANCE:
            raise TypeError(
                f"A: found {A.torch_dtype}, expected float32 or float64; convert it: A.to(dtype=torch.float32)."
            )
        if preconditioner is not None:
            _check_like(preconditioner, A)
        tol = _TOLERANCE[A.torch_dtype] if tol is None else tol
        if not 0 < tol < 1:
            raise ValueError(f"tol: found {tol!r}, expected a relative residual between 0 and 1.")
        if maxiter is not None and maxiter < 1:
            raise ValueError(f"maxiter: found {maxiter!r}, expected a positive integer.")
        self.A, self.preconditioner = A, preconditioner
        self.tol, self.maxiter = float(tol), 10 * max(A.shape) if maxiter is None else int(maxiter)
        self.last: SolveInfo | None = None
        super().__init__(
            A.range,
            A.domain,
            dtype=A.torch_dtype,
            device=A.device,
            symmetric=A.symmetric,
            domain_names=A.range_names,
            range_names=A.domain_names,
        )

    @abstractmethod
    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        """Solve for the rows of ``B``."""

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        B = join(V)
        if not torch.isfinite(B).all():
            raise ValueError("The right-hand side has NaN or infinite entries.")
        X, info = self._solve(B)
        info.residual = over(norm(B - self.A._rows(X)), norm(B)).squeeze(1)
        if info.converged is None:
            info.converged = info.residual <= self.tol
        self.last = info
        if not info.converged.all():
            warnings.warn(
                f"{type(self).__name__}: {int((~info.converged).sum())} of {len(B)} systems did not reach the relative "
                f"residual {self.tol:.1e} in {info.iterations} iterations; the worst has "
                f"{float(info.residual.max()):.1e}. Raise maxiter or tol, or give a (better) preconditioner.",
                RuntimeWarning,
                stacklevel=4,
            )
        return split(X, self.range)

    def inverse(self, damping: float = 0.0, how: str = "exact") -> LinearOperator:
        """Return ``(op + damping I)^-1``, which is known without damping: the operator itself."""
        return self.A if damping == 0 else super().inverse(damping, how)

    @property
    def _precondition(self) -> Rows:
        return (lambda R: R) if self.preconditioner is None else self.preconditioner._rows

    def __getstate__(self) -> dict:
        return {**self.__dict__, "last": None}


def _check_like(M: LinearOperator, A: LinearOperator) -> None:
    if not isinstance(M, LinearOperator) or (M.domain, M.range) != (A.range, A.domain):
        raise ValueError(
            f"preconditioner: found {M!r}, expected an operator of curvops that maps {A.range} to {A.domain}."
        )
    if (M.torch_dtype, M.device) != (A.torch_dtype, A.device):
        raise TypeError(
            f"preconditioner: found {M!r}, expected {A.torch_dtype} on {A.device}; convert it with .to(...)."
        )


def _require_symmetric(A: LinearOperator, name: str) -> None:
    if isinstance(A, LinearOperator) and not A.symmetric:
        raise ValueError(f"{name} needs a symmetric operator, found {A!r}; use LSMRInverseLinearOperator.")


class CGInverseLinearOperator(IterativeInverse):
    """The inverse of a symmetric positive definite operator by conjugate gradients (Hestenes and Stiefel 1952).

    Arguments as for :class:`IterativeInverse`. An operator that turns out indefinite is refused, naming the curvature.
    """

    def __init__(self, A: LinearOperator, **options: object) -> None:
        _require_symmetric(A, "CG")
        super().__init__(A, **options)  # type: ignore[arg-type]

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        return cg(self.A._rows, B, self._precondition, self.tol, self.maxiter)


class MINRESInverseLinearOperator(IterativeInverse):
    """The inverse of a symmetric operator, definite or not, by minimal residuals (Paige and Saunders 1975).

    Arguments as for :class:`IterativeInverse`. A singular but consistent system gets the solution of minimal norm.
    """

    def __init__(self, A: LinearOperator, **options: object) -> None:
        _require_symmetric(A, "MINRES")
        super().__init__(A, **options)  # type: ignore[arg-type]

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        return minres(self.A._rows, B, self._precondition, self.tol, self.maxiter)


class LSMRInverseLinearOperator(IterativeInverse):
    """The (pseudo-)inverse of any operator by least squares, ``min |A x - b|^2 + damp^2 |x|^2`` (Fong and Saunders 2011).

    A column is solved when its residual is small, or orthogonal to the range of ``A`` up to ``tol``.

    Args:
        A: Any operator, rectangular or singular, too.
        damp: Regularisation of the least-squares problem.
        preconditioner: ``x = M z`` is sought; for square operators without ``damp``.
        **options: See :class:`IterativeInverse`.
    """

    def __init__(
        self, A: LinearOperator, *, damp: float = 0.0, preconditioner: LinearOperator | None = None, **options: object
    ) -> None:
        if not damp >= 0:
            raise ValueError(f"damp: found {damp!r}, expected a number >= 0.")
        if preconditioner is not None and damp:
            raise ValueError("preconditioner: damping is of x, not of z with x = M z; give only one of the two.")
        self.damp = float(damp)
        super().__init__(A, preconditioner=preconditioner, **options)  # type: ignore[arg-type]

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        M, T = self._precondition, self.A._adjoint()._rows
        Mt = M if self.preconditioner is None else self.preconditioner._adjoint()._rows
        Z, info = lsmr(
            lambda V: self.A._rows(M(V)), lambda U: Mt(T(U)), B, self.shape[0], self.damp, self.tol, self.maxiter
        )
        X = M(Z)
        R = B - self.A._rows(X)
        slope = norm(Mt(T(R)) - self.damp**2 * Z)
        small = norm(R) <= self.tol * norm(B)
        info.converged = (small | (slope <= self.tol * norm(Mt(T(B))))).squeeze(1)
        return X, info

    def _adjoint(self) -> LinearOperator:
        if self.symmetric:
            return self
        adjoint = self.preconditioner and self.preconditioner._adjoint()
        return LSMRInverseLinearOperator(
            self.A._adjoint(), damp=self.damp, preconditioner=adjoint, tol=self.tol, maxiter=self.maxiter
        )

    def inverse(self, damping: float = 0.0, how: str = "exact") -> LinearOperator:
        """Return the operator itself, where this is an inverse: square and without ``damp``."""
        if self.damp or self.shape[0] != self.shape[1]:
            raise NotImplementedError("A pseudo-inverse, or one with damp, has no inverse here.")
        return super().inverse(damping, how)


class NeumannInverseLinearOperator(IterativeInverse):
    """The inverse by a truncated Neumann series, ``scale sum_k (I - scale M A)^k M`` (Lorraine et al. 2020).

    With a fixed number of terms it is a polynomial of ``A``: linear, and a useful approximation of a damped inverse.

    Args:
        A: A square operator.
        num_terms: Terms after the first.
        scale: Factor of ``A``; the series converges if ``|1 - scale * eigenvalue| < 1`` for all eigenvalues of ``M A``.
        preconditioner: ``M``, by default the identity.

    Raises:
        ValueError: From a product for which the series diverges, with a scale that would not.
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        num_terms: int = 100,
        scale: float = 1.0,
        preconditioner: LinearOperator | None = None,
    ) -> None:
        if num_terms < 0 or not scale > 0:
            raise ValueError(f"Found num_terms={num_terms!r}, scale={scale!r}, expected num_terms >= 0 and scale > 0.")
        if isinstance(A, LinearOperator) and A.shape[0] != A.shape[1]:
            raise ValueError(f"A: found shape {A.shape}, expected a square operator.")
        self.num_terms, self.scale = int(num_terms), float(scale)
        super().__init__(A, preconditioner=preconditioner)
        # (I - s M A)^k M is symmetric with A and M; the sum is, too.
        self.symmetric = A.symmetric and (preconditioner is None or preconditioner.symmetric)

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        info, size = SolveInfo(iterations=self.num_terms), norm(B)
        M, A = self._precondition, self.A._rows
        term = self.scale * M(B)
        X, first = term.clone(), norm(term)
        for _ in range(self.num_terms):
            info.residuals.append(over(norm(term), first))
            term = term - self.scale * M(A(term))
            X = X + term
        last = norm(term)
        if not torch.isfinite(X).all() or (last > 2 * first).any():
            raise ValueError(
                f"The Neumann series diverges: its terms grew from {float(first.max()):.1e} to {float(last.max()):.1e}. Choose "
                f"scale below {1.9 / self._largest(B):.2g} for this operator, and check that it is positive definite."
            )
        info.converged = torch.ones_like(size, dtype=torch.bool).squeeze(1)  # a polynomial, by definition
        return X, info

    def _largest(self, B: Tensor) -> float:
        """Estimate the largest eigenvalue of ``M A`` by power iteration."""
        v = B[:1] / norm(B[:1]).clamp(min=torch.finfo(B.dtype).tiny)
        value = torch.ones_like(v[:, :1])
        for _ in range(30):
            w = self._precondition(self.A._rows(v))
            value, v = dot(v, w).abs(), w / norm(w).clamp(min=torch.finfo(B.dtype).tiny)
        return max(float(value), torch.finfo(B.dtype).tiny)

    def _adjoint(self) -> LinearOperator:
        if self.symmetric:
            return self
        if self.preconditioner is not None:
            raise NotImplementedError("The adjoint of a preconditioned Neumann series of a non-symmetric operator.")
        return NeumannInverseLinearOperator(self.A._adjoint(), num_terms=self.num_terms, scale=self.scale)

    def inverse(self, damping: float = 0.0, how: str = "exact") -> LinearOperator:
        """Refuse: a truncated series is only near the inverse of ``A``."""
        raise NotImplementedError("A truncated Neumann series is only near an inverse; ask the operator itself.")
