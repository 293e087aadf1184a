"""Structures by name: those that exist, those of any size, and those that users add."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from curvops.structured.block_diagonal_matrix import Block30DiagonalMatrix, BlockDiagonalMatrixTemplate
from curvops.structured.dense_matrix import DenseMatrix
from curvops.structured.diagonal_matrix import DiagonalMatrix
from curvops.structured.hierarchical import (
    Hierarchical15_15Matrix,
    HierarchicalMatrixTemplate,
    RankKMatrixTemplate,
    TrilBottomRightDiagonalMatrix,
    TrilTopLeftDiagonalMatrix,
    TriuBottomRightDiagonalMatrix,
    TriuTopLeftDiagonalMatrix,
)
from curvops.structured.matrix import StructuredMatrix
from curvops.structured.stable import DenseStableMatrix
from curvops.structured.toeplitz import TrilToeplitzMatrix, TriuToeplitzMatrix


class Rank1Matrix(RankKMatrixTemplate):
    """The arrow of rank one."""

    RANK = 1


#: Structures by name; see :func:`register_structure`.
STRUCTURES: dict[str, type[StructuredMatrix]] = {
    "dense": DenseMatrix,
    "dense_stable": DenseStableMatrix,
    "diagonal": DiagonalMatrix,
    "block30diagonal": Block30DiagonalMatrix,
    "hierarchical15_15": Hierarchical15_15Matrix,
    "triltoeplitz": TrilToeplitzMatrix,
    "triutoeplitz": TriuToeplitzMatrix,
    "triltopleftdiag": TrilTopLeftDiagonalMatrix,
    "trilbottomrightdiag": TrilBottomRightDiagonalMatrix,
    "triutopleftdiag": TriuTopLeftDiagonalMatrix,
    "triubottomrightdiag": TriuBottomRightDiagonalMatrix,
    "rank1": Rank1Matrix,
}

_SIZE = "([1-9][0-9]*)"
#: For every template: how a name says the sizes, how the class is called, and what it calls the sizes.
_TEMPLATES: tuple[tuple[str, str, type[StructuredMatrix], tuple[str, ...]], ...] = (
    (f"block{_SIZE}diagonal", "Block{}DiagonalMatrix", BlockDiagonalMatrixTemplate, ("BLOCK_DIM",)),
    (f"hierarchical{_SIZE}_{_SIZE}", "Hierarchical{}_{}Matrix", HierarchicalMatrixTemplate, ("K1", "K2")),
    (f"rank{_SIZE}", "Rank{}Matrix", RankKMatrixTemplate, ("RANK",)),
)


def structure(what: str | type[StructuredMatrix]) -> type[StructuredMatrix]:
    """Return the class of a structure.

    Args:
        what: A class, a key of ``STRUCTURES``, or a name with sizes: ``"block7diagonal"``, ``"hierarchical3_2"``, ``"rank5"``.

    Raises:
        ValueError: Listing what exists.
    """
    if isinstance(what, type) and issubclass(what, StructuredMatrix):
        return what
    if not isinstance(what, str):
        raise TypeError(f"Got {what!r} as a structure, expected a name or a class of structured matrices.")
    found = STRUCTURES.get(what) or _sized(what)
    if found is None:
        raise ValueError(
            f"Got the structure {what!r}, expected one of {list(STRUCTURES)}, or with any sizes 'block7diagonal', "
            "'hierarchical3_2', 'rank5'. `register_structure` adds others."
        )
    return found


def register_structure(name: str, cls: type[StructuredMatrix]) -> None:
    """Make a class known by a name, which no other class may have."""
    if not (isinstance(cls, type) and issubclass(cls, StructuredMatrix)):
        raise TypeError(f"Got {cls!r} as the structure {name!r}, expected a subclass of StructuredMatrix.")
    if not isinstance(name, str) or not name:
        raise TypeError(f"Got the name {name!r} for {cls.__name__}, expected a string.")
    known = STRUCTURES.get(name) or _sized(name)
    if known not in (None, cls):
        raise ValueError(f"The structure {name!r} is {known.__name__} already, choose another name for {cls.__name__}.")
    STRUCTURES[name] = cls


def _sized(name: str) -> type[StructuredMatrix] | None:
    """Return the template of a name with sizes, filled in."""
    for k, (pattern, *_) in enumerate(_TEMPLATES):
        if match := re.fullmatch(pattern, name):
            return _filled(k, tuple(map(int, match.groups())))
    return None


@cache
def _filled(k: int, sizes: tuple[int, ...]) -> type[StructuredMatrix]:
    _, called, template, attributes = _TEMPLATES[k]
    name = called.format(*sizes)
    if name in globals():
        return globals()[name]
    about: dict[str, Any] = {"__module__": __name__, "__doc__": f"{template.__name__} of size {sizes}."}
    return type(name, (template,), {**about, **dict(zip(attributes, sizes, strict=True))})


def __getattr__(name: str) -> Any:
    """Find classes with sizes by the name of the class: they can be pickled, and unpickled in another process."""
    for k, (_, called, *_) in enumerate(_TEMPLATES):
        if match := re.fullmatch(called.replace("{}", _SIZE), name):
            return _filled(k, tuple(map(int, match.groups())))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
