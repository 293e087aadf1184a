"""A Kronecker-factored estimate as data: sums, counts, where the blocks sit, and how estimates combine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvops.kfac.collect import Collector
from curvops.kfac.sites import slot_key
from curvops.kfac.statistics import Sums
from curvops.losses import scale_of
from curvops.structured.placement import Placement

_STRUCTURES = {"EKFAC": "eigen", "GGNDiagonal": "diagonal", "GGNUnitWise": "unit-wise"}


@dataclass(eq=False)
class Estimate:
    """What a pass over the data leaves behind.

    Attributes:
        options: What must agree for two estimates to combine: Fisher, sharing, reduction, ...
        shapes: The parameters' names and shapes, in the order of the operator's space.
        dtype, device: Of the parameters.
        blocks: Factors of every Kronecker block: ``A`` a mean over its rows, ``B`` on the scale of the risk.
        dense: Blocks of parameters that no rule covers.
        normalizer: What a mean loss divides by over the data.
        num_data: Number of data; an average of numbers where estimates were averaged.
        seen: Number of data that were ever read: where the random draws of further data begin.
        notes: What to say of a parameter, beyond its block.
    """

    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    blocks: list[Sums]
    dense: dict[str, Tensor]
    normalizer: float
    num_data: float
    seen: int
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_pass(
        cls, collected: Collector[Any], blocks: list[Sums], shapes: dict, like: Tensor, options: dict[str, Any]
    ) -> Estimate:
        """Take over what a pass collected, and the blocks that were made of it."""
        counts = collected.counts
        notes = {n: "never reached by a prediction" for n in shapes if n not in counts.reached}
        notes |= {u.name: f"{u.function}: {u.reason}" for u in counts.unsupported.values()}
        dense = dict(collected.dense.sums)
        scale = scale_of(options["reduction"], counts.normalizer)
        # Means are formed here, once and in place; a bias alone may share its factor with its weight.
        for t in {id(t): t for t in (*(b.B for b in blocks), *dense.values()) if t is not None}.values():
            t.mul_(scale)
        for b in blocks:
            if b.A is not None:
                b.A.div_(b.rows or 1.0)
        return cls(
            options,
            shapes,
            like.dtype,
            like.device,
            blocks,
            dense,
            counts.normalizer,
            counts.num_data,
            counts.output_rows,
            notes,
        )

    @property
    def scale(self) -> float:
        """What sums over the data are multiplied by."""
        return scale_of(self.options["reduction"], self.normalizer)

    # ---- combining -------------------------------------------------------------------------
    def merged(self, other: Estimate) -> Estimate:
        """Return the estimate of both data sets together."""
        if self.options["reduction"] == "sum":
            return self._combined(other, None, (1.0, 1.0))
        total = self.normalizer + other.normalizer
        return self._combined(other, None, (self.normalizer / total, other.normalizer / total))

    def averaged(self, new: Estimate, decay: float) -> Estimate:
        """Return ``decay * old + (1 - decay) * new``, factor by factor."""
        weights = decay, 1 - decay
        return self._combined(new, weights, weights)

    def _combined(self, other: Estimate, inputs: tuple | None, outputs: tuple[float, float]) -> Estimate:
        """Combine with given weights of input factors (``None``: by their rows) and of output factors."""
        self._check_same(other)
        u, v = inputs or (1.0, 1.0)
        old, new = ({block_key(b.placement): b for b in e.blocks} for e in (self, other))
        blocks = [_combine(old.get(k), new.get(k), inputs, outputs) for k in {**old, **new}]
        names = {**self.dense, **other.dense}
        dense = {n: _weighted(self.dense.get(n), other.dense.get(n), *outputs) for n in names}
        # Something is still to be said of a parameter if it holds for both, or if its block is not a Kronecker product.
        notes = {
            n: t
            for n, t in {**other.notes, **self.notes}.items()
            if n in names or (n in self.notes and n in other.notes)
        }
        return replace(
            self,
            blocks=blocks,
            dense=dense,
            normalizer=u * self.normalizer + v * other.normalizer,
            num_data=u * self.num_data + v * other.num_data,
            seen=self.seen + other.seen,
            notes=notes,
        )

    def _check_same(self, other: Estimate) -> None:
        if self.shapes != other.shapes:
            raise ValueError("Cannot combine estimates of different parameters: names or shapes differ.")
        for key, value in self.options.items():
            if other.options[key] != value:
                raise ValueError(f"Cannot combine estimates with {key}={value!r} and {key}={other.options[key]!r}.")

    @property
    def structure(self) -> str:
        """What a block is: ``"kronecker"``, ``"eigen"``, ``"diagonal"`` or ``"unit-wise"``."""
        return _STRUCTURES.get(self.options["kind"], "kronecker")

    # ---- as plain data -------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings and lists only."""
        blocks = [
            {
                "placement": b.placement.state_dict(),
                "uses": list(b.uses),
                "A": b.A,
                "B": b.B,
                "rows": b.rows,
                "basis": b.basis and list(b.basis),
                "values": b.values,
            }
            for b in self.blocks
        ]
        return {
            "version": 1,
            "options": dict(self.options),
            "shapes": {n: list(s) for n, s in self.shapes.items()},
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "blocks": blocks,
            "dense": dict(self.dense),
            "normalizer": self.normalizer,
            "num_data": self.num_data,
            "seen": self.seen,
            "notes": dict(self.notes),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Estimate:
        """Undo :meth:`state_dict`; the device is that of the tensors."""
        if state.get("version") != 1:
            raise ValueError(f"state_dict: found version {state.get('version')!r}, expected 1.")
        blocks = [
            Sums(
                Placement.from_state_dict(b["placement"]),
                tuple(b["uses"]),
                b["A"],
                b["B"],
                b["rows"],
                basis=b.get("basis") and tuple(b["basis"]),
                values=b.get("values"),
            )
            for b in state["blocks"]
        ]
        tensors = [t for b in blocks for t in (b.A, b.B) if t is not None] + list(state["dense"].values())
        return cls(
            {"kind": "KFAC", **state["options"]},
            {n: tuple(s) for n, s in state["shapes"].items()},
            getattr(torch, state["dtype"]),
            tensors[0].device if tensors else torch.device(state["device"]),
            blocks,
            dict(state["dense"]),
            state["normalizer"],
            state["num_data"],
            state["seen"],
            dict(state["notes"]),
        )


def _combine(old: Sums | None, new: Sums | None, inputs: tuple | None, outputs: tuple[float, float]) -> Sums:
    """Combine the factors of a block; where one side never saw it, its curvature there is zero."""
    if old is None or new is None:
        block, weight = (old, outputs[0]) if old is not None else (new, outputs[1])
        assert block is not None
        return replace(block, B=_weighted(block.B, None, weight, 0.0))
    rows = old.rows + new.rows
    u, v = inputs or (old.rows / rows, new.rows / rows)
    if inputs is not None:
        rows = u * old.rows + v * new.rows
    return replace(old, A=_weighted(old.A, new.A, u, v), B=_weighted(old.B, new.B, *outputs), rows=rows)


def _weighted(a: Tensor | None, b: Tensor | None, u: float, v: float) -> Tensor | None:
    terms = [w * t for w, t in ((u, a), (v, b)) if t is not None]
    return sum(terms[1:], terms[0]) if terms else None


def block_key(placement: Placement) -> tuple:
    """Identify a block across estimates."""
    return tuple((slot_key(s.name, prod(s.shape), s.index), s.transposed) for s in placement.slots)
