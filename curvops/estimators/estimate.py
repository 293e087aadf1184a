"""A number with its standard error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimated number, or a tensor of them, with standard errors.

    ``float(estimate)``, ``torch.as_tensor(estimate)`` and ``numpy.asarray(estimate)`` give the value.

    Args:
        value: The estimate; detached, in float32 or better.
        stderr: Its standard error, entry by entry: infinite where one sample says nothing about it, zero where the value
            is exact up to rounding.
        num_matvecs: How many products with the operator (or its adjoint) it took.
        num_samples: How many samples the standard error comes from; 0 for an exact value.
        converged: Whether the tolerance that was asked for is reached; None if none was.
    """

    value: Tensor
    stderr: Tensor
    num_matvecs: int
    num_samples: int = 0
    converged: bool | None = None

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return a confidence interval (Student's, since few samples know little about their own spread)."""
        if not 0 < level < 1:
            raise ValueError(f"Got level={level}, expected a probability between 0 and 1, for example 0.95.")
        quantile = float(stdtrit(max(self.num_samples - 1, 1), (1 + level) / 2))
        return self.value - quantile * self.stderr, self.value + quantile * self.stderr

    def item(self) -> float:
        """Return a single value as a number."""
        return self.value.item()

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return f"{self.item():{spec}} ± {self.stderr.item():{spec}}" if spec else repr(self)

    # Numbers are exact. Two estimates may share samples, so their sum has no standard error that is known here.
    def __mul__(self, factor: float) -> Estimate:
        factor = _number(factor, "multiply")
        return replace(self, value=self.value * factor, stderr=self.stderr * abs(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Estimate:
        return self * (1.0 / _number(divisor, "divide"))

    def __add__(self, other: float) -> Estimate:
        return replace(self, value=self.value + _number(other, "add"))

    __radd__ = __add__

    def __sub__(self, other: float) -> Estimate:
        return self + -_number(other, "subtract")

    def __rsub__(self, other: float) -> Estimate:
        return -self + other

    def __neg__(self) -> Estimate:
        return self * -1.0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value.cpu().numpy(), dtype=dtype)

    # What torch.as_tensor looks for: no copy, and the device stays.
    def __dlpack__(self, **options: Any) -> Any:
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.value.__dlpack_device__()

    def __repr__(self) -> str:
        after = f"({self.num_matvecs} products{', not converged' if self.converged is False else ''})"
        if self.value.ndim == 0:
            return f"{self.value.item():.6g} ± {self.stderr.item():.2g} {after}"
        shape = "x".join(map(str, self.value.shape))
        largest = f"{self.stderr.max().item():.2g}" if self.stderr.numel() else "0"
        return f"Estimate of {shape} values, each ± {largest} at most {after}"


def _number(x: Any, what: str) -> float:
    if isinstance(x, Estimate):
        raise TypeError(
            f"Cannot {what} two estimates: they may share samples, so the standard error is unknown. Estimate of the sum of "
            "the operators instead, or use their .value."
        )
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"Cannot {what} an estimate and {x!r}, expected a number.")
    return float(x)


def exact(value: Tensor, num_matvecs: int, converged: bool | None = None) -> Estimate:
    """Return a value without a sampling error."""
    return Estimate(value, torch.zeros_like(value), num_matvecs, 0, converged)
