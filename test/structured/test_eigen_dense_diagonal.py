"""R10: closed forms of the other structures, on blocks of any shape."""

from __future__ import annotations

import io

import pytest
import torch
from operator_cases import F64, eigen, normal, psd

from curvops.structured import Dense, Diagonal, Eigen, Kronecker, Shifted, from_state_dict
from curvops.testing import check_closed_forms, check_operator

BLOCKS = {"domain": ((2, 2), (1,), (5,)), "names": ("a", "b", "c")}


def eigen_with(QB: bool, QA: bool, values: torch.Tensor, **options) -> tuple[Eigen, torch.Tensor]:
    """Return an operator with or without bases, and its matrix."""
    G, o, i = values.shape
    B, A = (torch.linalg.qr(normal(G, n, n, seed=n)).Q.contiguous() for n in (o, i))
    op = Eigen(B if QB else None, A if QA else None, values, **options)
    eye_b, eye_a = torch.eye(o, dtype=F64), torch.eye(i, dtype=F64)
    Q = [torch.kron(B[g] if QB else eye_b, A[g] if QA else eye_a) for g in range(G)]
    return op, torch.block_diag(*(q @ v.flatten().diag() @ q.T for q, v in zip(Q, values, strict=True)))


@pytest.mark.parametrize("QB", [True, False])
@pytest.mark.parametrize("QA", [True, False])
@pytest.mark.parametrize("G", [1, 3])
def test_R10_eigen(QB: bool, QA: bool, G: int) -> None:
    op, dense = eigen_with(QB, QA, normal(G, 2, 5).square() + 0.1)
    check_closed_forms(op, dense)
    check_operator(op, dense)
    dead = normal(G, 2, 5).square()
    dead[0, 1] = 0.0
    check_closed_forms(*eigen_with(QB, QA, dead), singular=True)


