"""Hessian, GGN and empirical Fisher against dense matrices of the whole-set risk."""

from __future__ import annotations

import pickle
import warnings
from functools import partial

import pytest
import torch
from kfac.nets import mlp
from kfac.oracle import block_diagonal, concatenated, dense_ef, dense_ggn, joint_groups, output_hessian, predictor
from kfac.photograph import state
from losses.loss_cases import CASES, PARAMS
from matrix_free_cases import Attention, Recurrent, Twice, Words, dense_hessian, flattened, jacobian
from torch import nn
from torch.func import jacrev
from torch.utils.checkpoint import checkpoint

from curvops import EFLinearOperator, FisherMCLinearOperator, GGNLinearOperator, HessianLinearOperator
from curvops.testing import check_operator

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def named(model) -> dict:
    return {n: p.detach() for n, p in model.named_parameters()}


def problem(loss=None, hidden=nn.Tanh):
    model = mlp(4, 5, 3, act=hidden)
    X, y = torch.randn(7, 4), torch.randint(3, (7,))
    return model, loss or nn.CrossEntropyLoss(), named(model), [(X[:4], y[:4]), (X[4:], y[4:])]


def wavy(p, x):
    """A prediction that is not linear in its parameters, near ``x`` itself."""
    return x * p["s"] + 0.01 * (p["t"] * x).sin()


@pytest.mark.parametrize(("name", "reduction"), PARAMS)
def test_R1_every_loss_and_output_shape(name: str, reduction: str):
    case = CASES[name]
    shape = case.output.shape[1:]
    params = {"s": 1 + 0.1 * torch.rand(shape), "t": torch.randn(shape)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # losses without a second derivative say so
        loss, options = case.make(reduction), dict(case.options)
        if not isinstance(loss, nn.Module):
            options["reduction"] = reduction
        ops = [op(wavy, loss, params, case.batches(), **options) for op in (HessianLinearOperator, GGNLinearOperator)]
        value = partial(case.value, loss)
        y = case.target.long() if getattr(case.target, "dtype", None) == torch.uint8 else case.target
        f, x = flattened(lambda p: value(wavy(p, case.output), y), params)
        H = jacrev(jacrev(f))(x)
        J = jacobian(wavy, params, case.output)
        out = wavy(params, case.output)
        if case.second is None:
            M = output_hessian(value, out, y)
        else:  # a Hessian quadratic in y: its expectation is the average over mean +- sd
            ends = [out[..., 0] + s * out[..., 1].sqrt() for s in (1, -1)]
            M = sum(output_hessian(value, out, y) for y in ends) / 2
        torch.testing.assert_close(ops[0].to_dense(), H, **TOLERANCE)
        torch.testing.assert_close(ops[1].to_dense(), J.T @ M @ J, **TOLERANCE)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator])
def test_R2_the_contract(kind):
    model, loss, params, data = problem(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])))
    check_operator(kind(model, loss, params, data))
    single = model.float()
    data = [(X.float(), y) for X, y in data]
    check_operator(kind(single, nn.CrossEntropyLoss(), None, data))


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator])
def test_R2_columns_agree_with_single_products(kind):
    model, loss, params, data = problem()
    op = kind(model, loss, params, data)
    V = torch.randn(op.shape[1], 5)
    for some in (V[:, :2], V):  # forward mode for few, one graph for many
        torch.testing.assert_close(op @ some, torch.stack([op @ v for v in some.T], 1), **TOLERANCE)


NETS = {
    "attention": (Attention, lambda: torch.randn(5, 2, 4), lambda: torch.randint(3, (5, 2))),
    "LSTM": (partial(Recurrent, nn.LSTM), lambda: torch.randn(5, 3, 4), lambda: torch.randint(3, (5,))),
    "GRU": (partial(Recurrent, nn.GRU), lambda: torch.randn(5, 3, 4), lambda: torch.randint(3, (5,))),
    "RNN": (partial(Recurrent, nn.RNN), lambda: torch.randn(5, 3, 4), lambda: torch.randint(3, (5,))),
    "words": (Words, lambda: torch.randint(7, (5, 3)), lambda: torch.randint(3, (5,))),
    "twice, tied, unused": (Twice, lambda: torch.randn(5, 4), lambda: torch.randint(4, (5,))),
}


