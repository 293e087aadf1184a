"""Where parameters sit in a canonical array ``[G, d_out, d_in]``: an isometry between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter, or a part of it, in the columns ``start:start + width`` of ``[G, d_out, d_in]``.

    Args:
        name: Name of the parameter.
        shape: Its shape.
        start: First column.
        width: Number of columns.
        transposed: Whether the parameter is stored as ``[G, width, d_out]`` and not as ``[G, d_out, width]``.
        index: Flat indices of the entries that sit here, in the order ``[G, d_out, width]``; by default all of them.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    width: int
    transposed: bool = False
    index: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if self.index is not None and self.transposed:
            raise ValueError(f"Slot {self.name!r} has an index, which fixes the order: leave `transposed` False.")
        if self.index is not None:
            object.__setattr__(self, "index", self.index.flatten().to(torch.int64))

    def pick(self, V: Tensor, G: int, o: int) -> Tensor:
        """Return the entries of ``V [K, *shape]`` as ``[K, G, o, width]``."""
        if self.index is not None:
            V = V.reshape(len(V), prod(self.shape)).index_select(1, self.index)
        if self.transposed:
            return V.reshape(len(V), G, self.width, o).mT
        return V.reshape(len(V), G, o, self.width)

    def put(self, Y: Tensor) -> Tensor:
        """Return ``[K, G, o, width]`` as ``[K, *shape]``, or as ``[K, len(index)]`` where there is an index."""
        if self.transposed:
            Y = Y.mT
        shape = self.shape if self.index is None else (len(self.index),)
        return Y.reshape(len(Y), *shape)


@dataclass(frozen=True, eq=False)
class Placement:
    """Slots side by side, tiling the columns of ``[G, d_out, d_in]``."""

    slots: tuple[Slot, ...]
    shape: tuple[int, int, int]

    def __init__(self, slots: Sequence[Slot], shape: Sequence[int]):
        G, o, i = map(int, shape)
        object.__setattr__(self, "slots", tuple(sorted(slots, key=lambda s: s.start)))
        object.__setattr__(self, "shape", (G, o, i))
        column = 0
        for slot in self.slots:
            if slot.start != column:
                raise ValueError(f"Slot {slot.name!r} starts at column {slot.start}, expected {column}; slots tile.")
            n = prod(slot.shape) if slot.index is None else len(slot.index)
            if n != G * o * slot.width:
                raise ValueError(
                    f"Slot {slot.name!r} has {n} entries, expected {G} x {o} x {slot.width} of the array {self.shape}."
                )
            column += slot.width
        if column != i:
            raise ValueError(f"Slots {self.names} fill {column} columns, expected {i}.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of their columns."""
        return tuple(dict.fromkeys(s.name for s in self.slots))

    def gather(self, blocks: Mapping[str, Tensor]) -> Tensor:
        """Return parameters ``[K, *shape]`` as one array ``[K, G, o, i]``; a single slot costs no copy."""
        G, o, _ = self.shape
        if len(self.slots) == 1:
            return self.slots[0].pick(blocks[self.slots[0].name], G, o)
        return torch.cat([s.pick(blocks[s.name], G, o) for s in self.slots], dim=-1)

    def pieces(self, Y: Tensor) -> list[Tensor]:
        """Return for every slot its entries of ``Y [K, G, o, i]``; views, unless transposed."""
        if len(self.slots) == 1:
            return [self.slots[0].put(Y)]
        return [s.put(y) for s, y in zip(self.slots, Y.split([s.width for s in self.slots], dim=-1), strict=True)]

    def scatter(self, Y: Tensor) -> list[tuple[str, Tensor]]:
        """Return for every slot the name and the parameter ``[K, *shape]``, zero where the slot does not reach."""
        result = []
        for slot, y in zip(self.slots, self.pieces(Y), strict=True):
            if slot.index is not None:
                whole = y.new_zeros(len(y), prod(slot.shape)).index_copy(1, slot.index, y)
                y = whole.reshape(len(y), *slot.shape)
            result.append((slot.name, y))
        return result

    def to(self, device: torch.device | str) -> Placement:
        """Move the indices."""
        moved = [s if s.index is None else replace(s, index=s.index.to(device)) for s in self.slots]
        return Placement(moved, self.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        slots = [
            {
                "name": s.name,
                "shape": list(s.shape),
                "start": s.start,
                "width": s.width,
                "transposed": s.transposed,
                "index": s.index,
            }
            for s in self.slots
        ]
        return {"slots": slots, "shape": list(self.shape)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Placement:
        """Undo :meth:`state_dict`."""
        return cls([Slot(**slot) for slot in state["slots"]], state["shape"])
