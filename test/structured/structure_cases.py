"""Structured matrices that the tests share."""

from __future__ import annotations

import math

import torch
from operator_cases import F64

from curvops._check_structure import element
from curvops.structured import (
    STRUCTURES,
    Block30DiagonalMatrix,
    DenseMatrix,
    Hierarchical15_15Matrix,
    RecursiveBottomLeftMatrixTemplate,
    RecursiveTopRightMatrixTemplate,
    StructuredMatrix,
    TriuToeplitzMatrix,
    structure,
)


class ToeplitzBelowBlocks(RecursiveBottomLeftMatrixTemplate):
    """Parts of any class: blocks of 3, below them anything, and an upper triangular Toeplitz corner."""

    MAX_DIMS = (math.inf, 4)
    SUBSTRUCTURES = (structure("block3diagonal"), TriuToeplitzMatrix)


class ThreeDeep(RecursiveTopRightMatrixTemplate):
    """A template in a template in a template, each with a dense corner (issue #54: no dense fallback)."""

    MAX_DIMS = (3, math.inf)
    SUBSTRUCTURES = (DenseMatrix, ToeplitzBelowBlocks)


CLASSES = [*map(structure, [*STRUCTURES, "block7diagonal", "hierarchical3_2", "rank5"]), ToeplitzBelowBlocks, ThreeDeep]
#: Sizes b of each class; dimensions around them are tested.
SIZES = {
    Block30DiagonalMatrix: (30,),
    Hierarchical15_15Matrix: (15, 30),
    structure("block7diagonal"): (7, 14),
    structure("hierarchical3_2"): (3, 5),
    structure("rank5"): (5,),
    ToeplitzBelowBlocks: (4, 7),
    ThreeDeep: (3, 7, 10),
}


def name_of(x: object) -> str | None:
    return x.__name__ if isinstance(x, type) else None


def dims_of(cls: type) -> list[int]:
    return sorted({0, 1, 2, 3, 40} | {b + k for b in SIZES.get(cls, ()) for k in (-1, 0, 1)})


def drawn(cls: type[StructuredMatrix], dim: int, batch: tuple = (), dtype: torch.dtype = F64, seed: int = 0):
    return element(cls, dim, batch, dtype, torch.Generator().manual_seed(seed))
