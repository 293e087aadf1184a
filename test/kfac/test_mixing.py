"""Token mixing, shared and coupled uses, odd layouts: KFAC factors against one backward pass per loss term."""

from __future__ import annotations

import pytest
import torch
from kfac.mixing_cases import (
    BY_MODEL,
    CASES,
    C,
    Case,
    D,
    FirstToken,
    FlatBT,
    FlatTB,
    Graph,
    H,
    Net,
    NoMix,
    Position,
    Routed,
    SequenceFirst,
    flat_tb,
    shared,
)
from kfac.oracle import kfac_factors, relative_error
from torch import Tensor, nn

from curvops import KFACLinearOperator
from curvops.kfac.collect import Collector
from curvops.kfac.statistics import Factors
from curvops.kfac.vectors import Fisher
from curvops.risk import EmpiricalRisk

FISHERS = ("type-2", "empirical", "empirical-per-term")
BATCHES = {
    "uneven": ((4, 2), (3, 3)),
    "first smaller": ((2, 5, 3), (3, 3, 3)),
    "ones first": ((1, 1, 3), (3, 3, 3)),
    "lengths": ((3, 2, 4, 3), (3, 5, 2, 3)),
    "length one": ((2, 3), (1, 4)),
}
RUNS = [(case, approx) for case in CASES for approx in ("expand", "reduce") if case.reduce or approx == "expand"]


def check(case: Case, model: nn.Module, loss: nn.Module, data: list, fisher: str, approx: str) -> None:
    """Compare the factors of every layer, and the matrix of one, with brute force."""
    K = KFACLinearOperator(model, loss, None, data, fisher_type=fisher, kfac_approx=approx)
    for name, layer in model.named_children():
        split = case.split.get(name)
        A, B = kfac_factors(model, loss, data, [layer], fisher=fisher, approx=approx, split=split)
        found = K.factors[f"{name}.weight"]
        assert relative_error(found.input, A) < 1e-9, (name, "input")
        assert relative_error(found.output, B) < 1e-9, (name, "output")
        place = torch.arange(len(A) * len(B)).reshape(len(B), len(A))
        order = torch.cat([place[:, :-1].flatten(), place[:, -1]])  # the weight, then the bias
        want = torch.kron(B, A)[order][:, order]
        assert relative_error(K.block(f"{name}.weight").to_dense(), want) < 1e-9, name


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize(("case", "approx"), RUNS, ids=lambda v: v if isinstance(v, str) else v.model.__name__)
def test_R3_factors_equal_brute_force_per_loss_term(case: Case, approx: str, fisher: str, batches: str) -> None:
    torch.set_default_dtype(torch.float64)
    check(case, case.model(), nn.MSELoss(), case.data(*BATCHES[batches], torch.randn), fisher, approx)


LOSSES = {
    "mse-sum": (nn.MSELoss(reduction="sum"), torch.randn),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.3, 2.0])), lambda *s: torch.rand(*s).round()),
    "ce": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0]), label_smoothing=0.1),
        lambda n, *s: torch.randint(s[-1], (n, *s[:-1])),
    ),
}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", [Net, FlatTB, Graph, FirstToken], ids=lambda m: m.__name__)
def test_R3_every_loss(model: type[nn.Module], loss: str, fisher: str, approx: str) -> None:
    torch.set_default_dtype(torch.float64)
    module, draw = LOSSES[loss]

    class ClassesFirst(model):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out.movedim(-1, 1) if loss == "ce" else out

    case = BY_MODEL[model]
    check(case, ClassesFirst(), module.double(), case.data(*BATCHES["first smaller"], draw), fisher, approx)


