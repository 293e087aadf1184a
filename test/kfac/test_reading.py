"""R7, R2: what reads the data once or several times reads the same data, keeps its own copies, and outlives inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kfac.nets import mlp
from kfac.oracle import batches, relative_error, shifted
from kfac.stream_cases import NETS, blocks, single_gradients
from torch import Tensor, nn

from curvops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNUnitWiseLinearOperator,
    KFACLinearOperator,
    KFOCLinearOperator,
    TNTLinearOperator,
)

READERS = [EKFACLinearOperator, KFOCLinearOperator]
KINDS = [KFACLinearOperator, *READERS, TNTLinearOperator, GGNDiagonalLinearOperator, GGNUnitWiseLinearOperator]


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def case(net: str = "mlp", sizes=(3, 3)):
    make, shape = NETS[net]
    model, loss = make(), nn.MSELoss()
    return model, loss, shifted(model), batches(model, loss, *(torch.randn(n, *shape) for n in sizes))


class Refilled:
    """A loader that has one buffer and fills it anew for every batch."""

    def __init__(self, batches: list) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        X, y = (torch.empty_like(t) for t in self.batches[0])
        for batch in self.batches:
            for buffer, t in zip((X, y), batch, strict=True):
                buffer.copy_(t)
            yield X, y


class Later:
    """Data that are others from the second reading on."""

    def __init__(self, batches: list, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.batches, self.change, self.readings = batches, change, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.readings += 1
        for batch in self.batches:
            yield batch if self.readings == 1 else self.change(*batch)


class CodesFirst(nn.Module):
    """The first layer that runs sees no data."""

    def __init__(self) -> None:
        super().__init__()
        self.pos, self.a, self.b = nn.Linear(2, 3), nn.Linear(5, 3), nn.Linear(3, 3)
        self.register_buffer("codes", torch.randn(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        code = self.pos(self.codes)
        return self.b((self.a(x) + code).tanh())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", ["mlp", "cnn", "tied"])
def test_R7_a_loader_may_fill_its_buffer_again(net: str, kind: type) -> None:
    model, loss, params, data = case(net)
    want = kind(model, loss, params, data, fisher_type="type-2").to_dense()
    assert relative_error(kind(model, loss, params, Refilled(data), fisher_type="type-2").to_dense(), want) < 1e-13


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "change",
    [
        lambda X, y: (X, y + 1),
        lambda X, y: (X.flip(1), y),
        lambda X, y: (X.flip(0), y.flip(0)),
        lambda X, y: (1.01 * X, y),
    ],
    ids=["targets", "mirrored", "order", "scale"],
)
@pytest.mark.parametrize("make", [lambda: mlp(5, 4, 3), CodesFirst], ids=["mlp", "codes first"])
def test_R7_every_change_between_readings_is_noticed(make, change, kind: type) -> None:
    model, loss = make(), nn.MSELoss()
    data = batches(model, loss, *(torch.randn(3, 5) + 30 for _ in range(2)))
    kind(model, loss, None, Later(data, lambda X, y: (X, y)), fisher_type="empirical", memory_budget=0)
    with pytest.raises(ValueError, match="Batch 0 differs between two readings"):
        kind(model, loss, None, Later(data, change), fisher_type="empirical", memory_budget=0)
    kind(model, loss, None, Later(data, change), fisher_type="empirical")  # one reading is enough


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical-per-term"])
@pytest.mark.parametrize("net", ["tokens, mixed", "tokens, apart", "sequence first", "coupled", "both orientations"])
def test_R7_equal_readings_are_equal_however_vectors_share_passes(net: str, fisher: str, kind: type) -> None:
    model, loss, params, data = case(net, sizes=(2, 3))
    options = {"fisher_type": fisher, "kfac_approx": "reduce"}
    want = kind(model, loss, params, data, **options).to_dense()
    assert relative_error(kind(model, loss, params, data, memory_budget=0, **options).to_dense(), want) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_R2_what_inference_mode_makes_can_be_differentiated(kind: type) -> None:
    model, loss, params, data = case()
    want = kind(model, loss, params, data).to_dense()
    with torch.inference_mode():
        made = kind(model, loss, params, data)
        updated = kind(model, loss, params, data).update(data, 0.5)
    assert torch.equal(made.to_dense(), want)
    for op in (made, updated):
        v = torch.randn(op.shape[1], requires_grad=True)
        (op @ v).sum().backward()
        assert relative_error(v.grad, op.to_dense().sum(0)) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_R2_loaded_operators_have_every_attribute(kind: type) -> None:
    op = kind(*case())
    public = {name for name in vars(op) if not name.startswith("_")}
    assert public <= set(vars(kind.from_state_dict(op.state_dict())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_R2_the_default_dtype_changes_nothing(precision: torch.dtype, kind: type) -> None:
    model, loss = mlp(5, 4, 3).to(precision), nn.MSELoss()
    data = [(torch.randn(3, 5, dtype=precision), torch.randn(3, 3, dtype=precision))]
    found = []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        blocks = kind(model, loss, None, data).state_dict()["blocks"]
        tensors = [t for b in blocks for t in (b["A"], b["B"], b["values"]) if t is not None]
        assert {t.dtype for t in tensors} == {precision}
        found.append(tensors)
    assert all(map(torch.equal, *found))


class Routed(nn.Module):
    """Sends every token to one of three layers; the last one gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        choice, y = (tokens[:, 0] > 0).long(), tokens.new_zeros(len(tokens), 3)
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero().flatten()
            y = y.index_add(0, rows, expert(tokens[rows]).tanh())
        return self.last(y.reshape(len(x), -1, 3).cumsum(1))


@pytest.mark.parametrize("budget", [0, 2**29])
@pytest.mark.parametrize("kind", KINDS)
def test_R3_a_layer_that_gets_no_rows_has_no_curvature(kind: type, budget: int) -> None:
    model, loss = Routed(), nn.MSELoss()
    data, params = batches(model, loss, *(torch.randn(1, 5, 4) for _ in range(3))), shifted(model)
    options = {"memory_budget": budget} if kind in READERS else {}
    op = kind(model, loss, params, data, fisher_type="type-2", **options)
    J = single_gradients(model, loss, params, data)
    for part, D in blocks(op, J):
        want = D.square().sum()
        if "experts.2" in part.label:
            assert want == part.operator.trace() == 0
        elif kind not in (KFACLinearOperator, KFOCLinearOperator):
            assert relative_error(part.operator.trace(), want) < 1e-12


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("budget", ["1GB", -1, float("nan"), None])
def test_budgets_are_checked(budget, kind: type) -> None:
    with pytest.raises(ValueError, match="memory_budget: found"):
        kind(*case(), memory_budget=budget)


@pytest.mark.parametrize("decay", ["0.5", float("nan"), None, 1.5])
def test_decays_are_checked(decay) -> None:
    model, loss, params, data = case()
    with pytest.raises(ValueError, match="decay: found"):
        TNTLinearOperator(model, loss, params, data).update(data, decay)
