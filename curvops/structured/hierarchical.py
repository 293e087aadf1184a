"""Block-triangular matrices by name: borders of diagonals, arrows of rank k, and the hierarchical matrix."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from curvops.structured.dense_matrix import DenseMatrix
from curvops.structured.diagonal_matrix import DiagonalMatrix
from curvops.structured.triangular import (
    BlockTriangularMatrix,
    RecursiveBottomLeftMatrixTemplate,
    RecursiveTopRightMatrixTemplate,
)


class TrilTopLeftDiagonalMatrix(RecursiveBottomLeftMatrixTemplate):
    """Lower triangular: a diagonal, and a last row."""

    MAX_DIMS = (math.inf, 1)
    SUBSTRUCTURES = (DiagonalMatrix, DiagonalMatrix)


class TrilBottomRightDiagonalMatrix(RecursiveBottomLeftMatrixTemplate):
    """Lower triangular: a diagonal, and a first column."""

    MAX_DIMS = (1, math.inf)
    SUBSTRUCTURES = (DiagonalMatrix, DiagonalMatrix)


class TriuTopLeftDiagonalMatrix(RecursiveTopRightMatrixTemplate):
    """Upper triangular: a diagonal, and a last column."""

    MAX_DIMS = (math.inf, 1)
    SUBSTRUCTURES = (DiagonalMatrix, DiagonalMatrix)


class TriuBottomRightDiagonalMatrix(RecursiveTopRightMatrixTemplate):
    """Upper triangular: a diagonal, and a first row."""

    MAX_DIMS = (1, math.inf)
    SUBSTRUCTURES = (DiagonalMatrix, DiagonalMatrix)


class RankKMatrixTemplate(RecursiveTopRightMatrixTemplate):
    """An arrow, ``[[A, B], [0, C]]`` with dense ``A`` of ``RANK`` rows and diagonal ``C``.

    ``M' M`` and ``(M M')^-1`` are a diagonal plus a positive semidefinite matrix of rank ``RANK``, as is, so, the
    curvature that ``M M'`` inverts. Subclasses say ``RANK``; ``structure("rank5")`` makes one of any rank.
    """

    RANK: ClassVar[int]

    def __init_subclass__(cls, **options: Any):
        if "RANK" in cls.__dict__:
            cls.MAX_DIMS, cls.SUBSTRUCTURES = (cls.RANK, math.inf), (DenseMatrix, DiagonalMatrix)
        super().__init_subclass__(**options)


class HierarchicalMatrixTemplate(RecursiveTopRightMatrixTemplate):
    """``[[A, B1, B2], [0, C, 0], [0, D, E]]`` with dense ``A`` of ``K1`` and ``E`` of ``K2`` rows, and diagonal ``C``.

    It is ``[[A, B], [0, tail]]``, and ``tail`` is ``[[C, 0], [D, E]]``. Dimensions up to ``K1`` have ``A`` only, up to
    ``K1 + K2`` they have no ``C`` and ``D``. Subclasses say ``K1`` and ``K2``; ``structure("hierarchical3_2")`` makes one of
    any sizes.
    """

    K1: ClassVar[int]
    K2: ClassVar[int]

    def __init_subclass__(cls, **options: Any):
        if "K1" in cls.__dict__:
            about = {
                "__doc__": f"The lower right part of {cls.__name__}.",
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Tail",
                "MAX_DIMS": (math.inf, cls.K2),
                "SUBSTRUCTURES": (DiagonalMatrix, DenseMatrix),
            }
            cls.Tail = type("Tail", (RecursiveBottomLeftMatrixTemplate,), about)
            cls.MAX_DIMS, cls.SUBSTRUCTURES = (cls.K1, math.inf), (DenseMatrix, cls.Tail)
        super().__init_subclass__(**options)

    Tail: ClassVar[type[BlockTriangularMatrix]]


class Hierarchical15_15Matrix(HierarchicalMatrixTemplate):
    """The hierarchical matrix with 15 dense rows at either end."""

    K1 = 15
    K2 = 15
