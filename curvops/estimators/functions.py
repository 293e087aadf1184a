"""Functions of a symmetric operator: their trace, and their product with vectors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from curvops._forms import join, split
from curvops._operator import LinearOperator
from curvops.estimators._operand import Operand, check_count
from curvops.estimators._sampling import Budget, Sampler, run
from curvops.estimators.estimate import Estimate
from curvops.estimators.lanczos import tridiagonalize
from curvops.estimators.spectrum import _ENTRIES, Function, LanczosSpectrum, apply_to_nodes


class _FunctionTrace(Sampler):
    name = "trace_of_function"

    def __init__(self, spectrum: LanczosSpectrum, f: Function):
        super().__init__(spectrum.products)
        self.spectrum, self.f, self.cost = spectrum, f, spectrum.ncv

    def add(self, n: int) -> None:
        """Start from further vectors."""
        self.spectrum.extend(n)
        self.probes += n

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Return the trace."""
        total = self.spectrum.trace_of(self.f)
        return total.value, total.stderr

    def exact_cost(self) -> float:
        """Infinite: no number of products gives it exactly."""
        return math.inf


def trace_of_function(
    A: Any,
    f: Function,
    num_matvecs: int | None = None,
    *,
    ncv: int = 30,
    distribution: str = "rademacher",
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 3000,
    seed: int = 0,
) -> Estimate:
    """Estimate ``tr f(A)`` by stochastic Lanczos quadrature (Ubaru, Chen, Saad, SIMAX 38, 2017).

    The standard error includes what the quadrature has not resolved; if more repeats do not lower it, raise ``ncv``.

    Args:
        A: A symmetric linear operator.
        f: Maps a tensor of eigenvalues to a tensor of the same shape, for example ``torch.log``.
        num_matvecs: Number of products, rounded down to a multiple of ``ncv``. Give this or a tolerance.
        ncv: Lanczos vectors for each random vector, at most as many as ``A`` has columns.
        distribution: Of the random vectors: ``"rademacher"``, ``"normal"`` or ``"sphere"``.
        tol: See :func:`hutchinson_trace`, also for the others.
        rtol: Relative tolerance.
        max_matvecs: Largest number of products on the way to the tolerance.
        seed: Seed of the random vectors.
    """
    spectrum = LanczosSpectrum(A, ncv, 0, distribution=distribution, seed=seed)
    return run(_FunctionTrace(spectrum, f), Budget(num_matvecs, tol, rtol, max_matvecs))


def lanczos_logdet(
    A: Any,
    num_matvecs: int | None = None,
    *,
    damping: float = 0.0,
    ncv: int = 30,
    tol: float | None = None,
    rtol: float | None = None,
    max_matvecs: int = 3000,
    seed: int = 0,
) -> Estimate:
    """Estimate ``log det(A + damping I)`` of a positive definite sum (Ubaru, Chen, Saad 2017).

    Arguments as for :func:`trace_of_function`.
    """
    f = _ShiftedLog(damping)
    return trace_of_function(A, f, num_matvecs, ncv=ncv, tol=tol, rtol=rtol, max_matvecs=max_matvecs, seed=seed)


class _ShiftedLog:
    def __init__(self, damping: float):
        if not damping >= 0:
            raise ValueError(f"Got damping={damping}, expected a number >= 0.")
        self.damping = damping

    def __call__(self, x: Tensor) -> Tensor:
        return torch.log(x + self.damping)


class FunctionLinearOperator(LinearOperator):
    """``f(A)`` of a symmetric operator: its products come from a Lanczos process that starts at the vector.

    The error is about that of the best polynomial of degree ``ncv - 1`` (Saad, SINUM 29, 1992; Druskin and Knizhnerman
    1989), none if ``ncv`` reaches the size of ``A``. A warning says when the last vectors still change the answer.

    Args:
        A: A symmetric linear operator.
        f: Maps a tensor of eigenvalues to a tensor of the same shape, for example ``torch.exp``. To be pickled, it must
            be a function with a name.
        ncv: Lanczos vectors, at most as many as ``A`` has columns.
        rtol: Change by the last eighth of the vectors, relative to the answer, above which to warn.
    """

    def __init__(self, A: Any, f: Function, ncv: int = 50, *, rtol: float = 1e-3):
        op = Operand(A, symmetric="A function").op
        super().__init__(
            op.domain,
            op.domain,
            dtype=op.torch_dtype,
            device=op.device,
            symmetric=True,
            domain_names=op.domain_names,
        )
        self.arg, self.f, self.ncv, self.rtol = op, f, min(check_count(ncv, "ncv"), op.shape[0]), rtol

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return FunctionLinearOperator(self.arg.to(device, dtype), self.f, self.ncv, rtol=self.rtol)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        products = Operand(self.arg)
        rows = join(V).to(products.dtype)
        size = max(1, _ENTRIES // (self.ncv * rows.shape[1]))
        Y = torch.cat([self._rows_of(products, v) for v in rows.split(size)])
        return split(Y.to(self.torch_dtype), self.domain)

    def _rows_of(self, products: Operand, V: Tensor) -> Tensor:
        moving = (V != 0).any(1)
        if not moving.all():  # there is no process to start from zero
            return torch.zeros_like(V).index_copy(0, at := moving.nonzero()[:, 0], self._rows_of(products, V[at]))
        if len(V) == 0:
            return V
        run = tridiagonalize(products, V, self.ncv, keep=True)
        c = self._coefficients(run.matrix())
        m = max(1, self.ncv - max(1, self.ncv // 8))
        change = c.clone()
        change[:, :m] -= self._coefficients(run.matrix(m))
        relative = (change.norm(dim=1) / c.norm(dim=1).clamp(min=torch.finfo(c.dtype).tiny)).max().item()
        if self.ncv < self.shape[0] and relative > self.rtol:
            warnings.warn(
                f"A product with f(A) still changes by {relative:.2g} (relative) with the last of {self.ncv} Lanczos "
                "vectors; raise `ncv`.",
                stacklevel=2,
            )
        c = c * V.norm(dim=1, keepdim=True)
        return torch.einsum("rj,rjn->rn", c.to(V), run.basis)

    def _coefficients(self, T: Tensor) -> Tensor:
        """Return ``f(T) e_1``."""
        nodes, S = torch.linalg.eigh(T)
        return torch.einsum("rij,rj->ri", S, apply_to_nodes(self.f, nodes, S[:, 0].square()) * S[:, 0])
