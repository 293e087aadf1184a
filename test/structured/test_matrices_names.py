"""R3: structures by name, those that users add, what constructors refuse, and mistakes that the conformance suite finds."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from operator_cases import F64
from structured.structure_cases import ThreeDeep, ToeplitzBelowBlocks, drawn

from curvops._check_structure import check_projection
from curvops._operator import LinearOperator
from curvops.structured import (
    STRUCTURES,
    Block30DiagonalMatrix,
    BlockDiagonalMatrixTemplate,
    DenseMatrix,
    DiagonalMatrix,
    Hierarchical15_15Matrix,
    RecursiveTopRightMatrixTemplate,
    TrilToeplitzMatrix,
    register_structure,
    structure,
)
from curvops.structured.names import _filled
from curvops.testing import check_structure

# Names


def test_R3_structures_by_name() -> None:
    assert structure("block30diagonal") is Block30DiagonalMatrix
    assert structure("hierarchical15_15") is Hierarchical15_15Matrix
    assert structure("block7diagonal") is structure("block7diagonal")
    assert structure("block7diagonal").BLOCK_DIM == 7
    assert issubclass(structure("block7diagonal"), BlockDiagonalMatrixTemplate)
    assert (structure("hierarchical3_2").K1, structure("hierarchical3_2").K2) == (3, 2)
    rank5 = structure("rank5")
    assert (rank5.RANK, *rank5.MAX_DIMS) == (5, 5, math.inf)
    assert structure(DenseMatrix) is DenseMatrix
    for unknown in ("dens", "block0diagonal", "hierarchical3", "rank", "rank-1", ""):
        with pytest.raises(ValueError, match=r"expected one of \['dense'.*'triltoeplitz'.*block7diagonal"):
            structure(unknown)
    for wrong in (3, None, int, LinearOperator):
        with pytest.raises(TypeError, match="name or a class"):
            structure(wrong)


def test_R3_users_register_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvops.structured.names.STRUCTURES", dict(STRUCTURES))
    register_structure("three_deep", ThreeDeep)
    assert structure("three_deep") is ThreeDeep
    register_structure("three_deep", ThreeDeep)  # again, as reloaded notebooks do
    for taken in ("three_deep", "dense", "block7diagonal"):
        with pytest.raises(ValueError, match="already"):
            register_structure(taken, ToeplitzBelowBlocks)
    with pytest.raises(TypeError, match="subclass of StructuredMatrix"):
        register_structure("linear", LinearOperator)
    with pytest.raises(TypeError, match="expected a string"):
        register_structure(3, ThreeDeep)


def test_R3_classes_made_by_name_survive_processes() -> None:
    matrices = [drawn(structure(n), 9) for n in ("block4diagonal", "hierarchical4_2", "rank4")]
    matrices.append(matrices[1].C)  # the part is of a class of its own
    saved = pickle.dumps(matrices)
    _filled.cache_clear()  # as in a process that never asked for these names
    for found, expected in zip(pickle.loads(saved), matrices, strict=True):
        assert type(found) is not type(expected)
        assert type(found).__qualname__ == type(expected).__qualname__
        assert torch.equal(found.to_dense(), expected.to_dense())


# Constructors


def test_R3_constructors_check_shapes() -> None:
    block3, three = structure("block3diagonal"), torch.zeros(3, 3)
    refused = [
        (DenseMatrix, (torch.zeros(3, 4),), "expected"),
        (DenseMatrix, (torch.zeros(3),), "expected"),
        (DiagonalMatrix, (torch.zeros(()),), "expected a tensor of shape"),
        (TrilToeplitzMatrix, (torch.zeros(()),), "expected a tensor of shape"),
        (block3, (torch.zeros(1, 4, 4), torch.zeros(0, 0)), r"expected \(1, 3, 3\)"),  # D25
        (block3, (torch.zeros(1, 3, 3), three), "rest < 3"),
        (block3, (torch.zeros(2, 1, 3, 3), torch.zeros(0, 0)), "expected"),
        (structure("rank2"), (DenseMatrix(three), torch.zeros(3, 1), DiagonalMatrix(torch.zeros(1))), r"\(2, 2\)"),
        (structure("rank3"), (DenseMatrix(three), torch.zeros(1, 3), DiagonalMatrix(torch.zeros(1))), r"\(3, 1\)"),
    ]
    for cls, arguments, reason in refused:
        with pytest.raises(ValueError, match=reason):
            cls(*arguments)
    with pytest.raises(TypeError, match="expected a DenseMatrix"):
        structure("rank3")(DiagonalMatrix(torch.zeros(3)), torch.zeros(3, 1), DiagonalMatrix(torch.zeros(1)))
    with pytest.raises(TypeError, match="float64"):
        structure("rank3")(DenseMatrix(three), torch.zeros(3, 1, dtype=F64), DiagonalMatrix(torch.zeros(1)))
    with pytest.raises(TypeError, match="float"):
        block3(torch.zeros(1, 3, 3), torch.zeros(1, 1, dtype=F64))


def test_R3_templates_check_what_they_are_made_of() -> None:
    for sizes in ((2, 3), (math.inf, math.inf), (2.5, math.inf), (-1, math.inf)):
        with pytest.raises(ValueError, match="expected an integer >= 0 and"):
            type("Wrong", (RecursiveTopRightMatrixTemplate,), {"MAX_DIMS": sizes, "SUBSTRUCTURES": (DenseMatrix,) * 2})
    for parts in ((DenseMatrix,), (DenseMatrix, int)):
        with pytest.raises(TypeError, match="two classes of structured matrices"):
            type("Wrong", (RecursiveTopRightMatrixTemplate,), {"MAX_DIMS": (1, math.inf), "SUBSTRUCTURES": parts})


def test_R3_the_check_finds_mistakes() -> None:
    """A class with singd's D1, and one with wrong weights, are found out."""

    class NoTranspose(DenseMatrix):
        def _adjoint_times(self, X: torch.Tensor) -> torch.Tensor:
            return self.M @ X

    class Halved(TrilToeplitzMatrix):
        def _project(self, S: torch.Tensor) -> TrilToeplitzMatrix:
            return super()._project(S) * 0.5

    class Asymmetric(DenseMatrix):
        def _project(self, S: torch.Tensor) -> DenseMatrix:
            return self._like(M=2 * S.tril(-1) + S.diagonal(dim1=-2, dim2=-1).diag_embed())

    with pytest.raises(AssertionError, match="adjoint_times"):
        check_structure(NoTranspose, 4)
    with pytest.raises(AssertionError, match="projection law"):
        check_projection(Halved, 4)
    with pytest.raises(AssertionError, match="least squares"):
        check_projection(Asymmetric, 4)
