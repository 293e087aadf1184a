"""The choices that users make by name."""

from __future__ import annotations

from enum import Enum
from typing import Any


class FisherType(str, Enum):
    """Which output vectors make up the output factors; every place takes the plain string, too."""

    TYPE2 = "type-2"
    MC = "mc"
    SIGNS = "signs"
    EMPIRICAL = "empirical"
    EMPIRICAL_PER_TERM = "empirical-per-term"
    FORWARD_ONLY = "forward-only"


class KFACType(str, Enum):
    """How weight sharing enters the factors; every place takes the plain string, too."""

    EXPAND = "expand"
    REDUCE = "reduce"


class Policy(str, Enum):
    """What happens to a parameter that no rule covers; every place takes the plain string, too."""

    RAISE = "raise"
    EXACT = "exact"
    DIAGONAL = "diagonal"
    ZERO = "zero"


def refuse_forward_only(fisher_type: str) -> None:
    """Refuse the kind that has no gradients of outputs, where everything is made of them."""
    if fisher_type == FisherType.FORWARD_ONLY:
        raise ValueError("fisher_type: found 'forward-only', which has no gradients of outputs; expected another one.")


def choice(argument: str, value: Any, kinds: type[Enum]) -> str:
    """Return a choice as its plain string, or raise listing all of them."""
    try:
        return str(kinds(value).value)
    except ValueError:
        expected = ", ".join(repr(k.value) for k in kinds)
        raise ValueError(f"{argument}: found {value!r}, expected one of {expected}.") from None
