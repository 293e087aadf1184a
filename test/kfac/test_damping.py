"""Inverses at every kind of damping, layer by layer, and running averages: a dead layer is no exception."""

from __future__ import annotations

import pytest
import torch
from kfac.oracle import relative_error
from kfac.test_silent_errors import Net, mlp, regression
from losses.loss_cases import unit
from torch import Tensor, nn

from curvops import KFACLinearOperator as KFAC


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def dense_inverse(M: Tensor, damping: float | Tensor) -> Tensor:
    return torch.linalg.inv(M + damping * torch.eye(len(M)))


def dead() -> tuple[Net, KFAC]:
    net = Net(lambda m, x: m.b(m.c(m.a(x).relu())), a=nn.Linear(3, 4), b=nn.Linear(5, 2), c=nn.Linear(4, 5))
    net.a.bias.data.fill_(-100.0)
    return net, KFAC(net, nn.MSELoss(), None, regression(net, 3), fisher_type="type-2", separate_weight_and_bias=True)


def test_R2_A21_the_default_inverse_inverts_the_sum_with_a_dead_layer_too() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    data = regression(net, 3)
    net.a.bias.data.fill_(-100.0)
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    assert not K.block("a.weight").to_dense().any()
    for damping in (1e-3, 1e-1, 10.0):
        assert relative_error(K.inverse(damping).to_dense(), dense_inverse(K.to_dense(), damping)) < 1e-10


def test_R2_T41_every_way_of_damping_with_a_dead_layer() -> None:
    _, K = dead()
    for name in ("a.weight", "b.weight", "c.weight"):
        B, A, d = K.factors[name].output, K.factors[name].input, 0.3
        pi = (A.diagonal().mean() / B.diagonal().mean()).sqrt() if A.any() and B.any() else torch.tensor(1.0)
        split = lambda b, a: torch.kron(dense_inverse(B, b), dense_inverse(A, a))  # noqa: B023, E731
        wants = {
            "exact": dense_inverse(torch.kron(B, A), d),
            "factors": split(d, d),
            "heuristic": split(d**0.5 / pi, d**0.5 * pi),
        }
        for how, want in wants.items():
            assert relative_error(K.inverse(d, how=how).block(name).to_dense(), want) < 1e-10


def test_R2_T42_damping_by_layer() -> None:
    _, K = dead()
    dampings = {n: 0.1 * (i + 1) for i, n in enumerate(K.domain_names)}
    M = K.to_dense()
    sizes = torch.tensor([torch.Size(s).numel() for s in K.domain])
    shift = torch.repeat_interleave(torch.tensor(list(dampings.values())), sizes)
    want = dense_inverse(M, shift)
    for damping in (dampings, dampings.get):
        assert relative_error(K.inverse(damping).to_dense(), want) < 1e-10
    with pytest.raises(ValueError, match=r"unknown keys \['z'\].*none for the parts \['a\.weight'"):
        K.inverse({"z": 1.0})


def test_R2_T42_dampings_of_a_joint_block_must_agree() -> None:
    net = mlp()
    K = KFAC(net, nn.MSELoss(), None, regression(net, 3))
    with pytest.raises(ValueError, match=r"different dampings .*'a\.bias': 0\.2.* for the part 'a\.weight'"):
        K.inverse({"a.weight": 0.1, "a.bias": 0.2, "b.weight": 0.1})


def test_R2_T46_an_inverse_answers_what_the_operator_answers() -> None:
    _, K = dead()
    M = K.to_dense() + 0.3 * torch.eye(len(K.to_dense()))
    inverse = K.inverse(0.3)
    want = torch.linalg.inv(M)
    assert abs(inverse.logdet() + torch.logdet(M)) < 1e-9
    assert abs(inverse.trace() / want.trace() - 1) < 1e-10
    assert abs(inverse.frobenius_norm() / want.norm() - 1) < 1e-10
    assert relative_error(inverse.inverse().to_dense(), M) < 1e-10
    assert relative_error(inverse.diagonal(), want.diagonal()) < 1e-10
    with pytest.raises(ValueError, match=r"a\.weight"):
        K.inverse()


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(unit(2, seed=6)), nn.MSELoss(reduction="sum")])
def test_R2_T62_a_running_average_is_factor_by_factor(loss: nn.Module) -> None:
    net = mlp()
    target = (lambda y: y) if isinstance(loss, nn.MSELoss) else (lambda y: (y[:, 0] > 0).long())
    data = [(x, target(y)) for x, y in regression(net, 3)]
    old, new = (KFAC(net, loss, None, [batch], fisher_type="type-2").factors for batch in data[::2])
    K = KFAC(net, loss, None, data[:1], fisher_type="type-2").update(data[2:], decay=0.8)
    for name, block in K.factors.items():
        assert relative_error(block.input, 0.8 * old[name].input + 0.2 * new[name].input) < 1e-12
        assert relative_error(block.output, 0.8 * old[name].output + 0.2 * new[name].output) < 1e-12
