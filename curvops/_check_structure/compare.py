"""Found against expected, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64


def same(found: Any, expected: Any, what: str) -> None:
    """Compare exactly."""
    assert found == expected, f"{what}: found {found}, expected {expected}"


def close(found: Tensor, expected: Tensor, size: Tensor, rtol: float, what: str) -> None:
    """Compare up to ``rtol`` times the largest entry of ``size``."""
    found = found.detach().cpu().double()
    same(tuple(found.shape), tuple(expected.shape), f"shape of {what}")
    if found.numel() == 0:
        return
    largest = size.abs().max().item() if size.numel() else 0.0
    error, allowed = (found - expected).abs().max().item(), rtol * max(largest, 1e-300)
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"


def refused(error: type[Exception], what: str, ask: Callable, *arguments: Any) -> None:
    """Ask for something that must raise, and say why."""
    try:
        ask(*arguments)
    except error as refusal:
        reason = str(refusal)
    else:
        raise AssertionError(f"{what} is accepted")
    assert len(reason) > 20, f"{what} is refused without a reason: {reason!r}"
