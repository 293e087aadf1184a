"""Scalars that may multiply an operator, and the dtype of numbers that are summed."""

from __future__ import annotations

from numbers import Complex, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and scalars: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def wide(t: Tensor) -> Tensor:
    """Return ``t`` in float32 or better (itself where it already is)."""
    return t.to(accumulation_dtype(t.dtype))


def is_scalar(x: Any) -> bool:
    """Tell whether ``x`` is a scalar of Python, numpy or torch."""
    return isinstance(x, (Number, np.generic)) or (isinstance(x, (Tensor, np.ndarray)) and x.ndim == 0)


def scalar_on(x: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a scalar where it can multiply tensors on ``device``."""
    return x.to(device) if isinstance(x, Tensor) else x


def real_scalar(x: Any, dtype: torch.dtype) -> float | Tensor:
    """Return a scalar as a Python float, or as a 0-dim tensor of ``dtype`` that keeps its graph."""
    if isinstance(x, Tensor):
        if x.is_complex():
            raise TypeError(f"Operators are real, got the complex scalar {x.item()}.")
        return x.to(dtype)
    x = x.item() if isinstance(x, (np.generic, np.ndarray)) else x
    if isinstance(x, Complex) and not hasattr(x, "__float__"):
        raise TypeError(f"Operators are real, got the complex scalar {x}.")
    return float(x)
