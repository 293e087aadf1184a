"""XTrace, XNysTrace and XDiag: every random vector serves as a sample of what the others leave over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvops.estimators._basis import Basis, beyond
from curvops.estimators._operand import Operand, check_distribution
from curvops.estimators._sampling import Budget, Sampler, moments, run
from curvops.estimators.estimate import Estimate
from curvops.estimators.hutchinson import exact_diagonal, exact_trace
from curvops.estimators.hutchpp import scaled
from curvops.estimators.nystrom import sketch_factor

#: Entries of diagonals that are spent on the correlation of samples.
_ENTRIES = 1 << 26


class _Exchangeable(Sampler):
    """Keeps its probes ``W``, and counts on the exact value being cheap for small operators."""

    def __init__(self, products: Operand, distribution: str, seed: int):
        super().__init__(products)
        self.distribution, self.seed = check_distribution(distribution), seed
        self.W = torch.zeros(0, products.N, dtype=products.dtype, device=products.device)

    def draw(self, n: int) -> Tensor:
        """Return further probes, and keep them."""
        new = self.products.probes(self.distribution, self.seed, (4,), self.probes, self.probes + n)
        self.W = torch.cat([self.W, new])
        self.probes += n
        return new

    def exact(self) -> Tensor:
        """Sum the diagonal."""
        return exact_trace(self.products)


def spread_out(h: Tensor, left: Callable[[Tensor, Tensor], Tensor], most: int = 32) -> tuple[Tensor, Tensor]:
    """Return the mean of exchangeable samples and an unbiased estimate of its error, which the samples do not show.

    Sample ``h_i`` depends on all probes, but given the others its mean over probe i is the truth. So samples are
    correlated, with ``E[(h_i - h_ij) (h_j - h_ji)]`` as covariance, where ``h_ij`` is sample i without the use of probe j:
    the mixed terms vanish. The usual formula takes it for zero, and is 1.3 to 4 times too small.

    Args:
        h: Samples ``[m, ...]``.
        left: Maps indices ``i [m]``, ``j [m]`` to ``h_ij``.
        most: How many distances between i and j to look at; all of them show the same covariance.
    """
    m = len(h)
    if m < 2:
        return h.mean(0), torch.full_like(h[0], torch.inf)
    i = torch.arange(m, device=h.device)
    lags = {round(1 + t * (m // 2 - 1) / most) for t in range(most)}  # all pairs, or enough of them
    covariance = torch.zeros_like(h[0])
    for lag in lags:
        j = (i + lag) % m
        covariance += ((h - left(i, j)) * (h[j] - left(j, i))).mean(0) / len(lags)
    return h.mean(0), (h.var(0) / m + covariance.clamp(min=0)).sqrt()


class XTrace(_Exchangeable):
    """Hutch++ with m - 1 vectors for the subspace and one for the rest, averaged over which one that is."""

    name, cost = "xtrace", 2

    def __init__(self, products: Operand, distribution: str, seed: int):
        super().__init__(products, distribution, seed)
        self.basis, self.Z = Basis(self.W), self.W

    def add(self, n: int) -> None:
        """Enlarge the subspace ``Q`` of products, and ``Z``, the products of that."""
        self.Z = torch.cat([self.Z, self.products(self.basis.extend(self.products(self.draw(n))))])

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the mean over leaving out each of the probes."""
        Q, R, S = self.basis.Q, self.basis.R, self.basis.omitted()
        H, C, X = ((a @ b.T).double() for a, b in ((Q, self.Z), (Q, self.W), (self.Z, self.W)))
        quadratic, size = (R * C).sum(0), self.W.double().square().sum(1)
        trace, N = H.trace(), self.products.N

        def sample(i: Tensor, *omitted: Tensor) -> Tensor:
            """The trace on ``Q`` without directions, and what probe i says about the rest."""
            c, part, dim = C[:, i], trace, torch.full_like(trace, N - len(Q))
            for s in omitted:
                c = c - s * (s * C[:, i]).sum(0)
                part = part - (s * (H @ s)).sum(0)
                dim = dim + s.square().sum(0)
            rest = quadratic[i] - ((X + R)[:, i] * c).sum(0) + (c * (H @ c)).sum(0)
            if self.distribution == "sphere":
                rest = rest * scaled(dim, size[i] - c.square().sum(0))
            return part + rest

        probes = torch.arange(self.probes, device=Q.device)
        return spread_out(sample(probes, S), lambda i, j: sample(i, S[:, j], beyond(S[:, i], S[:, j])[0]))


