"""Thin operators over the solvers: a product with one of them solves a system for all columns at once."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from curvops._forms import join, split
from curvops._operator import LinearOperator
from curvops.inverse._rows import Rows, dot, exponent, norm, over
from curvops.inverse._solvers import SolveInfo, cg, lsmr, minres, report, require_finite

#: Relative residuals that CG and MINRES reach at condition 1e6 in float64 and 1e4 in float32; LSMR at 1e6 and 1e3.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}

_HOPELESS = 1e8  # a series whose residual grew that much has lost all digits


def _integer(n: Any, what: str, least: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < least:
        raise ValueError(f"{what}: found {n!r}, expected an integer >= {least}.")
    return int(n)


def _real(x: Any, what: str, expected: str) -> float:
    if not isinstance(x, (Real, Tensor)) or isinstance(x, bool):
        raise TypeError(f"{what}: found {x!r}, expected {expected}.")
    return float(x)


class _Solution(torch.autograd.Function):
    """A solution as a function of the right-hand side: its derivative is a solve with the adjoint.

    That is right where products with the operator are opaque to autograd, and it keeps no iterates.
    """

    @staticmethod
    def forward(ctx: Any, B: Tensor, inverse: IterativeInverse) -> Tensor:
        ctx.inverse = inverse
        return inverse._run(B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.inverse._adjoint()._rows(grads[0]), None


class IterativeInverse(LinearOperator):
    """The inverse of an operator, by an iteration that stops at a relative residual.

    Products are differentiable with respect to the right-hand side, not to what the operator is made of.

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
        expected = "a relative residual between 0 and 1"
        self.tol = _TOLERANCE[A.torch_dtype] if tol is None else _real(tol, "tol", expected)
        if not 0 < self.tol < 1:
            raise ValueError(f"tol: found {tol!r}, expected {expected}.")
        self.A, self.preconditioner = A, preconditioner
        self.maxiter = 10 * max(A.shape) if maxiter is None else _integer(maxiter, "maxiter", 1)
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

    _promises = True  # whether a residual above the tolerance is worth a warning

    @abstractmethod
    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        """Solve for the rows of ``B``."""

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        B = join(V)
        X, info = _Solution.apply(B, self), self.last
        assert info is not None
        if self._promises and not info.converged.all():
            warnings.warn(
                f"{type(self).__name__}: {int((~info.converged).sum())} of {len(B)} systems did not reach the relative "
                f"residual {self.tol:.1e} in {info.iterations} iterations; the worst has "
                f"{float(info.residual.max()):.1e}. Raise maxiter or tol, or give a (better) preconditioner.",
                RuntimeWarning,
                stacklevel=4,
            )
        return split(X, self.range)

    @torch.no_grad()
    def _run(self, B: Tensor) -> Tensor:
        """Solve for the rows of ``B``, brought to size one, and say what happened."""
        if not torch.isfinite(B).all():
            raise ValueError(
                "The right-hand side has NaN or infinite entries, expected finite ones; check where it comes from."
            )
        power = exponent(B)
        X, self.last = self._solve(torch.ldexp(B, -power))
        return torch.ldexp(X, power)

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
        found = repr(M) if isinstance(M, LinearOperator) else type(M).__name__
        raise ValueError(
            f"preconditioner: found {found}, expected an operator of curvops that maps {A.range} to {A.domain}; wrap a "
            "matrix as structured.Dense."
        )
    if (M.torch_dtype, M.device) != (A.torch_dtype, A.device):
        raise TypeError(
            f"preconditioner: found {M!r}, expected {A.torch_dtype} on {A.device}; convert it with .to(...)."
        )


class SymmetricInverse(IterativeInverse):
    """The inverse of a symmetric operator, by an iteration that never multiplies by the adjoint."""

    def __init__(
        self,
        A: LinearOperator,
        *,
        tol: float | None = None,
        maxiter: int | None = None,
        preconditioner: LinearOperator | None = None,
    ) -> None:
        for name, op in (("A", A), ("preconditioner", preconditioner)):
            if isinstance(op, LinearOperator) and not op.symmetric:
                raise ValueError(
                    f"{name}: found {op!r} with symmetric=False, but {type(self).__name__} needs a symmetric operator; use "
                    "LSMRInverseLinearOperator."
                )
        super().__init__(A, tol=tol, maxiter=maxiter, preconditioner=preconditioner)


