"""Robust decompositions of (batches of) symmetric positive semidefinite matrices.

Matrices are scaled to unit size first, so entries of 1e-30 or 1e8 make no difference. A decomposition that fails is
tried again in float64, on the CPU, and with a small multiple of the identity; the label says which matrix it was.
Inputs are never modified.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

#: Larger asymmetry, or a more negative eigenvalue, relative to the largest entry, is a mistake and not rounding.
_ASYMMETRY, _NEGATIVITY = 1e-2, 1e-1
_JITTER = 1e-6
#: Cholesky loses digits as 1 / damping, an eigendecomposition does not where the null space is exact.
_CHOLESKY = 0.3


def named(label: str) -> str:
    """Return how messages call the matrix with this label."""
    return f"the block of {label!r}" if label else "the matrix"


def check_finite(M: Tensor, label: str = "", what: str = "matrix") -> Tensor:
    """Return ``M``, or raise naming the label."""
    # The sum of finite numbers is rarely infinite: one cheap pass, and a second look where it is.
    if not torch.isfinite(M.sum()) and not torch.isfinite(M).all():
        bad = (~torch.isfinite(M)).sum().item()
        raise ValueError(f"Found {bad} non-finite entries in {named(label)} ({what}); check the data and the loss.")
    return M


def symmetric_part(M: Tensor, label: str = "") -> Tensor:
    """Return ``(M + M') / 2``, or raise where ``M [..., n, n]`` is not finite or far from symmetric."""
    check_finite(M, label)
    S = M / 2 + M.mT / 2
    # Halves of the smallest numbers round by as much as these numbers.
    if ((M - S).abs().amax((-2, -1)) > _ASYMMETRY * M.abs().amax((-2, -1)) + torch.finfo(M.dtype).tiny).any():
        raise ValueError(f"Found a matrix that is not symmetric for {named(label)}, expected a symmetric one.")
    return S


def eigh(M: Tensor, label: str = "") -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``[..., n]``, ascending, and eigenvectors ``[..., n, n]`` of symmetric matrices."""
    if M.shape[-1] == 0:
        return M.new_zeros(M.shape[:-1]), M.new_zeros(M.shape)
    S = symmetric_part(M, label)
    size = _size(S)
    values, Q = _first_that_works(torch.linalg.eigh, S / size, label)
    return values * size.squeeze(-1), Q


def eigh_psd(M: Tensor, label: str = "") -> tuple[Tensor, Tensor]:
    """Return the eigendecomposition of positive semidefinite matrices; rounding noise around zero becomes zero."""
    values, Q = eigh(M, label)
    if values.shape[-1] == 0:
        return values, Q
    largest = values.abs().amax(-1, keepdim=True)
    if (values < -_NEGATIVITY * largest).any():
        raise ValueError(f"Found negative eigenvalues for {named(label)}, expected a positive semidefinite matrix.")
    return torch.where(values > noise(M) * largest, values, 0.0), Q


def noise(M: Tensor) -> float:
    """Return the relative size below which an eigenvalue of ``M`` says nothing (measured on matrices of low rank)."""
    return max(4.0, math.sqrt(M.shape[-1]) / 2) * torch.finfo(M.dtype).eps


def inverse_psd(M: Tensor, damping: Tensor | float, label: str = "") -> Tensor:
    """Return ``(M + damping I)^-1`` of ``M [..., n, n]``; ``damping`` is a number or ``[..., 1, 1]``."""
    S = symmetric_part(M, label)
    size, damping = _size(S), torch.as_tensor(damping, dtype=M.dtype, device=M.device)
    if (damping > _CHOLESKY * math.sqrt(torch.finfo(M.dtype).eps) * size).all():
        shifted = S + damping * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        size = _size(shifted)
        L, info = torch.linalg.cholesky_ex(shifted / size)
        if not info.any():
            inverse = torch.cholesky_inverse(L)
            return (inverse / 2 + inverse.mT / 2) / size
    # Too little damping for Cholesky to see a null space: look at the spectrum.
    values, Q = eigh_psd(M, label)
    damped = values + (damping.squeeze(-1) if damping.ndim else damping)
    with torch.autocast(Q.device.type, enabled=False):
        return (Q * reciprocal(damped, label).unsqueeze(-2)) @ Q.mT


def reciprocal(values: Tensor, label: str = "") -> Tensor:
    """Return ``1 / values``, or raise where that is not finite."""
    inverse = 1.0 / values
    if not torch.isfinite(inverse).all():
        raise ValueError(
            f"Cannot invert {named(label)}: it is singular in {values.dtype}. Give `damping` > 0 (found the smallest "
            f"eigenvalue {values.min().item():.3g})."
        )
    return inverse


def _size(M: Tensor) -> Tensor:
    """Return the largest entry of every matrix as ``[..., 1, 1]``; one for zero matrices."""
    size = M.abs().amax((-2, -1), keepdim=True)
    return torch.where(size > 0, size, 1.0)


def _first_that_works(decompose: Callable[[Tensor], tuple], M: Tensor, label: str) -> tuple[Tensor, Tensor]:
    """Try the native dtype and device, float64, the CPU, and jitter (subtracted from the eigenvalues again)."""
    attempts = (
        ("", M.device, M.dtype, 0.0),
        ("in float64", M.device, torch.float64, 0.0),
        ("on the CPU in float64", "cpu", torch.float64, 0.0),
        ("with jitter on the CPU in float64", "cpu", torch.float64, _JITTER),
    )
    for how, device, dtype, jitter in attempts:
        try:
            identity = torch.eye(M.shape[-1], device=device, dtype=dtype)
            values, Q = decompose(M.to(device, dtype) + jitter * identity if jitter else M.to(device, dtype))
        except RuntimeError:  # includes torch.linalg.LinAlgError, and what vendors' libraries raise instead
            continue
        if torch.isfinite(values).all() and torch.isfinite(Q).all():
            if how:
                warnings.warn(f"Decomposed {named(label)} {how}, since simpler attempts failed.", stacklevel=2)
            return (values - jitter).to(M), Q.to(M)
    raise ValueError(f"Cannot decompose {named(label)} of shape {tuple(M.shape)}, though its entries are finite.")
