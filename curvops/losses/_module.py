"""Losses that torch knows as modules, and their registry."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from curvops import _scalars
from curvops.losses._base import OutputLoss

_Class = TypeVar("_Class", bound=type)
MODULES: dict[type[nn.Module], Callable[..., OutputLoss]] = {}
TWINS: dict[Any, type[nn.Module]] = {}


def register(module: type[nn.Module], *twins: Callable[..., Tensor]) -> Callable[[_Class], _Class]:
    """Register the :class:`OutputLoss` of a loss module: the decorated class is called with the module.

    Args:
        module: The type of module. Subclasses that override ``forward`` are not taken for it.
        *twins: Functions that compute the same with the module's options as keywords.
    """

    def decorate(cls: _Class) -> _Class:
        MODULES[module] = cls
        TWINS.update(dict.fromkeys(twins, module))
        return cls

    return decorate


class ModuleLoss(OutputLoss):
    """A loss module with its options.

    Args:
        loss: The user's module; only read.
    """

    reductions: tuple[str, ...] = ("mean", "sum")

    def __init__(self, loss: nn.Module) -> None:
        self.name = type(loss).__name__
        self.loss: Any = loss
        if loss.reduction not in self.reductions:
            raise ValueError(
                f"{self.name} has reduction={loss.reduction!r}, expected one of {self.reductions}: "
                f"use {self.name}(..., reduction='mean')."
            )
        self.reduction = "sum" if loss.reduction == "sum" else "mean"

    def option(self, name: str, like: Tensor) -> Tensor | None:
        """Return a tensor among the options, in the dtype and on the device of ``like``."""
        value = getattr(self.loss, name)
        return None if value is None else value.detach().to(like)

    def check_nonnegative(self, name: str) -> None:
        """Raise if a weight is negative: the loss would be concave."""
        value = getattr(self.loss, name)
        if value is not None and (value < 0).any():
            raise ValueError(
                f"{self.name}: {name} holds {float(value.min()):g}, expected values >= 0: a negative weight makes "
                "the loss concave and its curvature indefinite."
            )

    def total(self, output: Tensor, target: Any) -> Tensor:
        self.check(output, target)
        with torch.autocast(output.device.type, enabled=False):
            return self._total(_scalars.wide(output), target)

    def check(self, output: Tensor, target: Any) -> None:
        """Raise if output and target do not fit together."""

    def _total(self, output: Tensor, target: Any) -> Tensor:
        return self.summed(output)(output, target.to(output.dtype))

    def summed(self, like: Tensor) -> nn.Module:
        """Return the module with reduction "sum" and options in the dtype of the output; the user's stays as it is."""
        loss = copy.copy(self.loss)
        loss._buffers = {k: None if b is None else b.detach().to(like) for k, b in self.loss._buffers.items()}
        loss.reduction = "sum"
        return loss
