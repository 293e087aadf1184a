"""The seam between the maths and the ranks: sums and broadcasts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Communicator(Protocol):
    """What the maths needs from a group of ranks; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the ranks, in place."""

    def broadcast_(self, tensors: Sequence[Tensor], src: int) -> None:
        """Replace every tensor by the one of rank ``src``, in place."""


class Serial:
    """A single process: sums are what they are, so callers need no branch."""

    rank: int = 0
    size: int = 1

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Leave the sums over one rank as they are."""

    def broadcast_(self, tensors: Sequence[Tensor], src: int = 0) -> None:
        """Leave the tensors of the only rank as they are."""
        if src != 0:
            raise ValueError(f"Got src={src}, expected 0: there is only one process.")
