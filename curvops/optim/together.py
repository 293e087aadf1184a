"""Do once for all blocks of one shape what would be done for each: tensors with leading axis ``G`` are joined along it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def alike(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items with equal keys, in the order of their first."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Join tensors along their first axis; ``None`` stays ``None``."""
    if tensors[0] is None or len(tensors) == 1:
        return tensors[0]
    return torch.cat([t for t in tensors if t is not None])


def parted(together: Tensor | None, like: Sequence[Tensor]) -> list[Tensor | None]:
    """Undo :func:`joined`, with as many entries as others have."""
    if together is None or len(like) == 1:
        return [together] * len(like)
    return list(together.split([len(t) for t in like]))
