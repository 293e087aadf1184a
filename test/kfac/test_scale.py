"""Scale: what a sum and a mean differ by, what more of the same data does, and that batches are of no consequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kfac.oracle import relative_error
from kfac.test_fisher_types import merged, table_data, table_kfac, table_model, table_params
from losses.loss_cases import CASES, classes, rand, unit
from torch import Tensor, nn

from curvops import KFACLinearOperator

# torch announces a change of "mean"; losses without curvature warn, which test_silent_errors.py checks
pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*has no second derivative:UserWarning"),
]
KINDS = ["type-2", "mc", "signs", "empirical", "empirical-per-term", "forward-only"]
NOT_RANDOM = ["type-2", "empirical", "empirical-per-term", "forward-only"]
APPROX = ["expand", "reduce"]
BOTH = [name for name, case in CASES.items() if case.reductions == ("mean", "sum")]

WEIGHT = unit(5, seed=60) + 0.2
X = rand(6, 4, 3, seed=63)
# Uneven numbers of valid tokens per datum; the fourth has none.
Y = classes(5, 6, 4, seed=61).masked_fill(unit(6, 4, seed=62) < 0.4, -100).index_fill(0, torch.tensor([3]), -100)


class Attention(nn.Module):
    """Tokens meet between two layers; the last layer sees them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 5)
        for i, p in enumerate(self.parameters()):
            p.data = rand(*p.shape, seed=70 + i)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(((h @ h.mT).softmax(-1) @ h).tanh())


def attention(
    kind: str, approx: str, batches: Sequence[int] = (2, 1, 3), *, x: Tensor = X, y: Tensor = Y, reduction: str = "mean"
) -> KFACLinearOperator:
    data = list(zip(x.split(batches), y.split(batches), strict=True))
    loss = nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, reduction=reduction)
    return KFACLinearOperator(
        Attention(), loss, None, data, class_dim=-1, fisher_type=kind, kfac_approx=approx, mc_samples=2
    )


def difference(K: KFACLinearOperator, L: KFACLinearOperator, factor: float = 1.0) -> float:
    """Return how far ``K`` is from ``factor L``, in the worst block: they may differ in size."""
    return max(relative_error(K.block(n).to_dense(), factor * L.block(n).to_dense()) for n in K.domain_names)


# ---- sum and mean ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BOTH)
def test_R5_a_sum_is_the_mean_times_what_torch_divides_by(name: str) -> None:
    case = CASES[name]
    out = table_model(table_params(case), merged(table_data(case))[0])
    total, mean = (float(case.value(case.make(r), out, case.target)) for r in ("sum", "mean"))
    for kind in ("type-2", "mc", "empirical"):
        K, L = (table_kfac(case, reduction=r, fisher_type=kind) for r in ("sum", "mean"))
        factor = total / mean if total else 1.0
        if kind == "empirical" and name in ("soft margin", "bce of probabilities"):
            # To a callable, a datum's loss is what it is: its gradient has the 1 / C, and is squared.
            factor = factor**2 / len(out)
        assert difference(K, L, factor) < 1e-12


@pytest.mark.parametrize("approx", APPROX)
@pytest.mark.parametrize("kind", KINDS)
def test_R5_sum_and_mean_of_every_kind(kind: str, approx: str) -> None:
    """A valid token counts as much as its class weighs; the output factors of "forward-only" have no scale."""
    total, mean = (attention(kind, approx, reduction=r) for r in ("sum", "mean"))
    factor = 1.0 if kind == "forward-only" else float(WEIGHT[Y[Y >= 0]].sum())
    assert difference(total, mean, factor) < 1e-12
    for name, block in mean.factors.items():
        assert torch.equal(total.factors[name].input, block.input)


