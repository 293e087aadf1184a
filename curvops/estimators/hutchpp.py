"""Hutch++: the exact trace on a random subspace, and Hutchinson's estimate on the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvops.estimators._basis import Basis
from curvops.estimators._operand import Operand, check_distribution
from curvops.estimators._sampling import Budget, Sampler, moments, run
from curvops.estimators.estimate import Estimate
from curvops.estimators.hutchinson import exact_trace


class HutchPlusPlus(Sampler):
    """A third of the products finds the subspace, a third gives the trace on it, a third samples the rest."""

    name, cost = "hutchpp_trace", 3

    def __init__(self, products: Operand, distribution: str, seed: int):
        super().__init__(products)
        self.distribution, self.seed = check_distribution(distribution), seed
        empty = torch.zeros(0, products.N, dtype=products.dtype, device=products.device)
        self.basis = Basis(empty)
        self.Z = self.G = self.AG = empty

    def add(self, n: int) -> None:
        """Enlarge the subspace and draw further samples; old samples see the new subspace without new products."""
        S, G = (
            self.products.probes(self.distribution, self.seed, (stream,), self.probes, self.probes + n)
            for stream in (2, 3)
        )
        self.Z = torch.cat([self.Z, self.products(self.basis.extend(self.products(S)))])
        self.G, self.AG = torch.cat([self.G, G]), torch.cat([self.AG, self.products(G)])
        self.probes += n

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the sum of both parts; given the subspace, its error is that of the second."""
        Q = self.basis.Q
        C = self.G @ Q.T
        U, AU = self.G - C @ Q, self.AG - C @ self.Z
        samples = (U * AU).double().sum(1)
        if self.distribution == "sphere":
            samples = samples * scaled(self.products.N - len(Q), U.double().square().sum(1))
        rest, stderr = moments(samples)
        return (Q * self.Z).double().sum() + rest, stderr

    def exact(self) -> Tensor:
        """Sum the diagonal."""
        return exact_trace(self.products)


def scaled(dim: Tensor | int, size: Tensor) -> Tensor:
    """Return what brings projections to a subspace of dimension ``dim``, of squared length ``size``, to average length.

    For vectors of random direction the length of a projection says nothing; without its fluctuation the error is smaller.
    """
    none = torch.as_tensor(dim, device=size.device).lt(0.5) | (size <= 0)
    return torch.where(none, 0.0, dim / torch.where(none, 1.0, size))


def hutchpp_trace(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "rademacher",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate a trace by Hutch++ (Meyer, Musco, Musco, Woodruff, SOSA 2021, arXiv:2010.09649).

    Unbiased for any square operator; good where eigenvalues decay. :func:`xtrace` is better at the same cost.

    Args:
        A: A square linear operator, or a matrix.
        num_matvecs: Number of products, rounded down to a multiple of 3. As many as ``A`` has columns give the exact
            trace. Give this or a tolerance.
        distribution: Of the random vectors: ``"rademacher"``, ``"normal"`` or ``"sphere"``.
        tol: See :func:`hutchinson_trace`, also for the others.
        rtol: Relative tolerance.
        max_matvecs: Largest number of products on the way to the tolerance.
        seed: Seed of the random vectors.
    """
    sampler = HutchPlusPlus(Operand(A, square="hutchpp_trace"), distribution, seed)
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))
