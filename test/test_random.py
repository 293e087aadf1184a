"""Counter-based draws: moments, independence, reproducibility."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from curvops import _random
from curvops._random import normal, signs, uniform

M = 200_000
KEYS = torch.arange(M)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def reference(seed: int, *keys: int) -> int:
    """The hash in Python's exact integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    z = mix((seed + 0x9E3779B97F4A7C15) & mask)
    for key in keys:
        z = mix(((z ^ (key & mask)) + 0x9E3779B97F4A7C15) & mask)
    return z


@pytest.mark.parametrize("keys", [(), (0,), (5, 3), (-1, 2**62), (7, 0, 11, 2)])
@pytest.mark.parametrize("seed", [0, 1, -3, 2147483647, 2**64 + 1])
def test_the_hash_is_splitmix64_in_64_bit_arithmetic(seed: int, keys: tuple[int, ...]) -> None:
    z = int(_random._hash(seed, keys, None)) % 2**64
    assert z == reference(seed, *keys)
    assert float(uniform(seed, *keys)) == (z >> 11) * 2.0**-53
    assert float(signs(seed, *keys)) == 1 - 2 * (z >> 63)


def test_golden_values() -> None:
    """A release that changes these changes every Monte-Carlo matrix of its users."""
    assert uniform(0, 0).item() == 0.6524484863740322
    assert [normal(1, i).item() for i in range(2)] == pytest.approx(
        [0.46489580088891663, 2.1783883199240712], abs=1e-14
    )
    assert signs(2147483647, torch.arange(8)).tolist() == [1, 1, 1, 1, -1, 1, 1, -1]


def test_known_output_of_splitmix64() -> None:
    """Without keys the hash is the first output of the published generator."""
    assert int(_random._hash(0, (), None)) % 2**64 == 0xE220A8397B1DCDAF


def test_moments_of_uniform() -> None:
    u = uniform(3, KEYS)
    assert u.min() >= 0
    assert u.max() < 1
    for k in range(1, 5):
        sd = math.sqrt(1 / (2 * k + 1) - 1 / (k + 1) ** 2)
        assert abs(float((u**k).mean()) - 1 / (k + 1)) < 4 * sd / math.sqrt(M)
    counts = torch.histc(u, bins=100, min=0, max=1)
    chi2 = float(((counts - M / 100) ** 2 / (M / 100)).sum())
    assert abs(chi2 - 99) < 4 * math.sqrt(2 * 99)


def test_moments_of_normal() -> None:
    z = normal(4, KEYS)
    assert z.isfinite().all()
    for k, (moment, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs(float((z**k).mean()) - moment) < 4 * math.sqrt(variance / M)
    for x in (-2.0, -0.5, 1.0, 3.0):
        cdf = 0.5 * (1 + math.erf(x / math.sqrt(2)))
        assert abs(float((z < x).double().mean()) - cdf) < 4 * math.sqrt(cdf * (1 - cdf) / M)


def test_moments_of_signs() -> None:
    s = signs(5, KEYS)
    assert set(s.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(s.mean())) < 4 / math.sqrt(M)


@pytest.mark.parametrize("draw", [uniform, normal, signs])
def test_neighbouring_keys_and_seeds_are_uncorrelated(draw) -> None:
    a = draw(0, KEYS, 0)
    others = [
        draw(1, KEYS, 0),
        draw(0, KEYS, 1),
        draw(0, KEYS + 1, 0),
        draw(0, 0, KEYS),
        draw(0, KEYS),
        draw(-1, KEYS, 0),
    ]
    for b in others:
        assert abs(correlation(a, b)) < 4 / math.sqrt(M)
        assert abs(correlation(a**2, b)) < 4 / math.sqrt(M) or draw is signs
    # in the second moment, where a linear generator would show
    assert draw is signs or all(abs(correlation(a**2, b**2)) < 4 / math.sqrt(M) for b in others)


def test_keys_broadcast_and_each_entry_depends_on_its_own_keys_only() -> None:
    n, t, c = torch.tensor([4, 9]).view(-1, 1, 1), torch.arange(3).view(-1, 1), torch.arange(5)
    for draw in (uniform, normal, signs):
        table = draw(7, n, 2, t, c)
        assert table.shape == (2, 3, 5)
        assert table.dtype == torch.float64
        assert table[1, 2, 3] == draw(7, 9, 2, 2, 3)
        torch.testing.assert_close(draw(7, n.flip(0), 2, t, c), table.flip(0), rtol=0, atol=1e-15)
    assert uniform(7, n.to(torch.int32), 2).equal(uniform(7, n, 2))


def test_the_number_of_keys_matters_and_so_does_their_order() -> None:
    assert len({float(uniform(0, *k)) for k in [(), (0,), (0, 0), (1,), (1, 0), (0, 1)]}) == 6


def test_global_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float16)
    assert normal(0, KEYS[:3]).dtype == torch.float64
    assert torch.get_rng_state().equal(state)


def test_floating_point_keys_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float32: use \.long"):
        uniform(0, torch.rand(3))
