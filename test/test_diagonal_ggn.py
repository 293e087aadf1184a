"""The diagonal and the unit-wise blocks of the GGN are exact, for every net and Fisher, and never need ``[N, D]``."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from kfac.nets import Then, every_loss
from kfac.oracle import batches, dense_ggn, relative_error, shifted
from kfac.stream_cases import NETS, SEED, positions, single_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvops import GGNDiagonalLinearOperator, GGNUnitWiseLinearOperator
from curvops.kfac import joined
from curvops.testing import check_closed_forms, check_operator

TOL = 1e-12
KINDS = {"diagonal": GGNDiagonalLinearOperator, "unit-wise": GGNUnitWiseLinearOperator}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def cut(kind: str, op, G: Tensor) -> Tensor:
    """Keep of a dense matrix what the operator holds."""
    M = G.diag().diag()
    for part in op.parts if kind == "unit-wise" else ():
        for row in positions(op, part).flatten(0, 1):
            M[row[:, None], row] = G[row[:, None], row]
    return M


def case(net: str, loss: nn.Module, sizes=(2, 3)):
    make, shape = NETS[net]
    model = make()
    if isinstance(loss, nn.CrossEntropyLoss):
        model = Then(model, lambda y: y.movedim(-1, 1))
    return model, shifted(model), batches(model, loss, *(torch.randn(n, *shape) for n in sizes))


@every_kind
@every_loss
@pytest.mark.parametrize("net", NETS)
def test_R1_parts_of_the_ggn(net: str, loss: nn.Module, kind: str) -> None:
    model, params, data = case(net, loss)
    if net == "coupled":  # the GGN of batches, not of a whole data set at once
        J = single_gradients(model, loss, params, data)
        G = J.T @ J
    else:
        G = dense_ggn(model, loss, params, data)
    op = KINDS[kind](model, loss, params, data)
    assert relative_error(op.to_dense(), cut(kind, op, G)) < TOL
    assert {t.kind for t in op.treatments.values()} == {kind}


@every_kind
@pytest.mark.parametrize("fisher", ["mc", "signs", "empirical", "empirical-per-term"])
@pytest.mark.parametrize("net", ["mlp", "tokens, mixed", "grouped cnn", "both orientations, tokens", "coupled"])
def test_R1_parts_of_every_fisher(net: str, fisher: str, kind: str) -> None:
    loss = nn.MSELoss()
    model, params, data = case(net, loss)
    op = KINDS[kind](model, loss, params, data, fisher_type=fisher, mc_samples=2, seed=SEED)
    J = single_gradients(model, loss, params, data, fisher, 2)
    assert relative_error(op.to_dense(), cut(kind, op, J.T @ J)) < TOL


def test_mc_samples_choose_the_fisher() -> None:
    loss = nn.CrossEntropyLoss()
    model, params, data = case("mlp", loss)
    sampled, named = (
        GGNDiagonalLinearOperator(model, loss, params, data, mc_samples=2, seed=SEED, **options)
        for options in ({}, {"fisher_type": "mc"})
    )
    assert torch.equal(sampled.diagonal(), named.diagonal())
    J = single_gradients(model, loss, params, data, "mc", 2)
    assert relative_error(sampled.diagonal(), J.square().sum(0)) < TOL
    many = GGNDiagonalLinearOperator(model, loss, params, data, mc_samples=1000)
    exact = GGNDiagonalLinearOperator(model, loss, params, data)
    torch.testing.assert_close(many.diagonal(), exact.diagonal(), rtol=0.2, atol=0.03 * float(exact.diagonal().max()))


class Scaled(nn.Module):
    """A parameter that no rule covers, one that is used in parts, one that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale, self.unused = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.scale.exp())


@every_kind
def test_R3_every_parameter_has_its_diagonal(kind: str) -> None:
    model, loss = Scaled(), nn.BCEWithLogitsLoss(weight=torch.tensor([0.5, 2.0]))
    data, params = batches(model, loss, torch.randn(2, 4), torch.randn(3, 4)), shifted(model)
    op = KINDS[kind](model, loss, params, data)
    G = dense_ggn(model, loss, params, data)
    assert relative_error(op.diagonal(), G.diag()) < TOL
    assert {n: t.kind for n, t in op.treatments.items() if "." not in n} == {"scale": "diagonal", "unused": "zero"}
    with pytest.raises(NotImplementedError, match="scale"):
        KINDS[kind](model, loss, params, data, unsupported="raise")


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor) and t.numel():
                held = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
                self.numel = max(self.numel, min(t.numel(), held))
        return result


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_R1_no_tensor_is_as_large_as_all_gradients(net: str, monkeypatch) -> None:
    monkeypatch.setattr(joined, "CHUNK", 4096)
    conv = nn.Conv2d(6, 40, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 4)
    wide = {
        "mlp": (nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 4)), (60,)),
        "cnn": (nn.Sequential(*conv), (6, 5, 5)),
    }
    model, shape = wide[net]
    X, y = torch.randn(100, *shape), torch.randint(4, (100,))
    D = sum(p.numel() for p in model.parameters())
    with Largest() as seen:
        op = GGNDiagonalLinearOperator(model, nn.CrossEntropyLoss(), None, [(X, y)])
    assert seen.numel < 100 * D / 4
    G = dense_ggn(model, nn.CrossEntropyLoss(), dict(model.named_parameters()), [(X[:10], y[:10])])
    few = GGNDiagonalLinearOperator(model, nn.CrossEntropyLoss(), None, [(X[:10], y[:10])])
    assert relative_error(few.diagonal(), G.diag()) < TOL
    assert op.trace() > 0


