"""R3: rotations are isometries with one direction to spare, and find every coupling above rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kfac.oracle import relative_error
from torch import nn

from curvops import KFACLinearOperator
from curvops.kfac.rotation import Combinations, Rotations


@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 5))
def test_R3_rotations_are_isometries_with_one_null_vector(units, vectors, seed):
    R = Rotations(units, vectors, seed, torch.device("cpu"))
    E = torch.stack([R.row(p) for p in range(R.passes)])  # [P, U, V]
    assert R.passes == vectors + 1
    eye = torch.eye(vectors, dtype=torch.float64).expand(units, -1, -1)
    assert torch.allclose(torch.einsum("puv,puw->uvw", E, E), eye, atol=1e-13)
    null = R.null()  # [P, U]
    assert torch.einsum("puv,pu->uv", E, null).abs().max() < 1e-13
    # Nobody else's vectors are orthogonal to it.
    cross = torch.einsum("puv,pw->uwv", E, null).norm(dim=2)
    assert cross[~torch.eye(units, dtype=torch.bool)].min() > 1e-6


@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 5))
def test_R3_combinations_hold_for_their_own_unit_only(units, vectors, seed):
    R = Combinations(units, vectors, seed, torch.device("cpu"))
    E, null = torch.stack([R.row(p) for p in range(R.passes)]), R.null()
    assert (R.fed, R.passes) == (vectors, vectors + 1)
    assert torch.equal(E[:vectors], torch.eye(vectors, dtype=torch.float64)[:, None].expand(-1, units, -1))
    assert torch.einsum("puv,pu->uv", E, null).abs().max() < 1e-15
    # Nobody else's vectors are orthogonal to it, not even nearly.
    cross = torch.einsum("puv,pw->uwv", E, null).abs().amin(2)
    assert cross[~torch.eye(units, dtype=torch.bool)].min() > 0.49 / units


def test_R3_a_single_unit_needs_no_extra_pass():
    R = Rotations(1, 4, 0, torch.device("cpu"))
    assert R.passes == 4
    assert torch.equal(torch.stack([R.row(p)[0] for p in range(4)]), torch.eye(4, dtype=torch.float64))


class Leak(nn.Module):
    """Datum 3 leaks into datum 1, by a little."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.first, self.last, self.strength = nn.Linear(4, 3), nn.Linear(3, 2), strength

    def forward(self, x):
        M = torch.eye(len(x), dtype=x.dtype)
        M[1, 3] = self.strength
        return self.last(torch.tanh(M @ self.first(x)))


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
def test_R3_one_weakly_coupled_pair_among_many_data_is_found(strength, fisher):
    model = Leak(strength).double()
    data = [(torch.randn(64, 4).double(), torch.randn(64, 2).double())]
    K = KFACLinearOperator(model, nn.MSELoss(), None, data, fisher_type=fisher)
    want = 0
    hidden = []
    handle = model.first.register_forward_hook(lambda *a: hidden.append(a[2]))
    out = model(data[0][0])
    handle.remove()
    vectors = 2**0.5 * torch.eye(2).double() if fisher == "type-2" else None
    for n in range(64):
        for v in vectors if vectors is not None else [2 * (out[n] - data[0][1][n]).detach()]:
            cotangent = torch.zeros_like(out)
            cotangent[n] = v
            (g,) = torch.autograd.grad(out, hidden, cotangent, retain_graph=True)
            want = want + g.T @ g / 128
    assert relative_error(K.factors["first.weight"].output, want) < 1e-12


def test_R3_float32_models_are_not_mistaken_for_coupled_ones():
    torch.manual_seed(0)
    layers = [
        layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.LayerNorm(16, elementwise_affine=False), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Linear(16, 5))
    data = [(torch.randn(64, 16), torch.randint(5, (64,)))]
    calls = []
    model.register_forward_hook(lambda *a: a[2].register_hook(calls.append) and None)
    KFACLinearOperator(model, nn.CrossEntropyLoss(), None, data, fisher_type="type-2")
    assert len(calls) == 5  # four columns and one pass of proof
