"""R3: matrices of a space closed under products: projection law, closure, dense twins, dimensions, dtypes, refusals."""

from __future__ import annotations

import pytest
import torch
from operator_cases import F64, normal
from structured.structure_cases import CLASSES, SIZES, ToeplitzBelowBlocks, dims_of, drawn, name_of

from curvops._check_structure import basis
from curvops._operator import LinearOperator
from curvops.structured import (
    Block30DiagonalMatrix,
    DenseMatrix,
    DiagonalMatrix,
    StructuredMatrix,
    TrilToeplitzMatrix,
    TriuToeplitzMatrix,
    structure,
    triangular,
)
from curvops.testing import check_operator, check_structure


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


@pytest.mark.parametrize("name", ["hierarchical15_15", "hierarchical3_2", "rank1", "rank5"])
def test_R3_moments_through_projections(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``Π(M' S M)`` is a function of ``Π(S)``, many columns are looked at once, and not multiplied."""
    cls = structure(name)
    assert cls.PROJECTS
    assert not any(c.PROJECTS for c in (ToeplitzBelowBlocks, structure("trilbottomrightdiag")))
    for dim in dims_of(cls):
        for batch in ((), (2,)):
            M, X = drawn(cls, dim, batch), normal(*batch, dim, 7)
            expected = M.gram_through(X)
            with monkeypatch.context() as patch:
                patch.setattr(triangular, "FEW", -1)
                found = M.gram_through(X)
            for n, t in found.named_tensors().items():
                assert t.is_contiguous()
                torch.testing.assert_close(t, expected.named_tensors()[n], rtol=1e-12, atol=1e-12 * max(dim, 1))
    M, X = drawn(cls, 40), normal(40, 4000)  # many, as they are
    expected = cls.gram(M.adjoint_times(X)).to_dense()
    torch.testing.assert_close(M.gram_through(X).to_dense(), expected, rtol=1e-12, atol=1e-9)
