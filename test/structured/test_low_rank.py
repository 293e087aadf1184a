"""R10: closed forms of a low-rank matrix plus a multiple of the identity."""

from __future__ import annotations

import io

import pytest
import torch
from operator_cases import F64, normal

from curvops._algebra import Identity
from curvops.structured import LowRank, from_state_dict
from curvops.testing import check_closed_forms, check_operator


def low_rank(n: int, r: int, rest: float = 0.0, **options: object) -> tuple[LowRank, torch.Tensor]:
    """Return an operator and its matrix, assembled from all eigenvectors."""
    Q = torch.linalg.qr(normal(n, n)).Q
    values = normal(n, seed=1).square() + 0.1
    values[r:] = rest
    return LowRank(Q[:, :r], values[:r], rest, **options), (Q * values) @ Q.T


@pytest.mark.parametrize(("n", "r"), [(9, 3), (9, 0), (9, 9), (1, 1), (1, 0), (7, 6)])
@pytest.mark.parametrize("rest", [0.0, 0.7])
def test_R10_low_rank(n: int, r: int, rest: float) -> None:
    op, dense = low_rank(n, r, rest)
    check_operator(op, dense)
    if n > r or rest:
        check_closed_forms(op, dense, singular=rest == 0 and r < n)
    torch.testing.assert_close(op.shift(0.3).shift(-0.1).to_dense(), dense + 0.2 * torch.eye(n, dtype=F64))


def test_R10_low_rank_keeps_its_form() -> None:
    op, dense = low_rank(9, 3, domain=((2, 2), (5,)), names=("a", "b"))
    eye = torch.eye(9, dtype=F64)
    for text, A, N in (
        ("shift", op.shift(0.5), dense + 0.5 * eye),
        ("plus identity", op + 0.5 * Identity(op), dense + 0.5 * eye),
        ("identity plus", 0.5 * Identity(op) + op, dense + 0.5 * eye),
        ("scaled", -2 * op, -2 * dense),
        ("inverse", op.inverse(0.2), torch.linalg.inv(dense + 0.2 * eye)),
        ("power", op.shift(0.5).power(-2), torch.linalg.matrix_power(torch.linalg.inv(dense + 0.5 * eye), 2)),
    ):
        assert isinstance(A, LowRank), text
        assert A.domain_names == ("a", "b")
        torch.testing.assert_close(A.to_dense(), N, rtol=1e-10, atol=1e-10)
    check_operator(op, dense)
    back = op.inverse(1e-8).inverse()  # small eigenvalues survive a huge multiple of the identity
    torch.testing.assert_close(back.shift(-1e-8).to_dense(), dense, rtol=1e-12, atol=1e-12)


def test_R10_low_rank_never_forms_a_large_matrix() -> None:
    n = 200_000
    U = torch.linalg.qr(normal(n, 3)).Q
    op = LowRank(U, torch.tensor([3.0, 2.0, 1.0], dtype=F64))
    damped = op.shift(0.1)
    expected = torch.tensor([3.1, 2.1, 1.1], dtype=F64).log().sum() + (n - 3) * torch.tensor(0.1, dtype=F64).log()
    torch.testing.assert_close(damped.logdet(), expected, rtol=1e-12, atol=0)
    x = normal(n)
    torch.testing.assert_close(damped.inverse() @ (damped @ x), x, rtol=1e-9, atol=1e-9)
    assert damped.sample(2).shape == (2, n)
    torch.testing.assert_close(damped.diagonal().sum(), damped.trace(), rtol=1e-10, atol=0)


def test_R10_low_rank_of_either_sign() -> None:
    Q = torch.linalg.qr(normal(6, 2)).Q
    op = LowRank(Q, torch.tensor([-2.0, 1.0], dtype=F64), 0.5)
    dense = op.to_dense()
    sign, size = torch.linalg.slogdet(dense)
    torch.testing.assert_close(op.slogdet(), (sign, size), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(op.eigenvalues(), torch.linalg.eigvalsh(dense), rtol=1e-10, atol=1e-12)
    for ask in (op.sqrt, lambda: op.sample(2)):
        with pytest.raises(ValueError, match="to the power"):
            ask()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_R10_low_rank_in_other_dtypes(dtype: torch.dtype) -> None:
    op, dense = low_rank(9, 3, 0.5)
    op, dense = op / 4, dense / 4
    check_operator(op.to(dtype=dtype), dense, rtol=20 * torch.finfo(dtype).eps)


def test_R10_low_rank_state() -> None:
    op, dense = low_rank(9, 3, 0.5, domain=((2, 2), (5,)), names=("a", "b"), label="sketch")
    buffer = io.BytesIO()
    torch.save(op.state_dict(), buffer)
    buffer.seek(0)
    loaded = from_state_dict(torch.load(buffer, weights_only=True))
    assert isinstance(loaded, LowRank)
    assert loaded.label == "sketch"
    check_operator(loaded, dense)


def test_bad_input() -> None:
    Q = torch.linalg.qr(normal(6, 2)).Q
    with pytest.raises(ValueError, match=r"expected \(N, r\) and \(r,\) with r <= N"):
        LowRank(Q.T, torch.ones(6, dtype=F64))
    with pytest.raises(ValueError, match="expected"):
        LowRank(Q, torch.ones(3, dtype=F64))
    with pytest.raises(ValueError, match="Cannot invert the block of 'sketch': it is singular"):
        LowRank(Q, torch.ones(2, dtype=F64), label="sketch").inverse()
    with pytest.raises(ValueError, match="non-finite"):
        LowRank(Q, torch.tensor([1.0, torch.nan], dtype=F64)).inverse(0.1)
