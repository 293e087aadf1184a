"""R10: inverses, powers, samples and log-determinants of KFAC; half precision; autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from kfac.oracle import relative_error
from torch import nn

from curvops import KFACLinearOperator

LOSS = nn.CrossEntropyLoss()


def net(dead: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    if dead:  # no unit of the hidden layer is ever active: its B and the next layer's A are (almost) zero
        nn.init.constant_(model[0].bias, -100.0)
    return model


def batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=g, dtype=dtype), torch.randint(3, (n,), generator=g)) for n in sizes]


def kfac(dead: bool = False, **options) -> KFACLinearOperator:
    return KFACLinearOperator(net(dead), LOSS, None, batches(4, 2), fisher_type="type-2", **options)


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("damping", [1e-6, 1e-2, 3.0])
def test_R10_exact_inverse_is_the_inverse_of_the_damped_matrix(dead, damping):
    K = kfac(dead)
    D = K.to_dense() + damping * torch.eye(K.shape[0], dtype=torch.float64)
    inverse = K.inverse(damping)
    assert relative_error(inverse.to_dense() @ D, torch.eye(len(D), dtype=torch.float64)) < 1e-9
    sign, logabs = torch.linalg.slogdet(D)
    assert sign == 1
    assert abs(inverse.logdet() + logabs) < 1e-9 * max(1, abs(logabs))
    assert abs(inverse.trace() - torch.linalg.inv(D).trace()) < 1e-9 * inverse.trace()
    assert relative_error(inverse.diagonal(), torch.linalg.inv(D).diagonal()) < 1e-9
    assert relative_error(inverse.inverse().to_dense(), D) < 1e-9
    assert relative_error((inverse.sqrt() @ inverse.sqrt()).to_dense(), inverse.to_dense()) < 1e-9
    assert relative_error(inverse.power(0.25).power(4).to_dense(), inverse.to_dense()) < 1e-9


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_R10_factored_and_heuristic_damping_follow_their_formulas(dead, separate):
    damping, K = 1e-2, kfac(dead, separate_weight_and_bias=separate)
    for how in ("factors", "heuristic"):
        inverse = K.inverse(damping, how=how)
        for name, block in K.factors.items():
            want = _damped_inverse(block.output, block.input, damping, how)
            got = inverse.block(name).to_dense()
            if block.input is not None and len(block.names) == 2:
                # rows of the joint block are (weight, bias); the operator's order is all weights, then all biases
                o, i = len(block.output), len(block.input) - 1
                order = [r * (i + 1) + c for r in range(o) for c in range(i)] + [r * (i + 1) + i for r in range(o)]
                want = want[order][:, order]
            assert relative_error(got, want) < 1e-9, (name, how)


def _damped_inverse(B, A, damping, how):
    def shifted(F, c):
        return torch.linalg.inv(F + c * torch.eye(len(F), dtype=F.dtype))

    if A is None:
        return shifted(B, damping)
    if how == "factors":
        return torch.kron(shifted(B, damping), shifted(A, damping))
    a, b = A.diagonal().mean(), B.diagonal().mean()
    pi = (a / b).sqrt() if a > 0 and b > 0 else 1.0
    return torch.kron(shifted(B, damping**0.5 / pi), shifted(A, damping**0.5 * pi))


def test_R10_damping_by_layer_as_dict_and_callable():
    K = kfac()
    by_name = K.inverse({"0.weight": 0.1, "2.bias": 0.5})
    by_rule = K.inverse(lambda name: 0.1 if name.startswith("0") else 0.5)
    for name, damping in (("0.weight", 0.1), ("2.weight", 0.5)):
        block = K.block(name).to_dense()
        want = torch.linalg.inv(block + damping * torch.eye(len(block), dtype=block.dtype))
        assert relative_error(by_name.block(name).to_dense(), want) < 1e-9
        assert relative_error(by_rule.block(name).to_dense(), want) < 1e-9


def test_R10_samples_have_the_inverse_as_covariance():
    inverse = kfac().inverse(0.1)
    n = 40_000
    S = inverse.sample(n, generator=torch.Generator().manual_seed(0))
    C = inverse.to_dense()
    # Var of an entry of the sample covariance of normals: (C_ij^2 + C_ii C_jj) / n
    std = ((C**2 + torch.outer(C.diagonal(), C.diagonal())) / n).sqrt()
    assert ((S.T @ S / n - C).abs() < 5 * std).all()


def test_R10_queries_leave_the_factors_as_they_were():
    K = kfac(True)
    before = copy.deepcopy(K.state_dict())
    for how in ("exact", "heuristic", "factors"):
        inverse = K.inverse(1e-3, how=how)
        inverse @ torch.ones(K.shape[0], dtype=torch.float64)
        inverse.sample(2)
    (2 * K.shift(0.3)).power(0.5)
    for old, new in zip(before["blocks"], K.state_dict()["blocks"], strict=True):
        assert torch.equal(old["A"], new["A"])
        assert torch.equal(old["B"], new["B"])


def test_R10_bf16_models_accumulate_in_float32_and_invert():
    half = net().bfloat16()
    data = batches(*[4] * 512, dtype=torch.bfloat16)
    K = KFACLinearOperator(half, LOSS, None, data, fisher_type="type-2")
    exact = KFACLinearOperator(
        copy.deepcopy(half).double(), LOSS, None, [(X.double(), y) for X, y in data], fisher_type="type-2"
    )
    for name, block in K.factors.items():
        assert block.input.dtype == block.output.dtype == torch.float32
        assert relative_error(block.input.double(), exact.factors[name].input) < 1e-3
        assert relative_error(block.output.double(), exact.factors[name].output) < 1e-3
    v = torch.randn(K.shape[0]).bfloat16()
    assert (K.inverse(1e-2) @ v).dtype == torch.bfloat16
    assert relative_error((K.inverse(1e-2) @ v).double(), exact.inverse(1e-2) @ v.double()) < 2e-2
    assert torch.isfinite(K.inverse(1e-2).logdet())


def test_R10_autocast_changes_nothing_beyond_rounding():
    model = net().float()
    data = [(X.float(), y) for X, y in batches(4, 2)]
    K = KFACLinearOperator(model, LOSS, None, data, fisher_type="type-2")
    v = torch.randn(K.shape[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        L = KFACLinearOperator(model, LOSS, None, data, fisher_type="type-2")
        product, solved, dense = K @ v, K.inverse(1e-2) @ v, K.inverse(1e-2).to_dense()
    # the model itself runs in bf16: 8 bits
    assert relative_error(L.to_dense(), K.to_dense()) < 2e-2
    # the operator does not
    assert relative_error(product, K @ v) < 1e-6
    assert relative_error(solved, K.inverse(1e-2) @ v) < 1e-6
    assert relative_error(dense, K.inverse(1e-2).to_dense()) < 1e-6
