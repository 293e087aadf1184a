"""Iterative solvers on rows: every function solves ``A x = b`` for all rows of ``B [K, N]`` at once.

Rows converge at their own pace. A row that is done is frozen, so it gets what it would get alone; products are still made
with all rows, because that costs little and keeps shapes. Scalars of a row have shape ``[K, 1]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]
_LOOK = 10  # iterations of LSMR between two looks at the true residual


@dataclass(eq=False)
class SolveInfo:
    """What a solver did.

    Attributes:
        iterations: Number of iterations.
        residuals: Relative residual norms after every iteration, ``[iterations + 1, K]``, as the recurrence has them.
        residual: Relative residual norms of the solutions, recomputed, ``[K]``.
        converged: Which right-hand sides reached the tolerance, ``[K]``.
    """

    iterations: int = 0
    residuals: list[Tensor] = field(default_factory=list)
    residual: Any = None
    converged: Any = None


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of rows, ``[K, 1]``."""
    return (a * b).sum(-1, keepdim=True)


def norm(a: Tensor) -> Tensor:
    """Return the norms of rows, ``[K, 1]``, without overflow."""
    return torch.linalg.vector_norm(a, dim=-1, keepdim=True)


def over(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and zero where ``b`` is."""
    return torch.where(b == 0, torch.zeros_like(b), a / torch.where(b == 0, torch.ones_like(b), b))


def cg(A: Rows, B: Tensor, M: Rows, tol: float, maxiter: int) -> tuple[Tensor, SolveInfo]:
    """Preconditioned conjugate gradients (Hestenes and Stiefel 1952) for a positive definite ``A``.

    Raises:
        ValueError: At a direction of negative curvature.
    """
    info, size = SolveInfo(), norm(B)
    X, R = torch.zeros_like(B), B.clone()
    Z = M(R)
    P, rz = Z.clone(), dot(R, Z)
    info.residuals.append(over(norm(R), size))
    active = info.residuals[-1] > tol
    since = 0  # iterations since the residual was last computed from its definition
    while active.any() and info.iterations < maxiter:
        Q = A(P)
        curvature = dot(P, Q)
        _check(curvature, active, P, Q)
        alpha = torch.where(active, over(rz, curvature), torch.zeros_like(rz))
        X, R = X + alpha * P, R - alpha * Q
        info.iterations, since = info.iterations + 1, since + 1
        relative = over(norm(R), size)
        if since > 1 and (active & (relative <= tol)).any():
            # The recurrence drifts from the truth: look before a row is called done, and restart those that are not.
            true = B - A(X)
            wrong = active & (relative <= tol) & (over(norm(true), size) > tol)
            R = torch.where(wrong, true, R)
            relative = over(norm(R), size)
            since = 0 if wrong.any() else since
        else:
            wrong = torch.zeros_like(active)
        info.residuals.append(torch.where(active, relative, info.residuals[-1]))
        active = active & (relative > tol)
        Z = M(R)
        new = dot(R, Z)
        beta = torch.where(wrong, torch.zeros_like(new), over(new, rz))
        P = torch.where(active, Z + beta * P, P)
        rz = torch.where(active, new, rz)
    return X, info


def _check(curvature: Tensor, active: Tensor, P: Tensor, Q: Tensor) -> None:
    if not torch.isfinite(curvature[active]).all():
        raise ValueError("A product with the operator has NaN or infinite entries.")
    round_off = torch.finfo(P.dtype).eps * norm(P) * norm(Q)
    if (active & (curvature < -round_off)).any():
        found = float((curvature / dot(P, P))[active].min())
        raise ValueError(
            f"The operator has a direction of negative curvature {found:.3g} (or its preconditioner is not positive "
            "definite): conjugate gradients need a positive definite operator. Use MINRESInverseLinearOperator, or shift it: "
            "op.shift(damping)."
        )


def minres(A: Rows, B: Tensor, M: Rows, tol: float, maxiter: int) -> tuple[Tensor, SolveInfo]:
    """Preconditioned minimal residuals (Paige and Saunders 1975) for a symmetric ``A``, restarted on the true residual."""
    info, size = SolveInfo(), norm(B)
    X, R = torch.zeros_like(B), B.clone()
    info.residuals.append(over(norm(R), size))
    stalled = torch.zeros_like(size, dtype=torch.bool)
    while ((info.residuals[-1] > tol) & ~stalled).any() and info.iterations < maxiter:
        before = over(norm(R), size)
        active = (before > tol) & ~stalled
        X = X + _minres_cycle(A, torch.where(active, R, torch.zeros_like(R)), size, M, tol, maxiter, info)
        R = B - A(X)
        after = over(norm(R), size)
        info.residuals[-1] = after
        stalled = stalled | (active & (after > 0.5 * before))
    return X, info


def _minres_cycle(A: Rows, R: Tensor, size: Tensor, M: Rows, tol: float, maxiter: int, info: SolveInfo) -> Tensor:
    """Return the correction for residuals ``R``, by Lanczos and Givens rotations."""
    zeros = torch.zeros_like(size)
    y = M(R)
    beta1 = dot(R, y)
    if (beta1 < 0).any():
        raise ValueError("The preconditioner is not positive definite: MINRES needs one that is.")
    beta1 = beta1.sqrt()
    eps = torch.finfo(R.dtype).eps
    r1, r2, beta, old = R, R, beta1, zeros
    dbar, epsilon, phibar, cosine, sine = zeros, zeros, beta1, -torch.ones_like(size), zeros
    X, w, w2 = torch.zeros_like(R), torch.zeros_like(R), torch.zeros_like(R)
    scale = norm(R)  # the recurrence measures residuals in the preconditioner's norm
    active = beta1 > 0
    largest = zeros
    first = True
    while active.any() and info.iterations < maxiter:
        v = over(torch.ones_like(beta), beta) * y
        y = A(v)
        if not torch.isfinite(y).all():
            raise ValueError("A product with the operator has NaN or infinite entries.")
        if not first:
            y = y - over(beta, old) * r1
        alpha = dot(v, y)
        y = y - over(alpha, beta) * r2
        r1, r2 = r2, y
        y = M(r2)
        old, beta = beta, dot(r2, y).clamp(min=0).sqrt()
        largest = torch.maximum(largest, (alpha.square() + beta.square() + old.square()).sqrt())
        oldeps, delta = epsilon, cosine * dbar + sine * alpha
        gbar, epsilon, dbar = sine * dbar - cosine * alpha, sine * beta, -cosine * beta
        gamma = (gbar.square() + beta.square()).sqrt().clamp(min=torch.finfo(R.dtype).tiny)
        cosine, sine = gbar / gamma, beta / gamma
        singular = gamma <= 10 * eps * largest
        phi = torch.where(active & ~singular, cosine * phibar, zeros)
        phibar = torch.where(active, sine * phibar, phibar)
        w1, w2 = w2, w
        w = (v - oldeps * w1 - delta * w2) / gamma
        X = X + phi * w
        info.iterations += 1
        estimate = over(phibar, beta1) * scale
        relative = torch.where(active, over(estimate, size), info.residuals[-1])
        info.residuals.append(relative)
        active = active & (relative > 0.5 * tol) & (beta > 10 * eps * largest) & ~singular
        first = False
    return X


def lsmr(A: Rows, T: Rows, B: Tensor, columns: int, damp: float, tol: float, maxiter: int) -> tuple[Tensor, SolveInfo]:
    """Least squares ``min |A x - b|^2 + damp^2 |x|^2`` by Golub-Kahan (Fong and Saunders 2011, LSMR), restarted if need be.

    ``T`` multiplies by the transpose. Without damping the solution has minimal norm.
    """
    info, size = SolveInfo(), norm(B)
    X = B.new_zeros(len(B), columns)
    R = B.clone()
    info.residuals.append(over(norm(R), size))
    scale = torch.zeros_like(size)
    stalled = torch.zeros_like(size, dtype=torch.bool)
    previous = None
    while info.iterations < maxiter:
        slope = T(R) - damp**2 * X
        done = _solved(R, slope, size, scale, tol)
        if previous is not None:
            stalled = stalled | (norm(slope) > 0.5 * previous)
        previous = norm(slope)
        active = ~done & ~stalled
        if not active.any():
            break
        step, found = _lsmr_cycle(A, T, R, X, size, active, damp, tol, maxiter, info)
        X, scale = X + step, torch.maximum(scale, found)
        R = B - A(X)
        info.residuals[-1] = over(norm(R), size)
    return X, info


def _solved(R: Tensor, slope: Tensor, size: Tensor, scale: Tensor, tol: float) -> Tensor:
    """Whether the residual is small, or what is left of it is orthogonal to the range."""
    return (norm(R) <= tol * size) | ((scale > 0) & (norm(slope) <= tol * scale * norm(R))) | (norm(slope) == 0)


def _lsmr_cycle(
    A: Rows,
    T: Rows,
    R: Tensor,
    X0: Tensor,
    size: Tensor,
    active: Tensor,
    damp: float,
    tol: float,
    maxiter: int,
    info: SolveInfo,
) -> tuple[Tensor, Tensor]:
    """Return the correction and an estimate of the operator's norm; with damping the step counts from ``X0``."""
    # min |A (x0 + d) - b|^2 + damp^2 |x0 + d|^2 is a damped problem in d only if x0 = 0: stack the two otherwise.
    stacked = bool(damp) and bool(X0.any())
    M = R.shape[1]

    def apply(V: Tensor) -> Tensor:
        return torch.cat([A(V), damp * V], 1) if stacked else A(V)

    def transpose(U: Tensor) -> Tensor:
        return T(U[:, :M]) + damp * U[:, M:] if stacked else T(U)

    lam = 0.0 if stacked else damp
    u = torch.cat([R, -damp * X0], 1) if stacked else R
    u = torch.where(active, u, torch.zeros_like(u))
    beta = norm(u)
    u = over(u, beta.expand_as(u))
    v = transpose(u)
    alpha = norm(v)
    v = over(v, alpha.expand_as(v))
    one, zero = torch.ones_like(beta), torch.zeros_like(beta)
    zetabar, alphabar, rho, rhobar, cbar, sbar = alpha * beta, alpha, one, one, one, zero
    h, hbar, X = v, torch.zeros_like(v), torch.zeros_like(v)
    square = alpha.square()
    live = active & (alpha > 0)
    for count in range(1, maxiter - info.iterations + 1):
        u = apply(v) - alpha * u
        beta = norm(u)
        u = over(u, beta.expand_as(u))
        v = transpose(u) - beta * v
        alpha = norm(v)
        v = over(v, alpha.expand_as(v))
        if not (torch.isfinite(alpha) & torch.isfinite(beta)).all():
            raise ValueError("A product with the operator has NaN or infinite entries.")
        alphahat = (alphabar.square() + lam**2).sqrt()
        rhoold, rho = rho, (alphahat.square() + beta.square()).sqrt()
        c, s = over(alphahat, rho), over(beta, rho)
        thetanew, alphabar = s * alpha, c * alpha
        rhobarold, thetabar, rhotemp = rhobar, sbar * rho, cbar * rho
        rhobar = (rhotemp.square() + thetanew.square()).sqrt()
        cbar, sbar = over(rhotemp, rhobar), over(thetanew, rhobar)
        zeta, zetabar = cbar * zetabar, -sbar * zetabar
        hbar = h - over(thetabar * rho, rhoold * rhobarold) * hbar
        X = torch.where(live, X + over(zeta, rho * rhobar) * hbar, X)
        h = v - over(thetanew, rho) * h
        square = square + beta.square() + alpha.square()
        info.iterations += 1
        live = live & (alpha > 0) & (zetabar != 0)
        if count % _LOOK == 0 or not live.any():
            r = R - A(X)
            live = live & ~_solved(r, T(r) - damp**2 * (X0 + X), size, square.sqrt(), tol)
            info.residuals.append(over(norm(r), size))
        else:
            info.residuals.append(info.residuals[-1])
        if not live.any():
            break
    return X, square.sqrt()
