"""Eigenvalues at the ends of the spectrum of a symmetric operator, with their eigenvectors and residuals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops.estimators._operand import Operand, check_count

#: Which eigenvalues, from their ascending tensor: positions, most wanted first.
_WHICH: dict[str, Callable[[Tensor], Tensor]] = {
    "LM": lambda values: values.abs().argsort(descending=True),
    "LA": lambda values: torch.arange(len(values) - 1, -1, -1, device=values.device),
    "SA": lambda values: torch.arange(len(values), device=values.device),
    "BE": lambda values: _both_ends(len(values), values.device),
}
#: Vectors that are multiplied together by default: as many equal eigenvalues are found for sure.
_BLOCK = 8
#: Operators up to this size need no restarts.
_SMALL = 256
#: Directions smaller than this multiple of rounding are none.
_NOISE = 10.0


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues and eigenvectors, the most wanted first; ``values, vectors = ...`` unpacks them.

    Args:
        values: Eigenvalues ``[k]``.
        vectors: Orthonormal eigenvectors as columns ``[N, k]``.
        residuals: ``|A v - value v|`` for each: an eigenvalue of ``A`` is no further from the value than this.
        num_matvecs: How many products it took.
        converged: Which residuals are as small as they should be, ``[k]``.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    num_matvecs: int
    converged: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))

    def __repr__(self) -> str:
        first = ", ".join(f"{v:.6g}" for v in self.values[:5].tolist()) + (", ..." if len(self.values) > 5 else "")
        state = "all converged" if self.converged.all() else f"{int(self.converged.sum())} converged"
        largest = f"{self.residuals.max().item():.2g}" if len(self.residuals) else "0"
        return f"<{len(self.values)} eigenpairs: {first}; residuals at most {largest}, {state}, {self.num_matvecs} products>"


def top_eigenpairs(
    A: Any,
    k: int = 1,
    which: str = "LM",
    method: str = "lanczos",
    *,
    tol: float | None = None,
    max_matvecs: int | None = None,
    ncv: int | None = None,
    block_size: int | None = None,
    preconditioner: Any = None,
    seed: int = 0,
) -> Eigenpairs:
    """Return ``k`` eigenpairs from the ends of the spectrum.

    ``"lanczos"`` is block Lanczos with full re-orthogonalisation and thick restarts (Wu and Simon, SIMAX 22, 2000; Stewart's
    Krylov-Schur form, SIMAX 23, 2001): fewest products. ``"lobpcg"`` holds only about ``7 k`` vectors and takes a
    preconditioner (Knyazev, SISC 23, 2001; basis as in Hetmaniuk and Lehoucq, J. Comput. Phys. 218, 2006).

    Args:
        A: A symmetric linear operator.
        k: How many.
        which: ``"LM"`` largest in magnitude, ``"LA"`` largest, ``"SA"`` smallest, ``"BE"`` half from each end.
        method: ``"lanczos"``, or ``"lobpcg"`` for ``"LA"`` and ``"SA"``.
        tol: Largest residual, relative to the largest eigenvalue in magnitude. Default: 1e-6, or what the dtype allows.
        max_matvecs: Largest number of products; if it is not enough, a warning says so. Default: ``100 + 50 k``.
        ncv: Vectors that Lanczos keeps. Default: a few times ``k``, or all there are if ``A`` is small.
        block_size: Vectors that Lanczos multiplies together. Default: ``k``, at most 8. An eigenvalue with more copies
            than this may show fewer of them.
        preconditioner: For LOBPCG: an operator close to the inverse of ``A``, such as ``kfac.inverse(damping)``.
        seed: Seed of the random starting vectors.
    """
    products = Operand(A, symmetric="top_eigenpairs")
    k = check_count(k, "k")
    if k > products.N:
        raise ValueError(f"Got k={k}, expected at most {products.N}, the size of {products.op!r}.")
    if which not in _WHICH:
        raise ValueError(f"Got which={which!r}, expected one of {tuple(_WHICH)}.")
    eps = torch.finfo(products.op.torch_dtype).eps
    tol = max(1e-6, min(30 * eps, 0.05)) if tol is None else float(tol)
    if not tol >= 0:
        raise ValueError(f"Got tol={tol}, expected a number >= 0.")
    limit = 100 + 50 * k if max_matvecs is None else check_count(max_matvecs, "max_matvecs")
    goal = _Goal(k, _WHICH[which], tol, limit + products.count, seed)
    if method == "lanczos":
        if preconditioner is not None:
            raise ValueError("A preconditioner is of use to method='lobpcg' only.")
        pairs = _lanczos(products, goal, *_sizes(products.N, k, ncv, block_size))
    elif method == "lobpcg":
        if which not in ("LA", "SA"):
            raise ValueError(f"Got which={which!r} with method='lobpcg', expected 'LA' or 'SA'; or method='lanczos'.")
        pairs = _lobpcg(products, goal, preconditioner, which)
    else:
        raise ValueError(f"Got method={method!r}, expected 'lanczos' or 'lobpcg'.")
    if not pairs.converged.all():
        warnings.warn(
            f"top_eigenpairs stopped after {pairs.num_matvecs} products with {int(pairs.converged.sum())} of {k} pairs "
            f"converged; the largest residual is {pairs.residuals.max().item():.3g}. Raise `max_matvecs` or `tol`.",
            stacklevel=2,
        )
    return pairs


@dataclass(frozen=True)
class _Goal:
    """What is wanted: ``k`` pairs in an order, to a tolerance, within so many products."""

    k: int
    order: Callable[[Tensor], Tensor]
    tol: float
    limit: int
    seed: int

    def pairs(self, values: Tensor, vectors: Tensor, residuals: Tensor, scale: Tensor, products: Operand) -> Eigenpairs:
        """Return the answer from rows of vectors."""
        converged = residuals <= self.tol * scale
        columns = vectors.T.to(products.op.torch_dtype)
        values, residuals = values.to(products.dtype), residuals.to(products.dtype)
        return Eigenpairs(values, columns, residuals, products.count, converged)


def _both_ends(n: int, device: torch.device) -> Tensor:
    """Return n-1, 0, n-2, 1, ..."""
    up = torch.arange(n, device=device)
    return torch.stack([up.flip(0), up], 1).flatten()[:n]


def _sizes(N: int, k: int, ncv: int | None, block_size: int | None) -> tuple[int, int]:
    """Return how many vectors to keep, and how many to multiply together."""
    block = min(k, _BLOCK) if block_size is None else check_count(block_size, "block_size")
    block = min(block, N)
    least = min(k + 2 * block, N)
    if ncv is None:
        ncv = N if N <= _SMALL else max(3 * k, 20 + k, k + 6 * block)
    check_count(ncv, "ncv")
    if ncv < least:
        raise ValueError(f"Got ncv={ncv}, expected at least {least} for k={k} and block_size={block}.")
    return min(ncv, N), block


def _orthonormal(W: Tensor, against: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Return orthonormal rows ``Q [r, N]`` and ``B [r, b]`` with ``W = B'Q`` up to what is ``smallest``.

    ``W`` must be orthogonal to the rows ``against`` up to rounding; ``Q`` is so to full precision.
    """
    Qt, R = torch.linalg.qr(W.T)
    U, s, Vh = torch.linalg.svd(R, full_matrices=False)
    rank = min(int((s > smallest).sum()), W.shape[1] - len(against))
    Q = (Qt @ U[:, :rank]).T
    Q = Q - (Q @ against.T) @ against
    return torch.linalg.solve_triangular(*_cholesky(Q), upper=False), (s[:, None] * Vh)[:rank]