@pytest.mark.parametrize("approx", APPROX)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("loss", "entries"), [(nn.MSELoss, 5), (nn.BCEWithLogitsLoss, 5), (nn.CrossEntropyLoss, 1)])
def test_R5_a_sum_is_N_R_C_times_the_mean(loss: type, entries: int, kind: str, approx: str) -> None:
    """N = 6 data of R = 4 tokens; C entries of a token count for MSE and BCE."""
    y = classes(5, 6, 4) if entries == 1 else unit(6, 4, 5)
    data = list(zip(X.split((2, 1, 3)), y.split((2, 1, 3)), strict=True))
    options = {"fisher_type": kind, "kfac_approx": approx} | ({"class_dim": -1} if entries == 1 else {})
    K, L = (KFACLinearOperator(Attention(), loss(reduction=r), None, data, **options) for r in ("sum", "mean"))
    assert difference(K, L, 1 if kind == "forward-only" else 6 * 4 * entries) < 1e-12


# ---- more data ------------------------------------------------------------------------------------
@pytest.mark.parametrize("approx", APPROX)
@pytest.mark.parametrize("kind", NOT_RANDOM)
def test_R5_the_data_twice_leave_a_mean_and_double_a_sum(kind: str, approx: str) -> None:
    x, y = torch.cat([X, X]), torch.cat([Y, Y])
    for reduction, factor in (("mean", 1), ("sum", 1 if kind == "forward-only" else 2)):
        once = attention(kind, approx, reduction=reduction)
        twice = attention(kind, approx, (2, 5, 1, 4), x=x, y=y, reduction=reduction)
        assert difference(twice, once, factor) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_R5_an_operator_merged_with_its_twin_is_that_of_the_data_twice(kind: str) -> None:
    for reduction, factor in (("mean", 1), ("sum", 1 if kind == "forward-only" else 2)):
        once = attention(kind, "expand", reduction=reduction)
        twice = attention(kind, "expand", reduction=reduction).merge(attention(kind, "expand", reduction=reduction))
        assert difference(twice, once, factor) < 1e-12
        assert twice.num_data == 12


@pytest.mark.parametrize("name", [n for n in CASES if any(k in n for k in ("(2, 3)", "(3, 2)", "gauss", "callable"))])
def test_R5_the_data_twice_for_every_loss(name: str) -> None:
    case = CASES[name]
    for reduction in case.reductions:
        once = table_kfac(case, reduction=reduction, fisher_type="type-2")
        twice = table_kfac(case, table_data(case) * 2, reduction, fisher_type="type-2")
        assert difference(twice, once, 2 if reduction == "sum" else 1) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_R5_a_datum_without_valid_targets_counts_in_A_only(kind: str) -> None:
    """The input factor averages over all rows of all data, ignored targets included; B carries the scale."""
    y = Y.clone()
    y[5] = -100
    with_it, without = attention(kind, "expand", [6], y=y), attention(kind, "expand", [5], x=X[:5], y=Y[:5])
    for name, factors in with_it.factors.items():
        assert relative_error(factors.output, without.factors[name].output) < 1e-12
    rows = torch.cat([X.flatten(0, 1), X.new_ones(24, 1)], 1)
    assert relative_error(with_it.factors["first.weight"].input, rows.T @ rows / 24) < 1e-12


# ---- other batches ---------------------------------------------------------------------------------
@pytest.mark.parametrize("approx", APPROX)
@pytest.mark.parametrize("kind", KINDS)
def test_R5_other_batches_change_nothing(kind: str, approx: str) -> None:
    """Neither their sizes, nor one without any valid target."""
    whole = attention(kind, approx, [6])
    for batches in ([2, 1, 3], [3, 1, 2], [1, 5], [5, 1], [1] * 6):
        assert difference(attention(kind, approx, batches), whole) < 1e-12


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
@pytest.mark.parametrize("name", list(CASES))
def test_R5_other_batches_change_nothing_for_every_loss(name: str, kind: str) -> None:
    case = CASES[name]
    data, options = table_data(case), {"reduction": case.reductions[0], "fisher_type": kind}
    whole = table_kfac(case, [merged(data)], **options)
    assert difference(table_kfac(case, data, **options), whole) < 1e-12
    single = [((x[i : i + 1], b[i : i + 1]), _row(y, i)) for (x, b), y in data for i in range(len(x))]
    assert difference(table_kfac(case, single, **options), whole) < 1e-12


def _row(y: Tensor | tuple, i: int) -> Tensor | tuple:
    return tuple(_row(t, i) for t in y) if isinstance(y, tuple) else y[i : i + 1]


