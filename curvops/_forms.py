"""The forms of a vector: flat tensor, list or tuple of blocks, dict of blocks. Answers have the form of the question.

Inside, vectors are a list of blocks ``[K, *shape]``. Outside, columns trail (``[D, K]``, ``[*shape, K]``) for products
from the left of ``op @ x``, and lead (``[K, D]``, ``[K, *shape]``) for ``x @ op``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
Names = tuple[str, ...]
#: numpy has no bfloat16 and ARPACK has no float16: both are shown to scipy as float32.
NUMPY_DTYPE = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float32,
    torch.bfloat16: np.float32,
}


class Space(NamedTuple):
    """One side of an operator: the shapes of its blocks, their names, and where they live."""

    shapes: Shapes
    names: Names | None
    dtype: torch.dtype
    device: torch.device


class Form(NamedTuple):
    """How a question was asked: its container (``Tensor``, ``list``, ``tuple``, ``dict``), and if it had columns."""

    kind: type
    columns: bool


def checked_names(names: Any, shapes: Shapes) -> Names | None:
    """Return the names of the blocks as a tuple, one distinct name for each."""
    if names is None:
        return None
    names = tuple(names)
    if len(names) != len(shapes) or len(set(names)) != len(names):
        raise ValueError(f"Got names {names} for {len(shapes)} blocks, expected one distinct name for each.")
    return names


def is_torch(x: Any) -> bool:
    """Tell whether ``x`` is one of the torch forms (anything else goes to scipy)."""
    if isinstance(x, (list, tuple)):
        return any(isinstance(v, Tensor) for v in x)
    return isinstance(x, (Tensor, Mapping))


def split(V: Tensor, shapes: Shapes) -> list[Tensor]:
    """Cut rows ``[K, D]`` into blocks ``[K, *shape]`` (views of contiguous rows)."""
    if len(shapes) == 1:
        return [V.reshape(len(V), *shapes[0])]
    parts = V.split([prod(s) for s in shapes], dim=1)
    return [v.reshape(len(V), *s) for v, s in zip(parts, shapes, strict=True)]


class Adjacent(list[Tensor]):
    """Blocks that lie side by side in ``rows [K, D]``, made for an answer: :func:`join` need not copy them.

    Args:
        rows: Uninitialised, or what the blocks hold.
        shapes: Shapes of the blocks.
    """

    def __init__(self, rows: Tensor, shapes: Shapes) -> None:
        super().__init__(split(rows, shapes))
        self.rows = rows


def join(V: Sequence[Tensor]) -> Tensor:
    """Concatenate blocks ``[K, *shape]`` to rows ``[K, D]``."""
    if isinstance(V, Adjacent):
        return V.rows
    if len(V) == 1:
        return V[0].reshape(len(V[0]), prod(V[0].shape[1:]))
    return torch.cat([v.reshape(len(v), prod(v.shape[1:])) for v in V], dim=1)


def regroup(V: list[Tensor], shapes: Shapes) -> list[Tensor]:
    """Cut the same vectors into other blocks; costs nothing where the blocks agree."""
    if tuple(tuple(v.shape[1:]) for v in V) == shapes:
        return V
    return split(join(V), shapes)


def read(x: Any, space: Space, leading: bool = False) -> tuple[list[Tensor], Form]:
    """Turn a vector of any torch form into blocks ``[K, *shape]``."""
    if isinstance(x, Tensor):
        return _read_flat(x, space, leading)
    if isinstance(x, Mapping):
        blocks, kind = _by_name(x, space), dict
    else:
        blocks, kind = list(x), type(x) if type(x) in (list, tuple) else list
    if len(blocks) != len(space.shapes):
        raise ValueError(f"Got {len(blocks)} blocks, expected {len(space.shapes)} with shapes {list(space.shapes)}.")
    extra = {v.ndim - len(s) for v, s in zip(blocks, space.shapes, strict=True) if isinstance(v, Tensor)}
    columns = extra == {1}
    K = blocks[0].shape[0 if leading else -1] if columns else 1
    for j, v in enumerate(blocks):
        _check_block(v, j, K if columns else None, space, leading)
    if not columns:
        return [v.unsqueeze(0) for v in blocks], Form(kind, False)
    return (blocks if leading else [v.movedim(-1, 0) for v in blocks]), Form(kind, True)


def write(Y: list[Tensor], form: Form, names: Names | None, leading: bool = False) -> Any:
    """Bring blocks ``[K, *shape]`` into ``form``; without names a dict is answered by a list."""
    if form.kind is Tensor:
        rows = join(Y)
        return rows.squeeze(0) if not form.columns else rows if leading else rows.T
    if not form.columns:
        Y = [y.squeeze(0) for y in Y]
    elif not leading:
        Y = [y.movedim(0, -1) for y in Y]
    if form.kind is dict and names is not None:
        return dict(zip(names, Y, strict=True))
    return tuple(Y) if form.kind is tuple else list(Y)


def _read_flat(x: Tensor, space: Space, leading: bool) -> tuple[list[Tensor], Form]:
    _check_kind(x, "tensor", space)
    D = sum(prod(s) for s in space.shapes)
    if x.ndim not in (1, 2) or x.shape[-1 if leading else 0] != D:
        expected = f"({D},) or (K, {D})" if leading else f"({D},) or ({D}, K)"
        raise ValueError(
            f"Got a tensor of shape {tuple(x.shape)}, expected {expected}. "
            "Flatten and concatenate the blocks, or pass them as a list."
        )
    rows = x.unsqueeze(0) if x.ndim == 1 else x if leading else x.T
    return split(rows, space.shapes), Form(Tensor, x.ndim == 2)


def _by_name(x: Mapping, space: Space) -> list[Tensor]:
    if space.names is None:
        raise ValueError("Got a dict, but the blocks of this operator have no names; pass a list of blocks.")
    if x.keys() != set(space.names):
        missing = [n for n in space.names if n not in x]
        unknown = [n for n in x if n not in space.names]
        raise ValueError(f"Got a dict with missing keys {missing} and unknown keys {unknown}; expected {space.names}.")
    return [x[n] for n in space.names]


def _check_kind(t: Tensor, what: str, space: Space) -> None:
    if t.dtype != space.dtype:
        raise TypeError(
            f"Got a {t.dtype} {what}, expected {space.dtype}. Convert it with `.to({space.dtype})`, "
            f"or the operator with `.to(dtype={t.dtype})`."
        )
    if t.device != space.device:
        raise ValueError(
            f"Got a {what} on {t.device}, expected {space.device}. Move it with `.to('{space.device}')`, "
            f"or the operator with `.to('{t.device}')`."
        )


def _check_block(v: Any, j: int, K: int | None, space: Space, leading: bool) -> None:
    what = f"block {j}" if space.names is None else f"block {space.names[j]!r}"
    if not isinstance(v, Tensor):
        raise TypeError(f"Got a {type(v).__name__} as {what}, expected a tensor. Convert it with `torch.as_tensor`.")
    _check_kind(v, what, space)
    shape = space.shapes[j]
    full = shape if K is None else (K, *shape) if leading else (*shape, K)
    if tuple(v.shape) != full:
        columns = (("K", *shape) if leading else (*shape, "K")) if K is None else full
        raise ValueError(
            f"Got shape {tuple(v.shape)} for {what}, expected {shape}, or {columns} with columns in every block."
        )
