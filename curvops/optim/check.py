"""Hyperparameters are checked where they come in."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor


def check_hyperparameters(group: Mapping[str, Any], least: Mapping[str, float]) -> None:
    """Refuse what is not a number, or smaller than it may be; functions of the step and tensors pass."""
    for name, lowest in least.items():
        value = group[name]
        if callable(value) or isinstance(value, Tensor):
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}: found {value!r}, expected a number.")
        if not float(value) >= lowest:
            raise ValueError(f"{name}: found {value!r}, expected a number >= {lowest}.")


def check_loss_average(average: Any) -> Any:
    """Refuse what does not say how many terms a loss averages over."""
    fits = average in (None, "batch", "batch+sequence") or (isinstance(average, int) and average > 0)
    if not fits or isinstance(average, bool):
        raise ValueError(
            f"loss_average: found {average!r}, expected 'batch', 'batch+sequence', None, or the number of loss terms."
        )
    return average