def by_hand(model, loss, params, data):
    """Dense Hessian and GGN from plain autograd on the module itself: functorch has no rules for recurrent kernels."""
    leaves = list(dict(model.named_parameters()).values())
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        X, y = concatenated(data)
        out = model(X)
        rows = [torch.autograd.grad(o, leaves, retain_graph=True, allow_unused=True) for o in out.flatten()]
        flat = lambda gs: torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gs, leaves)])  # noqa: E731, B905
        J = torch.stack([flat(r) for r in rows]).detach()
        slope = flat(torch.autograd.grad(loss(out, y), leaves, create_graph=True, allow_unused=True))
        rows = [
            torch.autograd.grad(s, leaves, retain_graph=True, allow_unused=True) if s.requires_grad else None
            for s in slope
        ]
        H = torch.stack([torch.zeros_like(slope) if r is None else flat(r) for r in rows]).detach()
    return H, J.T @ output_hessian(loss, out.detach(), y) @ J


@pytest.mark.parametrize("net", NETS)
def test_R3_operations_without_forward_mode_shared_and_unused_parameters(net):
    make, inputs, labels = NETS[net]
    model, X, y = make(), inputs(), labels()
    data, loss = [(X[:2], y[:2]), (X[2:], y[2:])], nn.CrossEntropyLoss(label_smoothing=0.1)
    H, G = by_hand(model, loss, named(model), data)
    for op, want in ((HessianLinearOperator, H), (GGNLinearOperator, G)):
        K = op(model, loss, None, data)
        torch.testing.assert_close(K.to_dense(), want, **TOLERANCE)
        v = torch.randn(K.shape[1])
        torch.testing.assert_close(K @ v, want @ v, **TOLERANCE)
        with K.cached():
            torch.testing.assert_close(K @ v, want @ v, **TOLERANCE)


def test_R3_zero_curvature_and_predictions_without_parameters():
    _, _, params, data = problem()
    linear = lambda out, y: out.sum()  # noqa: E731
    for op in (HessianLinearOperator, GGNLinearOperator):
        K = op(lambda p, x: x @ p["W"], linear, {"W": torch.randn(4, 3)}, data)
        assert not K.to_dense().any()
        K = op(lambda p, x: x[:, :3], nn.CrossEntropyLoss(), params, data)
        assert not K.to_dense().any()
        assert not (K @ torch.ones(K.shape[1])).any()


def test_R3_callable_on_a_slice_of_the_output():
    model, _, params, data = problem()
    loss = lambda out, y: (out[:, 1].exp() * (1 + y)).mean()  # noqa: E731
    X, y = concatenated(data)
    f, x = flattened(lambda p: loss(predictor(model)(p, X), y), params)
    torch.testing.assert_close(
        HessianLinearOperator(model, loss, params, data).to_dense(), jacrev(jacrev(f))(x), **TOLERANCE
    )
    torch.testing.assert_close(
        GGNLinearOperator(model, loss, params, data).to_dense(), dense_ggn(model, loss, params, data), **TOLERANCE
    )


def test_R3_callable_that_couples_data():
    model, _, params, data = problem()
    data = data[:1]
    loss = lambda out, y: (out @ out.T).logsumexp(1).mean()  # noqa: E731
    want = dense_hessian(model, loss, params, data)
    torch.testing.assert_close(HessianLinearOperator(model, loss, params, data).to_dense(), want, **TOLERANCE)
    want = dense_ggn(model, loss, params, data)
    torch.testing.assert_close(GGNLinearOperator(model, loss, params, data).to_dense(), want, **TOLERANCE)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(4, 5, 5, act=nn.Tanh), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def test_R1_values_other_than_the_models_own_and_checkpoints():
    model = Checkpointed()
    params = {n: p.detach() + 0.1 * torch.rand_like(p) for n, p in model.named_parameters()}
    X, y, loss = torch.randn(5, 4), torch.randint(3, (5,)), nn.CrossEntropyLoss()
    data = [(X[:2], y[:2]), (X[2:], y[2:])]

    def plain(p, x):
        h = torch.tanh(x @ p["body.0.weight"].T + p["body.0.bias"])
        h = h @ p["body.2.weight"].T + p["body.2.bias"]
        return h @ p["head.weight"].T + p["head.bias"]

    for op, dense in ((HessianLinearOperator, dense_hessian), (GGNLinearOperator, dense_ggn)):
        K, want = op(model, loss, params, data), dense(plain, loss, params, data)
        torch.testing.assert_close(K.to_dense(), want, **TOLERANCE)
        with K.cached():
            for _ in range(2):
                v = torch.randn(len(want))
                torch.testing.assert_close(K @ v, want @ v, **TOLERANCE)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("partition", ["module", "parameter", [["0.weight", "2.bias"], ["2.weight", "0.bias"]]])