class XNysTrace(_Exchangeable):
    """The trace of a Nyström approximation from m - 1 vectors, and one sample of the rest, averaged likewise."""

    name, cost = "xnystrace", 1

    def __init__(self, products: Operand, distribution: str, seed: int):
        super().__init__(products, distribution, seed)
        self.Y = self.W

    def add(self, n: int) -> None:
        """Take further products."""
        self.Y = torch.cat([self.Y, self.products(self.draw(n))])

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the mean over leaving out each of the probes."""
        F, L, shift = sketch_factor(self.W, self.Y, self.name)
        if F is None:
            return moments(self.Y.new_zeros(len(self.Y), dtype=torch.float64))
        T = torch.linalg.inv(L)  # column i without the others is what probe i adds
        G = (F @ F.T).double()
        K, M = T.T @ T, T.T @ G @ T
        trace, N, m = G.trace() - shift * self.products.N, self.products.N, self.probes
        J = torch.linalg.inv(self.W.double() @ self.W.double().T) if self.distribution == "sphere" else None
        k, n = K.diagonal(), M.diagonal()
        one = trace - n / k + (1.0 if J is None else (N - m + 1) * J.diagonal()) / k
        tiny = 1e3 * torch.finfo(F.dtype).eps

        def left(i: Tensor, j: Tensor) -> Tensor:
            """Sample i without probe j: the same with 2 x 2 blocks of ``K``, ``M`` and ``J``."""
            det = k[i] * k[j] - K[i, j] ** 2
            sample = trace - (k[j] * n[i] - 2 * K[i, j] * M[i, j] + k[i] * n[j]) / det
            rest = k[j] / det
            if J is not None:
                rest = rest * (N - m + 2) * (J[i, i] * J[j, j] - J[i, j] ** 2) / J[j, j]
            return torch.where(det > tiny * k[i] * k[j], sample + rest, one[i])  # else: nothing is left to see

        return spread_out(one, left)


class XDiag(_Exchangeable):
    """The diagonal on the subspace of m - 1 products, and one sample of the rest, averaged likewise."""

    name, cost = "xdiag", 2

    def __init__(self, products: Operand, seed: int):
        super().__init__(products, "rademacher", seed)
        self.basis, self.Z = Basis(self.W), self.W

    def add(self, n: int) -> None:
        """Enlarge the subspace ``Q`` of products, and ``Z``, the adjoint's products of that."""
        self.Z = torch.cat([self.Z, self.products.adjoint(self.basis.extend(self.products(self.draw(n))))])

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the mean over leaving out each of the probes."""
        Q, S = self.basis.Q, self.basis.omitted()
        own = (S * self.basis.R).sum(0).to(Q)[:, None]  # what is left of each product without the others
        U, V, diagonal = S.T.to(Q) @ Q, S.T.to(Q) @ self.Z, (Q * self.Z).sum(0)

        def left(i: Tensor, j: Tensor) -> Tensor:
            """Sample i without probe j."""
            _, overlap, scale = (t.to(Q) for t in beyond(S[:, i], S[:, j]))
            u, v = ((scale[:, None] * (A[i] - overlap[:, None] * A[j])) for A in (U, V))
            return diagonal - U[j] * V[j] - u * v + self.W[i] * u * own[i] * scale[:, None]

        most = min(max(_ENTRIES // self.W.numel(), 2), 32)
        return spread_out(diagonal - U * V + self.W * U * own, left, most)

    def exact(self) -> Tensor:
        """Read off the diagonal."""
        return exact_diagonal(self.products)


def xtrace(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "sphere",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate a trace by XTrace (Epperly, Tropp, Webber, SIMAX 45, 2024, arXiv:2301.07825).

    Unbiased for any square operator. Among estimators for general operators it needs the fewest products where
    eigenvalues decay; :func:`xnystrace` needs fewer still if ``A`` is positive semidefinite.

    Args:
        A: A square linear operator, or a matrix.
        num_matvecs: Number of products, rounded down to a multiple of 2. As many as ``A`` has columns give the exact
            trace. Give this or a tolerance.
        distribution: Of the random vectors: ``"sphere"`` (with the length of what a subspace leaves over set to its
            mean), ``"rademacher"`` or ``"normal"``.
        tol: See :func:`hutchinson_trace`, also for the others.
        rtol: Relative tolerance.
        max_matvecs: Largest number of products on the way to the tolerance.
        seed: Seed of the random vectors.
    """
    sampler = XTrace(Operand(A, square="xtrace"), distribution, seed)
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))


def xnystrace(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "sphere",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate the trace of a positive semidefinite operator by XNysTrace (Epperly, Tropp, Webber, SIMAX 45, 2024).

    Unbiased. An operator that is found to be indefinite is refused. Arguments as for :func:`xtrace`, with one product for
    each random vector.
    """
    sampler = XNysTrace(Operand(A, symmetric="xnystrace"), distribution, seed)
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))


def xdiag(
    A: Any,
    num_matvecs: int | None = None,
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate a diagonal by XDiag (Epperly, Tropp, Webber, SIMAX 45, 2024).

    Unbiased for any square operator with an adjoint. Arguments as for :func:`xtrace`; tolerances are for the largest
    standard error of an entry, relative to the largest entry.
    """
    sampler = XDiag(Operand(A, square="xdiag"), seed)
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))
