"""Linear layers."""
from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from curvops.kfac.rules._base import Form, Operation, register


@dataclass(frozen=True)
class LinearForm(Form):
    transposed: bool = False

    def inputs(self, x: Tensor) -> Tensor:
        return x.reshape(1, -1, 1, x.shape[-1])

    def cotangents(self, g: Tensor) -> Tensor:
        return g.reshape(1, -1, 1, g.shape[-1])

    def extent(self, x: Tensor) -> tuple[int, int]:
        return x.numel() // x.shape[-1], 1


@register(F.linear, modules=(nn.Linear,))
def linear(x, weight, bias=None, *, tracked):
    return Operation(LinearForm(), x, weight, bias)
