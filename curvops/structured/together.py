"""Matrices of one kind and size joined along their first batch axis, and parted again: one call for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from curvops.structured.matrix import StructuredMatrix

Matrix = TypeVar("Matrix", bound=StructuredMatrix)


def joined(matrices: Sequence[Matrix]) -> Matrix:
    """Join matrices along their first batch axis."""
    if len(matrices) == 1:
        return matrices[0]
    tensors = [M.named_tensors() for M in matrices]
    return matrices[0].with_tensors({n: torch.cat([t[n] for t in tensors]) for n in tensors[0]})


def parted(M: Matrix, sizes: Sequence[int]) -> list[Matrix]:
    """Undo :func:`joined`; the parts are views."""
    parts = {n: t.split(list(sizes)) for n, t in M.named_tensors().items()}
    return [M.with_tensors({n: t[k] for n, t in parts.items()}) for k in range(len(sizes))]
