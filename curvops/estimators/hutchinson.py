"""Means of independent samples: traces, diagonals, squared norms of matrices and of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from curvops.estimators._operand import Operand, check_distribution
from curvops.estimators._sampling import Budget, Moments, Sampler, run
from curvops.estimators.estimate import Estimate

#: A function of probes and their products, both as rows ``[k, N]`` and ``[k, M]``: one sample for each.
Integrand = Callable[[Tensor, Tensor], Tensor]


class Hutchinson(Sampler):
    """The mean of an integrand over random vectors with ``E[v v'] = I``.

    Args:
        products: The operator.
        integrand: What to average.
        distribution: Of the vectors.
        seed: Of the vectors.
        name: What messages call it.
    """

    def __init__(self, products: Operand, integrand: Integrand, distribution: str, seed: int, name: str):
        super().__init__(products)
        self.distribution, self.seed, self.name = check_distribution(distribution), seed, name
        self.integrand = integrand
        self.moments = Moments()

    def add(self, n: int) -> None:
        """Draw further probes, a chunk at a time: none is kept."""
        stop = self.probes + n
        while self.probes < stop:
            end = min(self.probes + self.products.chunk(), stop)
            V = self.products.probes(self.distribution, self.seed, (1,), self.probes, end)
            self.moments.add(self.integrand(V, self.products(V)))
            self.probes = end

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the mean."""
        return self.moments.estimate()

    def exact(self) -> Tensor:
        """Sum over unit vectors."""
        return sum_over(self.products, self.products.eye(self.products.N), self.integrand)


def sum_over(multiply: Callable[[Tensor], Tensor], vectors: Iterable[Tensor], integrand: Integrand) -> Tensor:
    """Return the sum of an integrand over vectors that come in chunks of rows."""
    total: Any = 0.0
    for V in vectors:
        total = total + integrand(V, multiply(V)).sum(0)
    return total


def exact_trace(products: Operand) -> Tensor:
    """Return the trace by one product with every unit vector."""
    return sum_over(products, products.eye(products.N), _quadratic)


def exact_diagonal(products: Operand) -> Tensor:
    """Return the diagonal by one product with every unit vector."""
    return sum_over(products, products.eye(products.N), _hadamard)


def _quadratic(V: Tensor, Y: Tensor) -> Tensor:
    return (V * Y).double().sum(1)


def _hadamard(V: Tensor, Y: Tensor) -> Tensor:
    return V * Y


def _squared(V: Tensor, Y: Tensor) -> Tensor:
    return Y.double().square().sum(1)


def _squared_entries(V: Tensor, Y: Tensor) -> Tensor:
    return Y.square()


def hutchinson_trace(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "rademacher",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate a trace as the mean of ``v'Av`` (Girard 1989; Hutchinson, Commun. Stat. 18, 1989).

    Unbiased for any square operator. The error falls as one over the square root of the number of products; for matrices
    whose eigenvalues decay, :func:`xtrace` needs far fewer.

    Args:
        A: A square linear operator, or a matrix.
        num_matvecs: Number of products. As many as ``A`` has columns give the exact trace. Give this or a tolerance.
        distribution: Of the random vectors: ``"rademacher"``, ``"normal"`` or ``"sphere"``.
        tol: Stop when the standard error is no larger than this.
        rtol: Stop when the standard error is no larger than this times the value.
        max_matvecs: Largest number of products on the way to the tolerance. If it is not enough, a warning says so, and
            ``converged`` is False.
        seed: Seed of the random vectors; torch's generators are not touched.
    """
    products = Operand(A, square="hutchinson_trace")
    sampler = Hutchinson(products, _quadratic, distribution, seed, "hutchinson_trace")
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))


def hutchinson_diag(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "rademacher",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate a diagonal as the mean of ``v * Av`` (Bekas, Kokiopoulou, Saad, Appl. Numer. Math. 57, 2007).

    Unbiased for any square operator. Arguments as for :func:`hutchinson_trace`; tolerances are for the largest standard
    error of an entry, relative to the largest entry.
    """
    products = Operand(A, square="hutchinson_diag")
    sampler = Hutchinson(products, _hadamard, distribution, seed, "hutchinson_diag")
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))


def hutchinson_squared_fro(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "rademacher",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate the squared Frobenius norm of any operator, wide or tall, as the mean of ``|Av|²`` (Hutchinson 1989).

    Arguments as for :func:`hutchinson_trace`.
    """
    sampler = _SquaredNorm(Operand(A), _squared, distribution, seed, "hutchinson_squared_fro")
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))


def hutchinson_squared_row_norms(
    A: Any,
    num_matvecs: int | None = None,
    distribution: str = "rademacher",
    *,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Estimate the squared norm of every row of any operator as the mean of ``(Av)²``.

    This is the diagonal of ``A A'`` without its second product (Bekas, Kokiopoulou, Saad 2007). Arguments as for
    :func:`hutchinson_diag`.
    """
    sampler = Hutchinson(Operand(A), _squared_entries, distribution, seed, "hutchinson_squared_row_norms")
    return run(sampler, Budget(num_matvecs, tol, rtol, max_matvecs))


class _SquaredNorm(Hutchinson):
    """A wide operator is known exactly by products of its adjoint, of which there are fewer."""

    def _short_side(self) -> bool:
        return self.products.M < self.products.N

    def exact_cost(self) -> float:
        return min(self.products.M, self.products.N)

    def exact(self) -> Tensor:
        if not self._short_side():
            return super().exact()
        return sum_over(self.products.adjoint, self.products.eye(self.products.M), self.integrand)
