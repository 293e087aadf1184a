"""Ways to multiply by a Jacobian: forward mode on tape, double backward, and how one is chosen."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from kfac.nets import mlp
from matrix_free_cases import Attention, Recurrent, Words, dense_hessian, jacobian
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvops import EFLinearOperator, GGNLinearOperator, HessianLinearOperator, JacobianLinearOperator
from curvops._linearize import Dual, Graph
from curvops._tape import Tape

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Net(nn.Module):
    """Two layers, and a body that uses them."""

    def __init__(self, body, frozen: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 6), nn.Linear(6, 3), body
        self.a.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Sine(torch.autograd.Function):
    """A function with a derivative, but no rule for tangents."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def filled(net: Net, x: Tensor) -> Tensor:
    """Write what depends on the parameters into a tensor that does not."""
    out = torch.zeros(len(x), 6, dtype=x.dtype)
    h = net.a(x)
    for i in range(6):
        out[:, i] = h[:, 5 - i].tanh()
    return net.b(out)


def in_place(net: Net, x: Tensor) -> Tensor:
    h = F.relu(net.a(x), inplace=True).clone().mul_(2).add_(x.sum())
    h[:, 0] += 3 * h[:, 1]
    return net.b(h).tanh_()


def inner_gradient(net: Net, x: Tensor) -> Tensor:
    """A model that differentiates: forces from an energy."""
    return net.b(torch.func.vmap(torch.func.grad(lambda z: net.a(z).sin().sum()))(x) @ net.a.weight.T)


