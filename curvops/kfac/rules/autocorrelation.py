"""Second moments of the windows of a convolution, without forming the windows.

With stride 1 and dilation ``d``, the block of the entries ``i`` and ``j = i + δ`` of a window is, along one axis,

    A[(c, i), (c', j)] = sum_m x[c, m] x[c', m + d δ],    m in a range that depends on i,

so up to the ends of that range it depends on the shift δ alone: ``A`` is an autocorrelation. The image is copied once,
as lines of positions, channels last, with zeros between the lines (:class:`_Lines`). A shift is then an offset in
memory, and all shifts along a line are one matrix product of two *views* of that copy. Borders are exact:

- along the first axis, ranges are cut where any of them begins or ends; every piece is multiplied once and added to the
  entries whose range contains it. Products with padding never arise;
- along the second axis, the windows that overlap the image but do not belong to the convolution are subtracted.

Strides are turned into channels (``x[s q + r]`` is channel ``r`` at ``q``); the first of three axes is unfolded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf, prod

import torch
from torch import Tensor

from curvops._gram import block_rows, mirror_
from curvops._scalars import accumulation_dtype
from curvops.kfac.rules.windows import Axis, add_channel_gram_, add_patch_gram_, pad, patches

_COPY = 130  #: multiplications that cost as much as copying one number into a product, or out of it
_CALL = 2_000_000  #: multiplications that cost as much as one small call
_LIMIT = 2**26  #: numbers in the copy of a part of the batch


def add_window_gram_(A: Tensor, x: Tensor, axes: Sequence[Axis]) -> None:
    """Add the second moment of the windows of ``x [N, G, C, *I]`` to what ``mirror_`` reads of ``A [G, C * K, C * K]``.

    Takes what costs least: one product over the channels, the autocorrelation, or products of patches.
    """
    x, axes = _without_points(x, axes)
    if not axes:
        add_channel_gram_(A, x.flatten(3))
    elif _work(x.shape, axes) > _patch_work(x.shape, axes):
        add_patch_gram_(A, x, axes)
    else:
        unfolded = axes[0].kernel if len(axes) == 3 else 1
        for part in x.split(max(1, _LIMIT // max(x[:1].numel() * unfolded, 1))):
            add_autocorrelation_(A, part, axes)


def _without_points(x: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, list[Axis]]:
    """Keep the pixels of ``x [N, G, C, *I]`` that kernels of length 1 read, and make these axes part of the batch."""
    points = [j for j, axis in enumerate(axes, start=3) if axis.kernel == 1]
    for j in points:
        axis = axes[j - 3]
        x = x.movedim(j, 0)[-axis.left % axis.stride :: axis.stride].movedim(0, j)
    if len(points) == len(axes):
        return x, []
    for j in reversed(points):
        x = x.movedim(j, 0).flatten(0, 1)
    return x, [axis for axis in axes if axis.kernel > 1]


def _patch_work(shape: Sequence[int], axes: Sequence[Axis]) -> float:
    """Count the work of ``add_patch_gram_``, in multiplications."""
    N, G, C, *sizes = shape
    d = C * prod(axis.kernel for axis in axes)
    rows = N * prod(axis.windows(size) for axis, size in zip(axes, sizes, strict=True))
    return G * rows * d * (d * (1.0 if d < 256 else 0.55) + _COPY)  # from 256 on one triangle, and larger products


def _work(shape: Sequence[int], axes: Sequence[Axis]) -> float:
    """Count the work of ``add_autocorrelation_``, in multiplications; infinite where it cannot be used."""
    if any(axis.stride > 1 and axis.dilation > 1 for axis in axes[-2:]):
        return inf
    N, G, C, *sizes = shape
    if len(axes) == 3:
        N, C, sizes, axes = N * axes[0].windows(sizes[0]), C * axes[0].kernel, sizes[1:], axes[1:]
    units = [_unit(axis) for axis in axes]
    strided = any(axis.stride > 1 for axis in axes)
    C *= prod(axis.stride for axis in axes)
    sizes = [_whole(a, u, n) // a.stride for a, u, n in zip(axes, units, sizes, strict=True)]
    row, column = (Axis(), *units)[-2:]
    H, W = (1, *sizes)[-2:]
    gap, block = column.kernel - 1, max(1, 8 // C)
    outside = max(0, gap - column.left) + max(0, gap - column.right)
    copies = 3 if strided else 1
    scattered = 1.6 * (C * row.kernel * column.kernel) ** 2  # writes of the result, by blocks
    work = _COPY * G * copies * (H * N * (W + gap) * C + scattered)
    for shift in range(row.kernel):
        pieces = _pieces(_ranges(row, H, shift))
        width = block + gap * (2 if shift else 1)
        work += sum(v - u for u, v in pieces) * N * (W + gap) * G * width * C * C
        work += _CALL * len(pieces) * column.dilation * (4 + outside)
    return work


def add_autocorrelation_(A: Tensor, x: Tensor, axes: Sequence[Axis]) -> None:
    """Add the second moment of the windows of ``x [*, G, C, *I]`` to what ``mirror_`` reads of ``A [G, C * K, C * K]``.

    Args:
        A: The sum, of any strides.
        x: Images; any number of leading axes.
        axes: One to three axes; of the last two, one with a stride must not be dilated.
    """
    if len(axes) == 3:
        x, axes = _unfold_first(x, axes[0]), axes[1:]
    if len(axes) == 1:
        x, axes = x.unsqueeze(-2), (Axis(), *axes)
    # 3x3, padding 1, two CPU threads: 5x to 8x faster than unfold and product from 16x16 on, two or three forward passes,
    # and about one copy of the image instead of 18 (bench/conv_gram.py).
    if any(axis.stride > 1 for axis in axes):
        A += _strided_gram(x, axes)
    else:
        _add_gram_(A, x, *axes)


def _unfold_first(x: Tensor, axis: Axis) -> Tensor:
    """Turn the first of three axes into channels: ``[*, G, C, D, H, W] -> [O, *, G, C * K, H, W]``."""
    P = patches(x.movedim(-3, -1), [axis])  # [*, G, C, H, W, K, O]
    return P.movedim(-1, 0).movedim(-1, -3).flatten(-4, -3)


def _strided_gram(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Turn strides into channels: with stride s, ``[*, G, C, H, W]`` becomes ``[*, G, C * s * s, H / s, W / s]``."""
    C, strides = x.shape[-3], [axis.stride for axis in axes]
    units = [_unit(axis) for axis in axes]
    lengths = [_whole(a, u, n) for a, u, n in zip(axes, units, x.shape[-2:], strict=True)]
    sides = [0 if a.stride == 1 else a.left for a in axes]
    ends = [max(0, m - n - left) for m, n, left in zip(lengths, x.shape[-2:], sides, strict=True)]
    x = pad(x, [Axis(left=a, right=b) for a, b in zip(sides, ends, strict=True)])[..., : lengths[0], : lengths[1]]
    x = x.unflatten(-1, (-1, strides[1])).unflatten(-3, (-1, strides[0]))  # [*, G, C, H / s, s, W / s, s]
    x = x.movedim((-3, -1), (-4, -3)).flatten(-5, -3)
    d = x.shape[-3] * prod(u.kernel for u in units)
    A = x.new_zeros(x.shape[-4], d, d, dtype=accumulation_dtype(x.dtype))
    _add_gram_(A, x, *units)
    mirror_(A)
    entry = torch.arange(d, device=x.device).view(C, *strides, *(u.kernel for u in units))
    entry = entry.permute(0, 3, 1, 4, 2).flatten(3).flatten(1, 2)  # [C, s * K / s, s * K / s]
    entry = entry[:, : axes[0].kernel, : axes[1].kernel].flatten()
    return A.index_select(1, entry).index_select(2, entry)


