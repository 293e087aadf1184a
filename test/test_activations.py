"""Curvature in activations, against dense derivatives of the rest of the model."""

from __future__ import annotations

import pytest
import torch
from kfac.oracle import output_hessian
from kfac.photograph import state
from torch import nn
from torch.func import jacrev
from torch.utils.data import DataLoader, TensorDataset

from curvops import ActivationGGNLinearOperator, ActivationHessianLinearOperator
from curvops.testing import check_operator

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def problem(reduction="mean"):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3))
    X, y = torch.randn(5, 4), torch.randint(3, (5,))
    loss = nn.CrossEntropyLoss(reduction=reduction, weight=torch.tensor([1.0, 2.0, 0.5]))
    return model, loss, [(X[:2], y[:2]), (X[2:], y[2:])], X, y


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("activation", "cut"), [("1", 2), ("2", 3), (("2", "input"), 2), ("4", 5)])
def test_R1_hessian_and_ggn_in_an_activation(activation, cut, reduction):
    model, loss, data, X, y = problem(reduction)
    a = model[:cut](X).detach()
    rest = lambda a: model[cut:](a.reshape(5, -1))  # noqa: E731
    H = jacrev(jacrev(lambda a: loss(rest(a), y)))(a.flatten()).detach()
    J = jacrev(lambda a: rest(a).flatten())(a.flatten()).detach()
    G = J.T @ output_hessian(loss, rest(a), y) @ J
    for kind, want in ((ActivationHessianLinearOperator, H), (ActivationGGNLinearOperator, G)):
        op = kind(model, loss, activation, data)
        assert op.domain == (tuple(a.shape),)
        torch.testing.assert_close(op.to_dense(), want, **TOLERANCE)
        with op.cached():
            for _ in range(2):
                torch.testing.assert_close(op.to_dense(), want, **TOLERANCE)


def test_R2_the_contract():
    model, loss, data, _, _ = problem()
    for kind in (ActivationHessianLinearOperator, ActivationGGNLinearOperator):
        check_operator(kind(model, loss, "1", data))


def test_no_hook_is_left_behind_and_bad_names_are_refused():
    model, loss, data, _, _ = problem()
    before = state(model)
    with pytest.raises(ValueError, match="expected a module of the model or its name"):
        ActivationGGNLinearOperator(model, loss, "nothing", data)
    twice = nn.Sequential(model[1], model[1])
    with pytest.raises(ValueError, match="more than once"):
        ActivationGGNLinearOperator(nn.Sequential(model[0], twice, model[2:]), loss, "1.0", data)
    op = ActivationHessianLinearOperator(model, loss, "1", data)
    with op.cached():
        op @ torch.ones(op.shape[1])
    assert state(model) == before
    for wrong in (nn.Tanh(), ("1", "inside"), 3, ("1",)):
        with pytest.raises(ValueError, match="activation: found"):
            ActivationGGNLinearOperator(model, loss, wrong, data)
    for right in (model[1], (model[1], "output")):
        torch.testing.assert_close(ActivationHessianLinearOperator(model, loss, right, data).to_dense(), op.to_dense())
    with pytest.raises(TypeError, match="module"):
        ActivationGGNLinearOperator(lambda p, x: x, loss, "1", data)


def test_R11_what_is_accepted_is_honoured_and_nothing_of_the_users_is_touched():
    model, loss, _, X, y = problem()
    model.insert(1, nn.BatchNorm1d(5))  # its statistics would move in train mode
    loader = DataLoader(TensorDataset(X, y), batch_size=3)  # draws a seed whenever it is read
    before = state(model)
    for kind in (ActivationHessianLinearOperator, ActivationGGNLinearOperator):
        op = kind(model, loss, "2", loader, allow_train_mode=True)
        with torch.inference_mode():
            op @ torch.ones(op.shape[1])
        wrong = kind(model, loss, "2", loader, allow_train_mode=True, num_data=6)
        with pytest.raises(ValueError, match="num_data: found 6, but the data hold 5"):
            wrong @ torch.ones(wrong.shape[1])
        assert not hasattr(op, "compiled")  # nothing that would be ignored
    assert state(model) == before


def test_a_mean_over_ignored_targets_is_refused():
    model, _, data, _, _ = problem()
    data = [(X, torch.full_like(y, -100)) for X, y in data]
    op = ActivationGGNLinearOperator(model, nn.CrossEntropyLoss(), "1", data)
    with pytest.raises(ValueError, match="divides by 0"):
        op @ torch.ones(op.shape[1])
