"""Parameters under other shapes, names and hands: views, casts, ties, functional models, dead branches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kfac.oracle import block_diagonal, dense_ggn, kfac_factors, relative_error
from torch import Tensor, nn
from torch.func import functional_call

from curvops import KFACLinearOperator

D = 4


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def batches(*sizes: int, out: tuple[int, ...] = (D,)) -> list:
    return [(torch.randn(n, D), torch.randn(n, *out)) for n in sizes]


def type2(model, params, data, **options) -> KFACLinearOperator:
    return KFACLinearOperator(model, nn.MSELoss(), params, data, fisher_type="type-2", **options)


def parts(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, -1)


# One layer under MSE: the GGN is a Kronecker product, and rows of a weight do not meet. So every case is exact.
VIEWS = {
    "t": lambda p, x: F.linear(x, p["w"].t(), p["b"]),
    "T": lambda p, x: F.linear(x, p["w"].T.contiguous(), p["b"]),
    "t and back": lambda p, x: F.linear(x, p["w"].t().contiguous().t(), p["b"]),
    "mT": lambda p, x: F.linear(x, p["w"].mT, p["b"].view(-1)),
    "transpose": lambda p, x: F.linear(x, torch.transpose(p["w"], 0, 1), p["b"].clone()),
    "permute": lambda p, x: F.linear(x, p["w"].permute(1, 0).clone(), p["b"]),
    "swapaxes by keyword": lambda p, x: F.linear(x, torch.swapaxes(input=p["w"], axis0=0, axis1=1), p["b"]),
    "reshape": lambda p, x: F.linear(x, p["w"].reshape(2, -1).reshape(D, D), p["b"].flatten()),
    "flatten": lambda p, x: F.linear(x, p["w"].flatten().unflatten(0, (D, D)), p["b"]),
    "unsqueeze": lambda p, x: F.linear(x, p["w"][None].squeeze(0), p["b"].unsqueeze(0).squeeze()),
    "view of t": lambda p, x: F.linear(x, p["w"].t().reshape(-1).view(D, D), p["b"]),
    "to": lambda p, x: F.linear(x, p["w"].to(torch.float64).to(x), p["b"].to("cpu")),
    "chunk": lambda p, x: parts(*(F.linear(x, w, b) for w, b in zip(p["w"].chunk(2), p["b"].chunk(2), strict=True))),
    "split": lambda p, x: parts(*(F.linear(x, w) for w in torch.split(p["w"], [1, 3]))),
    "getitem": lambda p, x: parts(F.linear(x, p["w"][:3], p["b"][:3]), F.linear(x, p["w"][3:], p["b"][3:])),
    "strided": lambda p, x: parts(F.linear(x, p["w"][::2], p["b"][::2]), F.linear(x, p["w"][1::2], p["b"][1::2])),
    "narrow": lambda p, x: parts(F.linear(x, p["w"].narrow(0, 1, 2)), x[:, :2]),
    "unbind": lambda p, x: torch.stack([F.linear(x, w[None])[:, 0] for w in p["w"].unbind(0)], 1),
    "permuted rows": lambda p, x: F.linear(x, p["w"][torch.tensor([2, 0, 3, 1])], p["b"][torch.tensor([2, 0, 3, 1])]),
    "permuted columns": lambda p, x: F.linear(x, p["w"][:, torch.tensor([2, 0, 3, 1])], p["b"]),
    "mask": lambda p, x: parts(F.linear(x, p["w"][torch.tensor([True, False, True, True])]), x[:, :1]),
    "part of a row": lambda p, x: F.linear(x[:, 1:], p["w"][:, 1:], p["b"]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_R8_views_of_parameters(name: str) -> None:
    model, data = VIEWS[name], batches(4, 2)
    params = {"b": torch.randn(D), "w": torch.randn(D, D)}
    K = type2(model, params, data)
    assert relative_error(K.to_dense(), dense_ggn(model, nn.MSELoss(), params, data)) < 1e-12
    assert K.treatments["w"].kind == "kronecker"


def test_R8_one_vector_of_all_parameters() -> None:
    f = lambda p, x: F.linear(torch.tanh(F.linear(x, p["v"][:20].view(5, D))), p["v"][20:].view(D, 5))  # noqa: E731
    g = lambda p, x: F.linear(torch.tanh(F.linear(x, p["a"])), p["b"])  # noqa: E731
    v, data = torch.randn(40), batches(4, 2)
    found = type2(f, {"v": v}, data).to_dense()
    assert relative_error(found, type2(g, {"a": v[:20].view(5, D), "b": v[20:].view(D, 5)}, data).to_dense()) < 1e-12


def test_R8_casts_of_parameters() -> None:
    f = lambda p, x: F.linear(x, p["w"].double(), p["b"].to(torch.float64))  # noqa: E731
    params, data = {"w": torch.randn(D, D).float(), "b": torch.randn(D).float()}, batches(3)
    K = type2(f, params, data)
    wide = {n: p.double() for n, p in params.items()}
    assert K.torch_dtype == torch.float32
    assert relative_error(K.to_dense().double(), dense_ggn(f, nn.MSELoss(), wide, data)) < 1e-6


# ---- ties ------------------------------------------------------------------------------------------
class Ties(nn.Module):
    """Uses of one weight whose outputs stand side by side: exact under MSE (expand); summed: exact, too (reduce)."""

    def __init__(self, kind: str, add: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 3), nn.Linear(D, 3, bias=kind != "without bias")
        self.kind, self.add = kind, add
        if kind == "tied bias":
            self.b.bias = self.a.bias
        elif kind == "one module":
            self.b = self.a
        else:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.a(x), self.b(x.flip(-1).sin())
        return sum(outputs) if self.add else torch.stack(outputs, 1)


GROUPS = {
    "one module": [["a.weight", "a.bias"]],
    "without bias": [["a.weight", "a.bias"]],
    "two biases": [["a.weight", "a.bias", "b.bias"]],
    "tied bias": [["a.weight"], ["b.weight"], ["a.bias"]],
}


@pytest.mark.parametrize("sizes", [(1,), (4, 2)], ids=str)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("kind", GROUPS)
def test_R8_tied_parameters(kind: str, add: bool, sizes: tuple[int, ...]) -> None:
    model, data = Ties(kind, add), batches(*sizes, out=(3,) if add else (2, 3))
    params = dict(model.named_parameters())
    K = type2(model, params, data, kfac_approx="reduce" if add else "expand")
    want = block_diagonal(dense_ggn(model, nn.MSELoss(), params, data), params, GROUPS[kind])
    assert relative_error(K.to_dense(), want) < 1e-12


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "empirical", "empirical-per-term"])
@pytest.mark.parametrize("kind", ["one module", "without bias"])
def test_R8_tied_parameters_in_a_chain_keep_their_uses_apart(kind: str, fisher: str, approx: str) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
            self.b.weight = self.a.weight
            self.b = self.a if kind == "one module" else self.b

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(torch.sin(self.b(x)))))

    model, data = Chain(), batches(3, 2)
    K = KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type=fisher, kfac_approx=approx)
    modules = [model.a] if kind == "one module" else [model.a, model.b]
    A, B = kfac_factors(model, nn.MSELoss(), data, modules, fisher=fisher, approx=approx)
    assert relative_error(K.factors["a.weight"].input, A) < 1e-12
    assert relative_error(K.factors["a.weight"].output, B) < 1e-12


# ---- other hands ---------------------------------------------------------------------------------------
def test_R8_functional_models() -> None:
    net, data = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D)), batches(4, 2)
    params = {n: p.detach() + torch.rand_like(p) for n, p in net.named_parameters()}
    want = type2(net, params, data).to_dense()
    by_hand = lambda p, x: (  # noqa: E731
        F.linear(torch.tanh(F.linear(x, p["0.weight"], p["0.bias"])), weight=p["2.weight"], bias=p["2.bias"])
    )
    for model in (by_hand, lambda p, x: functional_call(net, p, (x,))):
        assert relative_error(type2(model, params, data).to_dense(), want) < 1e-12
    own = list(net.parameters())
    assert relative_error(type2(net, own, data).to_dense(), type2(net, None, data).to_dense()) == 0
    swapped = type2(net, own[::-1], data).to_dense()
    assert relative_error(swapped.trace(), type2(net, None, data).to_dense().trace()) < 1e-12
    assert torch.equal(swapped[:D, :D], type2(net, None, data).to_dense()[-D:, -D:])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.dead = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.cut, self.logged = nn.Linear(D, D), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        self.dead(x).abs().sum()  # computed, but no part of the prediction
        self.logged.norm()  # nothing comes of it
        h = self.a(x)
        return h + self.cut(h).detach() + F.linear(x, self.a.weight.detach())


def test_R8_unused_and_dead_branches_are_zero_and_change_nothing() -> None:
    model, data = Branches(), batches(4, 2)
    params = dict(model.named_parameters())
    K = type2(model, params, data)
    rows = torch.cat([F.pad(x, (0, 1), value=1.0) for x, _ in data])
    assert relative_error(K.factors["a.weight"].input, rows.T @ rows / len(rows)) < 1e-12
    assert relative_error(K.factors["a.weight"].output, 2 * torch.eye(D) / D) < 1e-12
    for name in ("unused.weight", "dead.bias", "cut.weight", "logged"):
        assert K.treatments[name].kind == K.factors[name].kind == "zero"
        assert "never reached" in K.treatments[name].detail
        assert K.block(name).to_dense().abs().max() == 0


def test_R8_predictions_without_parameters_are_zero() -> None:
    K = type2(lambda p, x: x, {"w": torch.randn(3, 2)}, batches(2))
    assert torch.equal(K.to_dense(), torch.zeros(6, 6))


class Overlap(nn.Module):
    """Uses rows 0 to 2 and 1 to 3 of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:3]) + F.linear(x, self.weight[1:])


def test_R2_overlapping_parts_of_a_weight_are_refused_by_name_or_exact() -> None:
    model = Overlap().double()
    data = [(torch.randn(n, 3).double(), torch.randn(n, 3).double()) for n in (4, 2)]
    with pytest.raises(
        NotImplementedError, match=r"'weight' is used by linear: some of its entries .* unsupported='exact'"
    ):
        KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type="type-2")
    K = KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type="type-2", unsupported="exact")
    assert relative_error(K.to_dense(), dense_ggn(model, nn.MSELoss(), dict(model.named_parameters()), data)) < 1e-12
    assert K.treatments["weight"].kind == "exact"


def test_R2_a_repeated_row_is_refused_by_name() -> None:
    class Repeat(Overlap):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight[[0, 0, 1, 2]])

    data = [(torch.randn(4, 3).double(), torch.randn(4, 4).double())]
    with pytest.raises(NotImplementedError, match="some of its entries are used in more than one part"):
        KFACLinearOperator(Repeat().double(), nn.MSELoss(), None, data)
