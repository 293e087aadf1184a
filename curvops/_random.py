"""Random numbers as a pure function of keys: no generator, no state, the same on every device.

A draw is a hash of ``(seed, *keys)``. Keyed by the index of a datum in its data set, it does not depend on how the data
are cut into batches, on their order, or on how many ranks share the work, and the global generators are not touched.
The hash chains the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014, doi:10.1145/2660193.2660195).
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

Key: TypeAlias = "int | Tensor"


def _int64(value: int) -> int:
    """Wrap a Python int into the signed 64-bit range, where torch multiplies modulo 2**64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _int64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_M1 = _int64(0xBF58476D1CE4E5B9)
_M2 = _int64(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic, the mask clears the copies of the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _M1
    z = (z ^ _shift(z, 27)) * _M2
    return z ^ _shift(z, 31)


def _mix_int(z: int) -> int:
    """``_mix`` in Python's integers: keys that are numbers cost no tensor operations."""
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _hash(seed: int, keys: tuple[Key, ...], device: torch.device | str | None) -> Tensor:
    """Absorb one key after the other; for a fixed prefix every step is a bijection of the key."""
    if device is None:
        device = next((k.device for k in keys if isinstance(k, Tensor)), torch.device("cpu"))
    z: int | Tensor = _mix_int(int(seed) + _GAMMA)
    for key in keys:
        if isinstance(key, Tensor):
            if key.is_floating_point() or key.is_complex():
                raise TypeError(f"Keys of draws are integers, found a tensor of dtype {key.dtype}: use .long().")
            z = _mix(((_int64(z) if isinstance(z, int) else z) ^ key.to(device, torch.int64)) + _GAMMA)
        elif isinstance(z, int):
            z = _mix_int((z ^ int(key) & _MASK) + _GAMMA)
        else:
            z = _mix((z ^ _int64(int(key))) + _GAMMA)
    return torch.tensor(_int64(z), dtype=torch.int64, device=device) if isinstance(z, int) else z


def _unit(z: Tensor) -> Tensor:
    """The upper 53 bits as a float64 in [0, 1)."""
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def uniform(seed: int, *keys: Key, device: torch.device | str | None = None) -> Tensor:
    """Return uniform draws in ``[0, 1)``, one for each combination of keys.

    Args:
        seed: Any integer.
        *keys: Integers or integer tensors that broadcast against each other.
        device: Where to draw. Default: the device of the first tensor among the keys.

    Returns:
        A float64 tensor of the broadcast shape of the keys.
    """
    return _unit(_hash(seed, keys, device))


def normal(seed: int, *keys: Key, device: torch.device | str | None = None) -> Tensor:
    """Return standard normal draws (Box and Muller); arguments as for :func:`uniform`."""
    z = _hash(seed, keys, device)
    # 1 - u lies in (0, 1], where the logarithm is finite. The second hash is none that a further key could give.
    radius = (-2.0 * torch.log1p(-_unit(z))).sqrt()
    return radius * torch.cos(2.0 * math.pi * _unit(_mix(z + _M2)))


def signs(seed: int, *keys: Key, device: torch.device | str | None = None) -> Tensor:
    """Return draws of -1.0 and 1.0 with equal probability; arguments as for :func:`uniform`."""
    return 1.0 - 2.0 * _shift(_hash(seed, keys, device), 63).to(torch.float64)
