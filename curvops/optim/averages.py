"""Running averages of Kronecker factors, kept on the device: what was never finite leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops._scalars import accumulation_dtype
from curvops.kfac.statistics import Sums
from curvops.optim.blocks import Block, Blocks
from curvops.structured.placement import Placement


@dataclass(eq=False)
class Average:
    """The factors of one block.

    Attributes:
        A, B: Input and output factor ``[G, n, n]``; a bias alone has no ``A``.
        begun: 1 once a batch was adopted, else 0: the first one is not averaged with anything.
        uses: Operations that consume the block.
    """

    A: Tensor | None
    B: Tensor
    begun: Tensor
    uses: tuple[str, ...] = ()


class Averages:
    """``F = decay F + (1 - decay) F_new`` for every block; the first batch is taken as it is.

    Args:
        dtype: What factors are stored in; ``None``: float32 or better.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.of: dict[Block, Average] = {}
        self._prepared: dict[Block, Average] = {}

    def prepare(self, block: Block, sums: Sums, scale: Tensor | float, decay: float) -> Tensor:
        """Prepare the average with new sums; return a number that is finite if they are."""
        assert sums.B is not None
        A = None if sums.A is None else sums.A / (sums.rows or 1.0)
        B = sums.B * scale
        old = self._current(block)
        if old is None:
            old = Average(None if A is None else torch.zeros_like(A), torch.zeros_like(B), B.new_zeros(()))
        weight = 1.0 - decay * old.begun
        new = Average(_mixed(old.A, A, weight), _mixed(old.B, B, weight), torch.ones_like(old.begun), sums.uses)
        self._prepared[block] = new
        # Entries of a Gram matrix are bounded by its diagonal.
        traces = [F.diagonal(dim1=-2, dim2=-1).sum() for F in (A, B) if F is not None]
        return traces[0] if len(traces) == 1 else traces[0] + traces[1]

    def settle(self, ok: Tensor) -> None:
        """Adopt what was prepared where ``ok``."""
        for block, new in self._prepared.items():
            old = self._current(block)
            A = None if new.A is None else torch.where(ok, new.A, 0.0 if old is None else old.A)
            B = torch.where(ok, new.B, 0.0 if old is None else old.B)
            begun = torch.where(ok, new.begun, 0.0 if old is None else old.begun)
            self.of[block] = Average(self._held(A), self._held(B), begun, new.uses)
        self._prepared = {}

    def start(self, block: Block, A: Tensor | None, B: Tensor, uses: tuple[str, ...]) -> None:
        """Begin with factors that are known."""
        self.of[block] = Average(self._held(A), self._held(B), B.new_ones(()), uses)

    def wide(self, block: Block) -> tuple[Tensor | None, Tensor]:
        """Return ``(A, B)`` in float32 or better, where the parameters are now."""
        now = self._current(block)
        assert now is not None
        return now.A, now.B

    def _current(self, block: Block) -> Average | None:
        """Return an average in float32 or better, on the device of its parameters."""
        found = self.of.get(block)
        if found is None:
            return None
        device, dtype = block.parameter.device, accumulation_dtype(block.parameter.dtype)
        if found.B.device == device and found.B.dtype == dtype:
            return found
        A = None if found.A is None else found.A.to(device, dtype)
        return Average(A, found.B.to(device, dtype), found.begun.to(device, dtype), found.uses)

    def _held(self, F: Tensor | None) -> Any:
        return F if F is None or self._dtype is None else F.to(self._dtype)

    # ---- saving --------------------------------------------------------------------------------
    def state_dict(self) -> list[dict[str, Any]]:
        """Return plain data."""
        return [
            {"placement": b.placement.state_dict(), "A": f.A, "B": f.B, "begun": f.begun, "uses": list(f.uses)}
            for b, f in self.of.items()
        ]

    def load_state_dict(self, state: list[Mapping[str, Any]], blocks: Blocks) -> None:
        """Undo :meth:`state_dict`; what does not fit leaves the averages as they are."""
        found: dict[Block, Average] = {}
        for saved in state:
            block = blocks.restore(Placement.from_state_dict(saved["placement"]))
            G, o, i = block.placement.shape
            for name, n in (("A", i), ("B", o)):
                if saved[name] is not None and tuple(saved[name].shape) != (G, n, n):
                    raise ValueError(
                        f"state_dict: found a factor {name} {tuple(saved[name].shape)} of {block.label!r}, expected "
                        f"{(G, n, n)}."
                    )
            device = block.parameter.device
            A = None if saved["A"] is None else saved["A"].to(device, copy=True)
            B, begun = (saved[name].to(device, copy=True) for name in ("B", "begun"))
            found[block] = Average(A, B, begun, tuple(saved["uses"]))
        self.of, self._prepared = found, {}


def _mixed(old: Tensor | None, new: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if old is None or new is None else torch.lerp(old, new.to(old.dtype), weight.to(old.dtype))
