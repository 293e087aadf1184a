"""What an optimizer knows, as operators on all its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvops._algebra import Identity
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.optim.blocks import Block
from curvops.optim.decompositions import Solution, solved
from curvops.optim.two_sided import Factors
from curvops.structured import DirectSum, Kronecker, Part, Placement, Slot


def on_all(params: Mapping[str, Tensor], parts: Sequence[Part]) -> LinearOperator:
    """Return the direct sum of operators of blocks, with the identity on parameters that have none."""
    parts = list(parts)
    taken = {n for part in parts for n in part.placement.names}
    for name, p in params.items():
        if name not in taken:
            place = Placement((Slot(name, tuple(p.shape), 0, 1),), (1, p.numel(), 1))
            parts.append(Part(place, Identity((place.shape,), dtype=p.dtype, device=p.device)))
    return DirectSum(tuple(tuple(p.shape) for p in params.values()), tuple(params), parts)


class TwoSided(LinearOperator):
    """``K K' ⊗ C C'`` on arrays ``[G, d_out, d_in]`` of a block."""

    def __init__(self, factors: Factors, block: Block) -> None:
        shape, p = block.placement.shape, block.parameter
        super().__init__((shape,), (shape,), dtype=p.dtype, device=p.device, symmetric=True)
        self.factors, self.label = factors, block.label

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [torch.stack([self.factors.times(v) for v in V[0]]) if len(V[0]) else V[0].clone()]


class Damped(LinearOperator):
    """What multiplies the gradient of one block, ``[G, d_out, d_in]``."""

    def __init__(self, found: Solution, block: Block, damping: float | Tensor) -> None:
        p = block.parameter
        shape = block.placement.shape
        super().__init__((shape,), (shape,), dtype=p.dtype, device=p.device, symmetric=True)
        self._found, self._damping, self.label = found, damping, block.label

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [
            torch.stack([solved([self._found], [v], self._damping)[0] for v in V[0]]) if len(V[0]) else V[0].clone()
        ]


def undamped(f: Factors, block: Block) -> LinearOperator:
    """Return ``A ⊗ B`` with ``A = (K K')^-1 - λ κ I``, where ``κ`` is 1 in IKFAC and the mean trace of ``C' C`` else."""
    group, p = block.group, block.parameter
    found = []
    for M, other in ((f.C, f.K), (f.K, f.C)):
        dense = M._wide().to_dense_blocks()
        inverse = torch.linalg.inv(dense @ dense.mT)
        kappa = 1.0 if group["kfac_like"] else other._wide().self_gram().mean_trace()[:, None, None]
        eye = torch.eye(M.dim, dtype=dense.dtype, device=dense.device)
        values, Q = torch.linalg.eigh(inverse - group["damping"] * kappa * eye)
        found.append((Q * values.clamp(min=0).unsqueeze(-2)) @ Q.mT)
    held = accumulation_dtype(p.dtype)
    return Kronecker(found[0].to(held), found[1].to(held), label=block.label, dtype=p.dtype)
