"""Linear maps written as ``linear``, ``matmul`` or ``addmm``: every row of the input is a row of the canonical form.

The parameters of rules bear the names that torch gives them, for calls by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops._gram import add_outer_
from curvops.kfac.rules._base import Form, Operation, register, wide

Tracked = Callable[[Tensor], bool]


@dataclass(frozen=True)
class LinearForm(Form):
    """A matrix product: ``X [1, M, 1, in]``, ``Y [1, M, 1, out]``.

    Attributes:
        transposed: The weight is stored as ``[in, out]`` (``x @ W``), not as ``[out, in]``.
        left: The weight is the first factor (``W @ x``): the columns of ``x`` and of the result are the rows.
        vector: The weight is a vector ``[in]`` (``transposed``, one output): the result lacks the axis of outputs.
    """

    transposed: bool = False
    left: bool = False
    vector: bool = False

    def inputs(self, x: Tensor) -> Tensor:
        return self._rows(x)

    def cotangents(self, g: Tensor) -> Tensor:
        return g.reshape(1, -1, 1, 1) if self.vector else self._rows(g)

    def extent(self, x: Tensor) -> tuple[int, int]:
        x = x.mT if self.left and x.ndim > 1 else x
        return prod(x.shape[:-1]), 1

    def add_input_gram_(self, A: Tensor, x: Tensor) -> bool:
        return add_outer_(A, wide(self.inputs(x)).flatten(1, 2).mT)

    def add_output_gram_(self, B: Tensor, g: Tensor) -> bool:
        return add_outer_(B, wide(self.cotangents(g)).flatten(1, 2).mT)

    def input_sum(self, x: Tensor) -> Tensor:
        return wide(self.inputs(x)).squeeze(2)  # one position in a row

    def output_sum(self, g: Tensor) -> Tensor:
        return wide(self.cotangents(g)).squeeze(2)

    def _rows(self, t: Tensor) -> Tensor:
        t = t.mT if self.left and t.ndim > 1 else t
        return t.reshape(1, prod(t.shape[:-1]), 1, t.shape[-1])


@register(F.linear, modules=(nn.Linear,))
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tracked: Tracked,
) -> Operation:
    """Read a call of ``torch.nn.functional.linear``."""
    vector = weight.ndim == 1
    if bias is not None:
        bias = _bias(bias, [(), (1,)] if vector else [(len(weight),), (1, len(weight))], tracked)
    return Operation(LinearForm(transposed=vector, vector=vector), input, weight, bias)


def _bias(bias: Tensor, shapes: Sequence[tuple[int, ...]], tracked: Tracked) -> Tensor | None:
    """Return what is added if it is a bias: torch broadcasts anything."""
    if tuple(bias.shape) in shapes:
        return bias
    if tracked(bias):
        raise NotImplementedError(
            f"a parameter of shape {tuple(bias.shape)} is added; supported: one number per output, shape {shapes[0]}"
        )
    return None


@register(torch.matmul, torch.linalg.matmul, torch.mm, torch.mv, torch.bmm)
@register(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.mv, Tensor.bmm)
def matmul(
    input: Tensor,
    other: Tensor | None = None,
    *,
    mat2: Tensor | None = None,
    vec: Tensor | None = None,
    out: Tensor | None = None,
    tracked: Tracked,
) -> Operation:
    """Read a product of two tensors: the weight is the tracked one, or else the second."""
    second = next(t for t in (other, mat2, vec) if t is not None)
    if tracked(input) and tracked(second):
        raise NotImplementedError(
            "both factors of the product are parameters, so it is not linear in them; supported: one of them"
        )
    left = tracked(input)
    weight, x = (input, second) if left else (second, input)
    if weight.ndim > 2:
        raise NotImplementedError(
            f"the parameter is a batch of matrices, of shape {tuple(weight.shape)}; supported: a matrix or a vector"
        )
    vector = weight.ndim == 1
    return Operation(LinearForm(transposed=vector or not left, left=left, vector=vector), x, weight)


@register(Tensor.__rmatmul__)
def reversed_matmul(second: Tensor, first: Tensor, *, tracked: Tracked) -> Operation:
    """Read ``first @ second`` from the method of ``second``."""
    return matmul(first, second, tracked=tracked)


@register(torch.addmm, Tensor.addmm)
def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    tracked: Tracked,
) -> Operation:
    """Read ``input + mat1 @ mat2``, where ``input`` may be a bias."""
    if alpha != 1 or (beta != 1 and tracked(input)):
        raise NotImplementedError(f"the call has beta={beta}, alpha={alpha}; supported: 1")
    product = matmul(mat1, mat2, tracked=tracked)
    outputs = product.form.weight_shape(tuple(product.weight.shape))[1]
    biases = [(outputs, 1)] if product.weight is mat1 and product.x.ndim > 1 else [(outputs,), (1, outputs)]
    return Operation(product.form, product.x, product.weight, _bias(input, biases, tracked))


@register(torch.addmv, Tensor.addmv)
def addmv(
    input: Tensor,
    mat: Tensor,
    vec: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    tracked: Tracked,
) -> Operation:
    """Read ``input + mat @ vec``, where ``input`` may be a bias."""
    return addmm(input, mat, vec, beta=beta, alpha=alpha, tracked=tracked)