class Attention(nn.Module):
    """What ``nn.MultiheadAttention`` computes, in words; ``l1`` projects queries, keys and values at once."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, D // 2)).transpose(1, 2) for t in self.l1(x).chunk(3, -1))
        h = ((q @ k.mT) / (D // 2) ** 0.5).softmax(-1) @ v
        return self.l2(h.transpose(1, 2).flatten(2))


class MultiheadAttention(nn.Module):
    def __init__(self, batch_first: bool, plain: Attention) -> None:
        super().__init__()
        self.batch_first, self.a = batch_first, nn.MultiheadAttention(D, 2, batch_first=batch_first)
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        self.a.load_state_dict(dict(zip(names, plain.state_dict().values(), strict=True)))

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.a(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return self.a(x, x, x)[0].transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", FISHERS)
def test_R3_multihead_attention(fisher: str, approx: str, batch_first: bool) -> None:
    torch.set_default_dtype(torch.float64)
    plain = Attention()
    model = MultiheadAttention(batch_first, plain)
    data = [(torch.randn(n, 3, D), torch.randn(n, 3, D)) for n in (2, 3)]
    K = KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type=fisher, kfac_approx=approx)
    for layer, name in ((plain.l1, "a.in_proj_weight"), (plain.l2, "a.out_proj.weight")):
        A, B = kfac_factors(plain, nn.MSELoss(), data, [layer], fisher=fisher, approx=approx)
        assert relative_error(K.factors[name].input, A) < 1e-9
        assert relative_error(K.factors[name].output, B) < 1e-9


def test_R3_multihead_attention_to_other_tokens_has_a_block_for_every_projection() -> None:
    torch.set_default_dtype(torch.float64)

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.memory = nn.MultiheadAttention(D, 2, batch_first=True), torch.randn(1, 5, D)

        def forward(self, x: Tensor) -> Tensor:
            memory = self.memory.expand(len(x), -1, -1) + x.mean(1, keepdim=True)
            return self.a(x, memory, memory)[0]

    model, data = Cross(), [(torch.randn(n, 3, D), torch.randn(n, 3, D)) for n in (2, 3)]
    K = KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type="type-2")
    rows = torch.cat([torch.cat([x.flatten(0, 1), torch.ones(3 * len(x), 1)], 1) for x, _ in data])
    query = K.factors["a.in_proj_weight[0]"]
    assert query.names == ("a.in_proj_weight", "a.in_proj_bias")
    assert query.output.shape == (D, D)
    assert K.factors["a.in_proj_weight[1]"].output.shape == (2 * D, 2 * D)  # keys and values have one input
    assert relative_error(query.input, rows.T @ rows / len(rows)) < 1e-12
    dense = K.to_dense()
    assert relative_error(dense[:D, D * D : 2 * D * D], torch.zeros(D, D * D)) == 0  # queries and keys: no cross terms
    want = torch.kron(query.output, query.input).reshape(D, D + 1, D, D + 1)[:, :D, :, :D].reshape(D * D, D * D)
    assert relative_error(dense[: D * D, : D * D], want) < 1e-12


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "mc"])
def test_R3_reduce_of_routed_tokens_is_refused_by_name(fisher: str) -> None:
    torch.set_default_dtype(torch.float64)
    case = BY_MODEL[Routed]
    data = case.data((4, 3), (3, 3), torch.randn)
    with pytest.raises(NotImplementedError, match=r"l2\.weight.*no regular order.*kfac_approx='expand'"):
        KFACLinearOperator(Routed(), nn.MSELoss(), None, data, fisher_type=fisher, kfac_approx="reduce")


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["mc", "signs", "forward-only"])
def test_R3_layout_of_layers_changes_nothing(fisher: str, approx: str) -> None:
    torch.set_default_dtype(torch.float64)
    model = Net()
    data = CASES[0].data((2, 4), (3, 3), torch.randn)
    want = KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type=fisher, kfac_approx=approx).to_dense()
    for other in (FlatBT(), FlatTB(), SequenceFirst()):
        other.load_state_dict(model.state_dict())
        other.M = model.M
        K = KFACLinearOperator(other, nn.MSELoss(), None, data, fisher_type=fisher, kfac_approx=approx)
        assert relative_error(K.to_dense(), want) < 1e-9


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", FISHERS)
def test_R3_batch_statistics_couple_the_data(fisher: str, approx: str) -> None:
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3, affine=False), nn.Tanh(), nn.Linear(3, 2))
    data = [(torch.randn(n, D), torch.randn(n, 2)) for n in (3, 5)]
    options = {"fisher_type": fisher, "kfac_approx": approx, "allow_train_mode": True}
    K = KFACLinearOperator(model, nn.MSELoss(), None, data, **options)
    for i, split in ((0, shared), (3, None)):
        A, B = kfac_factors(model, nn.MSELoss(), data, [model[i]], fisher=fisher, approx=approx, split=split)
        assert relative_error(K.factors[f"{i}.weight"].input, A) < 1e-9
        assert relative_error(K.factors[f"{i}.weight"].output, B) < 1e-9


LEVELS = {NoMix: "terms", FlatBT: "data", SequenceFirst: "data", Routed: "terms", Position: "none", Graph: "none"}


@pytest.mark.parametrize("model", LEVELS, ids=lambda m: m.__name__)
def test_R3_output_vectors_are_shared_as_far_as_the_model_allows(model: type[nn.Module]) -> None:
    torch.set_default_dtype(torch.float64)
    risk = EmpiricalRisk(model(), nn.MSELoss(), None, BY_MODEL[model].data((4, 4), (3, 3), torch.randn))
    fisher = Fisher("type-2", 1, 0)
    collector = Collector(risk, fisher, lambda: Factors("expand"), by_datum=False, separate=False, policy="raise")
    assert collector.run().sharing.levels == [LEVELS[model]] * 2


class Masked(Net):
    """Tokens mix only where the data say so."""

    def mix(self, h: Tensor) -> Tensor:
        return torch.where(h[:, :1, :1] > 0, super().mix(h), h)


class Gated(Net):
    """A sequence-first branch that the data open and close."""

    def forward(self, x: Tensor) -> Tensor:
        branch = self.l2(self.mix(torch.tanh(self.l1(x)).sin()).transpose(0, 1)).transpose(0, 1)
        return self.l1(x)[..., :C] + (x[:, :1, :1] > 0) * branch


def _in_turns(model: type[Net], signs: tuple[int, ...]) -> tuple[Case, Net, list]:
    torch.set_default_dtype(torch.float64)
    net = model()
    nn.init.eye_(net.l1.weight)
    data = [(torch.randn(4, 3, D), torch.randn(4, 3, C)) for _ in signs]
    for (X, _), sign in zip(data, signs, strict=True):
        X[:, 0, 0] = sign * (X[:, 0, 0].abs() + 2)
    return Case(model, split={"l2": flat_tb} if model is Gated else {}), net, data


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize(("model", "approx"), [(Masked, "expand"), (Masked, "reduce"), (Gated, "expand")])
def test_R3_what_one_batch_proves_may_not_hold_for_the_next(model: type[Net], fisher: str, approx: str) -> None:
    case, net, data = _in_turns(model, (-1, 1, -1))
    check(case, net, nn.MSELoss(), data, fisher, approx)


@pytest.mark.parametrize("fisher", FISHERS)
def test_R3_rows_of_a_layer_without_gradient_are_guessed_and_a_wrong_guess_is_refused(fisher: str) -> None:
    case, net, data = _in_turns(Gated, (1, -1, -1))
    check(case, net, nn.MSELoss(), data, fisher, "reduce")  # the first batch tells how rows are laid out
    case, net, data = _in_turns(Gated, (-1, 1, -1))
    with pytest.raises(NotImplementedError, match=r"\['l2.weight', 'l2.bias'\] had no gradient"):
        check(case, net, nn.MSELoss(), data, fisher, "reduce")


class Messages(nn.Module):
    """A graph network whose edges are data: without edges, nodes are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(D, H), nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        A = torch.eye(len(x)) + (x[:, :1] > 0) * (x[:, 0] > 0)
        return self.l2(torch.tanh(A @ self.l1(x)))


@pytest.mark.parametrize("fisher", FISHERS)
def test_R3_graphs_without_edges_before_graphs_with_edges(fisher: str) -> None:
    torch.set_default_dtype(torch.float64)
    X = [torch.randn(5, D).abs() for _ in range(3)]
    X[0][:, 0] *= -1
    check(Case(Messages), Messages(), nn.MSELoss(), [(x, torch.randn(5, C)) for x in X], fisher, "expand")
