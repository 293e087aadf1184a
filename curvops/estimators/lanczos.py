"""The Lanczos process with full re-orthogonalisation, for several starting vectors at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvops.estimators._operand import Operand

#: A residual below this multiple of rounding is none: the Krylov space is exhausted.
_EXHAUSTED = 100.0


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """What the process leaves behind for each of ``R`` starting vectors, in float64.

    Args:
        alpha: Diagonals ``[R, m]``.
        beta: Off-diagonals ``[R, m]``; the last one is the size of the residual. After a zero, everything is padding.
        steps: How many rows of each matrix are no padding, ``[R]``.
        basis: Orthonormal vectors ``[R, m, N]``, zero in the padding, if they were asked for.
    """

    alpha: Tensor
    beta: Tensor
    steps: Tensor
    basis: Tensor | None = None

    def matrix(self, m: int | None = None) -> Tensor:
        """Return the tridiagonal matrices ``[R, m, m]``, or their leading parts."""
        m = self.alpha.shape[1] if m is None else m
        off = self.beta[:, : m - 1]
        return self.alpha[:, :m].diag_embed() + off.diag_embed(1) + off.diag_embed(-1)

    def quadrature(self, m: int | None = None) -> tuple[Tensor, Tensor]:
        """Return nodes and weights ``[R, m]`` with ``sum_j w_j f(x_j) = v' f(A) v`` for polynomials of degree < 2m.

        Weights of the padding are zero (Golub, Welsch 1969). Nodes of the padding lie where others do.
        """
        nodes, S = torch.linalg.eigh(self.matrix(m))
        return nodes, S[:, 0].square()


def tridiagonalize(products: Operand, V: Tensor, ncv: int, keep: bool = False) -> Tridiagonal:
    """Run ``ncv`` steps from the rows ``V [R, N]`` (Lanczos 1950; Paige 1972 on what rounding does to it).

    Every new vector is made orthogonal to all earlier ones, twice: without that, an isolated eigenvalue comes back as
    many copies. Where a Krylov space is exhausted (the identity after one step, zero, low rank) its process ends, and
    what is known is exact.
    """
    R, N = V.shape
    size = V.norm(dim=1, keepdim=True)
    q = V / torch.where(size > 0, size, 1.0)
    Q = V.new_zeros(R, ncv, N)
    alpha, beta = (torch.zeros(R, ncv, dtype=torch.float64, device=V.device) for _ in range(2))
    alive = size[:, 0] > 0
    steps = torch.zeros(R, dtype=torch.int64, device=V.device)
    scale = alpha.new_zeros(R)
    for j in range(ncv):
        Q[:, j] = q
        w = torch.zeros_like(q).index_copy(0, at := alive.nonzero()[:, 0], products(q[at]))
        a = (q * w).double().sum(1)
        alpha[:, j] = torch.where(alive, a, alpha[:, 0])
        steps += alive
        for _ in range(2):
            w = w - torch.einsum("rj,rjn->rn", torch.einsum("rjn,rn->rj", Q[:, : j + 1], w), Q[:, : j + 1])
        b = w.norm(dim=1).double()
        scale = torch.maximum(scale, a.abs() + b)
        alive = alive & (b > _EXHAUSTED * torch.finfo(V.dtype).eps * scale)
        beta[:, j] = torch.where(alive, b, 0.0)
        if j + 1 == N or not alive.any():
            alpha[:, j + 1 :] = alpha[:, :1]
            beta[:, j:] = 0.0
            break
        q = torch.where(alive, 1.0 / torch.where(alive, b, 1.0), 0.0).to(w)[:, None] * w
    return Tridiagonal(alpha, beta, steps, Q if keep else None)
