"""Random vectors: unbiased for the Hessian, and a function of (seed, datum, draw, term, entry) only."""

from __future__ import annotations

import pytest
import torch
from losses.loss_cases import CASES, Case, classes, kw, rand, unit
from losses.test_identities import build
from torch import Tensor, nn

from curvops.losses import OutputView, categorical, output_loss

R = 4000
METHODS = ["sample", "signs"]
# Two data, to keep the outer products small: [R, D, D].
SMALL = [case for case in CASES.values() if 0 < case.output[:2].numel() <= 12]


def repeated(case: Case) -> tuple[OutputView, OutputView]:
    """Return the view of two data, and of R copies of them."""
    built = build(case, case.reductions[0])[1]
    x, y = case.output[:2], tuple(t[:2] for t in case.target) if isinstance(case.target, tuple) else case.target[:2]
    copies = tuple(torch.cat([t] * R) for t in y) if isinstance(y, tuple) else torch.cat([y] * R)
    return built.view(x, y), built.view(torch.cat([x] * R), copies)


def dense(view: OutputView) -> Tensor:
    H = torch.block_diag(*view.hessian().flatten(0, 1))
    order = view.layout.join(torch.arange(len(H)).double().reshape(view.N, view.T, view.C)).flatten().long()
    return H[order][:, order]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_A6_draws_are_unbiased(case: Case, method: str) -> None:
    view, copies = repeated(case)
    g = getattr(copies, method)(11, torch.arange(2 * R), 3).reshape(R, -1)
    products = g.unsqueeze(-1) * g.unsqueeze(-2)
    H = dense(view)
    error = products.mean(0) - H
    # The sample misses rare joint events of two data; the variance of products of independent entries is known.
    variance = torch.maximum(products.var(0), torch.outer(H.diag(), H.diag()) * (H == 0))
    assert (error.abs() <= 4 * (variance / R).sqrt() + 1e-12).all()


@pytest.mark.parametrize("method", METHODS)
def test_draws_of_different_numbers_are_uncorrelated(method: str) -> None:
    view, copies = repeated(CASES["ce (4,) smoothing=0.0 weight=False"])
    a, b = (getattr(copies, method)(11, torch.arange(2 * R), d).reshape(R, -1) for d in (0, 1))
    variance = torch.outer(dense(view).diag(), dense(view).diag())
    assert ((a.mT @ b / R).abs() <= 4 * (variance / R).sqrt()).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["mse (2, 3)", "bce both", "ce (3, 2, 1, 2) smoothing=0.3 weight=True", "gauss learned", "callable dense"]
)
def test_A19_draws_do_not_depend_on_how_the_data_are_batched(name: str, method: str) -> None:
    case = CASES[name]
    built = build(case, "mean")[1]
    index = torch.tensor([4, 17, 0, 8, 3, 2**40])
    draw = lambda x, y, i, seed=0, number=0: getattr(built.view(x, y), method)(seed, i, number)  # noqa: E731
    whole = draw(case.output, case.target, index)
    parts = [draw(x, y, i) for (x, y), i in zip(case.batches(), index.split((3, 1, 2)), strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-14)
    order = torch.tensor([5, 2, 0, 1, 4, 3])
    torch.testing.assert_close(draw(case.output[order], case.target[order], index[order]), whole[order])
    for other in (
        draw(case.output, case.target, index + 1),
        draw(case.output, case.target, index, seed=1),
        draw(case.output, case.target, index, number=1),
    ):
        assert not torch.allclose(other, whole)


def test_A6_monte_carlo_of_cross_entropy_is_a_weighted_likelihood_gradient() -> None:
    """sqrt(weight of the actual target) (p - onehot): the sampled label's own weight would miss the Hessian."""
    w, x, y = unit(4) + 0.5, rand(50, 4), classes(4, 50)
    g = output_loss(nn.CrossEntropyLoss(w)).view(x, y).sample(0, torch.arange(50), 0)
    onehot = x.softmax(1) - g / w[y].sqrt().unsqueeze(1)
    torch.testing.assert_close(onehot, nn.functional.one_hot(onehot.argmax(1), 4).double())
    assert len(onehot.argmax(1).unique()) == 4


def test_A6_monte_carlo_of_binary_cross_entropy_is_a_weighted_likelihood_gradient() -> None:
    w, pw, x, y = unit(3) + 0.5, unit(3, seed=3), rand(50, 3), unit(50, 3).round()
    g = output_loss(nn.BCEWithLogitsLoss(weight=w, pos_weight=pw)).view(x, y).sample(0, torch.arange(50), 0)
    label = x.sigmoid() - g / (w * (pw * y + 1 - y)).sqrt()
    torch.testing.assert_close(label, label.round())
    assert label.round().unique().tolist() == [0, 1]


def test_classes_without_probability_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(categorical, "_CHUNK", 4 * 999)  # several chunks of rows
    x = torch.tensor([0.0, -2000.0, 1.0, -2000.0], dtype=torch.float64).expand(20_000, 4)
    g = (
        output_loss(nn.CrossEntropyLoss())
        .view(x, torch.zeros(len(x), dtype=torch.long))
        .sample(0, torch.arange(len(x)), 0)
    )
    drawn = (x.softmax(1) - g).argmax(1)
    assert drawn.unique().tolist() == [0, 2]


def test_inversion_at_the_ends_of_the_unit_interval() -> None:
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).expand(4, 4)
    u = torch.tensor([[0.0], [0.5 - 2**-54], [0.5], [1 - 2**-53]], dtype=torch.float64)
    assert categorical._invert(p, u).flatten().tolist() == [1, 1, 2, 2]


def test_the_data_index_needs_one_entry_per_datum() -> None:
    view = output_loss(kw(nn.MSELoss)("mean")).view(rand(3, 2), rand(3, 2))
    with pytest.raises(ValueError, match=r"data_index has shape \(2,\), expected \(3,\)"):
        view.sample(0, torch.arange(2), 0)
