"""Products with triangular Toeplitz matrices, a strip of rows at a time: faster than FFTs on a CPU, up to some thousand rows.

One thread, float32, 2048 columns, in ms, strips against FFT: 0.5 and 2.2 for d = 129, 5.0 and 18.7 for d = 513, 17 and 62 for
d = 1025; with 512 columns 15 and 19 for d = 2049, 60 and 44 for d = 4097; a single column is faster by FFT from d = 257.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from curvops.structured._batched import mm

#: Where strips win: not more rows, and not fewer columns.
MAX_DIM, MIN_COLUMNS = 2048, 64


def worth(X: Tensor) -> bool:
    """Tell whether products with ``X [..., d, n]`` should go by strips."""
    return X.device.type == "cpu" and X.shape[-2] <= MAX_DIM and X.shape[-1] >= MIN_COLUMNS


def _height(d: int) -> int:
    """Return the rows of a strip: enough for a matrix product, and few against ``d``."""
    return max(32, min(64, d // 8))


def convolve(t: Tensor, X: Tensor) -> Tensor:
    """Return ``T X`` for the lower triangular ``T`` with first column ``t [*batch, d]``."""
    return _reversed(t, X).flip(-2)


def correlate(t: Tensor, X: Tensor) -> Tensor:
    """Return ``T' X``: reversing the order of rows and columns transposes a Toeplitz matrix."""
    return _reversed(t, X.flip(-2))


def _reversed(t: Tensor, X: Tensor) -> Tensor:
    """Return the rows of ``T X``, last one first: so each row of ``T`` is that before it, seen one entry later."""
    d, height = X.shape[-2], _height(X.shape[-2])
    numbers = pad(t, (height - 1, 0)).flip(-1)
    strips = []
    for stop in range(d, 0, -height):
        rows = min(height, stop)
        strip = numbers.unfold(-1, stop, 1).narrow(-2, d - stop, rows)
        strips.append(mm(strip, X.narrow(-2, 0, stop)))
    return torch.cat(strips, -2)


def diagonal_sums(X: Tensor) -> Tensor:
    """Return the sums ``[*batch, d]`` of the main and the upper diagonals of ``X X'``."""
    d, height = X.shape[-2], _height(X.shape[-2])
    sums = X.new_zeros(X.shape[:-1])
    for start in range(0, d, height):
        rows, width = min(height, d - start), d - start
        strip = mm(X.narrow(-2, start, rows), X.narrow(-2, start, width).mT)
        sums.narrow(-1, 0, width).add_(column_sums_of_skewed(strip))
    return sums


def column_sums_of_skewed(S: Tensor) -> Tensor:
    """Return the sums of the main and the upper diagonals of ``S [..., r, w]``, ``r <= w``."""
    # With one more row, rows of w entries read as rows of w + 1 are skewed: diagonals become columns.
    r, w = S.shape[-2:]
    flat = pad(S.triu(), (0, 0, 0, 1)).reshape(*S.shape[:-2], (r + 1) * w)
    return flat.narrow(-1, 0, r * (w + 1)).reshape(*S.shape[:-2], r, w + 1).narrow(-1, 0, w).sum(-2)