class CGInverseLinearOperator(SymmetricInverse):
    """The inverse of a symmetric positive definite operator by conjugate gradients (Hestenes and Stiefel 1952).

    Arguments as for :class:`IterativeInverse`. An operator that turns out indefinite is refused, naming the curvature.
    """

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        return cg(self.A._rows, B, self._precondition, self.tol, self.maxiter)


class MINRESInverseLinearOperator(SymmetricInverse):
    """The inverse of a symmetric operator, definite or not, by minimal residuals (Paige and Saunders 1975).

    Arguments as for :class:`IterativeInverse`. A singular but consistent system gets the solution of minimal norm.
    """

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        return minres(self.A._rows, B, self._precondition, self.tol, self.maxiter)


class LSMRInverseLinearOperator(IterativeInverse):
    """The (pseudo-)inverse of any operator by least squares, ``min |A x - b|^2 + damp^2 |x|^2`` (Fong and Saunders 2011).

    A column is solved when its residual is small, or orthogonal to the range of ``A`` up to ``tol``. The vectors of the
    iteration are kept orthogonal to earlier ones, as many as fit into 128 MB.

    Args:
        A: Any operator, rectangular or singular, too.
        damp: Regularisation of the least-squares problem.
        tol: See :class:`IterativeInverse`.
        maxiter: Likewise.
        preconditioner: ``M``, for ``A M z = b`` and ``x = M z``; not with ``damp``. If several ``x`` solve,
            ``z`` has minimal norm.
    """

    def __init__(
        self,
        A: LinearOperator,
        *,
        damp: float = 0.0,
        tol: float | None = None,
        maxiter: int | None = None,
        preconditioner: LinearOperator | None = None,
    ) -> None:
        if not 0 <= _real(damp, "damp", "a finite number >= 0") < float("inf"):
            raise ValueError(f"damp: found {damp!r}, expected a finite number >= 0.")
        if preconditioner is not None and damp:
            raise ValueError("preconditioner: damping is of x, not of z with x = M z; give only one of the two.")
        self.damp = float(damp)
        super().__init__(A, tol=tol, maxiter=maxiter, preconditioner=preconditioner)

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        M, T = self._precondition, self.A._adjoint()._rows
        Mt = M if self.preconditioner is None else self.preconditioner._adjoint()._rows
        columns = self.shape[0] if self.preconditioner is None else self.preconditioner.shape[1]
        Z, info = lsmr(lambda V: self.A._rows(M(V)), lambda U: Mt(T(U)), B, columns, self.damp, self.tol, self.maxiter)
        X = M(Z)
        if self.preconditioner is not None and (short := info.converged & (info.residual > self.tol)).any():
            info.converged = info.converged & ~(short & self._misses(X, B, T))
        return X, info

    def _misses(self, X: Tensor, B: Tensor, T: Rows) -> Tensor:
        """Whether a preconditioner that is singular hid directions in which the residual could be smaller."""
        AX = self.A._rows(X)
        R = B - AX
        return (norm(T(R)) > self.tol**0.5 * over(norm(AX), norm(X)) * norm(R)).squeeze(1)

    def _adjoint(self) -> LinearOperator:
        if self.symmetric:
            return self
        adjoint = None if self.preconditioner is None else self.preconditioner._adjoint()
        if adjoint is not None and self.shape[0] != self.shape[1]:  # (M (A M)^+)' = (M' A')^+ M'
            left = adjoint._compose(self.A._adjoint())
            return LSMRInverseLinearOperator(left, tol=self.tol, maxiter=self.maxiter)._compose(adjoint)
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

    With a fixed number of terms it is a polynomial of ``A``: linear, and a useful approximation of a damped inverse. So
    it does not warn of a residual above the usual tolerance; ``last`` says what it is, after every term.

    Args:
        A: A square operator.
        num_terms: Terms after the first.
        scale: Factor of ``A``; the series converges if ``|1 - scale * eigenvalue| < 1`` for all eigenvalues of ``M A``.
        preconditioner: ``M``, by default the identity.
        check_nan: Whether every product is checked for NaN and infinity; otherwise only the last.

    Raises:
        ValueError: From a product for which the series diverges, with a scale that would not.
    """

    _promises = False

    def __init__(
        self,
        A: LinearOperator,
        num_terms: int = 100,
        scale: float = 1.0,
        *,
        preconditioner: LinearOperator | None = None,
        check_nan: bool = True,
    ) -> None:
        self.num_terms, self.check_nan = _integer(num_terms, "num_terms", 0), check_nan
        self.scale = _real(scale, "scale", "a finite number > 0")
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"scale: found {scale!r}, expected a finite number > 0.")
        if isinstance(A, LinearOperator) and A.shape[0] != A.shape[1]:
            raise ValueError(f"A: found shape {A.shape}, expected a square operator.")
        super().__init__(A, preconditioner=preconditioner)
        # (I - s M A)^k M is symmetric with A and M; the sum is, too.
        self.symmetric = A.symmetric and (preconditioner is None or preconditioner.symmetric)

    def _solve(self, B: Tensor) -> tuple[Tensor, SolveInfo]:
        M, A = self._precondition, self.A._rows
        X, R, size = torch.zeros_like(B), B, norm(B)
        Z = M(R)
        history, energy = [], [dot(R, Z)]
        for _ in range(self.num_terms + 1):
            X, R = X + self.scale * Z, R - self.scale * A(Z)
            if self.check_nan:
                require_finite(R)
            Z = M(R)
            history.append(over(norm(R), size))
            energy.append(dot(R, Z))
            if (history[-1] > _HOPELESS).any():
                break
        require_finite(X)
        if (row := self._diverging(history, energy)) is not None:
            self._explain(R[row : row + 1], history, row)
        true = over(norm(B - A(X)), size)
        return X, report(history, true, true <= self.tol)

    def _diverging(self, history: list[Tensor], energy: list[Tensor]) -> int | None:
        """Return the worst of the rows whose residual grows, if any.

        For symmetric operators ``r' M r`` is a sum of geometric sequences, so a growth is there to stay. For others it may
        be a transient: what counts is the sum of it.
        """
        floor = 100 * len(history) * torch.finfo(history[-1].dtype).eps
        grows = energy[-1].abs() > energy[-2].abs() * (1 + floor) if self.symmetric else history[-1] > 2
        grows = grows & (history[-1] > floor)
        return int(torch.where(grows, history[-1], 0).argmax()) if grows.any() else None

    def _explain(self, v: Tensor, history: list[Tensor], row: int) -> NoReturn:
        """Refuse a series that diverges, by the eigenvalue of ``M A`` to blame: what is left points there already."""
        value = 0.0
        for _ in range(30):
            v = v / norm(v).clamp(min=torch.finfo(v.dtype).tiny)
            w = self._precondition(self.A._rows(v))
            value, v = float(dot(v, w)), w
        grown = f"from {float(history[0][row]):.1e} to {float(history[-1][row]):.1e} in {len(history) - 1} terms"
        why = f"The Neumann series diverges: the relative residual went {grown}, as an eigenvalue is about {value:.3g}."
        if value <= 0:
            raise ValueError(
                f"{why} No scale helps an operator that is not positive definite: shift it, op.shift(damping), or use "
                "MINRESInverseLinearOperator."
            )
        raise ValueError(f"{why} Choose a scale below {2 / value:.3g}, for example scale={1 / value:.2g}.")

    def _adjoint(self) -> LinearOperator:
        if self.symmetric:
            return self
        # sum_k ((I - s M A)^k M)' = sum_k M' (I - s A' M')^k = sum_k (I - s M' A')^k M'
        return NeumannInverseLinearOperator(
            self.A._adjoint(),
            num_terms=self.num_terms,
            scale=self.scale,
            preconditioner=None if self.preconditioner is None else self.preconditioner._adjoint(),
            check_nan=self.check_nan,
        )

    def inverse(self, damping: float = 0.0, how: str = "exact") -> LinearOperator:
        """Refuse: a truncated series is only near the inverse of ``A``."""
        raise NotImplementedError("A truncated Neumann series is only near an inverse; ask the operator itself.")