def _cholesky(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Return what makes almost orthonormal rows orthonormal, without turning them."""
    return torch.linalg.cholesky(Q @ Q.T), Q


def _beyond(W: Tensor, S: Tensor, eps: float) -> Tensor:
    """Return orthonormal rows for what rows ``W`` hold beyond the orthonormal rows ``S``, if it is more than rounding."""
    for _ in range(2):
        W = W - (W @ S.T) @ S
    return _orthonormal(W, S, _NOISE * eps * W.norm().item())[0]


def _random(products: Operand, seed: int, stream: int, n: int, against: Tensor) -> Tensor:
    """Return ``n`` orthonormal random rows, orthogonal to others."""
    W = products.probes("normal", seed, (7, stream), 0, n)
    for _ in range(2):
        W = W - (W @ against.T) @ against
    return _orthonormal(W, against, 0.0)[0]


def _lanczos(products: Operand, goal: _Goal, ncv: int, block: int) -> Eigenpairs:
    """Grow an orthonormal basis ``V`` (rows) by products of its last block; diagonalise ``H = V A V'``; restart.

    At all times ``A V' = V' H + Q' B E'``, with ``Q`` the next block and ``E`` the last one.
    """
    N, eps = products.N, torch.finfo(products.dtype).eps
    V = torch.zeros(0, N, dtype=products.dtype, device=products.device)
    H = torch.zeros(0, 0, dtype=torch.float64, device=products.device)
    Q, before, step = _random(products, goal.seed, 0, block, V), None, 0
    while True:
        step += 1
        W, b, V = products(Q), len(Q), torch.cat([V, Q])
        C = W @ V.T
        W = W - C @ V
        again = W @ V.T
        C, W = (C + again).double(), W - again @ V
        H = torch.cat([torch.cat([H, C[:, : len(H)]]), torch.cat([C[:, : len(H)].T, (C[:, -b:] + C[:, -b:].T) / 2])], 1)
        values, S = torch.linalg.eigh(H)
        order, scale = goal.order(values), values.abs().max()
        Q, B = _orthonormal(W, V, _NOISE * eps * scale.item())
        residuals = (B.double() @ S[-b:]).norm(dim=0)
        wanted = order[: goal.k]
        done = len(wanted) == goal.k and bool((residuals[wanted] <= goal.tol * scale).all())
        if done and len(Q) < b < goal.k:  # an exhausted Krylov space may lack copies: look at new directions first
            done = before is not None and bool(((values[wanted] - before).abs() <= goal.tol * scale).all())
        before = values[wanted] if len(wanted) == goal.k else None
        room = N - len(V)
        if done or room == 0 or (products.count + min(block, room) > goal.limit and len(wanted) == goal.k):
            vectors = S[:, wanted].T.to(V) @ V
            return goal.pairs(values[wanted], vectors, residuals[wanted], scale, products)
        if len(V) + min(block, room) > ncv:
            kept = order[: min(goal.k + (ncv - goal.k) // 2, ncv - block)]
            V, H = S[:, kept].T.to(V) @ V, values[kept].diag()
        if len(Q) < min(block, room):
            Q = torch.cat([Q, _random(products, goal.seed, step, min(block, room) - len(Q), torch.cat([V, Q]))])


def _lobpcg(products: Operand, goal: _Goal, preconditioner: Any, which: str) -> Eigenpairs:
    """Minimise over the span of the vectors ``X``, their last steps ``P``, and their residuals; all rows orthonormal."""
    M = None if preconditioner is None else Operand(preconditioner, symmetric="A preconditioner")
    if M is not None and M.N != products.N:
        raise ValueError(f"Got a preconditioner of size {M.N}, expected {products.N}.")
    N, eps = products.N, torch.finfo(products.dtype).eps
    m = min(goal.k + goal.k // 4 + 1, N)  # a few more than wanted: the last ones converge slowly
    S = _random(products, goal.seed, 0, m, torch.zeros(0, N, dtype=products.dtype, device=products.device))
    AS = products(S)
    while True:
        H = (S @ AS.T).double()
        values, C = torch.linalg.eigh((H + H.T) / 2)
        scale = values.abs().max()
        order = goal.order(values)[:m]
        values, Cx = values[order], C[:, order]
        D = Cx.clone()
        D[:m] = 0.0  # the steps: what was added to the vectors
        D = D - Cx @ (Cx.T @ D)
        Cp = _orthonormal(D.T, Cx.T, _NOISE * torch.finfo(torch.float64).eps)[0].T
        S, AS = (torch.cat([Cx, Cp], 1).T.to(S) @ rows for rows in (S, AS))
        R = AS[:m] - values[:, None].to(S) * S[:m]
        residuals = R.norm(dim=1).double()
        active = residuals > goal.tol * scale
        done = not active[: goal.k].any()
        if done or len(S) == N or products.count + m + goal.k > goal.limit:
            break
        W = R[active] if M is None else M(R[active].to(M.dtype)).to(S)
        W = _beyond(W, S, eps)
        if len(W) == 0 and M is not None:  # a preconditioner that maps residuals to what is known already: do without
            W = _beyond(R[active], S, eps)
        if len(W) == 0:
            break
        S, AS = torch.cat([S, W]), torch.cat([AS, products(W)])
    X, values = S[: goal.k], values[: goal.k]
    residuals = (products(X) - values[:, None].to(X) * X).norm(dim=1).double()  # by fresh products, not by updated ones
    return goal.pairs(values, X, residuals, scale, products)
