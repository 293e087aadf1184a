"""R7: EKFAC is the nearest matrix with KFAC's eigenvectors, for every net, loss and Fisher; against single gradients."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from kfac.nets import Then, UNet, every_mse, joint_or_separate, kfac, mlp
from kfac.oracle import batches, block_diagonal, dense_ggn, joint_groups, relative_error, shifted
from kfac.stream_cases import NETS, SEED, Coupled, Routed, blocks, positions, single_gradients
from torch import Tensor, nn

from curvops import EKFACLinearOperator, KFACLinearOperator
from curvops.kfac import gradients, joined
from curvops.kfac.joined import Chunk
from curvops.kfac.reducers import squares
from curvops.kfac.vectors import Batch
from curvops.testing import check_closed_forms, check_operator

TOL = 1e-11


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def ekfac(model, loss, params, data, **options) -> EKFACLinearOperator:
    return EKFACLinearOperator(model, loss, params, data, **{"fisher_type": "type-2", "seed": SEED, **options})


def case(net: str, loss=None, sizes=(2, 3)):
    make, shape = NETS[net]
    loss, model = loss or nn.MSELoss(), make()
    if isinstance(loss, nn.CrossEntropyLoss):
        model = Then(model, lambda y: y.movedim(-1, 1))
    return model, loss, shifted(model), batches(model, loss, *(torch.randn(n, *shape) for n in sizes))


def worst(E: EKFACLinearOperator, J: Tensor) -> float:
    """Compare all eigenvalues with squared rotated gradients, relative to the largest of their block."""
    errors = []
    for part, D in blocks(E, J):
        op = part.operator
        if not hasattr(op, "values"):
            errors.append(relative_error(op.diagonal(), D.square().sum(0).flatten()))
            continue
        D = D if op.QB is None else op.QB.mT @ D
        D = D if op.QA is None else D @ op.QA
        want = D.square().sum(0)
        errors.append(float((op.values - want).abs().max() / want.abs().max()))
    return max(errors)


def basis(op) -> Tensor:
    """Return the eigenvectors of an operator as one matrix."""
    QA = torch.ones(op.array[0], 1, 1) if op.QA is None else op.QA
    return torch.block_diag(*(torch.kron(b, a) for b, a in zip(op.QB, QA, strict=True)))


@pytest.mark.parametrize("fisher", ["type-2", "mc", "signs", "empirical", "empirical-per-term"])
@pytest.mark.parametrize("net", NETS)
def test_R7_eigenvalues_are_squared_rotated_gradients(net: str, fisher: str) -> None:
    model, loss, params, data = case(net)
    E = ekfac(model, loss, params, data, fisher_type=fisher, mc_samples=2)
    J = single_gradients(model, loss, params, data, fisher, 2 if fisher in ("mc", "signs") else 1)
    assert worst(E, J) < TOL
    assert all(f.kind == "eigen" for f in E.factors.values())


def ignoring(loss: nn.Module, data):
    for _, y in data:
        y.view(-1)[1] = loss.ignore_index
    return data


CROSS_ENTROPIES = {
    "weights": lambda: nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.7])),
    "ignored": lambda: nn.CrossEntropyLoss(ignore_index=-7),
    "smooth, sum": lambda: nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"),
}


@joint_or_separate
@pytest.mark.parametrize(
    "net", ["tokens, mixed", "tokens, apart", "flattened", "cnn, a loss per pixel", "sequence first"]
)
@pytest.mark.parametrize("kind", CROSS_ENTROPIES)
def test_R7_outputs_of_any_shape_and_options_of_losses(kind: str, net: str, separate: bool) -> None:
    model, loss, params, data = case(net, CROSS_ENTROPIES[kind]())
    data = ignoring(loss, data) if kind == "ignored" else data
    E = ekfac(model, loss, params, data, separate_weight_and_bias=separate)
    assert worst(E, single_gradients(model, loss, params, data)) < TOL


def test_R7_a_callable_loss_and_a_callable_model() -> None:
    model, _, params, data = case("cnn")

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return ((out[:, :2] - y[:, :2]) ** 4).sum() + out[:, 2].square().sum() / 2

    def call(p: dict[str, Tensor], X: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (X,))

    E = ekfac(call, loss, params, data, reduction="sum")
    G = dense_ggn(call, loss, params, data)
    values, Q = torch.linalg.eigh(G)
    root = (Q * values.clamp(min=0).sqrt()).T
    assert worst(E, root) < 1e-9


def test_R7_a_prediction_with_data_and_tokens_in_one_axis() -> None:
    model = Then(mlp(4, 3, 2, act=nn.Tanh), lambda y: y.flatten(0, 1))
    data, params = batches(model, nn.MSELoss(), torch.randn(2, 3, 4), torch.randn(1, 3, 4)), shifted(model)
    E = ekfac(model, nn.MSELoss(), params, data)
    assert worst(E, single_gradients(model, nn.MSELoss(), params, data)) < TOL


@joint_or_separate
@every_mse
@pytest.mark.parametrize("net", ["mlp", "positions", "pixels"])
def test_R7_exact_where_kfac_is(loss: nn.Module, net: str, separate: bool) -> None:
    make, shape = {
        "mlp": (lambda: mlp(6, 3, 1), (6,)),
        "positions": (lambda: mlp(5, 4, 3), (2, 3, 5)),
        "pixels": (lambda: nn.Conv2d(3, 2, 4, padding=2), (3, 4, 5)),
    }[net]
    model = make()
    data, params = batches(model, loss, torch.randn(2, *shape), torch.randn(3, *shape)), shifted(model)
    groups = [[n] for n in params] if separate else joint_groups(params)
    G = block_diagonal(dense_ggn(model, loss, params, data), params, groups)
    assert relative_error(kfac(model, loss, params, data, separate_weight_and_bias=separate).to_dense(), G) < TOL
    assert relative_error(ekfac(model, loss, params, data, separate_weight_and_bias=separate).to_dense(), G) < TOL


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
@pytest.mark.parametrize(
    "net", ["mlp", "tokens, mixed", "cnn", "grouped cnn", "called twice", "both orientations", "one bias"]
)
def test_R7_never_further_than_kfac(net: str, fisher: str, approx: str) -> None:
    model, loss, params, data = case(net)
    options = {"fisher_type": fisher, "kfac_approx": approx, "seed": SEED}
    K, E = kfac(model, loss, params, data, **options), ekfac(model, loss, params, data, **options)
    J = single_gradients(model, loss, params, data, fisher)
    nearer = []
    for k, (part, D) in zip(K.parts, blocks(E, J), strict=True):
        G = torch.block_diag(*(d.flatten(1).T @ d.flatten(1) for d in D.unbind(1)))
        errors = [float((op.to_dense() - G).norm() / G.norm()) for op in (part.operator, k.operator)]
        assert errors[0] <= errors[1] + TOL
        nearer.append(errors[0] < 0.999 * errors[1])
    assert any(nearer)


@pytest.mark.parametrize("rotations", ["both", "outputs only", "none"])
@pytest.mark.parametrize(
    ("G", "n", "P", "S", "o", "i", "biases"), [(1, 2, 3, 4, 3, 5, 1), (2, 3, 1, 2, 4, 3, 0), (1, 4, 2, 1, 3, 2, 2)]
)
def test_R7_all_contraction_orders_agree(G, n, P, S, o, i, biases, rotations: str) -> None:
    x, c = torch.randn(G, n, S, i), torch.randn(G, n, P, S, o)
    ones = torch.randint(2, (S, biases)).double()
    QB, QA = (torch.linalg.qr(torch.randn(G, k, k)).Q for k in (o, i + biases))
    QB, QA = {"both": (QB, QA), "outputs only": (QB, None), "none": (None, None)}[rotations]
    full = torch.cat([x, ones.expand(G, n, S, biases)], -1)
    D = torch.einsum("gnpso,gnsi->gnpoi", c, full)
    D = D if QB is None else torch.einsum("gab,gnpac->gnpbc", QB, D)
    D = D if QA is None else torch.einsum("gcd,gnpbc->gnpbd", QA, D)
    want = D.square().sum((1, 2))
    orders = ["none", "inputs", "outputs", "both", None] + ["outer"] * (S == 1)
    layouts = [(x, c), (x.mT.contiguous().mT, c.mT.contiguous().mT)]  # positions last in memory, too
    kept = x.clone(), c.clone()
    for order in orders:
        for x_, c_ in layouts:
            assert relative_error(squares(Chunk(x_, ones, c_), QB, QA, order), want) < 1e-13
    assert torch.equal(x, kept[0])
    assert torch.equal(c, kept[1])


@pytest.mark.parametrize("net", ["cnn", "tokens, mixed", "both orientations, tokens", "sequence first", "grouped cnn"])
def test_R7_chunks_and_memory_change_nothing(net: str, monkeypatch) -> None:
    model, loss, params, data = case(net)
    E = ekfac(model, loss, params, data).to_dense()
    again = ekfac(model, loss, params, data, memory_budget=0).to_dense()
    assert relative_error(again, E) < TOL
    monkeypatch.setattr(joined, "CHUNK", 1)
    monkeypatch.setattr(gradients, "WAITING", 0)
    small = ekfac(model, loss, params, data)
    assert worst(small, single_gradients(model, loss, params, data)) < TOL


@pytest.mark.parametrize("fisher", ["mc", "signs", "type-2"])
def test_R7_batches_change_nothing(fisher: str) -> None:
    model, loss, params, data = case("tokens, mixed", sizes=(5,))
    (X, y), options = data[0], {"fisher_type": fisher, "mc_samples": 2}
    E = ekfac(model, loss, params, data, **options)
    parted = ekfac(model, loss, params, [(X[:2], y[:2]), (X[2:], y[2:])], **options)
    assert relative_error(parted.to_dense(), E.to_dense()) < 1e-9
    assert relative_error(ekfac(model, loss, params, data, **options).to_dense(), E.to_dense()) == 0


def test_R7_few_passes_suffice_where_loss_terms_or_data_do_not_meet(monkeypatch) -> None:
    counts = []
    original = Batch.backward
    monkeypatch.setattr(Batch, "backward", lambda self, *a, **k: counts.append(1) or original(self, *a, **k))
    for net, fisher, want in (
        ("tokens, apart", "type-2", 2 + 1),
        ("tokens, mixed", "mc", 1 + 1),
        ("cnn", "mc", 1 + 1),
        ("cnn", "type-2", 3 + 1),
        ("sequence first", "empirical", 1 + 1 + 3 + 1),  # a wrong guess, a probe of three passes, the vector
    ):
        counts.clear()
        model, loss, params, data = case(net, sizes=(3,))
        ekfac(model, loss, params, data, fisher_type=fisher)
        assert len(counts) == want, net


def test_R7_rounding_in_float32_does_not_look_like_coupling(monkeypatch) -> None:
    counts = []
    original = Batch.backward
    monkeypatch.setattr(Batch, "backward", lambda self, *a, **k: counts.append(1) or original(self, *a, **k))
    for seed in range(5):
        torch.manual_seed(seed)
        conv = nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3)
        model, X = nn.Sequential(*conv).float(), torch.randn(128, 2, 8, 8).float()
        ekfac(model, nn.CrossEntropyLoss(), None, [(X, torch.randint(3, (128,)))], fisher_type="mc")
    assert len(counts) == 5 * 2


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("fisher", ["mc", "empirical", "type-2"])
def test_R7_one_weakly_coupled_pair_among_many_data_is_found(strength: float, fisher: str) -> None:
    class Leak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            M = torch.eye(len(x))
            M[1, 3] = strength
            return self.last(torch.tanh(M @ self.first(x)))

    model, loss = Leak(), nn.MSELoss()
    data, params = batches(model, loss, torch.randn(40, 4)), shifted(model)
    E = ekfac(model, loss, params, data, fisher_type=fisher)
    assert worst(E, single_gradients(model, loss, params, data, fisher)) < TOL


def test_R7_a_second_pass_over_other_data_is_noticed() -> None:
    model, loss, params, data = case("mlp", sizes=(4, 4, 4))

    class Shuffled:
        def __init__(self, batches) -> None:
            self.batches, self.reads = batches, 0

        def __iter__(self):
            self.reads += 1
            return iter(self.batches[:: 1 if self.reads % 2 else -1])

    class Within(Shuffled):
        def __iter__(self):
            self.reads += 1
            return iter([(X.roll(self.reads, 0), y.roll(self.reads, 0)) for X, y in self.batches])

    for kind in (Shuffled, Within):
        with pytest.raises(ValueError, match="differs between two readings"):
            ekfac(model, loss, params, kind(data), fisher_type="mc", memory_budget=0)
    ekfac(model, loss, params, Shuffled(data), fisher_type="mc")  # one reading is enough


def test_R7_forward_only_is_kfac() -> None:
    model, loss, params, data = case("cnn")
    E, K = (f(model, loss, params, data, fisher_type="forward-only") for f in (ekfac, kfac))
    assert relative_error(E.to_dense(), K.to_dense()) < TOL


@joint_or_separate
@pytest.mark.parametrize("net", ["mlp", "grouped cnn", "both orientations"])
def test_R2_the_contract_and_the_closed_forms(net: str, separate: bool) -> None:
    model, loss, params, data = case(net, sizes=(3, 4) if net == "grouped cnn" else (9, 8))
    E = ekfac(model, loss, params, data, separate_weight_and_bias=separate)
    M = torch.zeros(E.shape)
    for part in E.parts:
        index, Q = positions(E, part).flatten(), basis(part.operator)
        M[index[:, None], index] = Q @ part.operator.values.flatten().diag() @ Q.T
    check_operator(E, M)
    check_closed_forms(E, M, singular=not E.eigenvalues().all(), rtol=1e-7)
    for damping in (1e-2, 0.3):
        assert relative_error(E.inverse(damping).to_dense(), torch.linalg.inv(M + damping * torch.eye(len(M)))) < 1e-9


def test_R2_dampings_by_block() -> None:
    model, loss, params, data = case("mlp")
    E = ekfac(model, loss, params, data)
    dampings = {"0.weight": 0.1, "2.weight": 2.0}
    want = torch.block_diag(
        *(torch.linalg.inv(E.block(n).to_dense() + d * torch.eye(E.block(n).shape[0])) for n, d in dampings.items())
    )
    for damping in (dampings, dampings.__getitem__):
        assert relative_error(E.inverse(damping).to_dense(), want) < 1e-10


def test_saving_and_loading() -> None:
    model, loss, params, data = case("cnn")
    E = ekfac(model, loss, params, data)
    buffer = io.BytesIO()
    torch.save(E.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    for copy in (EKFACLinearOperator.from_state_dict(state), pickle.loads(pickle.dumps(E))):
        assert torch.equal(copy.to_dense(), E.to_dense())
        assert torch.equal(copy.inverse(0.1).to_dense(), E.inverse(0.1).to_dense())
        assert copy.factors["0.weight"].input.shape == (13, 13)
    with pytest.raises(ValueError, match="EKFACLinearOperator, expected a KFACLinearOperator"):
        KFACLinearOperator.from_state_dict(state)


@pytest.mark.parametrize("net", ["mlp", "grouped cnn", "one bias"])
def test_update_averages_in_the_eigenvectors_of_the_averaged_factors(net: str) -> None:
    model, loss, params, data = case(net, sizes=(3, 4))
    old, new = (ekfac(model, loss, params, [batch]) for batch in data)
    mixed, before = ekfac(model, loss, params, data[:1]), old.to_dense()
    mixed.update(data[1:], 0.7)
    K = kfac(model, loss, params, data[:1]).update(data[1:], 0.7)
    J = single_gradients(model, loss, params, data[1:])
    for (part, D), k in zip(blocks(mixed, J), K.parts, strict=True):
        op, index = part.operator, positions(mixed, part).flatten()
        Q = basis(op)
        G = torch.block_diag(*(d.flatten(1).T @ d.flatten(1) for d in D.unbind(1)))
        M = 0.7 * before[index[:, None], index] + 0.3 * G
        assert relative_error(op.values.flatten(), (Q.T @ M @ Q).diagonal()) < TOL
        skew = Q.T @ k.operator.to_dense() @ Q
        assert float((skew - skew.diagonal().diag()).norm() / skew.norm()) < 1e-9
    assert relative_error(ekfac(model, loss, params, data[:1]).update(data[1:], 0.0).to_dense(), new.to_dense()) < TOL
    assert relative_error(ekfac(model, loss, params, data[:1]).update(data[1:], 1.0).to_dense(), before) < TOL


def test_merging_is_refused() -> None:
    model, loss, params, data = case("mlp")
    E = ekfac(model, loss, params, data)
    with pytest.raises(NotImplementedError, match="different eigenvectors"):
        E.merge(ekfac(model, loss, params, data))


@pytest.mark.parametrize("policy", ["exact", "diagonal", "zero"])
@pytest.mark.parametrize("budget", [0, 1e9])
def test_parameters_without_a_rule(policy: str, budget: float) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = mlp(4, 3, 2, act=nn.Tanh), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net[2](self.net[1](self.net[0](x)) * self.scale.exp())

    model, loss = Scaled(), nn.MSELoss()
    data, params = batches(model, loss, torch.randn(3, 4)), shifted(model)
    with pytest.raises(NotImplementedError, match="scale"):
        ekfac(model, loss, params, data)
    E = ekfac(model, loss, params, data, unsupported=policy, memory_budget=budget)
    G = dense_ggn(model, loss, params, data)
    offset = sum(p.numel() for p in list(params.values())[: list(params).index("scale")])
    found, want = E.to_dense()[offset : offset + 3, offset : offset + 3], G[offset : offset + 3, offset : offset + 3]
    want = {"exact": want, "diagonal": want.diag().diag(), "zero": 0 * want}[policy]
    assert relative_error(found, want) < TOL
    assert {t.kind for t in E.treatments.values()} == {"eigen", policy}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    model, loss, _, data = case("cnn")
    want = ekfac(model, loss, None, data).to_dense()
    model = model.to(dtype)
    E = ekfac(model, loss, None, [(X.to(dtype), y.to(dtype)) for X, y in data])
    assert (E.torch_dtype, E.parts[0].operator.values.dtype) == (dtype, torch.float32)
    assert relative_error(E.to_dense().double(), want) < (1e-4 if dtype == torch.float32 else 0.1)


def test_nothing_is_left_behind_and_nothing_is_modified() -> None:
    model, loss, _, data = case("cnn")
    kept, state = [(X.clone(), y.clone()) for X, y in data], {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    E = ekfac(model, loss, None, data)
    E.inverse(0.1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for pair, old in zip(data, kept, strict=True) for a, b in zip(pair, old, strict=True))
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_peers_agree(net: str, fisher: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    from kfac.nets import NETS as PLAIN

    make, shape = PLAIN[net]
    model, loss = make(), nn.CrossEntropyLoss()
    data = batches(model, loss, torch.randn(2, *shape), torch.randn(3, *shape))
    options = {"check_deterministic": False, "separate_weight_and_bias": False, "fisher_type": fisher}
    K = curvlinops.EKFACLinearOperator(model, loss, list(model.parameters()), data, **options)
    want = K @ torch.eye(K.shape[0])
    assert relative_error(ekfac(model, loss, None, data, fisher_type=fisher).to_dense(), want) < 1e-9


def test_a_unet_and_a_graph() -> None:
    for model, X in (
        (UNet(), torch.randn(2, 2, 4, 4)),
        (Coupled(), torch.randn(5, 4)),
        (Routed(), torch.randn(2, 3, 4)),
    ):
        loss = nn.MSELoss()
        data, params = batches(model, loss, X), shifted(model)
        assert worst(ekfac(model, loss, params, data), single_gradients(model, loss, params, data)) < TOL


def test_unknown_options_are_named() -> None:
    model, loss, params, data = case("mlp")
    with pytest.raises(TypeError, match="mc_sample"):
        ekfac(model, loss, params, data, mc_sample=3)
    with pytest.raises(ValueError, match="fisher_type"):
        ekfac(model, loss, params, data, fisher_type="type-3")