class Large(TorchDispatchMode):
    """Counts the storages of at least so many numbers that operations make."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes() >= self.numel * t.element_size():
                self.found[t.untyped_storage().data_ptr()] = t
        return result


@pytest.mark.parametrize("tokens", [False, True])
def test_R1_unit_wise_blocks_are_held_once(tokens: bool, monkeypatch) -> None:
    monkeypatch.setattr(joined, "CHUNK", 4096)
    X = torch.randn(9, *[2] * tokens, 60)
    with Large(20 * 61 * 61) as seen:
        op = GGNUnitWiseLinearOperator(nn.Linear(60, 20), nn.MSELoss(), None, [(X, torch.randn(*X.shape[:-1], 20))])
    assert len(seen.found) == 1
    assert op.factors["weight"].operator.M.numel() == 20 * 61 * 61


@every_kind
@pytest.mark.parametrize("net", ["mlp", "grouped cnn"])
def test_R2_the_contract_and_the_closed_forms(net: str, kind: str) -> None:
    loss = nn.MSELoss()
    model, params, data = case(net, loss, sizes=(9, 8))
    op = KINDS[kind](model, loss, params, data)
    M = cut(kind, op, dense_ggn(model, loss, params, data))
    check_operator(op, M)
    check_closed_forms(op, M, singular=not op.eigenvalues().all(), rtol=1e-7)


@every_kind
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sums_over_data_merge_and_average(kind: str, reduction: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.4, 1.0, 2.0]), reduction=reduction)
    model, params, data = case("cnn", loss, sizes=(2, 4))
    whole, first, second = (KINDS[kind](model, loss, params, d) for d in (data, data[:1], data[1:]))
    a, b = first.to_dense(), second.to_dense()
    assert relative_error(first.merge(second).to_dense(), whole.to_dense()) < TOL
    again = KINDS[kind](model, loss, params, data[:1]).update(data[1:], 0.3)
    assert relative_error(again.to_dense(), 0.3 * a + 0.7 * b) < TOL


@every_kind
def test_saving_and_loading(kind: str) -> None:
    loss = nn.MSELoss()
    model, params, data = case("cnn", loss)
    op, buffer = KINDS[kind](model, loss, params, data), io.BytesIO()
    torch.save(op.state_dict(), buffer)
    buffer.seek(0)
    for copy in (KINDS[kind].from_state_dict(torch.load(buffer, weights_only=True)), pickle.loads(pickle.dumps(op))):
        assert torch.equal(copy.to_dense(), op.to_dense())


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_backpack_agrees() -> None:
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import DiagGGNExact

    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    X, y, loss = torch.randn(4, 2, 3, 3), torch.randint(3, (4,)), nn.CrossEntropyLoss()
    D = GGNDiagonalLinearOperator(model, loss, None, [(X, y)])
    twin, risk = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(DiagGGNExact()):
        risk(twin(X), y).backward()
    want = torch.cat([p.diag_ggn_exact.flatten() for p in twin.parameters()])
    assert relative_error(D.diagonal(), want) < TOL


def test_bad_arguments() -> None:
    loss = nn.MSELoss()
    model, params, data = case("mlp", loss)
    for options, error in (
        ({"mc_samples": -1}, "mc_samples"),
        ({"mc_samples": True}, "mc_samples"),
        ({"fisher_type": "forward-only"}, "forward-only"),
        ({"fisher_type": "type-1"}, "fisher_type"),
        ({"unsupported": "exact"}, "unsupported"),  # would not be diagonal
        ({"unsupported": "no"}, "unsupported"),
    ):
        with pytest.raises(ValueError, match=error):
            GGNDiagonalLinearOperator(model, loss, params, data, **options)


def test_too_large_numbers_are_refused_by_name() -> None:
    model = nn.Linear(3, 2).float()
    X = torch.full((2, 3), 1e25, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight"):
        GGNDiagonalLinearOperator(model, nn.MSELoss(), None, [(X, torch.zeros(2, 2, dtype=torch.float32))])