def test_R1_block_diagonal(kind, partition):
    model, loss, params, data = problem()
    op = kind(model, loss, params, data)
    groups = {"module": joint_groups(params), "parameter": [[n] for n in params]}.get(str(partition), partition)
    want = block_diagonal(op.to_dense(), params, groups)
    torch.testing.assert_close(op.block_diagonal(partition).to_dense(), want, **TOLERANCE)
    with op.block_diagonal(partition).cached() as cached:
        torch.testing.assert_close(cached.to_dense(), want, **TOLERANCE)
    with pytest.raises(ValueError, match="partition"):
        op.block_diagonal([["0.weight"]])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_R1_monte_carlo_converges_and_batches_change_nothing(reduction):
    model, loss, params, data = problem(nn.CrossEntropyLoss(reduction=reduction, weight=torch.tensor([1.0, 2.0, 0.5])))
    G = GGNLinearOperator(model, loss, params, data).to_dense()
    few = GGNLinearOperator(model, loss, params, data, mc_samples=3).to_dense()
    whole = GGNLinearOperator(model, loss, params, [concatenated(data)], mc_samples=3).to_dense()
    torch.testing.assert_close(few, whole, rtol=1e-12, atol=1e-14)
    draws = torch.stack(
        [GGNLinearOperator(model, loss, params, data, mc_samples=1, seed=s).trace() for s in range(300)]
    )
    assert (draws.mean() - G.trace()).abs() < 4 * draws.std() / 300**0.5
    fisher = FisherMCLinearOperator(model, loss, params, data, mc_samples=3).to_dense()
    torch.testing.assert_close(fisher, few, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="mc_samples: found 0"):
        FisherMCLinearOperator(model, loss, params, data, mc_samples=0)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()])
def test_R1_empirical_fisher(loss):
    model, loss, params, data = problem(loss)
    if isinstance(loss, nn.MSELoss):
        data = [(X, torch.randn(len(X), 3)) for X, _ in data]
    for per in ("term", "example"):
        got = EFLinearOperator(model, loss, params, data, per=per).to_dense()
        torch.testing.assert_close(got, dense_ef(model, loss, params, data), **TOLERANCE)


def test_R1_empirical_fisher_of_terms_and_of_examples_differ():
    torch.manual_seed(1)
    model, loss = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.CrossEntropyLoss(reduction="sum")
    X, y = torch.randn(3, 2, 4), torch.randint(3, (3, 2))
    f = lambda p, x: predictor(model)(p, x).movedim(-1, 1)  # noqa: E731
    params = named(model)
    rows = []
    for n in range(3):
        for t in range(2):
            flat, x0 = flattened(lambda p, n=n, t=t: loss(f(p, X[n : n + 1])[..., t], y[n : n + 1, t]), params)
            rows.append(jacrev(flat)(x0))
    g = torch.stack(rows).detach()
    e = g.reshape(3, 2, -1).sum(1)
    data = [(X[:2], y[:2]), (X[2:], y[2:])]
    torch.testing.assert_close(EFLinearOperator(f, loss, params, data).to_dense(), g.T @ g, **TOLERANCE)
    torch.testing.assert_close(EFLinearOperator(f, loss, params, data, per="example").to_dense(), e.T @ e, **TOLERANCE)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator])
