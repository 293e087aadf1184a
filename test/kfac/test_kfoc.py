"""R7: KFOC is the best Kronecker product over all data, and inverts; TNT keeps partial traces."""

from __future__ import annotations

import io
import pickle
import warnings

import pytest
import torch
from kfac.nets import every_mse, joint_or_separate, mlp
from kfac.oracle import batches, block_diagonal, dense_ggn, joint_groups, relative_error, shifted
from kfac.stream_cases import NETS, SEED, blocks, positions, single_gradients
from torch import Tensor, nn

from curvops import KFACLinearOperator, KFOCLinearOperator, TNTLinearOperator
from curvops.kfac import gradients, joined
from curvops.kfac.rank_one import Bidiagonalization
from curvops.testing import check_closed_forms, check_operator

TOL = 1e-9
FISHERS = ["type-2", "mc", "empirical", "empirical-per-term"]


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def case(net: str, sizes=(2, 3)):
    make, shape = NETS[net]
    model, loss = make(), nn.MSELoss()
    return model, loss, shifted(model), batches(model, loss, *(torch.randn(n, *shape) for n in sizes))


def kfoc(model, loss, params, data, **options) -> KFOCLinearOperator:
    return KFOCLinearOperator(model, loss, params, data, **{"fisher_type": "type-2", "seed": SEED, **options})


def tnt(model, loss, params, data, **options) -> TNTLinearOperator:
    return TNTLinearOperator(model, loss, params, data, **{"fisher_type": "type-2", "seed": SEED, **options})


def rearranged(D: Tensor) -> Tensor:
    """Return ``sum_k G_k ⊗ G_k`` of ``[K, o, i]`` as a map from ``vec(A)`` to ``vec(B)``: ``[o^2, i^2]``."""
    _, o, i = D.shape
    return torch.einsum("kab,kcd->acbd", D, D).reshape(o * o, i * i)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("net", NETS)
def test_R7_the_best_kronecker_product(net: str, fisher: str) -> None:
    model, loss, params, data = case(net)
    F = kfoc(model, loss, params, data, fisher_type=fisher)
    J = single_gradients(model, loss, params, data, fisher)
    for part, D in blocks(F, J):
        op = part.operator
        for g, d in enumerate(D.unbind(1)):
            R, B = rearranged(d), op.B[g]
            A = torch.eye(1) if op.A is None else op.A[g]
            U, S, Vh = torch.linalg.svd(R)
            best = S[0] * torch.outer(U[:, 0], Vh[0])
            assert relative_error(torch.outer(B.flatten(), A.flatten()), best) < TOL
            # The gradient of |G - B ⊗ A|^2 with respect to both factors, on the scale of their own.
            b, a = B.flatten(), A.flatten()
            assert float((R @ a - b * (a @ a)).norm()) < 1e-8 * float(b.norm() * (a @ a))
            assert float((R.T @ b - a * (b @ b)).norm()) < 1e-8 * float(a.norm() * (b @ b))
            for factor in (A, B):
                assert torch.equal(factor, factor.T)
                assert torch.linalg.eigvalsh(factor).min() > -1e-10 * factor.norm()


@pytest.mark.parametrize("net", ["mlp", "cnn", "grouped cnn", "both orientations"])
def test_R7_no_further_than_any_other(net: str) -> None:
    model, loss, params, data = case(net)
    J = single_gradients(model, loss, params, data)
    ops = [f(model, loss, params, data) for f in (kfoc, tnt)]
    ops.append(KFACLinearOperator(model, loss, params, data, fisher_type="type-2"))
    gains = []
    for i, (_, D) in enumerate(blocks(ops[0], J)):
        G = torch.block_diag(*(d.flatten(1).T @ d.flatten(1) for d in D.unbind(1)))
        errors = [float((op.parts[i].operator.to_dense() - G).norm() / G.norm()) for op in ops]
        assert errors[0] <= min(errors) + TOL
        gains.append(max(errors) - errors[0])
    assert max(gains) > 0.01


@joint_or_separate
@every_mse
def test_R7_exact_where_kfac_is(loss: nn.Module, separate: bool) -> None:
    model = mlp(5, 4, 3)
    data, params = batches(model, loss, torch.randn(2, 5), torch.randn(3, 5)), shifted(model)
    groups = [[n] for n in params] if separate else joint_groups(params)
    G = block_diagonal(dense_ggn(model, loss, params, data), params, groups)
    for f in (kfoc, tnt):
        assert relative_error(f(model, loss, params, data, separate_weight_and_bias=separate).to_dense(), G) < TOL


@pytest.mark.parametrize("net", ["mlp", "tokens, mixed", "grouped cnn", "both orientations, tokens"])
def test_R7_memory_and_chunks_change_nothing(net: str, monkeypatch) -> None:
    model, loss, params, data = case(net)
    F = kfoc(model, loss, params, data).to_dense()
    assert relative_error(kfoc(model, loss, params, data, memory_budget=0).to_dense(), F) < TOL
    monkeypatch.setattr(joined, "CHUNK", 1)
    monkeypatch.setattr(gradients, "WAITING", 0)
    assert relative_error(kfoc(model, loss, params, data, kfac_approx="expand").to_dense(), F) < TOL


