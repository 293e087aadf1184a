"""Convolutions and correlations by FFT: what triangular Toeplitz matrices do to columns, and sums of diagonals.

On a CPU some columns are transformed at a time, and in place: what stays in its caches is up to five times faster. One thread,
float32, 2048 columns, ``T X`` in ms: 1.0 for d = 129, 4.9 for d = 577, 9.5 for d = 1025.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvops._scalars import wide
from curvops.structured._batched import own

#: Numbers that are transformed at once on a CPU.
CHUNK = 2**17


def convolved(s: Tensor, t: Tensor) -> Tensor:
    """Return ``sum_k s_k t_(j-k)`` for ``j < d``, along the last axes."""
    return _leading(_spectrum(s) * _spectrum(t), s.shape[-1]) if s.numel() else s


def correlated(s: Tensor, t: Tensor) -> Tensor:
    """Return ``sum_k s_k t_(j+k)`` for ``0 <= j < d``, along the last axes."""
    return _leading(_spectrum(s).conj() * _spectrum(t), s.shape[-1]) if s.numel() else s


def filtered(X: Tensor, t: Tensor, correlate: bool) -> Tensor:
    """Return the columns of ``X [*batch, d, n]`` convolved with ``t [*batch, d]``, or correlated."""
    if X.numel() == 0:  # MKL transforms something only
        return torch.zeros_like(X)
    f = _filter(t, correlate)
    parts = [_filtered(rows, f).to(X.dtype) for rows in _chunks(X)]
    return _joined(parts, -2).mT if X.stride(-2) == 1 else _joined([rows.mT for rows in parts], -1)


def diagonal_sums(X: Tensor) -> Tensor:
    """Return the sums ``[*batch, d]`` of the main and the upper diagonals of ``X X'``."""
    return _diagonal_sums(X, None)


def diagonal_sums_filtered(X: Tensor, t: Tensor, correlate: bool) -> Tensor:
    """Return the same of ``Y Y'`` for ``Y = filtered(X, t, correlate)``."""
    return _diagonal_sums(X, _filter(t, correlate) if X.numel() else None)


def _diagonal_sums(X: Tensor, f: Tensor | None) -> Tensor:
    if X.numel() == 0:
        return wide(X).sum(-1)
    powers = []
    for rows in _chunks(X):
        Y = rows if f is None else _filtered(rows, f)
        # Sums over rows of real numbers are ten times faster than those over the parts of complex ones.
        powers.append(torch.view_as_real(_spectrum(Y)).flatten(-2).square_().sum(-2))
    return _leading(sum(powers[1:], powers[0]).unflatten(-1, (-1, 2)).sum(-1), X.shape[-2])


def _filter(t: Tensor, correlate: bool) -> Tensor:
    f = _spectrum(t).unsqueeze(-2)
    return f.conj_physical() if correlate else f


def _filtered(rows: Tensor, f: Tensor) -> Tensor:
    return _leading(_spectrum(rows).mul_(f), rows.shape[-1])


def _spectrum(t: Tensor) -> Tensor:
    """Return the transform of ``t [..., d]`` with as many zeros behind it, so that nothing wraps around."""
    return torch.fft.rfft(wide(t), _length(t.shape[-1]))


def _leading(spectrum: Tensor, d: int) -> Tensor:
    return torch.fft.irfft(spectrum, _length(d)).narrow(-1, 0, d)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return torch.cat(parts, axis) if len(parts) > 1 else own(parts[0])


def _chunks(X: Tensor) -> Iterator[Tensor]:
    """Cut ``X [*batch, d, n]`` into rows ``[*batch, columns, d]`` that are treated at once."""
    # Rows, because layers give rows: X is the transpose of what lies in memory, which is faster to transform.
    columns = max(CHUNK // X.shape[:-1].numel(), 8) if X.device.type == "cpu" else X.shape[-1]
    yield from X.mT.split(columns, -2)


def _length(d: int) -> int:
    """Return a length of FFTs that is fast, and at least ``2 d - 1``."""
    least = max(2 * d - 1, 1)
    return min(m << max(-(-least // m) - 1, 0).bit_length() for m in (1, 3, 5, 9, 15))
