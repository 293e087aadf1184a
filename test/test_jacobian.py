"""The Jacobian, its transpose, and their product, against dense ones."""

from __future__ import annotations

import pickle

import pytest
import torch
from kfac.nets import mlp
from matrix_free_cases import Recurrent, jacobian
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvops import JacobianLinearOperator, NTKLinearOperator, TransposedJacobianLinearOperator
from curvops.testing import check_operator

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def problem(*shape: int):
    model = mlp(4, 5, 3, act=nn.Tanh)
    X = torch.randn(7, *shape, 4)
    return model, {n: p.detach() for n, p in model.named_parameters()}, [(X[:4], None), (X[4:], None)], X


@pytest.mark.parametrize("shape", [(), (2,)])
def test_R1_R2_the_jacobian_and_its_transpose(shape):
    model, params, data, X = problem(*shape)
    J, want = JacobianLinearOperator(model, params, data), jacobian(model, params, X)
    assert J.range == ((7, *shape, 3),)
    torch.testing.assert_close(J.to_dense(), want, **TOLERANCE)
    torch.testing.assert_close(J.T.to_dense(), want.T, **TOLERANCE)
    torch.testing.assert_close(TransposedJacobianLinearOperator(model, params, data).to_dense(), want.T, **TOLERANCE)
    assert J.T.T is J
    v, u = torch.randn(J.shape[1]), torch.randn(J.shape[0])
    torch.testing.assert_close(u @ (J @ v), (J.T @ u) @ v, **TOLERANCE)


def test_R2_the_contract():
    model, params, data, X = problem()
    data = [(X, y) for X, y in zip((X[:4], X[4:]), (torch.zeros(4), torch.zeros(3)), strict=True)]
    for op in (JacobianLinearOperator, TransposedJacobianLinearOperator, NTKLinearOperator):
        check_operator(op(model, params, data))


def test_R1_the_kernel():
    model, params, data, X = problem()
    want = jacobian(model, params, X)
    K = NTKLinearOperator(model, params, data)
    torch.testing.assert_close(K.to_dense(), want @ want.T, **TOLERANCE)
    assert K.symmetric
    with K.cached():
        torch.testing.assert_close(K.to_dense(), want @ want.T, **TOLERANCE)


def test_R1_outputs_of_different_shapes_make_a_flat_range():
    model, params, _, X = problem(4)
    data = [(X[:4], None), (X[4:, :2], None)]
    J = JacobianLinearOperator(model, params, data)
    want = torch.cat([jacobian(model, params, x) for x, _ in data])
    assert J.range == ((len(want),),)
    torch.testing.assert_close(J.to_dense(), want, **TOLERANCE)
    torch.testing.assert_close(J.T.to_dense(), want.T, **TOLERANCE)


def test_R3_recurrent_layers_and_parameters_without_effect():
    model, X = Recurrent(nn.LSTM), torch.randn(3, 2, 4)
    model.idle = nn.Parameter(torch.ones(2))
    leaves = [p for n, p in model.named_parameters()]
    J = JacobianLinearOperator(model, None, [(X, None)])
    rows = [torch.autograd.grad(o, leaves, retain_graph=True, allow_unused=True) for o in model(X).flatten()]
    want = torch.stack(
        [
            torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(r, leaves, strict=True)])
            for r in rows
        ]
    )
    torch.testing.assert_close(J.to_dense(), want, **TOLERANCE)
    torch.testing.assert_close(J @ torch.ones(J.shape[1]), want.sum(1), **TOLERANCE)


def test_R8_cached_through_the_transpose_and_pickled():
    model, params, data, X = problem()
    J, want = JacobianLinearOperator(model, params, data), jacobian(model, params, X)
    transposed = J.T
    with J.cached():
        for _ in range(2):
            torch.testing.assert_close(transposed.to_dense(), want.T, **TOLERANCE)
            torch.testing.assert_close(J.to_dense(), want, **TOLERANCE)
    assert J._cache is None
    torch.testing.assert_close(pickle.loads(pickle.dumps(transposed)).to_dense(), want.T, **TOLERANCE)


def test_R11_what_is_accepted_is_honoured_and_the_random_state_stays():
    model, params, data, X = problem()
    assert JacobianLinearOperator(model, params, data, num_data=7).shape[0] == 21
    with pytest.raises(ValueError, match="num_data: found 8, but the data hold 7"):
        JacobianLinearOperator(model, params, data, num_data=8)
    with pytest.raises(TypeError, match="reduction"):
        JacobianLinearOperator(model, params, data, reduction="sum")
    loader = DataLoader(TensorDataset(X, torch.zeros(7)), batch_size=3)  # draws a seed whenever it is read
    before = torch.get_rng_state()
    with torch.inference_mode():
        J = JacobianLinearOperator(model, params, loader)
        J @ torch.ones(J.shape[1])
        J.T @ torch.ones(J.shape[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_R8_compiled():
    model, params, data, X = problem()
    J, want = JacobianLinearOperator(model, params, data).compiled(backend="aot_eager"), jacobian(model, params, X)
    torch.testing.assert_close(J.T.to_dense(), want.T, **TOLERANCE)
    torch.testing.assert_close(J.to_dense(), want, **TOLERANCE)
    assert pickle.loads(pickle.dumps(J)).linearization == "forward"