def _unit(axis: Axis) -> Axis:
    """Return the axis with stride 1 that is left when the stride has become channels."""
    return axis if axis.stride == 1 else Axis(-(-axis.kernel // axis.stride))


def _whole(axis: Axis, unit: Axis, size: int) -> int:
    """Return how many padded pixels the windows of a strided axis read, in whole strides; else the size."""
    return size if axis.stride == 1 else axis.stride * (axis.windows(size) + unit.kernel - 1)


def _add_gram_(A: Tensor, x: Tensor, row: Axis, column: Axis) -> None:
    """Add the second moment of the windows of ``x [*, G, C, H, W]`` (strides 1) to what ``mirror_`` reads of ``A``."""
    C, H = x.shape[-3:-1]
    lines = [_Lines(phase, axis) for phase, axis in _phases(x, column)]
    size = row.kernel * column.kernel
    blocks = [
        (slice(-(-r.start // size), -(-r.stop // size)), slice(r.start // size, C)) for r in block_rows(A.shape[-1])
    ]
    A = A.unflatten(2, (C, row.kernel, column.kernel)).unflatten(1, (C, row.kernel, column.kernel))
    for shift in range(row.kernel):
        ranges = _ranges(row, H, shift)
        pieces = {
            (u, v): _sum(part.moment(u, v - u, row.dilation * shift) for part in lines) for u, v in _pieces(ranges)
        }
        for i, (a, b) in enumerate(ranges):
            M = _sum(piece for (u, v), piece in pieces.items() if a <= u and v <= b)  # [G, C, K, K, C]
            for top, right in blocks if M is not None else []:
                A[:, top, i, :, right, i + shift] += M[:, top, :, :, right].transpose(3, 4)
                if shift:
                    A[:, top, i + shift, :, right, i] += M[:, right, :, :, top].permute(0, 4, 3, 1, 2)


def _sum(terms: Iterable[Tensor | None]) -> Tensor | None:
    """Add tensors; nothing is ``None``."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def _ranges(row: Axis, size: int, shift: int) -> list[tuple[int, int]]:
    """For entries ``i``: the pixels that it reads while entry ``i + shift`` reads a pixel, too."""
    first = [row.dilation * i - row.left for i in range(row.kernel - shift)]
    ranges = [(max(f, 0), min(f + row.windows(size), size - row.dilation * shift)) for f in first]
    return [(a, max(a, b)) for a, b in ranges]


def _pieces(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut the union of ranges where any of them begins or ends."""
    cuts = pairwise(sorted({end for r in ranges for end in r}))
    return [(u, v) for u, v in cuts if any(a <= u and v <= b for a, b in ranges)]


def _phases(x: Tensor, axis: Axis) -> Iterator[tuple[Tensor, Axis]]:
    """Split a dilated convolution along the last axis into dense ones, on every d-th pixel."""
    d = axis.dilation
    windows = axis.windows(x.shape[-1])
    for r in range(min(d, windows)):  # padded pixels and windows that leave the remainder r
        phase = x[..., (r - axis.left) % d :: d]
        left = max(0, -((r - axis.left) // d))
        right = -((r - windows) // d) + axis.kernel - 1 - phase.shape[-1] - left
        if phase.shape[-1]:  # else only padding is read
            yield phase, Axis(axis.kernel, left=left, right=right)


class _Lines:
    """The rows of all images as lines of positions, channels last, with zeros after each line.

    In memory ``[G, H, N, W + gap, C]``: row h of all images is one long line, so a shift by a row is as good as a shift
    by a position, and the zeros make ``x[t] x[t + δ]'`` vanish where ``t + δ`` lies in another line.
    """

    def __init__(self, x: Tensor, axis: Axis) -> None:
        """Copy ``x [*, G, C, H, W]``."""
        *batch, G, C, H, W = x.shape
        self.kernel, self.gap, self.block = axis.kernel, axis.kernel - 1, max(1, 8 // C)
        positions = prod(batch) * (W + self.gap)
        self.line = -(-positions // self.block) * self.block
        self.front = self.gap * C
        self.flat = x.new_zeros(2 * self.front + G * H * self.line * C, dtype=accumulation_dtype(x.dtype))
        lines = self.flat[self.front : len(self.flat) - self.front].view(G, H, self.line, C)
        self.images = lines[:, :, :positions].unflatten(2, (prod(batch), W + self.gap))[:, :, :, :W]
        lead = len(batch)
        self.images.unflatten(2, batch).copy_(x.permute(lead, lead + 2, *range(lead), lead + 3, lead + 1))
        self.outside = [*self._outside(axis, W)]

    @staticmethod
    def _outside(axis: Axis, width: int) -> Iterator[tuple[slice, slice]]:
        """Windows on the image that the convolution does not have: their pixels, and the entries reading them."""
        for n in range(1, axis.kernel - axis.left):
            m = min(n, width)
            yield slice(0, m), slice(axis.kernel - n, axis.kernel - n + m)
        for n in range(1, axis.kernel - axis.right):
            m = min(n, width)
            yield slice(width - m, width), slice(n - m, n)

    def moment(self, top: int, rows: int, shift: int) -> Tensor:
        """Sum windows of rows times those ``shift`` rows below over ``rows`` rows from ``top``: ``[G, C, K, K, C]``."""
        S, K = self._shifts(top, rows, shift), self.kernel
        M = torch.stack([S[:, :, K - 1 - i : 2 * K - 1 - i] for i in range(K)], dim=2)
        upper, lower = (self.images[:, r : r + rows] for r in (top, top + shift))
        for pixels, entries in self.outside:
            P = upper[:, :, :, pixels].flatten(3).flatten(1, 2).mT @ lower[:, :, :, pixels].flatten(3).flatten(1, 2)
            n, C = pixels.stop - pixels.start, S.shape[1]
            M[:, :, entries, entries] -= P.view(-1, n, C, n, C).transpose(1, 2)
        return M

    def _shifts(self, top: int, rows: int, shift: int) -> Tensor:
        """Sum ``x[h, t] x[h + shift, t + δ]'`` over ``rows`` rows h and all t, for all δ: ``[G, C, 2 K - 1, C]``."""
        G, _, _, _, C = self.images.shape
        back = self.gap if shift else 0  # S is symmetric for shift = 0: half of it is enough
        b, w = self.block, self.block + self.gap + back
        R = self._products(top * self.line, (top + shift) * self.line - back, rows * self.line // b, w)
        diagonals = (b * C * w * C, (w * C + 1) * C, w * C, C, 1)
        S = R.as_strided((G, b, C, w - b + 1, C), diagonals).sum(1)
        return S if shift else torch.cat([S[:, :, 1:].flip(2).transpose(1, 3), S], 2)

    def _products(self, t: int, u: int, count: int, width: int) -> Tensor:
        """Multiply ``count`` successive blocks of positions from ``t`` on by ``width`` positions from ``u`` on.

        Windows of successive blocks overlap, which no matrix product takes; every k-th of them do not.
        """
        G, _, _, _, C = self.images.shape
        b, w = self.block * C, width * C
        k = -(-w // b)
        size, t, u = self.images.stride(0), self.front + t * C, self.front + u * C
        R = self.flat.new_zeros(G, b, w)
        if G == 1 and C < 128:  # as a batch: up to 1.4x faster than one by one
            n = count // k
            U = self.flat.as_strided((k, n, b), (b, k * b, 1), t)
            R += (U.mT @ self.flat.as_strided((k, n, w), (b, k * b, 1), u)).sum(0)
            t, u, count = t + n * k * b, u + n * k * b, count - n * k
        for r in range(min(k, count)):
            n = -(-(count - r) // k)
            U = self.flat.as_strided((G, n, b), (size, k * b, 1), t + r * b)
            R.baddbmm_(U.mT, self.flat.as_strided((G, n, w), (size, k * b, 1), u + r * b))
        return R
