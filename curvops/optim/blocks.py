"""The blocks of parameters that an optimizer has seen, and the parameters that have none."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from curvops.kfac.estimate import block_key
from curvops.kfac.rules._base import assumed_operation
from curvops.structured.placement import Placement


@dataclass(eq=False)
class Block:
    """Parameters that one preconditioner treats together.

    Attributes:
        key: Identifies it.
        placement: Where the parameters sit in ``[G, d_out, d_in]``.
        group: The parameter group, with its hyperparameters.
        parameter: Its first parameter: dtype and device, also after ``model.to``.
    """

    key: Hashable
    placement: Placement
    group: dict[str, Any]
    parameter: Tensor

    @property
    def label(self) -> str:
        """The name of its first parameter."""
        return self.placement.slots[0].name


class Blocks:
    """All blocks, in the order in which they were seen.

    Args:
        group_of: The parameter group of every name.
        params: The parameters by name.
        due: Whether a group is updated in the current step.
        step: The number of the current step.

    Attributes:
        refused: Parameters that have no block, and why.
    """

    def __init__(
        self,
        group_of: Mapping[str, dict[str, Any]],
        params: Mapping[str, Tensor],
        due: Callable[[Mapping[str, Any]], bool],
        step: Callable[[], int],
    ) -> None:
        self._group_of, self._params, self._due, self.step = group_of, params, due, step
        self._known: dict[Hashable, Block] = {}
        self.refused: dict[str, str] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    @property
    def names(self) -> set[str]:
        """The parameters that have a block."""
        return {name for block in self for name in block.placement.names}

    def due(self, block: Block) -> bool:
        """Whether a block is updated in the current step."""
        return self._due(block.group)

    def add(self, placement: Placement) -> Block | None:
        """Return the block at a placement, a new one if need be."""
        key = block_key(placement)
        if key in self._known:
            return self._known[key]
        if any(name in self.refused for name in placement.names):
            return None
        for name in placement.names:
            if self._params[name].is_complex():
                self.refused[name] = "it is complex"
                return None
        for name in placement.names:
            taken = [b for b in self if name in b.placement.names]
            if any(_overlap(b.placement, placement, name) for b in taken):
                self.refused[name] = "it is used in two arrangements that do not fit one block"
                for b in taken:
                    del self._known[b.key]
                return None
        groups = {id(self._group_of[name]) for name in placement.names}
        if len(groups) > 1:
            raise ValueError(_APART.format(names=list(placement.names)))
        first = placement.slots[0].name
        block = Block(key, placement, self._group_of[first], self._params[first])
        self._known[key] = block
        return block

    def restore(self, placement: Placement) -> Block:
        """Return the block at a placement of a saved state."""
        wrong = [
            s.name
            for s in placement.slots
            if s.name not in self._params or s.shape != tuple(self._params[s.name].shape)
        ]
        block = None if wrong else self.add(placement)
        if block is None:
            raise ValueError(
                f"state_dict: found a block of {list(placement.names)}, which does not fit the parameters here: the state "
                "belongs to another model, or to other parameters."
            )
        return block

    def check_layers(self, model: nn.Module) -> None:
        """Refuse weights and biases of one layer in two parameter groups."""
        names = {id(p): n for n, p in self._params.items()}
        for module in model.modules():
            if assumed_operation(module) is None:
                continue
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            if len({id(self._group_of[n]) for n in own}) > 1:
                raise ValueError(_APART.format(names=own))


def _overlap(a: Placement, b: Placement, name: str) -> bool:
    entries = []
    for placement in (a, b):
        for slot in placement.slots:
            if slot.name == name:
                entries.append(torch.arange(prod(slot.shape)) if slot.index is None else slot.index.cpu())
    together = torch.cat(entries)
    return len(together.unique()) < len(together)


def gathered(block: Block, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors by name as the block's array ``[G, d_out, d_in]``."""
    return block.placement.gather({n: tensors[n].unsqueeze(0) for n in block.placement.names}).squeeze(0)


def scatter(block: Block, array: Tensor, into: dict[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Write a block's array into tensors by name; entries that no block has keep those of ``like``."""
    pieces = block.placement.pieces(array.unsqueeze(0))
    for slot, piece in zip(block.placement.slots, pieces, strict=True):
        if slot.index is None:
            into[slot.name] = piece[0].to(like[slot.name].dtype)
        else:
            if slot.name not in into:
                into[slot.name] = like[slot.name].clone()
            flat = into[slot.name].view(-1)
            flat.index_copy_(0, slot.index.to(flat.device), piece[0].to(flat.dtype))


_APART = "params: found {names} in different groups, but they form one block; expected a layer's weight and bias in one group."
