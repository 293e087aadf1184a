"""What other libraries get silently wrong, row by row: exact here, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kfac.oracle import block_diagonal, dense_ggn, joint_groups, relative_error
from losses.loss_cases import classes, rand, unit
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from curvops import KFACLinearOperator as KFAC

BATCHES = (2, 1, 3)


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    """A module from a function of its layers."""

    def __init__(self, forward: Callable, **layers: nn.Module) -> None:
        super().__init__()
        self._call = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any) -> Any:
        return self._call(self, *args)


def mlp() -> Net:
    return Net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(BATCHES), y.split(BATCHES), strict=True))


def regression(model: nn.Module, *shape: int) -> list[tuple[Tensor, Tensor]]:
    """Return uneven batches of six data with zero-mean inputs."""
    x = rand(6, *shape)
    return batches(x, rand(*model(x).shape, seed=5))


def check(model: nn.Module, data: list, approx: str = "expand") -> KFAC:
    """Assert that type-2 is the GGN without the cross terms of layers, for a net where the theory says so."""
    params = dict(model.named_parameters())
    for reduction in ("mean", "sum"):
        loss = nn.MSELoss(reduction=reduction)
        K = KFAC(model, loss, None, data, fisher_type="type-2", kfac_approx=approx)
        want = block_diagonal(dense_ggn(model, loss, params, data), params, joint_groups(params))
        assert relative_error(K.to_dense(), want) < 1e-9
    return K


# ---- rows and loss terms --------------------------------------------------------------------------
FLAT: dict[str, Callable] = {
    "(B T)": lambda m, x: m.b(m.a(x.flatten(0, 1)).unflatten(0, x.shape[:2])),
    "(B T) both": lambda m, x: m.b(m.a(x.flatten(0, 1))).unflatten(0, x.shape[:2]),
    "(T B)": lambda m, x: m.b(m.a(x.transpose(0, 1).flatten(0, 1))).unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    "[T, B]": lambda m, x: m.b(m.a(x.transpose(0, 1)).transpose(0, 1)),
}


@pytest.mark.parametrize("layout", FLAT)
def test_R2_A1_A8_flattened_and_sequence_first_layer_inputs(layout: str) -> None:
    net = Net(FLAT[layout], a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    check(net, regression(net, 5, 3))


@pytest.mark.parametrize("layout", FLAT)
def test_R2_A8_reduce_finds_the_data_in_flattened_and_sequence_first_inputs(layout: str) -> None:
    net = Net(lambda m, x: FLAT[layout](m, x).mean(1), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    check(net, regression(net, 5, 3), "reduce")


def test_R2_A1_a_prediction_that_is_flat_itself() -> None:
    net = Net(lambda m, x: m.b(m.a(x)).flatten(0, 1), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    data = [(x, rand(len(x) * 5, 2, seed=len(x))) for x in rand(6, 5, 3).split(BATCHES)]
    check(net, data)
    with pytest.raises(ValueError, match=r"10 entries on its first axis.*pass batch_size_fn"):
        KFAC(net, nn.MSELoss(), None, data, fisher_type="empirical")


LOSSES: dict[str, tuple[Any, ...]] = {
    "mse": (nn.MSELoss(), rand(1, 3, 2), {}),
    "bce": (nn.BCEWithLogitsLoss(), unit(1, 3, 2), {}),
    "ce": (nn.CrossEntropyLoss(), classes(2, 1, 3), {"class_dim": -1}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_R2_A2_loss_terms_of_one_datum_have_no_cross_terms(name: str) -> None:
    loss, y, options = LOSSES[name]
    whole = (lambda o, y: loss(o.movedim(-1, 1), y)) if name == "ce" else loss
    net = Net(lambda m, x: m.a(x).unflatten(-1, (3, 2)), a=nn.Linear(4, 6))
    data = [(rand(1, 4), y)]
    K = KFAC(net, loss, None, data, fisher_type="type-2", **options)
    want = dense_ggn(net, whole, dict(net.named_parameters()), data)
    assert relative_error(K.to_dense(), want) < 1e-9


def test_R2_A2_T5_tokens_that_an_orthogonal_matrix_mixes() -> None:
    """Squares of an orthogonal matrix' rows add up to one, so expand is exact."""
    mix = torch.linalg.qr(rand(4, 4)).Q
    net = Net(lambda m, x: m.b(mix @ m.a(x)), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    check(net, regression(net, 4, 3))


def test_R2_A3_a_module_called_twice() -> None:
    net = Net(lambda m, x: torch.cat([m.a(x[:, :3]), m.a(x[:, 3:])], 1), a=nn.Linear(3, 2))
    check(net, regression(net, 6))
    summed = Net(lambda m, x: m.b(m.a(x[:, :3]) + m.a(x[:, 3:])), a=nn.Linear(3, 2), b=nn.Linear(2, 3))
    check(summed, regression(summed, 6), "reduce")


def test_R2_A3_a_parameter_tied_between_two_modules() -> None:
    net = Net(lambda m, x: torch.cat([m.a(x[:, :3]), m.b(x[:, 3:])], 1), a=nn.Linear(3, 2), b=nn.Linear(3, 2))
    net.b.weight = net.a.weight
    data, params = regression(net, 6), dict(net.named_parameters())
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    assert relative_error(K.to_dense(), dense_ggn(net, nn.MSELoss(), params, data)) < 1e-9
    assert K.factors["a.weight"].names == tuple(params)


# ---- convolutions ------------------------------------------------------------------------------------
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_R2_A4_padding_modes(mode: str, approx: str) -> None:
    net = Net(
        lambda m, x: m.a(x) if approx == "expand" else m.a(x).mean((2, 3)),
        a=nn.Conv2d(2, 3, (3, 2), padding=(2, 1), stride=(1, 2), padding_mode=mode),
    )
    check(net, regression(net, 2, 5, 4), approx)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("groups", [2, 4])
def test_R2_A5_groups_have_factors_of_their_own(groups: int, approx: str) -> None:
    layer = nn.Conv2d(4, 8, 3, padding=1, groups=groups)
    net = Net(lambda m, x: m.a(x) if approx == "expand" else m.a(x).mean((2, 3)), a=layer)
    K = check(net, regression(net, 4, 5, 4), approx)
    assert K.factors["a.weight"].input.shape == (groups, 36 // groups + 1, 36 // groups + 1)
    assert K.factors["a.weight"].output.shape == (groups, 8 // groups, 8 // groups)


def test_R2_T2_terms_are_counted_at_the_output_not_in_the_layer() -> None:
    net = Net(
        lambda m, x: m.b(F.interpolate(m.a(x), scale_factor=3.0)), a=nn.Conv2d(2, 3, 3, stride=2), b=nn.Conv2d(3, 5, 1)
    )
    data = regression(net, 2, 7, 5)
    N, C, *pixels = rand(6, *data[0][1].shape[1:]).shape
    for kind in ("type-2", "mc", "empirical"):
        total, mean = (KFAC(net, nn.MSELoss(reduction=r), None, data, fisher_type=kind) for r in ("sum", "mean"))
        for name in total.domain_names:
            R = pixels[0] * pixels[1]
            assert relative_error(total.factors[name].output, N * R * C * mean.factors[name].output) < 1e-12


# ---- options of losses ---------------------------------------------------------------------------------
W, V = unit(4, seed=6) + 0.2, unit(4, seed=4) * 3
Y = classes(4, 6).masked_fill(torch.tensor([0, 1, 0, 1, 1, 0]).bool(), -100)


def density(o: Tensor, y: Tensor) -> Tensor:
    """A convex callable whose entries meet."""
    return (torch.logsumexp(o, 1) + ((o - y) @ torch.diag(W)).square().sum(1)).mean()


OPTIONS: dict[str, tuple[Any, Any]] = {
    "ce": (nn.CrossEntropyLoss(), classes(4, 6)),
    "ce weight": (nn.CrossEntropyLoss(W), classes(4, 6)),
    "ce ignore": (nn.CrossEntropyLoss(), Y),
    "ce ignore sum": (nn.CrossEntropyLoss(reduction="sum"), Y),
    "ce everything": (nn.CrossEntropyLoss(W, label_smoothing=0.2), Y),
    "ce probabilities": (nn.CrossEntropyLoss(W), rand(6, 4).softmax(1)),
    "bce": (nn.BCEWithLogitsLoss(), unit(6, 4)),
    "bce weight": (nn.BCEWithLogitsLoss(weight=W), unit(6, 4)),
    "bce pos_weight": (nn.BCEWithLogitsLoss(pos_weight=V), unit(6, 4).round()),
    "bce everything": (nn.BCEWithLogitsLoss(weight=W, pos_weight=V, reduction="sum"), unit(6, 4)),
    "huber": (nn.HuberLoss(delta=0.8), rand(6, 4)),
    "poisson": (nn.PoissonNLLLoss(), 3 * unit(6, 4)),
    "callable": (density, rand(6, 4)),
}


def one_input(p: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
    """A layer that sees the same input for every datum: its GGN is a Kronecker product, whatever the loss."""
    return F.linear(x["constant"], p["a.weight"], p["a.bias"]) + x["offset"]


@pytest.mark.parametrize("name", OPTIONS)
def test_R2_A6_A6b_T10_T11_T13_losses_with_options_over_uneven_batches(name: str) -> None:
    loss, y = OPTIONS[name]
    p = {"a.weight": rand(4, 3, seed=1), "a.bias": rand(4, seed=2)}
    x, offset = rand(1, 3).expand(6, 3), rand(6, 4, seed=3)
    parts = zip(x.split(BATCHES), offset.split(BATCHES), y.split(BATCHES), strict=True)
    data = [({"constant": x, "offset": o}, y) for x, o, y in parts]
    K = KFAC(one_input, loss, p, data, fisher_type="type-2")
    assert relative_error(K.to_dense(), dense_ggn(one_input, loss, p, data)) < 1e-9


# ---- what a net does --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["type-2", "empirical"])
def test_R2_A7_a_checkpoint_recomputes_and_is_not_counted_twice(kind: str) -> None:
    inner = lambda m, x: m.b(m.a(x).tanh())  # noqa: E731
    plain = Net(inner, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    saving = Net(lambda m, x: checkpoint(inner, m, x, use_reentrant=False), a=plain.a, b=plain.b)
    # Values other than the module's own: what is recomputed must see them, too.
    params = {n: p.detach() + 0.1 for n, p in plain.named_parameters()}
    K, L = (KFAC(net, nn.MSELoss(), params, regression(plain, 3), fisher_type=kind) for net in (saving, plain))
    assert relative_error(K.to_dense(), L.to_dense()) < 1e-12


def test_R2_A7_a_reentrant_checkpoint_is_refused() -> None:
    inner = Net(lambda m, x: m.a(x), a=nn.Linear(3, 4))
    outer = lambda m, x: m.b(checkpoint(m.inner, x.requires_grad_(), use_reentrant=True))  # noqa: E731
    net = Net(outer, inner=inner, b=nn.Linear(4, 2))
    data = [(rand(4, 3), rand(4, 2))]
    with pytest.raises(NotImplementedError, match="use_reentrant=False"):
        KFAC(net, nn.MSELoss(), None, data)


@pytest.mark.parametrize("shape", [(3,), (4, 3)])
def test_R2_T33_activations_in_place(shape: tuple[int, ...]) -> None:
    net = Net(lambda m, x: m.b(m.f(m.a(x))), a=nn.Linear(3, 4), f=nn.ReLU(inplace=True), b=nn.Linear(4, 2))
    plain = Net(lambda m, x: m.b(m.a(x).relu()), a=net.a, b=net.b)
    for kind in ("type-2", "mc", "empirical"):
        K, L = (KFAC(m, nn.MSELoss(), None, regression(plain, *shape), fisher_type=kind) for m in (net, plain))
        assert relative_error(K.to_dense(), L.to_dense()) < 1e-12


# ---- meaning of the matrix ------------------------------------------------------------------------------------
def test_R2_T1_T4_T8_one_layer_in_closed_form() -> None:
    """``2 / (N C) I ⊗ sum x x'`` in row-major order, output factor first, and the random kinds in expectation (T4)."""
    net, x = nn.Linear(3, 2, bias=False), rand(6, 3)
    data = [(x, rand(6, 2, seed=5))]
    want = torch.kron(2 / (6 * 2) * torch.eye(2), x.T @ x)
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    assert relative_error(K.to_dense(), want) < 1e-12
    assert relative_error(K.factors["weight"].output, torch.eye(2)) < 1e-12
    assert relative_error(K.factors["weight"].input, x.T @ x / 6) < 1e-12
    many = [(x.repeat(2000, 1), data[0][1].repeat(2000, 1))]
    for kind in ("mc", "signs"):
        assert relative_error(KFAC(net, nn.MSELoss(), None, many, fisher_type=kind).to_dense(), want) < 0.03


def test_R2_T8_factors_are_named_and_not_symmetric_in_their_roles() -> None:
    net = Net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(3, 2), b=nn.Linear(2, 4))
    K = KFAC(net, nn.MSELoss(), None, regression(net, 3), fisher_type="type-2", separate_weight_and_bias=True)
    block = K.factors["a.weight"]
    assert (block.output.shape, block.input.shape) == ((2, 2), (3, 3))
    assert relative_error(K.block("a.weight").to_dense(), torch.kron(block.output, block.input)) < 1e-12
    assert relative_error(K.block("a.bias").to_dense(), block.output) < 1e-12


# ---- derivatives, and tensors that only look like parameters ------------------------------------------------------
def slope(m: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)[0]


def tangent(m: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m.b(m.a(forward_ad.make_dual(x, torch.ones_like(x))).tanh())).tangent


def test_R2_a_prediction_that_is_a_derivative_of_the_net_is_refused_by_name() -> None:
    """It meets the weights in nodes that the forward pass saved inside an operation, not behind the operation's result."""
    net = Net(slope, a=nn.Linear(3, 4), b=nn.Linear(4, 1))
    data = [(rand(4, 3), rand(4, 3))]
    with pytest.raises(
        NotImplementedError, match=r"'a\.bias' is used by autograd\.grad: the prediction depends on a deriv"
    ):
        KFAC(net, nn.MSELoss(), None, data)
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2", unsupported="exact")
    params = dict(net.named_parameters())

    def closed_form(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.linear(x, p["a.weight"], p["a.bias"]).tanh()
        return (p["b.weight"] * (1 - h.square())) @ p["a.weight"] + 0 * p["b.bias"]

    want = block_diagonal(dense_ggn(closed_form, nn.MSELoss(), params, data), params, [[n] for n in params])
    assert relative_error(K.to_dense(), want) < 1e-9


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_R2_a_prediction_in_forward_mode_is_refused_by_name() -> None:
    net = Net(tangent, a=nn.Linear(3, 4), b=nn.Linear(4, 1))
    with pytest.raises(NotImplementedError, match=r"'[ab]\.weight' is used by the autograd node .*forward-mode"):
        KFAC(net, nn.MSELoss(), None, [(rand(4, 3), rand(4, 1))])


@pytest.mark.parametrize("cast", ["to", "type_as", "view_as"])
def test_R2_an_activation_cast_like_a_weight_is_no_weight(cast: str) -> None:
    net = Net(lambda m, x: m.b(getattr(m.a(x), cast)(m.b.weight) * 2), a=nn.Linear(3, 4), b=nn.Linear(4, 6))
    x = rand(6, 3)
    check(net, [(x, rand(6, 6, seed=5))])


def test_R2_a_complex_function_of_a_parameter_is_refused_by_name() -> None:
    net = Net(lambda m, x: m.a(x) * torch.fft.rfft(m.a.weight).abs().sum(), a=nn.Linear(3, 4))
    with pytest.raises(NotImplementedError, match=r"'a\.weight' is used by fft_rfft"):
        KFAC(net, nn.MSELoss(), None, regression(net, 3))


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_R2_sparse_inputs_are_refused_by_name(layout: str) -> None:
    net = Net(lambda m, x: getattr(x, layout)() @ m.a.weight.T, a=nn.Linear(3, 4, bias=False))
    with pytest.raises(NotImplementedError, match=r"'a\.weight' is used by matmul: its input is sparse"):
        KFAC(net, nn.MSELoss(), None, regression(net, 3))
