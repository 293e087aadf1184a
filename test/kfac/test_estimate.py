"""Estimates as data: averaging, merging, saving, and weights in two orientations."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from kfac.oracle import relative_error
from torch import nn

from curvops import KFACLinearOperator, explain
from curvops.kfac.tied import nearest_kronecker


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(*sizes: int) -> list:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=g).double(), torch.randint(3, (n,), generator=g)) for n in sizes]


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_R10_merging_estimates_of_two_data_sets_is_one_estimate_of_both(approx, reduction):
    model, loss, data = net(), nn.CrossEntropyLoss(reduction=reduction), batches(4, 2, 3)

    def make(part):
        return KFACLinearOperator(model, loss, None, part, fisher_type="type-2", kfac_approx=approx)

    merged = make(data[:1]).merge(make(data[1:]))
    assert relative_error(merged.to_dense(), make(data).to_dense()) < 1e-12
    assert merged.num_data == 9


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_R10_update_averages_factors(reduction):
    model, loss, data = net(), nn.CrossEntropyLoss(reduction=reduction), batches(4, 2)
    old, new, K = (
        KFACLinearOperator(model, loss, None, d, fisher_type="type-2") for d in (data[:1], data[1:], data[:1])
    )
    assert K.update(data[1:], decay=0.9) is K
    for name, block in K.factors.items():
        for role in ("input", "output"):
            want = 0.9 * getattr(old.factors[name], role) + 0.1 * getattr(new.factors[name], role)
            assert relative_error(getattr(block, role), want) < 1e-12


def test_R4_updates_on_the_same_data_draw_anew():
    model, loss, data = net(), nn.CrossEntropyLoss(), batches(4)
    K = KFACLinearOperator(model, loss, None, data)
    draws = [K.update(data, decay=0.0).factors["2.weight"].output.clone() for _ in range(3)]
    for i in range(3):
        assert relative_error(draws[i], draws[i - 1]) > 1e-3  # other draws for the same data


def test_R10_estimates_that_differ_in_kind_do_not_combine():
    model, loss, data = net(), nn.CrossEntropyLoss(), batches(4)
    K = KFACLinearOperator(model, loss, None, data, fisher_type="type-2")
    before = K.to_dense()
    with pytest.raises(ValueError, match="kfac_approx='expand' and kfac_approx='reduce'"):
        K.merge(KFACLinearOperator(model, loss, None, data, fisher_type="type-2", kfac_approx="reduce"))
    with pytest.raises(ValueError, match="names or shapes"):
        K.merge(KFACLinearOperator(model, loss, [model[0].weight], data, fisher_type="type-2"))
    with pytest.raises(ValueError, match=r"decay: found 1\.5"):
        K.update(data, decay=1.5)
    assert torch.equal(K.to_dense(), before)


def test_R9_saved_operators_come_back_without_their_model():
    K = KFACLinearOperator(net(), lambda o, y: F.mse_loss(o, y), None, [(X, X[:, :3]) for X, _ in batches(4)])
    file = io.BytesIO()
    torch.save(K.state_dict(), file)
    file.seek(0)
    loaded = KFACLinearOperator.from_state_dict(torch.load(file, weights_only=True))
    whole = io.BytesIO()
    torch.save(K, whole)  # pickles although its loss is a lambda
    whole.seek(0)
    copies = [loaded, pickle.loads(pickle.dumps(K)), copy.deepcopy(K), torch.load(whole, weights_only=False)]
    for other in copies:
        assert torch.equal(other.to_dense(), K.to_dense())
        assert str(other.treatments) == str(K.treatments)
    with pytest.raises(ValueError, match="without its model"):
        loaded.update(batches(4), decay=0.5)


def test_R2_a_weight_in_both_orientations_is_the_nearest_kronecker_product():
    class AutoEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(4, 3)
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return F.linear(torch.tanh(self.encode(x)), self.encode.weight.t(), self.bias)

    torch.manual_seed(0)
    tied = AutoEncoder().double()
    data = [(X, X.flip(1)) for X, _ in batches(4, 2)]
    K = KFACLinearOperator(tied, nn.MSELoss(), None, data, fisher_type="type-2")
    assert "both orientations" in K.treatments["encode.weight"].detail
    assert dict(explain(tied, data=data)) == dict(K.treatments)

    # The same model with two weights gives the two blocks.
    untied = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    untied[0].load_state_dict(tied.encode.state_dict())
    untied[2].weight.data, untied[2].bias.data = tied.encode.weight.data.T.clone(), tied.bias.data
    parts = KFACLinearOperator(
        untied, nn.MSELoss(), None, data, fisher_type="type-2", separate_weight_and_bias=True
    ).factors
    first, second = parts["0.weight"], parts["2.weight"]
    M = torch.kron(first.output, first.input) + torch.kron(second.input, second.output)
    got = torch.kron(K.factors["encode.weight"].output, K.factors["encode.weight"].input)
    _assert_nearest_kronecker(got, M, 3, 4)
    for name, other in (("encode.bias", "0.bias"), ("bias", "2.bias")):
        assert relative_error(K.factors[name].output, parts[other].output) < 1e-12


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 1e8])
def test_R2_nearest_kronecker_is_optimal_and_positive(scale):
    torch.manual_seed(0)
    B1, A1, B2, A2 = (torch.randn(1, d, d + 1).double() for d in (3, 4, 3, 4))
    B1, A1, B2, A2 = (F @ F.mT for F in (B1, A1, scale * B2, A2))
    B, A = nearest_kronecker((B1, A1), (B2, A2))
    _assert_nearest_kronecker(torch.kron(B[0], A[0]), torch.kron(B1[0], A1[0]) + torch.kron(B2[0], A2[0]), 3, 4)
    for factor in (B, A):
        assert torch.linalg.eigvalsh(factor).min() > 0


def _assert_nearest_kronecker(got, M, o, i):
    """The best rank-one approximation of the rearranged matrix leaves the other singular values."""
    rearranged = M.reshape(o, i, o, i).permute(0, 2, 1, 3).reshape(o * o, i * i)
    best = torch.linalg.svdvals(rearranged)[1:].norm()
    assert abs((M - got).norm() - best) < 1e-9 * M.norm()