@pytest.mark.parametrize("mask", [[1, 2, 3], [0, 1, 2, 3], [0, 2]])
@pytest.mark.parametrize("kind", NOT_RANDOM)
def test_R5_what_a_batch_with_ignored_tokens_seems_to_prove_is_not_relied_on(kind: str, mask: list[int]) -> None:
    """A first batch in which few tokens have curvature shows no mixing; the second one does mix."""
    y = Y.clone()
    y[0, mask] = -100
    assert difference(attention(kind, "expand", [1, 5], y=y), attention(kind, "expand", [6], y=y)) < 1e-12


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("first", ["few labels", "no edges"])
@pytest.mark.parametrize("kind", NOT_RANDOM)
def test_R5_a_first_batch_without_visible_mixing_proves_nothing_about_the_next(
    kind: str, first: str, tokens: bool
) -> None:
    """What meets (data, or tokens of one) may be seen in later batches only: labels are ignored, edges are data."""
    p = {"a.weight": rand(4, 3, seed=82), "a.bias": rand(4, seed=83), "b.weight": rand(5, 4, seed=84)}

    def graph(p: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        h = batch["edges"] @ nn.functional.linear(batch["x"], p["a.weight"], p["a.bias"])
        return batch["edges"] @ nn.functional.linear(h.tanh(), p["b.weight"])

    x, y = rand(4, 3, 3, seed=81), torch.tensor([[4, 2, 0], [1, 0, 3], [2, 2, 1], [3, 0, 4]])
    edges = rand(3, 3, seed=80)
    parts = zip(x.split(2), y.split(2), strict=True) if tokens else zip(x, y, strict=True)
    nodes = [({"x": n, "edges": edges}, t.clone()) for n, t in parts]
    if first == "no edges":
        nodes[0][0]["edges"] = torch.eye(3).double()
    else:
        nodes[0][1][..., 1:] = -100
    loss, options = nn.CrossEntropyLoss(WEIGHT), {"fisher_type": kind, "class_dim": -1, "batch_size_fn": _nodes}
    K = KFACLinearOperator(graph, loss, p, nodes, **options)
    alone, *others = (KFACLinearOperator(graph, loss, p, [batch], **options) for batch in nodes)
    for other in others:
        alone.merge(other)
    assert difference(K, alone) < 1e-12


def _nodes(batch: dict[str, Tensor]) -> int:
    return len(batch["x"])


@pytest.mark.parametrize("approx", APPROX)
@pytest.mark.parametrize("kind", NOT_RANDOM)
def test_R5_another_order_of_the_data_changes_nothing(kind: str, approx: str) -> None:
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    assert difference(attention(kind, approx, x=X[order], y=Y[order]), attention(kind, approx)) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_R5_a_flattened_prediction_is_the_same_risk(loss: type, reduction: str) -> None:
    """``[N, T, C]`` and ``[N * T, C]`` hold the same loss terms."""
    y = classes(5, 6, 4) if loss is nn.CrossEntropyLoss else unit(6, 4, 5)
    model, batches = Attention(), (2, 1, 3)
    p = dict(model.named_parameters())
    flat = lambda p, x: torch.func.functional_call(model, p, (x,)).flatten(0, 1)  # noqa: E731
    data = list(zip(X.split(batches), y.split(batches), strict=True))
    data_flat = [(x, t.flatten(0, 1)) for x, t in data]
    for kind in ("type-2", "empirical-per-term", "forward-only"):
        options = {"fisher_type": kind, "class_dim": -1} if loss is nn.CrossEntropyLoss else {"fisher_type": kind}
        K = KFACLinearOperator(flat, loss(reduction=reduction), p, data_flat, **options)
        L = KFACLinearOperator(model, loss(reduction=reduction), p, data, **options)
        assert difference(K, L) < 1e-12
        for approx in APPROX:
            counted = {**options, "kfac_approx": approx, "batch_size_fn": len}
            K = KFACLinearOperator(flat, loss(reduction=reduction), p, data_flat, **counted)
            L = KFACLinearOperator(model, loss(reduction=reduction), p, data, **counted)
            assert difference(K, L) < 1e-12
