"""R3: matrices of a space closed under products: projection law, closure, dense twins, dimensions, dtypes, refusals."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from operator_cases import F64, normal

from curvops._check_structure import basis, check_projection, element
from curvops._operator import LinearOperator
from curvops.structured import (
    STRUCTURES,
    Block30DiagonalMatrix,
    BlockDiagonalMatrixTemplate,
    DenseMatrix,
    DiagonalMatrix,
    Hierarchical15_15Matrix,
    RecursiveBottomLeftMatrixTemplate,
    RecursiveTopRightMatrixTemplate,
    StructuredMatrix,
    TrilToeplitzMatrix,
    TriuToeplitzMatrix,
    _strips,
    register_structure,
    structure,
)
from curvops.structured.names import _filled
from curvops.testing import check_operator, check_structure


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


@pytest.mark.parametrize(("cls", "dim"), [(c, d) for c in CLASSES for d in dims_of(c)], ids=name_of)
def test_R3_float64(cls: type[StructuredMatrix], dim: int) -> None:
    check_structure(cls, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_other_dtypes(cls: type[StructuredMatrix], dtype: torch.dtype) -> None:
    for dim in {1, 3, 16, 40} | {b + 1 for b in SIZES.get(cls, ())}:
        check_structure(cls, dim, dtype=dtype)


@pytest.mark.parametrize("batch", [(1,), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_batches(cls: type[StructuredMatrix], batch: tuple[int, ...]) -> None:
    for dim in (1, 8, 17):
        check_structure(cls, dim, batch=batch)
    check_structure(cls, 17, batch=batch, dtype=torch.bfloat16)


@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_members_of_a_batch_are_as_if_alone(cls: type[StructuredMatrix]) -> None:
    A, B, X = drawn(cls, 11, (3,)), drawn(cls, 11, (3,), seed=1), normal(3, 11, 4)
    c = normal(3, seed=2)
    results = lambda A, B, X, c: [  # noqa: E731
        *(M.to_dense_blocks() for M in (A.compose(B), A.self_gram(), A.gram_through(X), type(A).gram(X))),
        *(M.to_dense_blocks() for M in (A.add(B, c), A * c, A.shift(c))),
        *(A.times(X), A.adjoint_times(X), A.traces(), A.mean_trace(), A.frobenius_norms(), A.max_abs()),
    ]
    together = results(A, B, X, c)
    for k in range(3):
        alone = results(A._map(lambda t, k=k: t[k]), B._map(lambda t, k=k: t[k]), X[k], c[k])
        for found, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(found[k], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_is_an_operator(cls: type[StructuredMatrix]) -> None:
    for dim, batch, dtype in ((11, (), F64), (6, (2,), torch.float32), (4, (2, 1), torch.bfloat16)):
        A = drawn(cls, dim, batch, dtype)
        assert A.domain == ((*batch, dim),)
        check_operator(A, torch.block_diag(*A.to_dense_blocks().double().reshape(-1, dim, dim)))


def test_R3_algebra_leaves_the_class_only_where_it_must() -> None:
    A, B = drawn(TrilToeplitzMatrix, 5), drawn(TriuToeplitzMatrix, 5)
    for mixed, dense in ((A @ B, A.to_dense() @ B.to_dense()), (A + B, A.to_dense() + B.to_dense())):
        assert isinstance(mixed, LinearOperator)
        assert not isinstance(mixed, StructuredMatrix)
        torch.testing.assert_close(mixed.to_dense(), dense, rtol=1e-12, atol=1e-12)
    assert type(A + 0.5 * (A**0)) is TrilToeplitzMatrix
    assert type(A**3 - 2 * A / 3) is TrilToeplitzMatrix
    x = normal(5)
    torch.testing.assert_close((A @ A.T) @ x, A.to_dense() @ (A.to_dense().T @ x), rtol=1e-12, atol=1e-12)
    assert A.T.T is A
    d = drawn(DiagonalMatrix, 5)
    assert d.T is d


def test_R3_the_law_has_the_weights_of_the_paper() -> None:
    S = normal(5, 5)
    S = S + S.T
    torch.testing.assert_close(structure("dense").from_dense(S).M, S)
    torch.testing.assert_close(structure("diagonal").from_dense(S).d, S.diagonal())
    means = torch.stack([S.diagonal(k).mean() * (2 if k else 1) for k in range(5)])
    torch.testing.assert_close(structure("triltoeplitz").from_dense(S).column, means)
    torch.testing.assert_close(structure("triutoeplitz").from_dense(S).row, means)
    H = structure("hierarchical1_2").from_dense(S).to_dense()
    mask = torch.tensor([[1, 2, 2, 2, 2], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 2, 2, 1, 1], [0, 2, 2, 1, 1]])
    torch.testing.assert_close(H, S * mask)
    for name, where in (
        ("triltopleftdiag", "lower last row"),
        ("trilbottomrightdiag", "lower first column"),
        ("triutopleftdiag", "upper last column"),
        ("triubottomrightdiag", "upper first row"),
    ):
        mask = torch.eye(5)
        side, which, _ = where.split()
        at = 0 if which == "first" else 4
        edge = torch.zeros(5, 5)
        edge[at] = edge[:, at] = 2
        mask += edge.tril(-1) if side == "lower" else edge.triu(1)
        torch.testing.assert_close(structure(name).from_dense(S).to_dense(), S * mask)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("dense", 40**2),
        ("diagonal", 40),
        ("block30diagonal", 30**2 + 10**2),
        ("hierarchical15_15", 31 * 40 - 255),
        ("triltoeplitz", 40),
        ("triutoeplitz", 40),
        ("triltopleftdiag", 2 * 40 - 1),
        ("trilbottomrightdiag", 2 * 40 - 1),
        ("triutopleftdiag", 2 * 40 - 1),
        ("triubottomrightdiag", 2 * 40 - 1),
        ("rank5", 25 + 5 * 35 + 35),
    ],
)
def test_R3_stores_no_more_than_its_free_numbers(name: str, count: int) -> None:
    elements = basis(structure(name), 40).flatten(1)
    assert len(elements) == count
    assert (elements.norm(dim=1) > 0).all()
    assert elements.abs().sum(0).max() == 1  # no entry is held twice, so the numbers are independent


def test_R3_small_dimensions_degrade() -> None:
    cls = structure("hierarchical3_2")
    sizes = {d: (M.A.dim, M.C.A.dim, M.C.C.dim) for d in range(8) for M in [cls.zeros(d)]}
    assert sizes == {
        0: (0, 0, 0),
        1: (1, 0, 0),
        2: (2, 0, 0),
        3: (3, 0, 0),
        4: (3, 0, 1),
        5: (3, 0, 2),
        6: (3, 1, 2),
        7: (3, 2, 2),
    }
    blocks = {d: tuple(structure("block3diagonal").zeros(d).blocks.shape) for d in (0, 2, 3, 4, 7)}
    assert blocks == {0: (0, 3, 3), 2: (0, 3, 3), 3: (1, 3, 3), 4: (1, 3, 3), 7: (2, 3, 3)}


@pytest.mark.parametrize("dim", [29, 30])
def test_R3_one_block_is_dense_to_the_last_bit(dim: int) -> None:
    """D1: what singd has wrong after the second step, here after 200."""
    for dtype in (F64, torch.float32, torch.bfloat16):
        dense, blocks = (cls.eye(dim, dtype=dtype) for cls in (DenseMatrix, Block30DiagonalMatrix))
        for k in range(200):
            X = normal(dim, 11 if k % 2 else 97, seed=k, dtype=dtype)
            dense, blocks = (_step(K, X) for K in (dense, blocks))
        assert torch.equal(dense.to_dense(), blocks.to_dense())
        assert not torch.equal(dense.to_dense(), dense.to_dense().T)
        assert torch.equal(dense.times(X), blocks.times(X))
        assert torch.equal(dense.adjoint_times(X), blocks.adjoint_times(X))


def _step(K: StructuredMatrix, X: torch.Tensor) -> StructuredMatrix:
    """One update of IKFAC with a skew direction, such as momentum makes it."""
    m = K.gram_through(X).scale(1 / X.shape[-1]).add(K.self_gram(), 0.1).shift(-1.0)
    return K.add(K.compose(m.compose(K)), -0.01)


def test_R3_rank_k_is_a_diagonal_plus_rank_k() -> None:
    M = drawn(structure("rank2"), 9).shift(2.0)
    dense = M.to_dense()
    lower = torch.cat([torch.zeros(2, dtype=F64), M.C.d.square()]).diag()
    assert torch.linalg.matrix_rank(dense.T @ dense - lower) == 2
    curvature = torch.linalg.inv(dense @ dense.T)
    rest = curvature - torch.cat([torch.zeros(2, dtype=F64), M.C.d.square().reciprocal()]).diag()
    assert torch.linalg.matrix_rank(rest, rtol=1e-10) == 2
    assert torch.linalg.eigvalsh(rest).min() > -1e-10


@pytest.mark.parametrize("shape", [(1,), (2,), (257,)], ids=str)
@pytest.mark.parametrize("cls", [TrilToeplitzMatrix, TriuToeplitzMatrix], ids=name_of)
def test_R3_toeplitz_against_the_definition(cls: type[StructuredMatrix], shape: tuple[int]) -> None:
    (d,) = shape
    t = normal(d)
    dense = sum(t[k] * torch.diag(torch.ones(d - k, dtype=F64), -k) for k in range(d))
    dense = dense if cls is TrilToeplitzMatrix else dense.T
    M, X = cls(t), normal(d, 3, seed=1)
    assert torch.equal(M.to_dense(), dense)
    torch.testing.assert_close(M.times(X), dense @ X, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(M.adjoint_times(X), dense.T @ X, rtol=1e-12, atol=1e-12)
    gram = dense.T @ dense
    means = torch.stack([gram.diagonal(k).mean() * (2 if k else 1) for k in range(d)])
    torch.testing.assert_close(getattr(M.self_gram(), cls.TENSORS[0]), means, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("d", [1, 2, 3, 31, 32, 33, 70, 300])
@pytest.mark.parametrize("cls", [TrilToeplitzMatrix, TriuToeplitzMatrix], ids=name_of)
def test_R3_toeplitz_by_fft_and_by_strips(cls: type[StructuredMatrix], d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in ((), (2,)):
        t, X = normal(*batch, d), normal(*batch, d, 3, seed=1)
        M, results = cls(t), []
        for fewest in (1, 4):
            monkeypatch.setattr(_strips, "MIN_COLUMNS", fewest)
            assert _strips.worth(X) == (fewest == 1)
            ways = M.times(X), M.adjoint_times(X), cls.gram(X), M.gram_through(X)
            results.append([w if isinstance(w, torch.Tensor) else getattr(w, cls.TENSORS[0]) for w in ways])
        size = max(r.abs().max().item() for r in results[0])
        torch.testing.assert_close(*results, rtol=0, atol=1e-13 * size)
        dense = M.to_dense_blocks()
        torch.testing.assert_close(results[0][:2], [dense @ X, dense.mT @ X], rtol=0, atol=1e-13 * size)


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
