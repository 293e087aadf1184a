"""Every loss x option x shape x reduction against torch's own loss on the whole data set, by autograd."""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from losses.loss_cases import CASES, PARAMS, Case, classes, rand, unit
from torch import Tensor, nn
from torch.autograd.functional import hessian

from curvops.losses import OutputLoss, OutputView, output_loss

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
# torch announces a change of "mean"; what curvops says about losses without curvature is tested in test_interface.py
pytestmark = pytest.mark.filterwarnings("ignore:reduction:UserWarning")


def build(case: Case, reduction: str) -> tuple[Any, OutputLoss]:
    loss = case.make(reduction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of losses without curvature: test_interface.py
        return loss, output_loss(loss, **dict(case.options))


def views(case: Case, reduction: str) -> tuple[list[OutputView], Tensor | float]:
    """Return the views of all batches and what their sum is divided by."""
    built = build(case, reduction)[1]
    assert built.reduction == ("sum" if reduction == "sum" else "mean")
    views = [built.view(x, y) for x, y in case.batches()]
    return views, sum(v.normalizer for v in views) if built.reduction == "mean" else 1.0


def all_columns(view: OutputView) -> Tensor:
    """Return every column of every term, flattened like the output: ``[D, N * T * V]``."""
    columns = []
    for n in range(view.N):
        for t in range(view.T):
            for v in range(view.columns):
                index = torch.full((view.N, view.T), -1)
                index[n, t] = v
                columns.append(view.column(index).flatten())
    return torch.stack(columns, -1)


@pytest.mark.parametrize(("name", "reduction"), PARAMS)
def test_A6_columns_assemble_to_the_hessian_of_the_whole_data_set(name: str, reduction: str) -> None:
    case = CASES[name]
    loss = case.make(reduction)
    batches, Z = views(case, reduction)
    blocks = [R @ R.mT for R in map(all_columns, batches)]
    D = case.output.numel()

    def dense(target: Any) -> Tensor:
        return hessian(lambda x: case.value(loss, x, target), case.output).reshape(D, D)

    expected = dense(case.target)
    if case.second is not None:
        expected = (expected + dense(case.second)) / 2
    torch.testing.assert_close(torch.block_diag(*blocks) / Z, expected, **CLOSE)


@pytest.mark.parametrize(("name", "reduction"), PARAMS)
def test_A6_gradient_and_total_are_those_of_torch(name: str, reduction: str) -> None:
    case = CASES[name]
    loss, built = build(case, reduction)
    batches, Z = views(case, reduction)
    x = case.output.clone().requires_grad_()
    value = case.value(loss, x, case.target)
    (expected,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(torch.cat([v.gradient() for v in batches]) / Z, expected, **CLOSE)
    total = sum(
        built.total(o, y) for o, y in zip(x.split([v.N for v in batches]), [y for _, y in case.batches()], strict=True)
    )
    torch.testing.assert_close(total / Z, value, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(total / Z, x)[0], expected, **CLOSE)


@pytest.mark.parametrize(("name", "reduction"), PARAMS)
def test_columns_roots_and_dense_hessians_agree(name: str, reduction: str) -> None:
    for view in views(CASES[name], reduction)[0]:
        N, T, C, V = view.N, view.T, view.C, view.columns
        D = N * T * C
        order = view.layout.join(torch.arange(D).double().reshape(N, T, C)).flatten().long()
        H = torch.block_diag(*view.hessian().reshape(N * T, C, C))
        R = all_columns(view)
        torch.testing.assert_close(R @ R.mT, H[order][:, order], rtol=1e-9, atol=1e-11)
        for v in range(V):
            eps = torch.zeros(N, T, V, dtype=torch.float64)
            eps[..., v] = 1
            index = torch.full((N, T), v)
            torch.testing.assert_close(view.root(eps), view.column(index), rtol=0, atol=1e-14)
        eps = rand(N, T, V)
        torch.testing.assert_close(view.root(eps).flatten(), R @ eps.flatten(), **CLOSE)
        assert not view.column(torch.full((N, T), -1)).any()


@pytest.mark.parametrize(("name", "reduction"), PARAMS)
def test_R1_products_are_those_of_the_dense_hessian(name: str, reduction: str) -> None:
    for view in views(CASES[name], reduction)[0]:
        V = rand(3, *view.layout.shape, seed=11)
        # The definition is what views without a product of their own inherit.
        want = view.layout.join_columns(OutputView._product(view, view.layout.split_columns(V)))
        torch.testing.assert_close(view.product(V), want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_pick_keeps_terms(name: str) -> None:
    case = CASES[name]
    view = views(case, case.reductions[0])[0][0]
    values = rand(*view.layout.shape)
    values.flatten()[0] = torch.nan
    terms = torch.zeros(view.N, view.T, dtype=torch.bool)
    terms[1, -1] = True
    assert view.column(torch.zeros(view.N, view.T, dtype=torch.long)).shape == values.shape
    expected = torch.zeros(view.N, view.T, view.C, dtype=torch.float64)
    expected[1, -1] = view.layout.split(values)[1, -1]
    assert view.pick(values, terms).equal(view.layout.join(expected))


def test_what_a_term_is() -> None:
    """The position of a term's entries in the output, spelled out once without the code under test."""
    x = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
    view = output_loss(nn.CrossEntropyLoss()).view(x, torch.zeros(2, 4, dtype=torch.long))
    assert (view.N, view.T, view.C, view.columns) == (2, 4, 3, 2)
    assert view.pick(x, torch.eye(4, dtype=torch.bool)[:2]).nonzero().tolist() == [
        *[[0, c, 0] for c in (1, 2)],  # x[0, 0, 0] is 0
        *[[1, c, 1] for c in range(3)],
    ]
    view = output_loss(nn.MSELoss()).view(x, x)
    assert (view.N, view.T, view.C, view.columns) == (2, 3, 4, 4)
    view = output_loss(nn.MSELoss()).view(x[0, 0], x[0, 0])
    assert (view.N, view.T, view.C, view.columns) == (4, 1, 1, 1)
    view = output_loss(lambda x, y: (x - y).sum()).view(x, x)
    assert (view.N, view.T, view.C, view.columns) == (2, 1, 12, 12)


@settings(max_examples=40)
@given(
    C=st.integers(1, 5),
    inner=st.lists(st.integers(1, 3), max_size=2),
    ignore=st.integers(-2, 4),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_A6_cross_entropy_with_anything(C, inner, ignore, smoothing, weighted, seed, scale) -> None:
    shape = (6, C, *inner)
    target = classes(C, 6, *inner, seed=seed)
    if not (target != ignore).any():
        return  # torch's mean is 0 / 0
    weight = unit(C, seed=seed) + 0.01 if weighted else None
    make = lambda r: nn.CrossEntropyLoss(weight, ignore_index=ignore, label_smoothing=smoothing, reduction=r)  # noqa: E731
    case = Case("", make, rand(*shape, seed=seed, scale=scale), target)
    batches, Z = views(case, "mean")
    H = hessian(lambda x: make("mean")(x, target), case.output).reshape(case.output.numel(), -1)
    R = torch.block_diag(*[all_columns(v) for v in batches])
    torch.testing.assert_close(R @ R.mT / Z, H, rtol=1e-9, atol=1e-12)


def test_A6_ignored_terms_are_exactly_zero() -> None:
    x, y = rand(2, 3, 4), classes(3, 2, 4)
    y[0, 1] = y[1, 3] = -100
    ignored = (y == -100).unsqueeze(1).expand_as(x)
    weight = unit(3)
    for smoothing in (0.0, 0.5):
        view = output_loss(nn.CrossEntropyLoss(weight, label_smoothing=smoothing)).view(x, y)
        i = torch.arange(2)
        for vector in (
            view.gradient(), view.sample(0, i, 0), view.signs(0, i, 0), view.column(torch.zeros(2, 4).long()),
            view.root(rand(2, 4, 2)),
        ):  # fmt: skip
            assert not vector[ignored].any()
            assert (vector[~ignored] != 0).any()


def test_saturated_classes_keep_their_digits() -> None:
    """p (1 - p) of a class with p close to 1, in float32."""
    x = torch.tensor([[0.0, 3.0, 20.0, -60.0], [-800.0, 800.0, 0.0, 0.0]])
    view = output_loss(nn.CrossEntropyLoss()).view(x, torch.zeros(2, dtype=torch.long))
    R = torch.stack([view.column(torch.full((2, 1), j)) for j in range(3)], -1).double()
    H = R @ R.mT
    e = x[0].double().exp()
    p, rest = e / e.sum(), 1 - torch.eye(4, dtype=torch.float64)
    exact = torch.diag(p * (rest @ e) / e.sum()) - rest * torch.outer(p, p)
    torch.testing.assert_close(H[0], exact, rtol=1e-5, atol=1e-37)
    assert not H[1].any()


def test_saturated_logits_keep_their_digits() -> None:
    x = torch.tensor([[30.0, -30.0, 90.0]])
    view = output_loss(nn.BCEWithLogitsLoss()).view(x, torch.ones(1, 3))
    exact = x.double().sigmoid() * (-x.double()).sigmoid()
    torch.testing.assert_close(view.column(torch.zeros(1, 1).long())[0, 0] ** 2, exact[0, 0].float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.diagonal(view.hessian()[0, 0])[:2].double(), exact[0, :2], rtol=1e-5, atol=0)
    torch.testing.assert_close(view.gradient().double(), -(-x.double()).sigmoid(), rtol=1e-5, atol=1e-37)
