"""Which keywords a class takes, wherever in its family they end up: so that an error names the class that was called."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any


def check_keywords(cls: type, keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that no constructor behind a class takes."""
    known = accepted(cls) if keywords else frozenset()
    if unknown := [name for name in keywords if name not in known]:
        offered = sorted(name for name in known if not name.startswith("_"))
        raise TypeError(f"{cls.__name__}: found unknown arguments {unknown}, expected some of {offered}.")


@lru_cache(maxsize=256)
def accepted(cls: type) -> frozenset[str]:
    """Return the names of a constructor's arguments, and of those that it passes its other keywords on to."""
    names: set[str] = set()
    further: Iterable[type] = ()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            own, open_ended = _parameters(base)
            names |= own
            if not open_ended:
                break
            further = getattr(cls, "_PASSES_ON", ())
    return frozenset(names.union(*(accepted(other) for other in further)))


def _parameters(cls: type) -> tuple[set[str], bool]:
    """Return the names of the arguments, and whether there may be others."""
    found = inspect.signature(vars(cls)["__init__"]).parameters.values()
    names = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
    return names, any(p.kind is p.VAR_KEYWORD for p in found)
