"""Nyström approximations: a positive semidefinite operator seen through a few products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvops.estimators._operand import Operand, check_count
from curvops.structured import LowRank

#: Multiples of rounding by which a sketch is shifted until it has a Cholesky decomposition.
_SHIFTS = (10.0, 1e2, 1e3, 1e4, 1e5)


def sketch_factor(W: Tensor, Y: Tensor, name: str) -> tuple[Tensor | None, Tensor | None, float]:
    """Return ``F [m, N]``, ``L [m, m]`` and a tiny ``c`` with ``F'F`` the Nyström approximation of ``A + c I``.

    ``Y = A W``, all as rows. ``W (A + c I) W' = L L'`` and ``F = L^-1 W (A + c I)``. The shift makes this stable (Tropp,
    Yurtsever, Udell, Cevher 2017, algorithm 3). None for an operator that is zero.
    """
    size = (Y.norm(dim=1) / W.norm(dim=1)).max().item()
    if size == 0.0:
        return None, None, 0.0
    for multiple in _SHIFTS:
        shift = multiple * torch.finfo(Y.dtype).eps * size
        shifted = torch.add(Y, W, alpha=shift)
        core = (W @ shifted.T).double()
        L, info = torch.linalg.cholesky_ex((core + core.T) / 2)
        if not info:
            return torch.linalg.solve_triangular(L.to(Y), shifted, upper=False), L, shift
    raise ValueError(
        f"{name} needs a positive semidefinite operator, found negative curvature: the smallest eigenvalue of its sketch "
        f"is {torch.linalg.eigvalsh((core + core.T) / 2)[0].item():.3g}. Use a Gauss-Newton matrix or `op.shift(c)`, or an "
        "estimator for general operators."
    )


def nystrom(A: Any, rank: int, *, oversampling: int = 5, seed: int = 0) -> LowRank:
    """Approximate a positive semidefinite operator by one of low rank, from ``rank + oversampling`` products.

    The approximation is never larger than ``A``, and close to the best one of its rank where eigenvalues decay (Tropp,
    Yurtsever, Udell, Cevher, NeurIPS 2017, arXiv:1706.05736). It has all closed forms: ``inverse(damping)``, a
    preconditioner (Frangella, Tropp, Udell, SIMAX 44, 2023), ``shift(c).logdet()``, ``trace()``, ``eigenvalues()``,
    ``sample(n)``.

    Args:
        A: A symmetric positive semidefinite linear operator; one that is found to be indefinite is refused.
        rank: Largest rank of the approximation. Sizes beyond that of ``A`` are cut to it.
        oversampling: Further products, which make the approximation better but not larger.
        seed: Seed of the random vectors.
    """
    products = Operand(A, symmetric="nystrom")
    rank = min(check_count(rank, "rank"), products.N)
    m = min(rank + check_count(oversampling, "oversampling", 0), products.N)
    W = torch.linalg.qr(products.probes("normal", seed, (5,), 0, m).T).Q.T
    F, _, shift = sketch_factor(W, products(W), "nystrom")
    op = products.op
    if F is None:
        U, values = W[:0].T, W.new_zeros(0)
    else:
        U, S, _ = torch.linalg.svd(F.T, full_matrices=False)
        values = (S.square() - shift)[:rank]
        values = values[values > 0]
        U = U[:, : len(values)]
    return LowRank(U, values, dtype=op.torch_dtype, domain=op.domain, names=op.domain_names)
