"""The blocks of an estimate as operators: from sums and factors to parts of a direct sum."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.kfac.estimate import Estimate
from curvops.kfac.statistics import Sums
from curvops.kfac.tied import is_turned, nearest_kronecker
from curvops.structured.dense import Dense
from curvops.structured.diagonal import Diagonal
from curvops.structured.direct_sum import Part
from curvops.structured.eigen import Eigen
from curvops.structured.kronecker import Kronecker
from curvops.structured.placement import Placement, Slot


def parts_of(estimate: Estimate) -> list[Part]:
    """Return the blocks of the operator: one for every Kronecker block, dense block, and zero."""
    covered = {n: _Entries(prod(s)) for n, s in estimate.shapes.items()}
    parts = []
    for label, (sums, *turned) in labelled(estimate).items():
        for slot in sums.placement.slots:
            covered[slot.name].take(slot)
        parts.append(Part(sums.placement, _operator(estimate, label, sums, *turned)))
    for name in estimate.dense:
        place = _whole(name, estimate.shapes[name])
        covered[name].take(place.slots[0])
        parts.append(Part(place, _dense(estimate, name)))
    return parts + [_zero(estimate, n, e.free()) for n, e in covered.items() if e.count < e.numel]


def labelled(estimate: Estimate) -> dict[str, list[Sums]]:
    """Return the blocks by label: the name of their first parameter, numbered where it has several blocks.

    A weight that is used in both orientations is one block with two entries.
    """
    groups: list[list[Sums]] = []
    for sums in estimate.blocks:
        weights = (g for g in groups if g[0].A is not None and sums.A is not None)
        partner = next((g for g in weights if is_turned(g[0].placement, sums.placement)), None)
        if partner is None:
            groups.append([sums])
        else:
            partner.append(sums)
    names = [g[0].placement.slots[0].name for g in groups]
    labels = [n if names.count(n) == 1 else f"{n}[{names[:i].count(n)}]" for i, n in enumerate(names)]
    return dict(zip(labels, groups, strict=True))


def _operator(estimate: Estimate, label: str, sums: Sums, *turned: Sums) -> LinearOperator:
    shape, structure = sums.placement.shape, estimate.structure
    if structure == "kronecker":
        return Kronecker(*factor_pair(estimate, label, sums, *turned), shape=shape, label=label, dtype=estimate.dtype)
    found = sums.values if structure == "eigen" else sums.B
    if structure == "unit-wise":  # entries of a Gram matrix are bounded by its diagonal
        found = found.diagonal(dim1=-2, dim2=-1)
    if not torch.isfinite(found).all():
        raise ValueError(
            f"Block {label!r}: its squared gradients have NaN or infinite entries; rescale the data, or use float64."
        )
    if structure == "eigen":
        return Eigen(*sums.basis, sums.values, label=label, dtype=estimate.dtype)
    if structure == "diagonal":
        return Diagonal(sums.B, label=label, dtype=estimate.dtype)
    return Dense(sums.B.flatten(0, 1), domain=(shape,), label=label, dtype=estimate.dtype)


def factor_pair(estimate: Estimate, label: str, sums: Sums, *turned: Sums) -> tuple[Tensor, Tensor | None]:
    """Return the factors ``(B, A)`` of a block."""
    B, A = _pair(estimate, sums, label)
    for other in turned:
        # B2 ⊗ A2 on the transpose is A2 ⊗ B2 on the weight.
        B2, A2 = _pair(estimate, other, label)
        assert A is not None
        assert A2 is not None
        B, A = nearest_kronecker((B, A), (A2, B2))
    if estimate.options["kind"] == "TNT":  # both factors have the trace of the block
        A = A / A.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(A.dtype).tiny)[:, None, None]
    return B, A


def _pair(estimate: Estimate, sums: Sums, label: str) -> tuple[Tensor, Tensor | None]:
    G, o, _ = sums.placement.shape
    wide: dict[str, Any] = {"dtype": accumulation_dtype(estimate.dtype), "device": estimate.device}
    if estimate.options["fisher_type"] == "forward-only":
        B = torch.eye(o, **wide).repeat(G, 1, 1)
    elif sums.B is None:
        B = torch.zeros(G, o, o, **wide)
    else:
        B = sums.B
    for factor, name in ((sums.A, "input"), (B, "output")):
        # Entries of a Gram matrix are bounded by its diagonal.
        if factor is not None and not torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all():
            raise ValueError(
                f"Block {label!r}: its {name} factor has NaN or infinite entries; rescale the data, or use float64."
            )
    return B, sums.A


def _dense(estimate: Estimate, name: str) -> LinearOperator:
    kind, block = estimate.options["unsupported"], estimate.dense[name]
    shape = _whole(name, estimate.shapes[name]).shape
    if kind == "exact":
        return Dense(block, domain=(shape,), label=name, dtype=estimate.dtype)
    return Diagonal(block.reshape(shape), label=name, dtype=estimate.dtype)


def _zero(estimate: Estimate, name: str, entries: Tensor) -> Part:
    n = int(entries.sum())
    zeros = torch.zeros(1, n, 1, dtype=accumulation_dtype(estimate.dtype), device=estimate.device)
    index = None if n == entries.numel() else entries.nonzero().flatten().to(estimate.device)
    slot = Slot(name, estimate.shapes[name], 0, 1, index=index)
    return Part(Placement((slot,), (1, n, 1)), Diagonal(zeros, label=name, dtype=estimate.dtype))


def _whole(name: str, shape: tuple[int, ...]) -> Placement:
    return Placement((Slot(name, shape, 0, 1),), (1, prod(shape), 1))


class _Entries:
    """Which entries of a parameter are in a block already."""

    def __init__(self, numel: int) -> None:
        self.numel, self.count = numel, 0
        self._parts: list[Tensor] = []

    def take(self, slot: Slot) -> None:
        """Take the entries of a slot."""
        self.count += self.numel if slot.index is None else slot.index.numel()
        if slot.index is not None:
            self._parts.append(slot.index.cpu())
        if self.count > self.numel or (self._parts and len(torch.cat(self._parts).unique()) != self.count):
            raise NotImplementedError(
                f"Parameter {slot.name!r} is used in two ways that one block cannot hold (as a whole and in parts, as a weight "
                "and as a bias, or with a bias that another batch does not have). Leave it out of params."
            )

    def free(self) -> Tensor:
        """Return which entries are in no block."""
        free = torch.ones(self.numel, dtype=torch.bool, device="cpu")
        for part in self._parts:
            free[part] = False
        return free
