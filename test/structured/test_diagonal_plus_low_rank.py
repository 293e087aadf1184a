"""R3: a diagonal plus a matrix of low rank: closed forms by Woodbury and the determinant lemma."""

from __future__ import annotations

import io

import pytest
import torch
from operator_cases import F64, normal

from curvops._algebra import Identity
from curvops.structured import DiagonalPlusLowRank, from_state_dict
from curvops.testing import check_closed_forms, check_operator


def case(n: int, r: int, sign: int = 1, dtype: torch.dtype = F64, **options: object) -> tuple:
    d, U = normal(n).square() + 1, normal(n, r, seed=1) / (2 * n) ** 0.5
    op = DiagonalPlusLowRank(d.to(dtype), U.to(dtype) * (1 if sign > 0 else 0.4), sign, **options)
    U = op.U.double()
    return op, op.d.double().diag() + sign * U @ U.T


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("n", "r"), [(9, 3), (9, 0), (9, 9), (4, 7), (1, 1), (1, 0)])
def test_R3_diagonal_plus_low_rank(n: int, r: int, sign: int) -> None:
    op, dense = case(n, r, sign)
    check_operator(op, dense)
    check_closed_forms(op, dense)


@pytest.mark.parametrize("sign", [1, -1])
def test_R3_diagonal_plus_low_rank_keeps_its_form(sign: int) -> None:
    op, dense = case(9, 3, sign, domain=((2, 2), (5,)), names=("a", "b"))
    eye = torch.eye(9, dtype=F64)
    for text, A, N in (
        ("shift", op.shift(0.5), dense + 0.5 * eye),
        ("shift down", op.shift(-0.1), dense - 0.1 * eye),
        ("plus identity", op + 0.5 * Identity(op), dense + 0.5 * eye),
        ("scaled", 2 * op, 2 * dense),
        ("inverse", op.inverse(0.2), torch.linalg.inv(dense + 0.2 * eye)),
        ("inverse of the inverse", op.inverse().inverse(0.1), torch.linalg.inv(torch.linalg.inv(dense) + 0.1 * eye)),
    ):
        assert isinstance(A, DiagonalPlusLowRank), text
        assert A.domain_names == ("a", "b")
        torch.testing.assert_close(A.to_dense(), N, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(A.logdet(), torch.logdet(N), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(A.frobenius_norm(), N.norm(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close((-op).to_dense(), -dense)
    torch.testing.assert_close(op.shift(-5.0).to_dense(), dense - 5 * eye)


def test_R3_diagonal_plus_low_rank_never_forms_a_large_matrix() -> None:
    n = 200_000
    d, U = normal(n).square() + 0.1, normal(n, 3, seed=1) / n**0.5
    op, x = DiagonalPlusLowRank(d, U), normal(n, seed=2)
    torch.testing.assert_close(op.inverse(0.1) @ (op.shift(0.1) @ x), x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(op.inverse(0.1).logdet(), -op.shift(0.1).logdet(), rtol=1e-10, atol=0)
    torch.testing.assert_close(op.diagonal().sum(), op.trace(), rtol=1e-10, atol=0)
    assert op.frobenius_norm() > d.norm()
    assert op.sample(2).shape == (2, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_R3_diagonal_plus_low_rank_in_other_dtypes(dtype: torch.dtype) -> None:
    op, dense = case(9, 3, dtype=dtype)
    check_operator(op, dense)
    check_closed_forms(op, dense)


def test_R3_diagonal_plus_low_rank_state() -> None:
    op, _ = case(9, 3, -1, label="fc")
    buffer = io.BytesIO()
    torch.save(op.state_dict(), buffer)
    buffer.seek(0)
    back = from_state_dict(torch.load(buffer, weights_only=True))
    assert (type(back), back.sign, back.label) == (DiagonalPlusLowRank, -1, "fc")
    assert torch.equal(back.to_dense(), op.to_dense())


def test_R3_diagonal_plus_low_rank_refuses() -> None:
    d, U = torch.ones(4), torch.ones(4, 2)
    for arguments, error, reason in (
        ((d[:3], U), ValueError, r"expected \(N,\) and \(N, r\)"),
        ((d, U[:, 0]), ValueError, r"expected \(N,\) and \(N, r\)"),
        ((d.double(), U), TypeError, "expected the same"),
        ((d, U, 2), ValueError, "expected 1 or -1"),
        ((0 * d, U), ValueError, "not positive"),
        ((d * torch.nan, U), ValueError, "not positive"),
    ):
        with pytest.raises(error, match=reason):
            DiagonalPlusLowRank(*arguments)
    for ask in (DiagonalPlusLowRank(d, U, -1, label="fc").inverse, DiagonalPlusLowRank(d, U, -1, label="fc").logdet):
        with pytest.raises(ValueError, match="not positive definite for the block of 'fc'"):
            ask()
