"""Iterative solvers on rows: every function solves ``A x = b`` for all rows of ``B [K, N]`` at once.

Rows converge at their own pace. A row that is done is frozen, so it gets what it would get alone, and products are made
with the others only. Scalars of a row have shape ``[K, 1]``. Rows of any size are welcome: nothing is squared that may vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvops.inverse._rows import Rows, dot, norm, only, over

Cycle = Callable[[Tensor, Tensor, Tensor, list[Tensor], int], Tensor]
_LOOK = 10  # iterations of LSMR between two looks at the true residual
_ENTRIES = 1 << 24  # of the vectors that LSMR keeps to make new ones orthogonal to them
_DRIFT = 10.0  # how far a true residual may be above that of the recurrence of LSMR
_STRIKES = 3  # restarts of a row that may fail to halve its residual: then rounding is all that is left


@dataclass(eq=False)
class SolveInfo:
    """What a solver did.

    Attributes:
        iterations: Number of iterations.
        residuals: Relative residual norms ``[iterations + 1, K]``, from the right-hand side to the solution. Those on the
            way are what the recurrence has (LSMR computes them every ten iterations); the last is ``residual``.
        residual: Relative residual norms of the solutions, recomputed from ``b - A x``, ``[K]``.
        converged: Which columns reached the tolerance, ``[K]``.
    """

    iterations: int
    residuals: Tensor
    residual: Tensor
    converged: Tensor


def require_finite(Y: Tensor) -> None:
    """Refuse a product that overflowed, or that came from a model with NaN in it."""
    if not torch.isfinite(Y).all():
        raise ValueError(
            "A product with the operator has NaN or infinite entries, expected finite ones; check the data and the parameters, "
            "or use float64."
        )


def report(history: list[Tensor], true: Tensor, converged: Tensor) -> SolveInfo:
    """Return what happened; ``true`` are the relative residuals ``[K, 1]`` of the solutions."""
    residuals = torch.cat([*history[:-1], true], 1).T
    return SolveInfo(len(history) - 1, residuals, true.squeeze(1), converged.squeeze(1))


def _record(history: list[Tensor], active: Tensor, relative: Tensor) -> None:
    history.append(torch.where(active, relative, history[-1]))


def _refine(
    cycle: Cycle, A: Rows, B: Tensor, tol: float, maxiter: int, margin: float = 1.0
) -> tuple[Tensor, SolveInfo]:
    """Solve for what is left until the residual that counts, ``b - A x``, is small: recurrences drift away from it.

    A cycle that made a row worse is undone. Every failure asks the next cycle for a smaller residual.
    """
    size = norm(B)
    X, R, history = torch.zeros_like(B), B, [over(norm(B), norm(B))]
    strikes = torch.zeros_like(size)
    while len(history) <= maxiter:
        before = norm(R)
        active = (before > tol * size) & (strikes < _STRIKES)
        if not active.any():
            break
        target = margin * tol * size * 0.1**strikes
        new = X + cycle(torch.where(active, R, torch.zeros_like(R)), target, size, history, maxiter)
        true = torch.where(active, B - only(A, active, new), R)
        better = active & (norm(true) < before)
        X, R = torch.where(better, new, X), torch.where(better, true, R)
        strikes = strikes + (active & (norm(R) > 0.5 * before))
    true = over(norm(R), size)
    return X, report(history, true, true <= tol)


def cg(A: Rows, B: Tensor, M: Rows, tol: float, maxiter: int) -> tuple[Tensor, SolveInfo]:
    """Preconditioned conjugate gradients (Hestenes and Stiefel 1952) for a positive definite ``A``.

    Raises:
        ValueError: At a direction of negative curvature.
    """

    def cycle(R: Tensor, target: Tensor, size: Tensor, history: list[Tensor], maxiter: int) -> Tensor:
        active = norm(R) > target
        X, Z = torch.zeros_like(R), only(M, active, R)
        P, rz = Z, dot(R, Z)
        _require_definite(rz, active)
        largest = torch.zeros_like(rz)
        while active.any() and len(history) <= maxiter:
            Q = only(A, active, P)
            require_finite(Q)
            largest = torch.maximum(largest, over(norm(Q), norm(P)))
            curvature = over(dot(over(P, norm(P)), Q), norm(P))
            _require_convex(curvature, largest, active)
            active = active & (curvature > 0)  # zero up to rounding: nothing to gain in this direction
            alpha = torch.where(active, over(rz, dot(P, Q)), torch.zeros_like(rz))
            X, R = X + alpha * P, R - alpha * Q
            _record(history, active, over(norm(R), size))
            active = active & (norm(R) > target)
            Z = only(M, active, R)
            new = dot(R, Z)
            _require_definite(new, active)
            P = torch.where(active, Z + over(new, rz) * P, torch.zeros_like(P))
            rz = new
        return X

    return _refine(cycle, A, B, tol, maxiter)


def _require_definite(rz: Tensor, active: Tensor) -> None:
    if not (rz[active] > 0).all():
        found = float(rz[active].min())
        raise ValueError(
            f"The preconditioner M is not positive definite: found r' M r = {found:.3g} for a residual r. Expected an operator "
            "such as `kfac.inverse(damping)` with damping > 0."
        )


def _require_convex(curvature: Tensor, largest: Tensor, active: Tensor) -> None:
    if (active & (curvature < -100 * torch.finfo(curvature.dtype).eps * largest)).any():
        raise ValueError(
            f"The operator has a direction of negative curvature {float(curvature[active].min()):.3g}: conjugate gradients "
            "need a positive definite operator. Use MINRESInverseLinearOperator, or shift it: op.shift(damping)."
        )


def _root(a: Tensor, b: Tensor) -> Tensor:
    """Return square roots of inner products that may be too small or large for them."""
    return norm(a).sqrt() * norm(b).sqrt() * dot(over(a, norm(a)), over(b, norm(b))).clamp(min=0).sqrt()


def minres(A: Rows, B: Tensor, M: Rows, tol: float, maxiter: int) -> tuple[Tensor, SolveInfo]:
    """Preconditioned minimal residuals (Paige and Saunders 1975) for a symmetric ``A``."""

    def cycle(R: Tensor, target: Tensor, size: Tensor, history: list[Tensor], maxiter: int) -> Tensor:
        return _minres_cycle(A, R, M, target, size, history, maxiter)

    return _refine(cycle, A, B, tol, maxiter, 0.5)


def _minres_cycle(
    A: Rows, R: Tensor, M: Rows, target: Tensor, size: Tensor, history: list[Tensor], maxiter: int
) -> Tensor:
    """Return the correction for residuals ``R``, by Lanczos and Givens rotations."""
    zeros, nothing = torch.zeros_like(size), torch.zeros_like(R)
    active = norm(R) > target
    y = only(M, active, R)
    _require_definite(dot(R, y), active)
    beta1 = _root(R, y)
    eps = torch.finfo(R.dtype).eps
    r1, r2, beta, old = R, R, beta1, zeros
    dbar, epsilon, phibar, cosine, sine = zeros, zeros, beta1, -torch.ones_like(size), zeros
    X, w, w2 = nothing, nothing, nothing
    scale = over(norm(R), beta1)  # the recurrence measures residuals in the preconditioner's norm
    largest = zeros
    while active.any() and len(history) <= maxiter:
        v = torch.where(active, over(torch.ones_like(beta), beta) * y, nothing)
        y = only(A, active, v)
        require_finite(y)
        y = y - over(beta, old) * r1
        alpha = dot(v, y)
        y = y - over(alpha, beta) * r2
        r1, r2 = r2, torch.where(active, y, nothing)
        y = only(M, active, r2)
        old, beta = beta, _root(r2, y)
        largest = torch.maximum(largest, torch.hypot(alpha, beta))
        oldeps, delta = epsilon, cosine * dbar + sine * alpha
        gbar, epsilon, dbar = sine * dbar - cosine * alpha, sine * beta, -cosine * beta
        gamma = torch.hypot(gbar, beta).clamp(min=torch.finfo(R.dtype).tiny)
        cosine, sine = gbar / gamma, beta / gamma
        active = active & (gamma > 10 * eps * largest)  # what is left is in the null space
        phi = torch.where(active, cosine * phibar, zeros)
        phibar = torch.where(active, sine * phibar, phibar)
        w1, w2 = w2, w
        w = torch.where(active, (v - oldeps * w1 - delta * w2) / gamma, nothing)
        X = X + phi * w
        _record(history, active, over(phibar * scale, size))
        active = active & (phibar * scale > target) & (beta > 10 * eps * largest)
    return X


def lsmr(A: Rows, T: Rows, B: Tensor, columns: int, damp: float, tol: float, maxiter: int) -> tuple[Tensor, SolveInfo]:
    """Least squares ``min |A x - b|^2 + damp^2 |x|^2`` by Golub-Kahan (Fong and Saunders 2011, LSMR), restarted if need be.

    ``T`` multiplies by the transpose. Without damping the solution has minimal norm.
    """
    size = norm(B)
    X, R, history = B.new_zeros(len(B), columns), B, [over(norm(B), norm(B))]
    scale = torch.zeros_like(size)
    stalled = torch.zeros_like(size, dtype=torch.bool)
    previous = None
    active = torch.ones_like(stalled)
    slope = torch.zeros_like(X)
    while True:
        slope = torch.where(active, only(T, active, R) - damp**2 * X, slope)
        done = _solved(R, slope, size, scale, tol)
        if previous is not None:
            stalled = stalled | (norm(slope) > 0.5 * previous)
        previous = norm(slope)
        active = ~done & ~stalled
        if not active.any() or len(history) > maxiter:
            break
        step, found = _lsmr_cycle(A, T, R, X, size, active, damp, tol, maxiter, history)
        X, scale = X + step, torch.maximum(scale, found)
        R = torch.where(active, B - only(A, active, X), R)
    return X, report(history, over(norm(R), size), done)


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
    history: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the correction and an estimate of the operator's norm; with damping the step counts from ``X0``."""
    # min |A (x0 + d) - b|^2 + damp^2 |x0 + d|^2 is a damped problem in d only if x0 = 0: stack the two otherwise.
    stacked = bool(damp) and bool(X0.any())
    M = R.shape[1]

    def apply(V: Tensor) -> Tensor:
        AV = only(A, live, V)
        return torch.cat([AV, damp * V], 1) if stacked else AV

    def transpose(U: Tensor) -> Tensor:
        TU = only(T, live, U[:, :M])
        return TU + damp * U[:, M:] if stacked else TU

    lam = 0.0 if stacked else damp
    u = torch.cat([R, -damp * X0], 1) if stacked else R
    u = torch.where(active, u, torch.zeros_like(u))
    beta = norm(u)
    u = over(u, beta)
    live = active
    v = transpose(u)
    alpha = norm(v)
    v = over(v, alpha)
    one, zero = torch.ones_like(beta), torch.zeros_like(beta)
    zetabar, alphabar, rho, rhobar, cbar, sbar = alpha * beta, alpha, one, one, one, zero
    h, hbar, X = v, torch.zeros_like(v), torch.zeros_like(v)
    largest = alpha
    live, start, eps = active & (alpha > 0), beta, torch.finfo(v.dtype).eps
    room = _ENTRIES // max(v.numel(), 1)
    kept = v[:, None][:, :room]  # rounding costs the v their orthogonality, and that many iterations: restore it
    r = R
    for count in range(1, maxiter - len(history) + 2):
        u = apply(v) - alpha * u
        beta = norm(u)
        u = over(u, beta)
        v = _orthogonal(transpose(u) - beta * v, kept)
        alpha = norm(v)
        v = over(v, alpha)
        kept = torch.cat([kept, v[:, None]], 1)[:, -room:] if room else kept
        require_finite(alpha + beta)
        alphahat = torch.hypot(alphabar, torch.full_like(alphabar, lam))
        rhoold, rho = rho, torch.hypot(alphahat, beta)
        c, s = over(alphahat, rho), over(beta, rho)
        thetanew, alphabar = s * alpha, c * alpha
        rhobarold, thetabar, rhotemp = rhobar, sbar * rho, cbar * rho
        rhobar = torch.hypot(rhotemp, thetanew)
        cbar, sbar = over(rhotemp, rhobar), over(thetanew, rhobar)
        zeta, zetabar = cbar * zetabar, -sbar * zetabar
        hbar = h - over(thetabar, rhoold) * over(rho, rhobarold) * hbar
        X = torch.where(live, X + over(over(zeta, rho), rhobar) * hbar, X)
        h = v - over(thetanew, rho) * h
        largest = torch.maximum(largest, torch.hypot(beta, alpha))  # no larger than the norm of A
        live = live & (torch.minimum(alpha, beta) > 100 * eps * largest)  # else all of the space is seen
        live = live & (zetabar.abs() > eps * largest * start)
        if count % _LOOK == 0 or not live.any():
            r = torch.where(live, R - only(A, live, X), r)
            slope = only(T, live, r) - damp**2 * (X0 + X)
            _record(history, live, over(norm(r), size))
            live = live & ~_solved(r, slope, size, largest, tol)
            live = live & (norm(slope) <= _DRIFT * zetabar.abs())  # else what the recurrence has is no longer true
        else:
            history.append(history[-1])
        if not live.any():
            break
    return X, largest


def _orthogonal(v: Tensor, kept: Tensor) -> Tensor:
    """Return rows ``v [K, N]`` without their parts along vectors ``kept [K, m, N]``."""
    for _ in range(2):
        v = v - torch.einsum("km,kmn->kn", torch.einsum("kmn,kn->km", kept, v), kept)
    return v
