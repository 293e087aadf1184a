"""Transposed convolutions, as convolutions with flipped kernels over an image with zeros between its pixels.

So positions are those of the *output*, and the bias belongs to the block: exact for one loss term per position, as for
convolutions. Factors over the positions of the input are 8 to 45 % off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops.kfac.rules._base import Operation, register
from curvops.kfac.rules.conv import ConvForm, per_axis


@dataclass(frozen=True)
class ConvTransposeForm(ConvForm):
    """A transposed convolution: ``X [G, N, O, in/G * K]`` are patches of the image with zeros, ``W [G, out/G, in/G * K]``.

    Attributes:
        spread: Distance of neighbouring pixels in the image with zeros, per axis: the stride of the transposed convolution.
        crop: Pixels that padding takes off the image, left and right, per axis.
    """

    spread: tuple[int, ...] = ()
    crop: tuple[tuple[int, int], ...] = ()

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        return self.groups, shape[1], shape[0] // self.groups * prod(shape[2:])

    def arrangement(self, shape: tuple[int, ...]) -> Tensor:
        axes = tuple(range(3, 3 + len(self.kernel)))
        entries = torch.arange(prod(shape)).reshape(self.groups, shape[0] // self.groups, *shape[1:])
        return entries.flip(axes).permute(0, 2, 1, *axes).reshape(self.weight_shape(shape))

    def _image(self, x: Tensor) -> Tensor:
        x = self._batched(x)
        spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], self.spread, strict=True)))
        pixels: Any = (..., *(slice(None, None, s) for s in self.spread))
        spread[pixels] = x
        return F.pad(spread, [-w for sides in reversed(self.crop) for w in sides])

    def _sizes(self, x: Tensor) -> Sequence[int]:
        sizes = zip(self._batched(x).shape[2:], self.spread, self.crop, strict=True)
        return [(n - 1) * s + 1 - sum(sides) for n, s, sides in sizes]


@register(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    modules=(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    tracked: Callable[[Tensor], bool],
) -> Operation:
    """Read a call of ``torch.conv_transpose1d/2d/3d``."""
    kernel = tuple(weight.shape[2:])
    n = len(kernel)
    strides, dilations = per_axis(stride, n), per_axis(dilation, n)
    sides = [
        (d * (k - 1) - p, d * (k - 1) - p + extra)
        for k, d, p, extra in zip(kernel, dilations, per_axis(padding, n), per_axis(output_padding, n), strict=True)
    ]
    paddings = tuple((max(a, 0), max(b, 0)) for a, b in sides)
    crop = tuple((max(-a, 0), max(-b, 0)) for a, b in sides)
    form = ConvTransposeForm(kernel, (1,) * n, paddings, dilations, groups, strides, crop)
    return Operation(form, input, weight, bias)
