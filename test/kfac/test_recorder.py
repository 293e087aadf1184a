"""What the recorder sees, follows, refuses by name, and hands to the policies."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kfac.oracle import block_diagonal, dense_ef, dense_ggn, kfac_factors, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvops import GGNLinearOperator, KFACLinearOperator, explain

D = 4


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def batches(*sizes: int, shape: tuple[int, ...] = (), out: tuple[int, ...] = (D,)) -> list:
    return [(torch.randn(n, *shape, D), torch.randn(n, *shape, *out)) for n in sizes]


def type2(model, params, data, **options) -> KFACLinearOperator:
    return KFACLinearOperator(model, nn.MSELoss(), params, data, fisher_type="type-2", **options)


def calling(f: Callable[..., Tensor], *modules: nn.Module) -> nn.Module:
    """Return a module that owns others, and calls ``f(*modules, x)``."""

    class Calling(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return f(*self, x)

    return Calling(modules)


# ---- values: in-place activations, checkpoints -------------------------------------------------
IN_PLACE = {
    "relu_": (torch.relu_, torch.relu),
    "leaky": (nn.LeakyReLU(inplace=True), nn.LeakyReLU()),
    "mul_ add_": (lambda h: h.mul_(2.0).add_(1.0).tanh_(), lambda h: (h * 2 + 1).tanh()),
    "residual": (lambda h: h.add_(h.detach().sin()), lambda h: h + h.detach().sin()),
    "part": (lambda h: h[..., :2].zero_().new_zeros(()) + h, lambda h: torch.cat([0 * h[..., :2], h[..., 2:]], -1)),
}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", IN_PLACE)
def test_R8_in_place_activations_after_linear(name: str, bias: bool, shape: tuple, approx: str) -> None:
    layers = nn.Linear(D, 5, bias=bias), nn.Linear(5, D)
    data = batches(4, 2, shape=shape)
    found, want = (
        type2(calling(lambda a, b, x, act=act: b(act(a(x))), *layers), None, data, kfac_approx=approx).to_dense()
        for act in IN_PLACE[name]
    )
    assert relative_error(found, want) < 1e-12
    assert want.diagonal().min() > 0 or name in ("relu_", "part")


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_R8_in_place_activations_after_unbatched_convolutions(dim: int) -> None:
    conv, linear = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1](2, 3, 2), nn.Linear(3, D)
    data = [(torch.randn(1, 2, *[4] * dim), torch.randn(1, D)) for _ in range(2)]

    def net(act: Callable, unbatched: bool) -> nn.Module:
        def forward(conv: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
            h = act(conv(x[0]))[None] if unbatched else act(conv(x))
            return linear(h.flatten(2).mean(2))

        return calling(forward, conv, linear)

    found = type2(net(torch.relu_, True), None, data).to_dense()
    assert relative_error(found, type2(net(torch.relu, False), None, data).to_dense()) < 1e-12


def test_R8_an_input_modified_after_its_use_is_refused_by_name() -> None:
    model = calling(lambda a, b, x: b(a(h := x + 1) + h.mul_(2)), nn.Linear(D, D), nn.Linear(D, D))
    with pytest.raises(ValueError, match=r"input of linear with .*'0.weight', '0.bias'.* was modified in place"):
        type2(model, None, batches(3))


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_R8_checkpoints_recompute_with_the_given_params(fisher: str, approx: str) -> None:
    layers = nn.Linear(D, 5), nn.Linear(5, 5), nn.Linear(5, D)

    def block(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        return b(torch.tanh(a(x)))

    def checkpointed(a: nn.Module, b: nn.Module, c: nn.Module, x: Tensor) -> Tensor:
        return c(torch.sin(checkpoint(block, a, b, x, use_reentrant=False)))

    saving = calling(checkpointed, *layers)
    plain = calling(lambda a, b, c, x: c(torch.sin(block(a, b, x))), *layers)
    params = {n: p.detach() + torch.rand_like(p) for n, p in plain.named_parameters()}
    data = batches(4, 2, shape=(3,))
    found, want, own = (
        KFACLinearOperator(m, nn.MSELoss(), p, data, fisher_type=fisher, kfac_approx=approx).to_dense()
        for m, p in ((saving, params), (plain, params), (plain, None))
    )
    assert relative_error(found, want) < 1e-12
    assert relative_error(own, want) > 1e-2


# ---- what is refused by name ----------------------------------------------------------------------
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


def no_grad(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = a(x)
    return b(h)


def set_item(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    w = a.weight.clone()
    w[0] = 0.0
    return b(F.linear(x, w, a.bias))


def scaled_list(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    torch._foreach_mul_(w := [a.weight.clone()], 2.0)
    return b(F.linear(x, w[0].t().t(), a.bias))


REFUSED = {
    "function besides linear": (lambda a, b, x: Product.apply(b(a(x)), a.weight), ["0.weight", "ProductBackward"]),
    "function on a view": (lambda a, b, x: Product.apply(b(a(x)), a.weight.t()), ["0.weight", "ProductBackward"]),
    "vmap": (lambda a, b, x: torch.func.vmap(b)(a(x)), ["1.", "linear", "functorch"]),
    "grad": (
        lambda a, b, x: torch.func.vmap(torch.func.grad(lambda z: a(z).tanh().sum()))(b(x)),
        ["0.", "linear", "functorch"],
    ),
    "jvp": (lambda a, b, x: torch.func.jvp(a, (b(x),), (x,))[1], ["0.weight", "linear", "functorch"]),
    "reentrant": (
        lambda a, b, x: checkpoint(b, a(x), use_reentrant=True),
        ["CheckpointFunction", "use_reentrant=False"],
    ),
    "no_grad": (no_grad, ["0.weight", "linear", "without gradient"]),
    "data": (lambda a, b, x: b(F.linear(x, a.weight.data, a.bias)), ["0.weight", "data", "without gradient"]),
    "detach": (lambda a, b, x: b(F.linear(x, a.weight, a.bias.detach())), ["0.bias", "detach", "without gradient"]),
    "no rule": (lambda a, b, x: b(F.linear(x, a.weight.abs(), a.bias)), ["0.weight", "abs", "unsupported='exact'"]),
    "input": (lambda a, b, x: b(x) + F.linear(a.weight, b.weight)[:1], ["0.weight"]),
    "set item": (set_item, ["0.weight", "linear", "modified in place"]),
    "list in place": (scaled_list, ["0.weight", "t", "modified in place"]),
    "prediction": (lambda a, b, x: a.weight[: len(x)], ["0.weight", "prediction itself"]),
    "overlap": (lambda a, b, x: b(F.pad(F.linear(x, a.weight[:3]), (0, 1))) + F.linear(x, a.weight), ["0.weight"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of forward mode itself
@pytest.mark.parametrize("name", REFUSED)
def test_R8_what_cannot_be_seen_is_refused_by_name(name: str) -> None:
    f, words = REFUSED[name]
    model = calling(f, nn.Linear(D, D), nn.Linear(D, D))
    with pytest.raises(NotImplementedError) as error:
        type2(model, None, batches(3))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_R8_params_reached_around_the_module_are_refused_by_name() -> None:
    layer = nn.Linear(D, D)
    transposed = layer.weight.t()
    cached = calling(lambda a, x: torch.addmm(a.bias, x, transposed), layer)
    listed = calling(lambda a, x: F.linear(x, ws[0], a.bias), layer)
    ws = [layer.weight]
    closure = lambda p, x: F.linear(x, layer.weight) + p["0.bias"] * 0  # noqa: E731
    for model in (cached, listed, closure):
        params = None if isinstance(model, nn.Module) else {f"0.{n}": p for n, p in layer.named_parameters()}
        with pytest.raises(NotImplementedError, match=r"'0\.weight'.*before the forward pass"):
            type2(model, params, batches(3), unsupported="exact")


# ---- blocks for what no rule covers -----------------------------------------------------------------
class Scaled(nn.Module):
    """``gamma`` and ``w`` meet operations without a rule, ``w`` besides ``linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gamma, self.w = nn.Linear(D, D), nn.Parameter(torch.rand(D)), nn.Parameter(torch.randn(3, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(torch.tanh(F.linear(x, self.w).sum(-1, keepdim=True) + x) * self.gamma)
        return h + self.w.square().sum()


@pytest.mark.parametrize("policy", ["exact", "diagonal", "zero"])
@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
def test_R8_policies_for_parameters_without_a_rule(fisher: str, policy: str) -> None:
    model, data = Scaled(), batches(3, 1, 4)
    params = dict(model.named_parameters())
    K = KFACLinearOperator(model, nn.MSELoss(), params, data, fisher_type=fisher, unsupported=policy)
    dense = (dense_ggn if fisher == "type-2" else dense_ef)(model, nn.MSELoss(), params, data)
    want = block_diagonal(dense, params, [["gamma"], ["w"], ["a.weight", "a.bias"]])
    n = D + 3 * D  # gamma and w come first
    assert list(params)[:2] == ["gamma", "w"]
    want = {"exact": want[:n, :n], "diagonal": want[:n, :n].diagonal().diag(), "zero": torch.zeros(n, n)}[policy]
    found = K.to_dense()
    assert relative_error(found[:n, :n], want) < 1e-9
    assert found[:n, n:].abs().max() == 0
    for got, factor in zip(
        (K.factors["a.weight"].input, K.factors["a.weight"].output),
        kfac_factors(model, nn.MSELoss(), data, [model.a], fisher=fisher),
        strict=True,
    ):
        assert relative_error(got, factor) < 1e-9
    assert {n: t.kind for n, t in K.treatments.items()} == dict.fromkeys(("gamma", "w"), policy) | dict.fromkeys(
        ("a.weight", "a.bias"), "kronecker"
    )
    assert K.treatments["gamma"].detail == "mul: no rule covers it"
    with pytest.raises(NotImplementedError, match=r"'(w|gamma)' is used by (square|mul)"):
        type2(model, params, data)


# ---- explain ------------------------------------------------------------------------------------------
def test_R8_explain_tells_before_anything_is_computed() -> None:
    model = Scaled()
    model.dead = nn.Linear(2, 2)
    told = explain(model, data=batches(3))
    kinds = {n: t.kind for n, t in told.items()}
    assert kinds == {
        "gamma": "unsupported", "w": "unsupported", "a.weight": "kronecker", "a.bias": "kronecker",
        "dead.weight": "zero", "dead.bias": "zero",
    }  # fmt: skip
    assert not any(t.assumed for t in told.values())
    assert "mul" in told["gamma"].detail
    assert "joint" in told["a.weight"].detail
    assert explain(model, data=batches(3), unsupported="diagonal")["w"].kind == "diagonal"
    assert "joint" not in explain(model, data=batches(3), separate_weight_and_bias=True)["a.weight"].detail
    assert "gamma" in str(told)


def test_R3_explain_says_how_matrix_free_products_are_formed() -> None:
    """Fused LSTM layers have no forward mode: what torch said, and what is done instead, is printed."""
    x = torch.randn(4, 3, D, dtype=torch.float32)
    for model, words in (
        (nn.Sequential(nn.Linear(D, D), nn.Tanh()).float(), "Matrix-free products: forward mode"),
        (nn.LSTM(D, 2, batch_first=True).float(), "double backward, since torch says: .*rnn"),
    ):
        told = explain(model, data=[(x, x)])
        assert re.search(words, str(told))
        width = 2 if isinstance(model, nn.LSTM) else D
        G = GGNLinearOperator(model, nn.MSELoss(), None, [(x, x[..., :width])])
        G @ torch.zeros(G.shape[1], dtype=torch.float32)
        assert G.linearization in told.products
        assert told.products.startswith("forward") or G.refusal.splitlines()[0] in told.products
    assert not explain(nn.Linear(D, D)).products


def test_R8_explain_without_data_assumes() -> None:
    told = explain(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)))
    assert {n: t.kind for n, t in told.items()} == {
        "0.weight": "kronecker", "0.bias": "kronecker", "1.weight": "unsupported", "1.bias": "unsupported",
    }  # fmt: skip
    assert all(t.assumed for t in told.values())
    assert "(assumed)" in str(told)
    with pytest.raises(ValueError, match="pass data"):
        explain(lambda p, x: x @ p["w"], {"w": torch.randn(D, D)})
