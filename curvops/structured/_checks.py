"""What arguments of structured matrices must be."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def checked_dim(dim: Any) -> int:
    """Return a dimension, or raise."""
    if not isinstance(dim, int) or dim < 0:
        raise ValueError(f"Got dimension {dim!r}, expected an integer >= 0.")
    return dim


def check_tensor(t: Any, name: str, shape: str) -> None:
    """Refuse what is not a floating point tensor with at least two axes."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        found = f"a {t.dtype} tensor" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"Got {found} as {name}, expected a floating point tensor of shape {shape}.")
    if t.ndim < 2:
        raise ValueError(f"Got {name} of shape {tuple(t.shape)}, expected {shape}.")