def test_R10_eigen_of_either_sign() -> None:
    values = normal(1, 3, 4)
    values[0, 0, 0] = -1.0
    op, dense = eigen_with(True, True, values)
    torch.testing.assert_close(op.to_dense(), dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op.eigenvalues(), torch.linalg.eigvalsh(dense), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op.det(), torch.linalg.det(dense), rtol=1e-10, atol=1e-12)
    sign, size = torch.linalg.slogdet(dense)
    torch.testing.assert_close(op.slogdet(), (sign, size), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((-3 * op).shift(0.1).trace(), 1.2 - 3 * dense.trace(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(op.inverse().to_dense(), torch.linalg.inv(dense), rtol=1e-9, atol=1e-9)
    for ask in (op.sqrt, lambda: op.sample(2)):
        with pytest.raises(ValueError, match="to the power"):
            ask()
    odd = op if sign < 0 else Eigen(None, None, torch.tensor([[[-1.0, 2.0]]], dtype=F64))
    with pytest.raises(ValueError, match="negative and has no logarithm"):
        odd.logdet()


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_R10_dense(batch: int | None) -> None:
    M = psd(5, batch or 1)
    op = Dense(M if batch else M[0])
    assert op.domain == (((5,) if batch is None else (batch, 5)),)
    dense = torch.block_diag(*M)
    check_closed_forms(op, dense)
    before = M.clone()
    check_closed_forms(Dense(psd(5, 2, rank=1)), torch.block_diag(*psd(5, 2, rank=1)), singular=True)
    assert torch.equal(M, before)


def test_R10_dense_on_blocks() -> None:
    M = psd(5, 2)
    op = Dense(M, **BLOCKS, label="norm")
    check_operator(op, torch.block_diag(*M))
    check_closed_forms(op, torch.block_diag(*M))
    assert op.inverse(0.1).domain_names == BLOCKS["names"]
    with pytest.raises(ValueError, match=r"Got shape \(5, 4\) for the block of 'norm', expected \(n, n\)"):
        Dense(normal(5, 4), label="norm")
    with pytest.raises(ValueError, match="expected 4 entries"):
        Dense(psd(2, 2), **BLOCKS)
    with pytest.raises(ValueError, match="not symmetric for the block of 'norm'"):
        Dense(normal(5, 5), label="norm").logdet()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e8])
def test_R10_diagonal(size: float) -> None:
    d = size * (normal(2, 5).square() + 0.1)
    before = d.clone()
    check_closed_forms(Diagonal(d), d.flatten().diag())
    check_operator(Diagonal(d / size, **BLOCKS), (d / size).flatten().diag())
    assert Diagonal(d).domain == ((2, 5),)
    dead = d.clone()
    dead[0] = 0.0
    check_closed_forms(Diagonal(dead), dead.flatten().diag(), singular=True)
    check_closed_forms(Diagonal(0 * d), 0 * d.flatten().diag(), singular=True)
    for op in (Diagonal(d).inverse(0.1), Diagonal(d).sqrt(), Diagonal(d).shift(1.0), 2 * Diagonal(d)):
        assert isinstance(op, Diagonal)
    assert torch.equal(d, before)


@pytest.mark.parametrize("make", [lambda d: Diagonal(d, label="x"), lambda d: Eigen(None, None, d[None], label="x")])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_R10_non_finite_values_are_named(make, bad: float) -> None:
    """An infinite entry has a finite inverse, which must not hide it."""
    d = torch.ones(2, 3, dtype=F64)
    d[1, 1] = bad
    op = make(d)
    for ask in (lambda: op.inverse(0.1), op.logdet, op.sqrt, op.eigenvalues):
        with pytest.raises(ValueError, match="Found 1 non-finite entries in the block of 'x'"):
            ask()


def test_R10_shapes_of_eigen_are_checked() -> None:
    Q = torch.eye(3, dtype=F64)[None]
    with pytest.raises(ValueError, match=r"Got QA of shape \(1, 3, 3\) for the block of 'x', expected \(1, 4, 4\)"):
        Eigen(None, Q, normal(1, 2, 4), label="x")
    with pytest.raises(ValueError, match=r"Got values \(4,\) for the block of 'x', expected shape \(G, o, i\)"):
        Eigen(None, None, normal(4), label="x")


def test_R10_shifted() -> None:
    K = Kronecker(psd(3, rank=1), psd(4), label="fc")
    dense = torch.kron(K.B[0], K.A[0])
    eye = torch.eye(12, dtype=F64)
    op = K.shift(0.25)
    assert isinstance(op, Shifted)
    check_operator(op, dense + eye / 4)
    check_closed_forms(op, dense + eye / 4)
    again = 2 * op.shift(0.25)
    assert isinstance(again, Shifted)
    assert isinstance(again.base, Kronecker)
    check_closed_forms(again, 2 * dense + eye)
    torch.testing.assert_close((-op).to_dense(), -dense - eye / 4, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op.inverse(0.75, how="factors").to_dense(), torch.linalg.inv(dense + eye))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_R10_narrow_vectors(dtype: torch.dtype) -> None:
    for op in (eigen(), Dense(psd(5)), Diagonal(normal(5).square() + 0.1)):
        dense = op.to_dense()
        narrow = op.to(dtype=dtype)
        assert (narrow.held_dtype, narrow.torch_dtype) == (torch.float32, dtype)
        check_closed_forms(narrow, dense)
        assert narrow.to(dtype=F64).held_dtype == F64


@pytest.mark.parametrize("make", [eigen, lambda: Dense(psd(5, 2), **BLOCKS), lambda: Diagonal(normal(10), **BLOCKS)])
def test_R10_state_dict(make) -> None:
    op = make()
    buffer = io.BytesIO()
    torch.save(op.state_dict(), buffer)
    buffer.seek(0)
    clone = from_state_dict(torch.load(buffer, weights_only=True))
    assert (type(clone), clone.domain, clone.domain_names) == (type(op), op.domain, op.domain_names)
    assert torch.equal(clone.to_dense(), op.to_dense())
