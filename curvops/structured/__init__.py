"""Matrices with structure, each a linear operator with closed forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvops._operator import LinearOperator
from curvops.structured.dense import Dense as Dense
from curvops.structured.diagonal import Diagonal as Diagonal
from curvops.structured.direct_sum import DirectSum as DirectSum
from curvops.structured.direct_sum import Part as Part
from curvops.structured.eigen import Eigen as Eigen
from curvops.structured.kronecker import Kronecker as Kronecker
from curvops.structured.low_rank import LowRank as LowRank
from curvops.structured.placement import Placement as Placement
from curvops.structured.placement import Slot as Slot
from curvops.structured.shifted import Shifted as Shifted


def from_state_dict(state: Mapping[str, Any]) -> LinearOperator:
    """Rebuild a structured operator from its ``state_dict()``."""
    kinds: dict[str, Any] = {c.__name__: c for c in (Dense, Diagonal, DirectSum, Eigen, Kronecker, LowRank, Shifted)}
    if state["kind"] not in kinds:
        raise ValueError(f"Got a state of kind {state['kind']!r}, expected one of {sorted(kinds)}.")
    return kinds[state["kind"]].from_state_dict(state)
