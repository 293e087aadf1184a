"""R9: sums, multiples, products and parts stay in torch, and linear queries pass through them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from operator_cases import F64, Matrix, direct_sum, normal, psd

from curvops._algebra import Block, Converted, Identity, Product, Scaled, SubmatrixLinearOperator, Sum
from curvops.structured import Dense, Diagonal, DirectSum, Kronecker, Shifted


def blocked(M: torch.Tensor, names: tuple[str, ...] | None = None, **options) -> Matrix:
    shapes = ((2, 3), (4,))
    return Matrix(M, shapes, shapes, domain_names=names, range_names=names, **options)


def test_R9_linear_queries_pass_through_without_products() -> None:
    class Known(Dense):
        def _apply(self, V):
            raise AssertionError("a closed form was not used")

    A, B = Known(psd(6)[0]), Known(psd(6, seed=1)[0])
    op = -(Sum(A, B) / 2 - 3 * Scaled(A, -1.0)) + 0.5 * Identity(A)
    M = -((A.M[0] + B.M[0]) / 2 + 3 * A.M[0]) + 0.5 * torch.eye(6, dtype=F64)
    torch.testing.assert_close(op.to_dense(), M, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op.diagonal(), M.diagonal(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(op.trace(), M.trace(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((-2 * A).frobenius_norm(), 2 * A.M.norm(), rtol=1e-12, atol=1e-12)


def test_R9_product_to_dense_needs_the_columns_of_one_factor() -> None:
    A, B = Matrix(normal(3, 5)), Matrix(normal(5, 4))
    torch.testing.assert_close((A @ B).to_dense(), A.M @ B.M, rtol=1e-12, atol=1e-12)
    assert (A.calls, B.calls) == (1, 1)


def test_R9_powers_of_symmetric_operators_are_symmetric() -> None:
    A, B = Dense(psd(5)[0]), Dense(psd(5, seed=1)[0])
    assert (A**3).symmetric
    cube = A**3
    assert cube.T is cube
    torch.testing.assert_close(cube.to_dense(), A.M[0] @ A.M[0] @ A.M[0], rtol=1e-12, atol=1e-12)
    assert not (A @ B).symmetric
    torch.testing.assert_close((A @ B).T.to_dense(), B.M[0] @ A.M[0], rtol=1e-12, atol=1e-12)
    M = Matrix(normal(5, 5))
    assert not (M**2).symmetric
    torch.testing.assert_close((M**2).T.to_dense(), (M.M @ M.M).T, rtol=1e-12, atol=1e-12)
    assert isinstance(A**0, Identity)
    assert A**1 is A
    assert isinstance(A ** np.int64(2), Product)


@pytest.mark.parametrize("scalar", [2, 2.0, np.float32(2), np.array(2.0), np.int64(2), torch.tensor(2), True + True])
def test_R9_scalars_keep_the_dtype(scalar: object) -> None:
    op = Matrix(normal(3, 4, dtype=torch.float32))
    for A in (scalar * op, op * scalar, op / (1 / scalar), op.dot(scalar)):
        assert (A.torch_dtype, A.dtype) == (torch.float32, np.float32)
        torch.testing.assert_close(A.to_dense(), 2 * op.M)


def test_R9_division_by_an_integer_tensor_is_exact_in_float64() -> None:
    """1 / torch.tensor(3) has the default dtype, which would cost half of the digits."""
    op = Matrix(normal(3, 4))
    for A in (op / torch.tensor(3), op / 3, op / torch.tensor(3.0)):
        torch.testing.assert_close(A.to_dense(), op.M / 3, rtol=1e-15, atol=0)
    with pytest.raises(ZeroDivisionError):
        op / 0


def test_R9_operands_that_do_not_fit() -> None:
    ab, ba = ("a", "b"), ("b", "a")
    A = blocked(normal(10, 10), ab)
    with pytest.raises(ValueError, match=re.escape("('a', 'b') and ('b', 'a'); give both the same order")):
        A + blocked(normal(10, 10), ba)
    with pytest.raises(ValueError, match="same order"):
        A @ blocked(normal(10, 10), ba)
    with pytest.raises(ValueError, match="expected the same shapes"):
        A + Matrix(normal(10, 10), ((3, 2), (4,)), ((3, 2), (4,)))
    with pytest.raises(ValueError, match="expected the same shapes"):
        A @ Matrix(normal(9, 10))
    with pytest.raises(TypeError, match=r"torch\.float64 on cpu and torch\.float32 on cpu. Convert one with"):
        A + blocked(normal(10, 10, dtype=torch.float32))
    with pytest.raises(TypeError, match="Cannot multiply operators"):
        A @ blocked(normal(10, 10), ab).to(dtype=torch.float32)


def test_R9_a_flat_block_meets_every_cut() -> None:
    A, B = blocked(normal(10, 10), ("a", "b")), Dense(psd(10)[0])
    x = {"a": normal(2, 3), "b": normal(4, seed=1)}
    flat = torch.cat([v.flatten() for v in x.values()])
    for op, M in (
        (A + B, A.M + B.M[0]),
        (B + A, A.M + B.M[0]),
        (A @ B @ A, A.M @ B.M[0] @ A.M),
        (B.shift(0.5) - A, B.M[0] + 0.5 * torch.eye(10, dtype=F64) - A.M),
        (A + 2 * Identity(10, dtype=F64), A.M + 2 * torch.eye(10, dtype=F64)),
    ):
        answer = op @ x
        assert tuple(answer) == ("a", "b")
        torch.testing.assert_close(torch.cat([v.flatten() for v in answer.values()]), M @ flat, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(op.T @ flat, M.T @ flat, rtol=1e-12, atol=1e-12)


def test_R9_structure_survives_shift_and_scale() -> None:
    op, dense = direct_sum()
    eye = torch.eye(65, dtype=F64)
    for A, M in (
        (op.shift(0.5), dense + eye / 2),
        (op + 0.5 * Identity(op), dense + eye / 2),
        (3 * op, 3 * dense),
        ((3 * op + Identity(op)) / 2, 1.5 * dense + eye / 2),
    ):
        assert isinstance(A, DirectSum)
        torch.testing.assert_close(A.logdet(), M.logdet(), rtol=1e-12, atol=1e-12)
    K = Kronecker(psd(3), psd(4))
    assert isinstance(2 * K, Kronecker)
    assert isinstance(K + 0.5 * Identity(K), Shifted)
    assert isinstance(2 * Diagonal(normal(4)), Diagonal)
    assert isinstance(Diagonal(normal(4)).shift(2.0), Diagonal)


def test_R9_a_negative_multiple_is_no_longer_positive() -> None:
    """Closed forms that clamp eigenvalues at zero must not be asked of it."""
    for K in (Kronecker(psd(3), psd(4)), Dense(psd(5)[0])):
        M = K.to_dense()
        A = -K
        torch.testing.assert_close(A.to_dense(), -M, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(A.trace(), -M.trace(), rtol=1e-12, atol=1e-12)
        with pytest.raises(NotImplementedError, match="eigenvalues"):
            A.eigenvalues()
    op, M = direct_sum()
    torch.testing.assert_close((-op).to_dense(), -M, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match="logdet"):
        (-op).logdet()


def test_R9_submatrix() -> None:
    M = Matrix(normal(9, 8))
    rows, cols = [7, 0, 3], [5, 2]
    op = SubmatrixLinearOperator(M, rows, cols)
    torch.testing.assert_close(op.to_dense(), M.M[rows][:, cols], rtol=1e-15, atol=0)
    torch.testing.assert_close(op.T.to_dense(), M.M[rows][:, cols].T, rtol=1e-15, atol=0)
    assert SubmatrixLinearOperator(M, [], cols).shape == (0, 2)
    assert SubmatrixLinearOperator(M, np.array([1, 2]), torch.tensor([0])).shape == (2, 1)
    for bad, text in (
        ([0, 0], "repeated row indices"),
        ([9], "out of bounds, expected 0 <= index < 9"),
        ([-1], "out of bounds"),
        ([0.5], "expected a list of integers"),
        ([True, False], "expected a list of integers"),
        ([[0, 1]], "expected a list of integers"),
    ):
        with pytest.raises(ValueError, match=text):
            SubmatrixLinearOperator(M, bad, cols)


def test_R9_block_by_name_and_position() -> None:
    A = blocked(normal(10, 10), ("a", "b"))
    for key, at in (("a", slice(0, 6)), (0, slice(0, 6)), ("b", slice(6, 10)), (1, slice(6, 10))):
        op = A.block(key)
        assert isinstance(op, Block)
        assert (op.domain, op.domain_names) == ((A.domain[op._at],), (A.domain_names[op._at],))
        torch.testing.assert_close(op.to_dense(), A.M[at, at], rtol=1e-15, atol=0)
        torch.testing.assert_close(op.T.to_dense(), A.M[at, at].T, rtol=1e-15, atol=0)
    with pytest.raises(ValueError, match="Got the block 'c', expected one of"):
        A.block("c")
    with pytest.raises(ValueError, match="same blocks on both sides"):
        Matrix(normal(3, 4)).block(0)


def test_R9_identity() -> None:
    op, _ = direct_sum()
    eye = Identity(op)
    assert (eye.domain, eye.domain_names) == (op.domain, op.domain_names)
    x = [normal(*s) for s in op.domain]
    assert all(torch.equal(a, b) for a, b in zip(eye @ x, x, strict=True))
    assert Identity(op, dtype=torch.float32).torch_dtype == torch.float32
    with pytest.raises(TypeError, match="needs a dtype"):
        Identity(3)
    with pytest.raises(ValueError, match="expected a square one"):
        Identity(Matrix(normal(3, 4)))


def test_R9_conversion_without_moving_the_operator() -> None:
    A = Matrix(normal(3, 4))
    narrow = A.to(dtype=torch.float32)
    assert isinstance(narrow, Converted)
    assert A.to("cpu") is A
    assert narrow.to(dtype=F64) is A
    assert A.to(torch.float32).torch_dtype == torch.float32
    x = normal(4, dtype=torch.float32)
    torch.testing.assert_close(narrow @ x, (A.M @ x.double()).float(), rtol=0, atol=0)
    K = Kronecker(psd(3), psd(4))
    for op in (
        2 * A.T,
        A @ A.T,
        A + A,
        SubmatrixLinearOperator(A, [0], [1]),
        Identity(A @ A.T),
        K - K,
        (K - K).block(0),
        -K,
    ):
        torch.testing.assert_close(op.to(dtype=torch.float32).to_dense(), op.to_dense().float())
