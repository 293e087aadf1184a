"""Sliding windows of a convolution: sizes, patches, and sums over windows without patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the windows: entry ``i`` of window ``o`` reads pixel ``stride * o + dilation * i - left``.

    Pixels outside the image are zero.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    left: int = 0
    right: int = 0

    def windows(self, size: int) -> int:
        """Return how many windows an image of ``size`` pixels has."""
        return (size + self.left + self.right - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def hits(self, size: int, like: Tensor) -> Tensor:
        """Return ``[kernel, size]``: 1 where an entry reads a pixel in some window, else 0."""
        pixel = torch.arange(size, device=like.device)
        entry = torch.arange(self.kernel, device=like.device)
        start = pixel + self.left - self.dilation * entry.unsqueeze(1)  # of the window, in padded pixels
        last = self.stride * (self.windows(size) - 1)
        return ((start % self.stride == 0) & (start >= 0) & (start <= last)).to(like.dtype)


def pad(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Pad the trailing axes of ``x`` with zeros."""
    widths = [w for axis in reversed(axes) for w in (axis.left, axis.right)]
    return F.pad(x, widths) if any(widths) else x


def patches(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return the windows of ``x [*, *I]`` as a view ``[*, *K, *O]`` of its padded copy."""
    x, lead, n = pad(x, axes), x.ndim - len(axes), len(axes)
    for j, axis in enumerate(axes):
        span = axis.dilation * (axis.kernel - 1) + 1
        x = x.unfold(lead + j, span, axis.stride)[..., :: axis.dilation]  # the axis of entries goes last
    return x.permute(*range(lead), *range(lead + n, lead + 2 * n), *range(lead, lead + n))


def window_sums(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return the sum of all windows of ``x [*, *I]`` as ``[*, *K]``, axis by axis and without patches.

    An entry reads a pixel in one window at most, so the sum over windows is a 0/1 matrix per axis.
    """
    for j, axis in enumerate(reversed(axes), start=1):
        x = (x.movedim(-j, -1) @ axis.hits(x.shape[-j], x).mT).movedim(-1, -j)
    return x