def test_R7_a_zero_curvature_is_zero() -> None:
    model, loss = nn.Linear(3, 2), lambda out, y: out.sum()
    F = kfoc(model, loss, None, [(torch.randn(4, 3), torch.zeros(4))], reduction="sum")
    assert not F.to_dense().any()
    assert torch.allclose(F.inverse(0.5).to_dense(), 2 * torch.eye(8))
    T = tnt(model, loss, None, [(torch.randn(4, 3), torch.zeros(4))], reduction="sum")
    assert not T.to_dense().any()


def test_R7_one_input_and_one_output() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1, bias=False))
    data = batches(model, nn.MSELoss(), torch.randn(5, 1))
    F = kfoc(model, nn.MSELoss(), None, data)
    J = single_gradients(model, nn.MSELoss(), dict(model.named_parameters()), data)
    assert relative_error(F.to_dense()[2:, 2:], (J.T @ J)[2:, 2:]) < TOL


def test_R7_stops_where_it_says_and_says_where_it_does_not() -> None:
    model, loss, params, data = case("mlp", sizes=(20,))
    with pytest.warns(UserWarning, match=r"after 1 iterations with relative residuals up to"):
        kfoc(model, loss, params, data, max_iterations=1, tolerance=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F = kfoc(model, loss, params, data, tolerance=1e-3)
    assert set(F.residuals) == {"0.weight", "2.weight"}
    assert max(F.residuals.values()) <= 1e-3
    for options in ({"tolerance": 0.0}, {"max_iterations": 0}, {"fisher_type": "forward-only"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            kfoc(model, loss, params, data, **options)
    with pytest.raises(ValueError, match="forward-only"):
        tnt(model, loss, params, data, fisher_type="forward-only")
    with pytest.raises(ValueError, match="kfac_approx: found 'reduce'"):
        tnt(model, loss, params, data, kfac_approx="reduce")


def test_a_slow_iteration_begins_again() -> None:
    """Two singular values that are close, and more steps than are held."""
    generator = torch.Generator().manual_seed(0)
    Q, P = (torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q for _ in range(2))
    R = Q @ torch.linspace(1, 0.9, 64).diag() @ P
    run = Bidiagonalization(torch.eye(8)[None])
    steps = 0
    while run.residual > 1e-9 and steps < 900:
        steps += 1
        run.take_left((R @ run.inner.flatten()).reshape(1, 8, 8))
        run.take_right((R.T @ run.outer.flatten()).reshape(1, 8, 8))
    assert 16 < steps < 900
    assert abs(run.value.item() - 1) < 1e-9


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("net", NETS)
def test_tnt_keeps_the_partial_traces(net: str, fisher: str) -> None:
    model, loss, params, data = case(net)
    T = tnt(model, loss, params, data, fisher_type=fisher)
    J = single_gradients(model, loss, params, data, fisher)
    for part, D in blocks(T, J):
        B, A = (torch.einsum(spec, D, D) for spec in ("kgai,kgbi->gab", "kgai,kgaj->gij"))
        trace = D.square().sum((0, 2, 3))
        want = torch.block_diag(*(torch.kron(b, a) / t for b, a, t in zip(B, A, trace, strict=True)))
        assert relative_error(part.operator.to_dense(), want) < 1e-12
    assert relative_error(T.trace(), J.square().sum()) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tnt_merges(reduction: str) -> None:
    model, _, params, data = case("grouped cnn", sizes=(2, 4))
    loss = nn.MSELoss(reduction=reduction)
    whole, first, second = (tnt(model, loss, params, d) for d in (data, data[:1], data[1:]))
    assert relative_error(first.merge(second).to_dense(), whole.to_dense()) < 1e-12


@pytest.mark.parametrize("make", [kfoc, tnt])
def test_updates_between_old_and_new(make) -> None:
    model, loss, params, data = case("cnn", sizes=(3, 4))
    old, new = (make(model, loss, params, [d]).to_dense() for d in data)
    for decay, want in ((0.0, new), (1.0, old)):
        assert relative_error(make(model, loss, params, data[:1]).update(data[1:], decay).to_dense(), want) < TOL
    mixed = make(model, loss, params, data[:1]).update(data[1:], 0.5).to_dense()
    assert min(relative_error(mixed, M) for M in (old, new)) > 1e-3


def test_updates_of_kfoc_are_nearest_to_the_average() -> None:
    model, loss, params, data = case("mlp", sizes=(3, 4))
    old, new = (kfoc(model, loss, params, [d]) for d in data)
    F = kfoc(model, loss, params, data[:1]).update(data[1:], 0.7)
    for part, a, b in zip(F.parts, old.parts, new.parts, strict=True):
        R = sum(w * torch.outer(p.operator.B.flatten(), p.operator.A.flatten()) for w, p in ((0.7, a), (0.3, b)))
        U, S, Vh = torch.linalg.svd(R)
        got = torch.outer(part.operator.B.flatten(), part.operator.A.flatten())
        assert relative_error(got, S[0] * torch.outer(U[:, 0], Vh[0])) < TOL
    with pytest.raises(NotImplementedError, match="nearest Kronecker product of a sum"):
        old.merge(new)


@pytest.mark.parametrize("make", [kfoc, tnt])
@pytest.mark.parametrize("net", ["mlp", "grouped cnn"])
def test_R2_the_contract_and_the_closed_forms(net: str, make) -> None:
    model, loss, params, data = case(net, sizes=(9, 8))
    op = make(model, loss, params, data)
    M = torch.zeros(op.shape)
    for part in op.parts:
        index = positions(op, part).flatten()
        pairs = zip(part.operator.B, part.operator.A, strict=True)
        M[index[:, None], index] = torch.block_diag(*(torch.kron(b, a) for b, a in pairs))
    check_operator(op, M)
    check_closed_forms(op, M, singular=not op.eigenvalues().all(), rtol=1e-7)
    for how in ("heuristic", "factors"):
        assert torch.isfinite(op.inverse(0.1, how=how).to_dense()).all()


@pytest.mark.parametrize("make", [kfoc, tnt])
def test_saving_and_loading(make) -> None:
    model, loss, params, data = case("cnn")
    op, buffer = make(model, loss, params, data), io.BytesIO()
    torch.save(op.state_dict(), buffer)
    buffer.seek(0)
    for copy in (type(op).from_state_dict(torch.load(buffer, weights_only=True)), pickle.loads(pickle.dumps(op))):
        assert torch.equal(copy.to_dense(), op.to_dense())
        assert copy.factors["0.weight"].kind == "kronecker"


def test_float32_converges_to_its_tolerance() -> None:
    model, loss, _, data = case("cnn")
    want = kfoc(model, loss, None, data).to_dense()
    F = kfoc(model.float(), loss, None, [(X.float(), y.float()) for X, y in data])
    assert relative_error(F.to_dense().double(), want) < 1e-4


@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize("exponent", [-18, -12, 12, 18])
def test_R7_the_scale_of_a_problem_in_float32_does_not_matter(exponent: int, of_inputs: bool) -> None:
    """The matrix fits into float32, but squares of its entries do not."""
    model, loss = nn.Linear(4, 3, bias=False).float(), nn.MSELoss()
    X = torch.randn(7, 4).float()
    want = kfoc(model.double(), loss, None, [(X.double(), torch.zeros(7, 3))], fisher_type="mc").to_dense()
    model, scale = model.float(), 10.0**exponent

    def scaled(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return nn.functional.linear(x, params["weight"]) * (1 if of_inputs else scale)

    data = [(X * scale if of_inputs else X, torch.zeros(7, 3).float())]
    F = kfoc(scaled, loss, dict(model.named_parameters()), data, fisher_type="mc")
    assert relative_error(F.to_dense().double() / scale / scale, want) < 1e-4


def test_R7_what_leaves_float32_is_refused_by_name() -> None:
    model, X = nn.Linear(4, 3).float(), torch.full((2, 4), 1e14).float()
    for scale in (1.0, 1e4):
        y = torch.full((2, 3), 1e14 * scale).float()
        with pytest.raises(ValueError, match=r"'weight'.*float64"):
            kfoc(model, nn.MSELoss(reduction="sum"), None, [(X, y)], fisher_type="empirical")


@pytest.mark.parametrize(
    "options",
    [{"tolerance": "a"}, {"tolerance": 0}, {"max_iterations": 2.5}, {"max_iterations": None}, {"max_iterations": True}],
)
def test_bad_arguments(options: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: found"):
        kfoc(*case("mlp"), **options)


class Forked(nn.Module):
    """Which layer a batch reaches depends on its size."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few, self.last = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.many(x) if len(x) > 3 else self.few(x)).tanh())


def test_R7_updates_of_tnt_have_the_partial_traces_of_the_average() -> None:
    """Also where data have other weights than rows, and where some blocks are not reached."""
    model, loss = Forked(), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 5.0]))
    params = shifted(model)
    data = [(torch.randn(n, 4), torch.randint(2, (n,)).sort().values) for n in (5, 3, 6, 2)]
    T = tnt(model, loss, params, data[:1], fisher_type="empirical")
    for batch in data[1:]:
        T.update([batch], 0.5)
    weights = (0.125, 0.125, 0.25, 0.5)
    J = torch.cat(
        [w**0.5 * single_gradients(model, loss, params, [d], "empirical") for w, d in zip(weights, data, strict=True)]
    )
    for part, D in blocks(T, J):
        B, A = (torch.einsum(spec, D, D) for spec in ("kgai,kgbi->ab", "kgai,kgaj->ij"))
        assert relative_error(part.operator.to_dense(), torch.kron(B, A) / D.square().sum()) < 1e-12


@pytest.mark.parametrize(
    ("approx", "message"), [("reduce", "leave it out"), ("foo", "expected one of 'expand', 'reduce'")]
)
def test_tnt_has_no_approximation_of_sharing(approx: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tnt(*case("mlp"), kfac_approx=approx)
