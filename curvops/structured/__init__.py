"""Matrices with structure, each a linear operator with closed forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvops._operator import LinearOperator
from curvops.structured.block_diagonal_matrix import Block30DiagonalMatrix as Block30DiagonalMatrix
from curvops.structured.block_diagonal_matrix import BlockDiagonalMatrixTemplate as BlockDiagonalMatrixTemplate
from curvops.structured.dense import Dense as Dense
from curvops.structured.dense_matrix import DenseMatrix as DenseMatrix
from curvops.structured.diagonal import Diagonal as Diagonal
from curvops.structured.diagonal_matrix import DiagonalMatrix as DiagonalMatrix
from curvops.structured.diagonal_plus_low_rank import DiagonalPlusLowRank as DiagonalPlusLowRank
from curvops.structured.direct_sum import DirectSum as DirectSum
from curvops.structured.direct_sum import Part as Part
from curvops.structured.eigen import Eigen as Eigen
from curvops.structured.hierarchical import Hierarchical15_15Matrix as Hierarchical15_15Matrix
from curvops.structured.hierarchical import HierarchicalMatrixTemplate as HierarchicalMatrixTemplate
from curvops.structured.hierarchical import RankKMatrixTemplate as RankKMatrixTemplate
from curvops.structured.hierarchical import TrilBottomRightDiagonalMatrix as TrilBottomRightDiagonalMatrix
from curvops.structured.hierarchical import TrilTopLeftDiagonalMatrix as TrilTopLeftDiagonalMatrix
from curvops.structured.hierarchical import TriuBottomRightDiagonalMatrix as TriuBottomRightDiagonalMatrix
from curvops.structured.hierarchical import TriuTopLeftDiagonalMatrix as TriuTopLeftDiagonalMatrix
from curvops.structured.kronecker import Kronecker as Kronecker
from curvops.structured.low_rank import LowRank as LowRank
from curvops.structured.matrix import StructuredMatrix as StructuredMatrix
from curvops.structured.names import STRUCTURES as STRUCTURES
from curvops.structured.names import Rank1Matrix as Rank1Matrix
from curvops.structured.names import register_structure as register_structure
from curvops.structured.names import structure as structure
from curvops.structured.placement import Placement as Placement
from curvops.structured.placement import Slot as Slot
from curvops.structured.shifted import Shifted as Shifted
from curvops.structured.stable import DenseStableMatrix as DenseStableMatrix
from curvops.structured.toeplitz import TrilToeplitzMatrix as TrilToeplitzMatrix
from curvops.structured.toeplitz import TriuToeplitzMatrix as TriuToeplitzMatrix
from curvops.structured.triangular import BlockTriangularMatrix as BlockTriangularMatrix
from curvops.structured.triangular import RecursiveBottomLeftMatrixTemplate as RecursiveBottomLeftMatrixTemplate
from curvops.structured.triangular import RecursiveTopRightMatrixTemplate as RecursiveTopRightMatrixTemplate


def from_state_dict(state: Mapping[str, Any]) -> LinearOperator:
    """Rebuild a structured operator from its ``state_dict()``."""
    classes = (Dense, Diagonal, DiagonalPlusLowRank, DirectSum, Eigen, Kronecker, LowRank, Shifted)
    kinds: dict[str, Any] = {c.__name__: c for c in classes}
    if state["kind"] not in kinds:
        raise ValueError(f"Got a state of kind {state['kind']!r}, expected one of {sorted(kinds)}.")
    return kinds[state["kind"]].from_state_dict(state)
