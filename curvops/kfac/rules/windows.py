"""Sliding windows of a convolution: sizes, patches, and their first and second moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from curvops._gram import add_outer_
from curvops.kfac.rules._base import wide

_CACHED = 2**22  #: numbers that are copied at a time on their way into a product, small enough for caches


@dataclass(frozen=True)
class Axis:
    """One axis of the windows: entry ``i`` of window ``o`` reads pixel ``stride * o + dilation * i - left``.

    Pixels outside the image are zero.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    left: int = 0
    right: int = 0

    @property
    def span(self) -> int:
        """Pixels from the first to the last entry of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def windows(self, size: int) -> int:
        """Return how many windows an image of ``size`` pixels has."""
        return (size + self.left + self.right - self.span) // self.stride + 1

    def hits(self, size: int, like: Tensor) -> Tensor:
        """Return ``[kernel, size]``: 1 where an entry reads a pixel in some window, else 0."""
        return _hits(self, size, like.device, like.dtype)


@lru_cache(maxsize=256)  # eight small kernels each time, else
def _hits(axis: Axis, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    pixel = torch.arange(size, device=device)
    entry = torch.arange(axis.kernel, device=device).unsqueeze(1)
    start = pixel - axis.dilation * entry + axis.left  # of the window, in padded pixels
    last = axis.stride * (axis.windows(size) - 1)
    return ((start % axis.stride == 0) & (start >= 0) & (start <= last)).to(dtype)


def pad(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Pad the trailing axes of ``x`` with zeros."""
    widths = [w for axis in reversed(axes) for w in (axis.left, axis.right)]
    return F.pad(x, widths) if any(widths) else x


def patches(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return the windows of ``x [*, *I]`` as ``[*, *K, *O]``, a view of the padded image."""
    x, lead, n = pad(x, axes), x.ndim - len(axes), len(axes)
    for j, axis in enumerate(axes):
        x = x.unfold(lead + j, axis.span, axis.stride)[..., :: axis.dilation]  # the axis of entries goes last
    return x.permute(*range(lead), *range(lead + n, lead + 2 * n), *range(lead, lead + n))


def window_sums(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return the sum over the windows of ``x [*, *I]`` as ``[*, *K]``, axis by axis and without patches.

    An entry reads a pixel in one window at most, so along an axis the sum is a product with a 0/1 matrix.
    """
    for j, axis in enumerate(reversed(axes), start=1):
        x = (x.movedim(-j, -1) @ axis.hits(x.shape[-j], x).mT).movedim(-1, -j)
    return x


def add_channel_gram_(A: Tensor, x: Tensor) -> None:
    """Add ``sum_{n, l} x x'`` of ``x [N, G, C, L]`` to ``A [G, C, C]``, at least to what ``mirror_`` copies."""
    G, C, L = x.shape[1:]
    for part in x.split(max(1, 16 * _CACHED // max(G * C * L, 1))):
        part = wide(part)
        if L < C or (G > 1 and C >= 256):  # few positions: gather them
            add_outer_(A, part.permute(1, 2, 0, 3).flatten(2))
        elif C >= 256:
            for image in part:
                add_outer_(A, image)
        else:  # 6x faster than einsum at 64 x 64 x 32 x 32
            A += (part @ part.mT).sum(0)


def add_patch_gram_(A: Tensor, x: Tensor, axes: Sequence[Axis]) -> None:
    """Add the second moment of the windows of ``x [N, G, C, *I]`` to what ``mirror_`` reads of ``A [G, C * K, C * K]``.

    Patches are formed some images (or a part of one) at a time.
    """
    n = len(axes)
    for part in _portions(patches(x, axes), 3 + n):
        add_outer_(A, wide(part).movedim(0, 2 + n).reshape(*A.shape[:2], -1))


def _portions(P: Tensor, axis: int) -> Iterator[Tensor]:
    """Split patches by images, and one large image along ``axis`` too."""
    images = max(1, _CACHED // max(P[:1].numel(), 1))
    rows = max(1, _CACHED * P.shape[axis] // max(P[:1].numel(), 1))
    for part in P.split(images):
        yield from part.split(rows, axis) if images == 1 else [part]
