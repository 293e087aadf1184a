"""Products with triangular Toeplitz matrices, a strip of rows at a time: faster than FFTs on a CPU, up to some thousand rows.

One thread, float32, 2048 columns, in ms, strips against FFT: 0.5 and 2.2 for d = 129, 5.0 and 18.7 for d = 513, 17 and 62 for
d = 1025; with 512 columns 15 and 19 for d = 2049, 60 and 44 for d = 4097; a single column is faster by FFT from d = 257.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from curvops.structured._batched import mm

#: Makes some rows of a triangular Toeplitz matrix, given the first of them and how many.
Strip = Callable[[Tensor, int, int], tuple[Tensor, slice]]
#: Where strips win: not more rows, and not fewer columns.
MAX_DIM, MIN_COLUMNS = 2048, 64
#: Numbers that are treated at once: what fits into caches needs no fresh memory (2x in a step of training).
CHUNK = 2**18


def worth(X: Tensor) -> bool:
    """Tell whether products with ``X [..., d, n]`` should go by strips."""
    return X.device.type == "cpu" and X.shape[-2] <= MAX_DIM and X.shape[-1] >= MIN_COLUMNS


def chunks(X: Tensor) -> tuple[Tensor, ...]:
    """Cut ``X [..., d, n]`` into columns that are treated at once."""
    columns = max(CHUNK // max(X.shape[:-1].numel(), 1), MIN_COLUMNS)
    return X.split(columns, -1) if X.device.type == "cpu" else (X,)


def _height(d: int) -> int:
    """Return the rows of a strip: enough for a matrix product, and few against ``d``."""
    return max(32, min(64, d // 8))


def convolve(t: Tensor, X: Tensor) -> Tensor:
    """Return ``T X`` for the lower triangular ``T`` with first column ``t [*batch, d]``."""
    return _by_strips(t, X, _convolving)


def correlate(t: Tensor, X: Tensor) -> Tensor:
    """Return ``T' X``."""
    return _by_strips(t, X, _correlating)


def _by_strips(t: Tensor, X: Tensor, strip: Strip) -> Tensor:
    Y = X.new_empty(*X.shape[:-2], X.shape[-1], X.shape[-2]).mT if X.stride(-2) == 1 else X.new_empty(X.shape)
    d, height = X.shape[-2], _height(X.shape[-2])
    for start in range(0, d, height):
        rows = min(height, d - start)
        S, seen = strip(t, start, rows)
        Y.narrow(-2, start, rows).copy_(mm(S, X[..., seen, :]))
    return Y


def _convolving(t: Tensor, start: int, rows: int) -> tuple[Tensor, slice]:
    """Return some rows of the lower triangular ``T``, and the columns in which they are not zero."""
    reversed_ = pad(t.narrow(-1, 0, start + rows), (rows - 1, 0)).flip(-1)
    return reversed_.unfold(-1, start + rows, 1).flip(-2), slice(0, start + rows)


def _correlating(t: Tensor, start: int, rows: int) -> tuple[Tensor, slice]:
    """Return some rows of ``T'``, and the columns in which they are not zero."""
    width = t.shape[-1] - start
    return pad(t.narrow(-1, 0, width), (rows - 1, 0)).unfold(-1, width, 1).flip(-2), slice(start, None)


def diagonal_sums(X: Tensor) -> Tensor:
    """Return the sums ``[*batch, d]`` of the main and the upper diagonals of ``X X'``."""
    d, height = X.shape[-2], _height(X.shape[-2])
    sums = X.new_zeros(X.shape[:-1])
    for start in range(0, d, height):
        rows, width = min(height, d - start), d - start
        strip = mm(X.narrow(-2, start, rows), X.narrow(-2, start, width).mT)
        sums.narrow(-1, 0, width).add_(column_sums_of_skewed(strip))
    return sums


def diagonal_sums_through_(t: Tensor, U: Tensor, lower: bool) -> Tensor:
    """Return the sums ``[*batch, d]`` of the main and the upper diagonals of ``T' U T`` for symmetric ``U``, which is lost.

    Args:
        t: The first column of the lower triangular ``T``, or the first row of the upper triangular one.
        U: The matrices ``[*batch, d, d]``; ``U T`` takes their place, a strip of rows at a time.
        lower: Which of the two.
    """
    d, height = U.shape[-1], _height(U.shape[-1])
    several = max(2 * height, d // 3)
    for start in range(0, d, several):
        rows = U.narrow(-2, start, min(several, d - start))
        rows.copy_(_by_strips(t, rows.mT, _correlating if lower else _convolving).mT)
    sums = U.new_zeros(U.shape[:-1])
    for start in range(0, d, height):
        rows = min(height, d - start)
        S, seen = (_correlating if lower else _convolving)(t, start, rows)
        sums.narrow(-1, 0, d - start).add_(column_sums_of_skewed(mm(S, U[..., seen, start:])))
    return sums


def column_sums_of_skewed(S: Tensor) -> Tensor:
    """Return the sums of the main and the upper diagonals of ``S [..., r, w]``, ``r <= w``."""
    # With one more row, rows of w entries read as rows of w + 1 are skewed: diagonals become columns.
    r, w = S.shape[-2:]
    flat = pad(S.triu(), (0, 0, 0, 1)).reshape(*S.shape[:-2], (r + 1) * w)
    return flat.narrow(-1, 0, r * (w + 1)).reshape(*S.shape[:-2], r, w + 1).narrow(-1, 0, w).sum(-2)