#: Body, and whether a tape of it can be replayed.
BODIES = {
    "plain": (lambda n, x: n.b(n.a(x).tanh()), True),
    "in place": (in_place, True),
    "fills a constant": (filled, True),
    "several outputs": (lambda n, x: n.b(torch.cat(n.a(x).chunk(2, 1)[::-1], 1).sort(1).values), True),
    "softmax, norm": (lambda n, x: F.layer_norm(n.b(n.a(x).softmax(1)), (3,)), True),
    "pooling": (lambda n, x: n.b(F.max_pool1d(n.a(x)[:, None], 3, 1, 1)[:, 0]), True),
    "index": (lambda n, x: n.b(n.a(x)[torch.arange(len(x)).flip(0)].cumsum(0)), True),
    "linear in every parameter": (lambda n, x: x @ n.a.weight[:3].T + n.b.bias, True),
    "a branch without parameters": (lambda n, x: n.b(n.a(x).exp()) + x[:, :3].sin(), True),
    "einsum": (lambda n, x: torch.einsum("ni,oi,no->no", n.a(x), n.b.weight, x[:, :3]), True),
    "inner gradient": (inner_gradient, None),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_R1_tape_and_double_backward_give_the_jacobian(body: str, frozen: bool) -> None:
    run, replayable = BODIES[body]
    net, X = Net(run, frozen), torch.randn(5, 4)
    params = {n: p.detach() for n, p in net.named_parameters() if p.requires_grad}
    J = jacobian(net, params, X)
    sizes, which = [p.numel() for p in params.values()], list(range(len(params)))
    V = torch.randn(4, sum(sizes))
    blocks = [v.reshape(4, *p.shape) for v, p in zip(V.split(sizes, 1), params.values(), strict=True)]
    leaves = [p.clone().requires_grad_() for p in params.values()]

    def output(tensors: list[Tensor]) -> Tensor:
        return torch.func.functional_call(net, dict(zip(params, tensors, strict=True)), (X,))

    dual = Dual(output, leaves, keep=False)
    for graph in (dual, Graph(output(leaves), leaves)):
        for _ in range(2):
            torch.testing.assert_close(graph.jvp(blocks, which).reshape(4, -1), V @ J.T, **TOLERANCE)
        U = torch.randn(2, *graph.output.shape)
        rows = torch.cat([g.flatten(1) for g in graph.vjp(U, which)], 1)
        torch.testing.assert_close(rows, U.flatten(1) @ J, **TOLERANCE)
        assert graph.jvp([b[:0] for b in blocks], which).shape == (0, *graph.output.shape)
    if replayable is not None:
        assert (dual._tangents.tape is not None) == replayable


@pytest.mark.parametrize("make", [Attention, lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Words])
def test_R3_tapes_of_composite_operations_can_be_replayed(make) -> None:
    model = make()
    X = torch.randint(7, (5, 3)) if make is Words else torch.randn(5, 3, 4)
    J = JacobianLinearOperator(model, None, [(X[:2], None), (X[2:], None)])
    V = torch.randn(J.shape[1], 3)
    singly = torch.stack([J @ v for v in V.T], 1)
    with J.cached():
        torch.testing.assert_close(J @ V, singly, **TOLERANCE)
        assert all(p.graph._tangents.tape is not None for p in J._cache.points)
    assert J.linearization == "forward"


def test_R8_a_replayed_tape_does_not_run_the_model() -> None:
    model, X, y, calls = mlp(4, 5, 3, act=nn.Tanh), torch.randn(5, 4), torch.randint(3, (5,)), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for kind in (GGNLinearOperator, EFLinearOperator, HessianLinearOperator):
        op = kind(model, nn.CrossEntropyLoss(), None, [(X, y)])
        with op.cached():
            op @ torch.ones(op.shape[1])
            calls.clear()
            op @ torch.ones(op.shape[1], 3)
            assert not calls
        op @ torch.ones(op.shape[1], 3)
        assert len(calls) == 1  # one forward pass serves all columns


def test_R8_cached_transpose_first() -> None:
    model, X = mlp(4, 5, 3, act=nn.Tanh), torch.randn(5, 4)
    want = jacobian(model, {n: p.detach() for n, p in model.named_parameters()}, X)
    J = JacobianLinearOperator(model, None, [(X, None)])
    with J.cached():
        torch.testing.assert_close(J.T.to_dense(), want.T, **TOLERANCE)
        torch.testing.assert_close(J.to_dense(), want, **TOLERANCE)
        assert J._cache.points[0].graph._tangents.tape is not None


def recorded(f, x: Tensor, v: Tensor) -> tuple[bool, Tape]:
    """Record ``f`` at ``x`` along ``v``; say whether the tape can be replayed."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        with Tape([forward_ad.unpack_dual(dual).tangent]) as tape:
            tangent = forward_ad.unpack_dual(f(dual)).tangent
        return tape.finish([tangent], [v]), tape


def test_R8_tapes_that_would_lie_are_refused() -> None:
    x, v = torch.randn(3), torch.randn(3)
    kept = torch.ones(3)

    def changes_a_constant_afterwards(d: Tensor) -> Tensor:
        weight = kept.clone()
        y = d * weight
        weight.mul_(2)
        return y

    def reads_a_number(d: Tensor) -> Tensor:
        return d * float(forward_ad.unpack_dual(d).tangent[0])

    def hides_a_tangent(d: Tensor) -> Tensor:
        stolen = torch.from_numpy(forward_ad.unpack_dual(d).tangent.numpy().copy())
        return forward_ad.make_dual(d.sin().detach(), d.detach().cos() * stolen)

    def adds_a_constant_tangent(d: Tensor) -> Tensor:
        return d.sin() + forward_ad.make_dual(torch.zeros(3), torch.ones(3))

    def writes_into_a_constant(d: Tensor) -> Tensor:
        return forward_ad.make_dual(d.sin().detach(), kept.clone().add_(forward_ad.unpack_dual(d).tangent))

    liars = (
        changes_a_constant_afterwards,
        reads_a_number,
        hides_a_tangent,
        adds_a_constant_tangent,
        writes_into_a_constant,
    )
    for f in liars:
        assert not recorded(f, x, v)[0], f.__name__
    valid, tape = recorded(torch.sin, x, v)
    assert valid
    torch.testing.assert_close(tape.replay([torch.ones(3)])[0], x.cos(), **TOLERANCE)


def test_R8_a_tape_drops_what_it_needs_no_more() -> None:
    """Replaying holds a few tangents, not those of all layers."""
    valid, tape = recorded(lambda d: d.sin().exp().tanh().sigmoid().sin().exp().tanh(), torch.randn(5), torch.randn(5))
    assert valid
    assert len(tape.steps) >= 7
    assert sum(map(len, tape._dropped.values())) >= len(tape.steps) - 1


def convolutional() -> nn.Sequential:
    body = (nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.Tanh())
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 3))


def test_R1_hessian_of_convolutions_forward_over_reverse() -> None:
    model, loss = convolutional(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    X, y = torch.randn(3, 1, 8, 8), torch.randint(3, (3,))
    data, params = [(X[:1], y[:1]), (X[1:], y[1:])], {n: p.detach() for n, p in model.named_parameters()}
    H, want = HessianLinearOperator(model, loss, None, data), dense_hessian(model, loss, params, data)
    assert H.linearization == "forward"
    v = torch.randn(len(want))
    torch.testing.assert_close(H @ v, want @ v, **TOLERANCE)
    torch.testing.assert_close(H.to_dense(), want, **TOLERANCE)
    with H.cached():
        for _ in range(2):
            torch.testing.assert_close(H @ v, want @ v, **TOLERANCE)
    assert H.linearization == "forward"
    for a in (H.block_diagonal("parameter"), H.block_diagonal("parameter").block("0.weight")):
        torch.testing.assert_close(a.to_dense(), a.to_dense().T, **TOLERANCE)
    torch.testing.assert_close(H.block_diagonal("parameter").block("0.weight").to_dense(), want[:18, :18], **TOLERANCE)


def test_R3_functions_without_a_rule_for_tangents_go_by_double_backward() -> None:
    X, y = torch.randn(5, 4), torch.randint(3, (5,))
    for net in (Net(lambda n, x: n.b(Sine.apply(n.a(x)))), nn.Sequential(nn.Conv1d(4, 4, 1), _Sine(), nn.Linear(1, 3))):
        inputs = X if isinstance(net, Net) else X[..., None]
        loss = nn.CrossEntropyLoss() if isinstance(net, Net) else lambda out, y: (out**3).mean()
        plain = _with_sine(net)
        params = {n: p.detach() for n, p in net.named_parameters()}
        for kind in (GGNLinearOperator, HessianLinearOperator):
            op, same = kind(net, loss, None, [(inputs, y)]), kind(plain, loss, params, [(inputs, y)])
            v = torch.randn(op.shape[1])
            torch.testing.assert_close(op @ v, same @ v, **TOLERANCE)
            assert op.linearization == "backward"
            with op.cached():
                torch.testing.assert_close(op @ v, same @ v, **TOLERANCE)


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sine.apply(x)


def _with_sine(net: nn.Module):
    """Return the same model as a function that autograd can differentiate both ways."""
    if isinstance(net, Net):
        return lambda p, x: (x @ p["a.weight"].T + p["a.bias"]).sin() @ p["b.weight"].T + p["b.bias"]
    return lambda p, x: F.linear(F.conv1d(x, p["0.weight"], p["0.bias"]).sin(), p["2.weight"], p["2.bias"])


def test_R3_errors_of_the_model_are_not_taken_for_missing_rules() -> None:
    def broken(p, x):
        raise NotImplementedError("the model's own")

    op = GGNLinearOperator(broken, nn.MSELoss(), {"w": torch.ones(2)}, [(torch.ones(2, 1), torch.ones(2, 1))])
    with pytest.raises(NotImplementedError, match="own"):
        op @ torch.ones(2)
    assert op.linearization == "forward"


@pytest.mark.parametrize("columns", [1, 3])
def test_R3_checkpoints_recompute_without_tangents(columns: int) -> None:
    net = Net(lambda n, x: n.b(checkpoint(lambda z: n.a(z).tanh().square(), x, use_reentrant=False)))
    plain = Net(lambda n, x: n.b(n.a(x).tanh().square()))
    plain.load_state_dict(net.state_dict())
    data = [(torch.randn(2, 4), torch.randint(3, (2,))), (torch.randn(3, 4), torch.randint(3, (3,)))]
    for kind in (GGNLinearOperator, EFLinearOperator, HessianLinearOperator):
        op, same = (kind(m, nn.CrossEntropyLoss(), None, data) for m in (net, plain))
        V = torch.randn(op.shape[1], columns)
        torch.testing.assert_close(op @ V, same @ V, **TOLERANCE)
        with op.cached():
            for _ in range(2):
                torch.testing.assert_close(op @ V, same @ V, **TOLERANCE)


def test_autocast_of_the_caller_changes_nothing() -> None:
    model, X, y = mlp(4, 5, 3, act=nn.Tanh).float(), torch.randn(5, 4).float(), torch.randint(3, (5,))
    for kind in (GGNLinearOperator, HessianLinearOperator):
        op = kind(model, nn.CrossEntropyLoss(), None, [(X, y)])
        V = torch.randn(op.shape[1], 2, dtype=torch.float32)
        want = op @ V
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(op @ V, want, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(op @ V[:, 0], want[:, 0], rtol=1e-5, atol=1e-6)


def test_A14c_many_small_batches_in_half_precision_do_not_lose_digits() -> None:
    model, X = nn.Linear(3, 1, bias=False), torch.rand(512, 3) + 0.5
    want = 2 * X.T @ X / len(X)
    half = model.to(torch.bfloat16)
    data = [(x[None].bfloat16(), torch.zeros(1, 1, dtype=torch.bfloat16)) for x in X]
    G = GGNLinearOperator(half, nn.MSELoss(), None, data).to_dense().double()
    assert (G - want).norm() < 0.01 * want.norm()


def test_R1_no_columns() -> None:
    model, X, y = mlp(4, 5, 3), torch.randn(5, 4), torch.randint(3, (5,))
    for kind in (GGNLinearOperator, HessianLinearOperator):
        op = kind(model, nn.CrossEntropyLoss(), None, [(X, y)])
        assert (op @ torch.zeros(op.shape[1], 0)).shape == (op.shape[1], 0)


def test_examples_are_not_guessed_from_rows() -> None:
    """A prediction of tokens, flattened: its rows are not the data."""
    f = lambda p, x: (x @ p["w"]).reshape(-1, 3)  # noqa: E731
    data = [(torch.randn(2, 5, 4), torch.randint(3, (10,)))]
    op = EFLinearOperator(f, nn.CrossEntropyLoss(), {"w": torch.randn(4, 3)}, data, per="example")
    with pytest.raises(ValueError, match=r"per='example'.*one row for every datum"):
        op @ torch.ones(12)


@pytest.mark.parametrize("kind", [GGNLinearOperator, HessianLinearOperator])
@pytest.mark.parametrize("columns", [(), (3,)])
def test_answers_are_the_callers_own(kind, columns: tuple[int, ...]) -> None:
    model, X, y = mlp(4, 5, 3, act=nn.Tanh), torch.randn(5, 4), torch.randint(3, (5,))
    op = kind(model, nn.CrossEntropyLoss(), None, [(X, y)])
    v = torch.randn(op.shape[1], *columns)
    before = v.clone()
    with op.cached():
        want = (op @ v).clone()
        (op @ v).zero_()
        for block in op @ [torch.randn(*s, *columns) for s in op.domain]:
            block.zero_()
        torch.testing.assert_close(op @ v, want, rtol=0, atol=0)
    torch.testing.assert_close(v, before, rtol=0, atol=0)