@pytest.mark.parametrize("memory", [0, 2500, 2**30])
def test_R8_cached_products_equal_uncached_ones_and_free_their_memory(kind, memory):
    model, loss, params, data = problem()
    op = kind(model, loss, params, data)
    V = torch.randn(op.shape[1], 4)
    want, shifted = op @ V, op.shift(0.3)
    with op.cached(memory):
        for _ in range(2):
            torch.testing.assert_close(op @ V, want, rtol=1e-13, atol=1e-15)
            torch.testing.assert_close(shifted @ V, want + 0.3 * V, rtol=1e-13, atol=1e-15)
        kept = [p for p in op._cache.points if p is not None]
        assert len(kept) == (0 if memory == 0 else len(data) if memory > 2500 else len(kept))
        assert pickle.loads(pickle.dumps(op))._cache is None
    assert op._cache is None
    torch.testing.assert_close(op @ V, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_R8_compiled_products_have_no_graph_break(kind, reduction):
    model, loss, params, data = problem(nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1))
    params = {n: p + 0.1 for n, p in params.items()}
    op = kind(model, loss, params, data)
    compiled = op.compiled(backend="aot_eager")  # fullgraph=True: a break would raise
    V = torch.randn(op.shape[1], 3)
    torch.testing.assert_close(compiled @ V, op @ V, **TOLERANCE)
    blocks = op.block_diagonal()
    torch.testing.assert_close(blocks.compiled(backend="aot_eager") @ V, blocks @ V, **TOLERANCE)
    with compiled.cached():
        torch.testing.assert_close(compiled @ V, op @ V, **TOLERANCE)
    torch.testing.assert_close(pickle.loads(pickle.dumps(compiled)) @ V, op @ V, **TOLERANCE)


def test_R8_compiled_gaussian_hessian_is_no_expectation():
    torch.manual_seed(0)
    model, X, y = nn.Linear(4, 2), torch.randn(5, 4), torch.randn(5, 1)
    f = lambda p, x: ((out := predictor(model)(p, x))[:, :1], out[:, 1:].exp())  # noqa: E731
    op = HessianLinearOperator(f, nn.GaussianNLLLoss(), named(model), [(X, y)])
    torch.testing.assert_close(op.compiled(backend="eager").to_dense(), op.to_dense(), **TOLERANCE)


def test_R8_an_exception_inside_leaves_no_cache():
    model, loss, params, data = problem()
    op = GGNLinearOperator(model, loss, params, data)
    with pytest.raises(ValueError, match="expected"), op.cached():
        op @ torch.ones(op.shape[1] + 1)
    assert op._cache is None


def test_R8_a_model_that_fails_midway_leaves_no_half_filled_cache():
    model, loss, params, data = problem()
    calls = []

    def fragile(p, x):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("midway")
        return predictor(model)(p, x)

    op, good = GGNLinearOperator(fragile, loss, params, data), GGNLinearOperator(model, loss, params, data)
    v = torch.randn(op.shape[1])
    with op.cached():
        with pytest.raises(RuntimeError, match="midway"):
            op @ v
        for _ in range(2):
            torch.testing.assert_close(op @ v, good @ v, **TOLERANCE)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator])
def test_nothing_of_the_users_is_touched(kind):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3)).eval()
    _, loss, _, data = problem()
    model(data[0][0]).sum().backward()
    before = state(model)
    op = kind(model, loss, None, data)
    with torch.no_grad():
        op @ torch.ones(op.shape[1])
    with torch.inference_mode():
        op @ torch.ones(op.shape[1])
    with op.cached():
        op @ torch.ones(op.shape[1], 3)
        op @ torch.ones(op.shape[1], 3)
    assert state(model) == before


def test_bad_input():
    model, loss, params, data = problem()
    with pytest.raises(ValueError, match="mc_samples"):
        GGNLinearOperator(model, loss, params, data, mc_samples=-1)
    with pytest.raises(ValueError, match="per"):
        EFLinearOperator(model, loss, params, data, per="token")
    with pytest.raises(ValueError, match="one-shot"):
        GGNLinearOperator(model, loss, params, iter(data))
    with pytest.raises(ValueError, match="num_data"):
        GGNLinearOperator(model, loss, params, data, num_data=8) @ torch.ones(43)
    with pytest.raises(ValueError, match="train mode"):
        HessianLinearOperator(nn.Sequential(nn.Linear(4, 3), nn.Dropout()), loss, None, data)
    ignored = [(X, torch.full_like(y, -100)) for X, y in data]
    for op in (GGNLinearOperator, HessianLinearOperator):
        with pytest.raises(ValueError, match="divides by 0"):
            op(model, loss, params, ignored) @ torch.ones(43)
