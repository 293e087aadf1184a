"""What a forward pass makes of tracked parameters: uses that a rule covers, and operations that none does."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvops.kfac.rules import supported
from curvops.kfac.rules._base import Form


@dataclass(frozen=True, eq=False)
class Operand:
    """A tracked parameter, or a rearranged part of one, as an operand of an operation.

    Attributes:
        name: Name of the parameter.
        tensor: The very tensor; held so that its identity stays taken.
        shape: Shape of the parameter.
        entries: Flat indices of the parameter's entries, shaped like ``tensor``; ``None`` for the parameter itself.
        version: Of the tensor when it was recorded.
    """

    name: str
    tensor: Tensor
    shape: torch.Size
    entries: Tensor | None = None
    version: int = 0

    @property
    def modified(self) -> bool:
        """Whether it no longer holds the parameter's entries (a leaf stays a leaf, whatever its values)."""
        return not self.tensor.is_leaf and self.tensor._version != self.version


@dataclass(eq=False)
class Use:
    """One operation of the forward pass that consumes tracked parameters.

    Attributes:
        function: Name of the operation.
        form: Its canonical form.
        x: Its input; ``version`` tells whether it was modified afterwards.
        edge: Where the gradient of its output, of shape ``shape``, arrives.
        weight, bias: The tracked operands; ``None`` where an operand is absent or not tracked.
    """

    function: str
    form: Form
    x: Tensor
    edge: GradientEdge
    shape: torch.Size
    weight: Operand | None
    bias: Operand | None
    version: int = -1

    def __post_init__(self) -> None:
        if self.version < 0:
            self.version = self.x._version

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tracked parameters it consumes."""
        return tuple(o.name for o in (self.weight, self.bias) if o is not None)

    def input(self) -> Tensor:
        """Return the input as it was when the operation ran."""
        if self.x._version != self.version:
            raise ValueError(
                f"The input of {self.function} with parameters {list(self.names)} was modified in place after its use; "
                "its value is lost. Make that operation out of place."
            )
        return self.x.detach()

    def forget_input(self) -> None:
        """Let the input go; its shape stays."""
        self.x = torch.empty_like(self.x, device="meta")


def without(uses: Sequence[Use], names: Container[str]) -> list[Use]:
    """Take parameters out of uses, in place; return those that still have some."""
    for use in uses:
        if use.weight is not None and use.weight.name in names:
            use.weight = None
        if use.bias is not None and use.bias.name in names:
            use.bias = None
    return [use for use in uses if use.names]


@dataclass(frozen=True)
class Unsupported:
    """An operation on a tracked parameter that no rule covers; ``interval`` or ``nodes`` find it in the graph."""

    name: str
    function: str
    reason: str
    interval: tuple[int, int] = (0, 0)
    nodes: frozenset[Any] = frozenset()


def unsupported_message(found: Unsupported) -> str:
    """Say what is not supported, what is, and how to go on."""
    return (
        f"Parameter {found.name!r} is used by {found.function}: {found.reason}. Supported operations: "
        f"{', '.join(supported())}. Register a rule with curvops.kfac.rules.register, leave the parameter out of params, or "
        "choose unsupported='exact', 'diagonal' or 'zero'."
    )
