"""Spectral densities, moments and traces of functions, all from one Lanczos process for each random vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops._forms import Space, join, read
from curvops.estimators._operand import Operand, check_count, check_distribution
from curvops.estimators._sampling import moments
from curvops.estimators.estimate import Estimate
from curvops.estimators.lanczos import Tridiagonal, tridiagonalize

Function = Callable[[Tensor], Tensor]
Boundaries = tuple[float | None, float | None]
#: Entries of Lanczos vectors that are kept at once.
_ENTRIES = 1 << 27
#: Spectra narrower than this, relative to the size of the eigenvalues, have no width to draw.
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Density:
    """A spectral density on a grid; ``grid, density = ...`` unpacks it.

    Args:
        grid: Where, ``[num_points]``.
        density: How much of the spectrum lies there, per unit of the grid. Integrates to one, but for tails beyond the grid.
        stderr: Standard error over the repeats; infinite for a single one.
    """

    grid: Tensor
    density: Tensor
    stderr: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.grid, self.density))

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        low, high = self.grid[0].item(), self.grid[-1].item()
        return f"<density on {len(self.grid)} points from {low:.4g} to {high:.4g}>"


class LanczosSpectrum:
    """What Lanczos processes say about the spectrum of a symmetric operator, for as many questions as wanted.

    Each repeat starts from a random vector ``v`` and gives a Gauss quadrature of ``v' f(A) v``, exact for polynomials of
    degree ``2 ncv - 1`` (Golub and Meurant 1994; Bai, Fahey, Golub 1996; Ubaru, Chen, Saad, SIMAX 38, 2017). Memory:
    ``ncv`` vectors for each repeat that runs at a time.

    Args:
        A: A symmetric linear operator.
        ncv: Lanczos vectors, at least 2; more than ``A`` has columns are cut to that, and then all is exact.
        num_repeats: Number of random vectors; they are multiplied together.
        distribution: Of the random vectors: ``"sphere"``, ``"normal"`` (the same, since lengths do not count) or
            ``"rademacher"``.
        seed: Seed of the random vectors.
        start: Starting vectors instead of random ones, as columns in any form that ``A`` accepts. Each counts the same,
            so the columns of an orthogonal matrix give exact traces.
    """

    def __init__(
        self,
        A: Any,
        ncv: int,
        num_repeats: int = 1,
        *,
        distribution: str = "sphere",
        seed: int = 0,
        start: Any = None,
    ):
        self.products = Operand(A, symmetric="A spectrum by Lanczos")
        self.n = self.products.N
        self.resolution = check_count(ncv, "ncv", 1 if self.n == 1 else 2)
        self.ncv = min(self.resolution, self.n)
        self.distribution, self.seed = check_distribution(distribution), seed
        self._runs: list[Tridiagonal] = []
        if start is None:
            self.extend(check_count(num_repeats, "num_repeats", 0))
        else:
            op = self.products.op
            space = Space(op.domain, op.domain_names, op.torch_dtype, op.device)
            self._run(join(read(start, space)[0]).detach().to(self.products.dtype))

    @property
    def num_repeats(self) -> int:
        """The number of starting vectors so far."""
        return sum(len(run.alpha) for run in self._runs)

    @property
    def num_matvecs(self) -> int:
        """The number of products so far."""
        return self.products.count

    def extend(self, num_repeats: int) -> None:
        """Start from further random vectors."""
        size = max(1, _ENTRIES // (self.ncv * self.n))
        stop = self.num_repeats + num_repeats
        while (at := self.num_repeats) < stop:
            end = min(at + size, stop)
            self._run(self.products.probes(self.distribution, self.seed, (6,), at, end))

    def _run(self, V: Tensor) -> None:
        self._runs.append(tridiagonalize(self.products, V, self.ncv))

    def quadrature(self, m: int | None = None) -> tuple[Tensor, Tensor]:
        """Return nodes and weights ``[repeats, ncv]``; the weights of each repeat sum to one."""
        if not self._runs:
            raise ValueError("Got num_repeats=0, expected at least 1 (or `extend`) before the first question.")
        nodes, weights = zip(*(run.quadrature(m) for run in self._runs), strict=True)
        return torch.cat(nodes), torch.cat(weights)

    def boundaries(self) -> tuple[float, float]:
        """Return an interval that holds the spectrum, widened by the residuals of its ends."""
        low, high = [], []
        for run in self._runs:
            nodes, S = torch.linalg.eigh(run.matrix())
            residual = run.beta[:, -1:] * S[:, -1].abs()
            low.append((nodes - residual)[:, 0].min().item())
            high.append((nodes + residual)[:, -1].max().item())
        return min(low), max(high)

    def trace_of(self, f: Function) -> Estimate:
        """Estimate ``tr f(A)``; the error adds to the spread what the second half of the Lanczos vectors changed.

        Args:
            f: Maps a tensor of eigenvalues to a tensor of the same shape.
        """
        samples = self.n * self._means(f, self.ncv)
        value, stderr = moments(samples)
        shorter = self.n * self._means(f, max(1, self.ncv // 2))
        return Estimate(value, torch.hypot(stderr, (samples - shorter).mean()), self.num_matvecs, len(samples))

    def _means(self, f: Function, m: int) -> Tensor:
        nodes, weights = self.quadrature(m)
        return (weights * apply_to_nodes(f, nodes, weights)).sum(1)

    def moment(self, p: int) -> Estimate:
        """Estimate ``tr(A^p) / n`` for ``p < 2 ncv``, where the quadrature is exact."""
        if check_count(p, "p", 0) >= 2 * self.ncv and self.ncv < self.n:
            raise ValueError(f"Got p={p}, expected less than 2 ncv = {2 * self.ncv}; use more Lanczos vectors.")
        samples = self._means(lambda x: x**p, self.ncv)
        return Estimate(*moments(samples), self.num_matvecs, len(samples))

    def density(
        self,
        num_points: int = 1024,
        kappa: float = 3.0,
        boundaries: Boundaries | None = None,
        margin: float = 0.05,
    ) -> Density:
        """Return the density of eigenvalues: every node of the quadrature becomes a Gaussian (Papyan, JMLR 21, 2020).

        Args:
            num_points: Size of the grid.
            kappa: Width of the Gaussians, larger than 1; larger means narrower.
            boundaries: Smallest and largest eigenvalue; None for what the processes say, also for one of them.
            margin: How far the grid goes beyond that, relative to the width of the spectrum.
        """
        nodes, weights = self.quadrature()
        ends = _ends(boundaries, self.boundaries())
        size = max(map(abs, ends)) or 1.0
        return _smooth(nodes, weights, ends, size, num_points, kappa, margin, self.resolution)

    def log_density(
        self,
        num_points: int = 1024,
        kappa: float = 1.04,
        boundaries: Boundaries | None = None,
        margin: float = 0.05,
        epsilon: float = 1e-5,
    ) -> Density:
        """Return the density of ``|eigenvalue| + epsilon`` with Gaussians on a logarithmic axis (Papyan 2020, C.7).

        Args:
            num_points: Size of the grid, whose points are at equal ratios.
            kappa: As for :meth:`density`.
            boundaries: Smallest and largest size of an eigenvalue.
            margin: As for :meth:`density`, on the logarithmic axis.
            epsilon: What is added to all sizes, positive.
        """
        if not epsilon > 0:
            raise ValueError(f"Got epsilon={epsilon}, expected a positive number: the logarithm of 0 is not finite.")
        nodes, weights = self.quadrature()
        size = nodes.abs()
        seen = size[weights > torch.finfo(weights.dtype).eps]
        ends = _ends(boundaries, (seen.min().item(), max(map(abs, self.boundaries()))))
        if ends[0] < 0:
            raise ValueError(f"Got boundaries={boundaries}, expected sizes of eigenvalues, which are not negative.")
        ends = math.log(ends[0] + epsilon), math.log(ends[1] + epsilon)
        log = _smooth((size + epsilon).log(), weights, ends, 1.0, num_points, kappa, margin, self.resolution)
        grid = log.grid.exp()
        return Density(grid, log.density / grid, log.stderr / grid)


def apply_to_nodes(f: Function, nodes: Tensor, weights: Tensor) -> Tensor:
    """Return ``f(nodes)``, zero where the weight is; refuse values that are not finite."""
    values = f(nodes)
    if values.shape != nodes.shape:
        raise ValueError(f"Got a tensor of shape {tuple(values.shape)} from f, expected {tuple(nodes.shape)}.")
    values = torch.where(weights > 0, values, 0.0)
    bad = nodes[~torch.isfinite(values)]
    if len(bad):
        raise ValueError(
            f"The function is not finite at {bad[0].item():.6g}, which is an eigenvalue or lies between two. Use a function "
            "that is finite on the spectrum, for example `lambda x: torch.log(x + damping)`, or `op.shift(damping)`."
        )
    return values


def _ends(given: Boundaries | None, found: tuple[float, float]) -> tuple[float, float]:
    given = (None, None) if given is None else tuple(given)
    if len(given) != 2:
        raise ValueError(f"Got boundaries={given}, expected (smallest, largest), each a number or None.")
    low, high = (f if g is None else float(g) for g, f in zip(given, found, strict=True))
    if low > high:
        raise ValueError(f"Got boundaries {low} and {high}, expected the smaller one first.")
    return low, high


def _smooth(
    nodes: Tensor,
    weights: Tensor,
    ends: tuple[float, float],
    size: float,
    num_points: int,
    kappa: float,
    margin: float,
    ncv: int,
) -> Density:
    """Put a Gaussian on every node; its width is that of Papyan's, for a spectrum scaled to [-1, 1].

    Where all eigenvalues are equal, ``size`` takes the place of the width of the spectrum.
    """
    check_count(num_points, "num_points", 2)
    if not kappa > 1:
        raise ValueError(f"Got kappa={kappa}, expected a number larger than 1.")
    if not margin >= 0:
        raise ValueError(f"Got margin={margin}, expected a number >= 0.")
    low, high = ends
    width = high - low
    padding = (margin if width > _EQUAL * size else max(margin, _EQUAL)) * (width if width > _EQUAL * size else size)
    low, high = low - padding, high + padding
    sigma = max((high - low) / max(ncv - 1, 1) / math.sqrt(8 * math.log(kappa)), torch.finfo(nodes.dtype).tiny)
    grid = torch.linspace(low, high, num_points, dtype=nodes.dtype, device=nodes.device)
    samples = torch.stack(
        [
            (w[:, None] * torch.exp(-0.5 * ((grid - x[:, None]) / sigma) ** 2)).sum(0)
            for x, w in zip(nodes, weights, strict=True)
        ]
    )
    return Density(grid, *moments(samples / (sigma * math.sqrt(2 * math.pi))))


def lanczos_approximate_spectrum(
    A: Any,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 3.0,
    boundaries: Boundaries | None = None,
    margin: float = 0.05,
    *,
    seed: int = 0,
) -> Density:
    """Approximate the spectral density of a symmetric operator (Papyan, JMLR 21, 2020, algorithm 2).

    With full re-orthogonalisation: an isolated eigenvalue appears once. For further questions about the same spectrum keep
    a :class:`LanczosSpectrum`.

    Args:
        A: A symmetric linear operator.
        ncv: Lanczos vectors, at least 2, at most as many as ``A`` has columns.
        num_points: Size of the grid.
        num_repeats: Random vectors to average over; more than one gives standard errors.
        kappa: Width of the Gaussians, larger than 1; larger means narrower.
        boundaries: Smallest and largest eigenvalue; None for what the process says, also for one of them.
        margin: How far the grid goes beyond that, relative to the width of the spectrum.
        seed: Seed of the random vectors.

    Returns:
        Grid and density (``grid, density = ...``), and the density's ``stderr``.
    """
    return LanczosSpectrum(A, ncv, num_repeats, seed=seed).density(num_points, kappa, boundaries, margin)


def lanczos_approximate_log_spectrum(
    A: Any,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 1.04,
    boundaries: Boundaries | None = None,
    margin: float = 0.05,
    epsilon: float = 1e-5,
    *,
    seed: int = 0,
) -> Density:
    """Approximate the density of ``|eigenvalue| + epsilon`` on a logarithmic axis (Papyan, JMLR 21, 2020, section C.7).

    Arguments and answer as for :func:`lanczos_approximate_spectrum`; ``boundaries`` are of ``|A|``.
    """
    return LanczosSpectrum(A, ncv, num_repeats, seed=seed).log_density(num_points, kappa, boundaries, margin, epsilon)
