"""``op + c I`` of a structured operator: decomposed only when a closed form is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops._scalars import scalar_on
from curvops.structured._base import Decomposition, Structured


class Shifted(Structured):
    """A structured operator plus a multiple of the identity.

    Args:
        base: The operator.
        c: The multiple.
    """

    def __init__(self, base: Structured, c: float | Tensor):
        super().__init__(base.array, base.held_dtype, device=base.device, **base._place())
        self.base, self.c = base, c

    def _multiply(self, X: Tensor) -> Tensor:
        return self.base._multiply(X) + X * self.c

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> Shifted:
        return Shifted(self.base._rebuild(device, held, dtype), scalar_on(self.c, device))

    def _data(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "c": self.c}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Shifted:
        """Undo :meth:`state_dict`."""
        from curvops.structured import from_state_dict

        return cls(from_state_dict(state["data"]["base"]), state["data"]["c"])

    def eigendecomposition(self) -> Decomposition:
        QB, QA, values = self.base.eigendecomposition()
        return QB, QA, values + self.c

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``."""
        return self.base.shift(self.c + self._scalar(c))

    def _scale(self, s: float | Tensor) -> LinearOperator:
        base = self.base._scale(s)
        return Shifted(base, self.c * s) if isinstance(base, Structured) else super()._scale(s)

    def diagonal(self) -> Tensor:
        return self.base.diagonal() + self.c

    def trace(self) -> Tensor:
        return self.base.trace() + self.c * self.shape[0]
