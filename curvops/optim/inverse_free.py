"""SINGD as a method of the engine: ``K K' ⊗ C C'`` for every block, followed without inverse or decomposition."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.kfac.sites import Site
from curvops.optim.blocks import Block, Blocks
from curvops.optim.engine import Occasion
from curvops.optim.operators import TwoSided, on_all, undamped
from curvops.optim.passes import Counts, loss_scale
from curvops.optim.projected import Frame, Projected
from curvops.optim.together import alike
from curvops.optim.two_sided import Factors, inverse_free_update, joined_factors, parted_factors
from curvops.structured import Part, Placement, StructuredMatrix, structure
from curvops.structured.pulled import Pulled, joined_pulled

#: Blocks up to this size are treated together on the CPU, too; larger copies cost more than calls.
SMALL = 64


class InverseFree:
    """What the engine asks for: see :class:`curvops.optim.engine.Preconditioner`.

    Args:
        blocks: The blocks of the shell.
        start: Returns the first ``(K, C)`` of a block as dense symmetric matrices, or ``None`` for the identity.
    """

    separate: bool = False

    def __init__(
        self, blocks: Blocks, groups: list[dict[str, Any]], start: Callable[[Block], tuple[Tensor, Tensor] | None]
    ) -> None:
        self._blocks, self._groups, self._start = blocks, groups, start
        self.factors: dict[Block, Factors] = {}
        self._prepared: dict[Block, Factors] = {}

    @property
    def by_datum(self) -> bool:
        """Whether any group reduces over positions first."""
        return any(group["kfac_approx"] == "reduce" for group in self._groups)

    def due(self, group: Mapping[str, Any], step: int) -> bool:
        """Whether a group is updated in a step."""
        return step % group["T"] == 0

    def statistic(self) -> Projected:
        """Return an empty statistic."""
        return Projected(self._frame)

    def register(self, statistic: Projected) -> None:
        """Nothing is left to do: what was asked for has a block."""

    def _frame(self, site: Site) -> Frame | None:
        block = self._blocks.add(site.placement)
        if block is None or not self._blocks.due(block):
            return None
        found = self._of(block)
        return Frame(found.K._wide(), found.C._wide(), block.group["kfac_approx"], block)

    def _of(self, block: Block) -> Factors:
        """Return the factors of a block, new ones if need be, where its parameters are now."""
        if block not in self.factors:
            self.factors[block] = self._first(block)
        found, p, dtypes = self.factors[block], block.parameter, _dtypes(block)
        if (found.K.torch_dtype, found.C.torch_dtype, found.K.device) != (*dtypes, p.device):
            found = self.factors[block] = found.move(p, dtypes)
        return found

    def _first(self, block: Block) -> Factors:
        G, o, i = block.placement.shape
        p = block.parameter
        dtypes = _dtypes(block)
        classes = [structure(s) for s in block.group["structures"]]
        dense = self._start(block)
        made = []
        for side, (n, cls, dtype) in enumerate(zip((i, o), classes, dtypes, strict=True)):
            if dense is None:
                made.append(cls.eye(n, batch=(G,), dtype=dtype, device=p.device))
            else:
                made.append(cls.from_dense(dense[side])._retyped(dtype))
        return Factors(made[0], made[1], steps=block.group["T"])

    # ---- the update ----------------------------------------------------------------------------
    def update(self, statistic: Projected, counts: Counts, occasion: Occasion) -> dict[str, Tensor]:
        """Prepare new factors of the blocks that were observed."""
        numbers: dict[str, Tensor] = {}
        seen: dict[Block, tuple[Pulled, Pulled, float]] = {}
        for key, moments in statistic.sums.items():
            block = statistic.block_of(key)
            if moments.B.fed:
                H = moments.A.value(), moments.B.value()
                numbers[f"the statistics of {block.label!r}"] = H[0].mean_trace().sum() * H[1].mean_trace().sum()
                seen[block] = (*H, moments.rows)
        for blocks in alike(seen, self._bucket):
            scale = loss_scale(blocks[0].group["loss_average"], counts, occasion.scale)
            self._update([(b, *seen[b]) for b in blocks], scale, occasion.step)
        return numbers

    def _update(self, seen: list[tuple[Block, Pulled, Pulled, float]], scale: Tensor | float, step: int) -> None:
        """Prepare new factors of blocks of one shape and group."""
        group = seen[0][0].group
        old = [self.factors[block] for block, *_ in seen]
        wide = [accumulation_dtype(M.torch_dtype) for M in (old[0].K, old[0].C)]
        now = joined_factors([f.retyped(wide) for f in old])
        K, C, m = inverse_free_update(
            now.K,
            now.C,
            now.m,
            (joined_pulled([A for _, A, _, _ in seen]), joined_pulled([B for _, _, B, _ in seen])),
            (_per_block([1.0 / rows for *_, rows in seen], old), scale),
            damping=group["damping"],
            alpha1=0.0 if group["kfac_like"] else group["alpha1"],
            lr_cov=group["lr_cov"](step) if callable(group["lr_cov"]) else group["lr_cov"],
            kfac_like=group["kfac_like"],
            normalize=group["normalize_lr_cov"],
        )
        held = old[0].K.torch_dtype, old[0].C.torch_dtype
        for (block, *_), new in zip(seen, parted_factors(Factors(K, C, m, group["T"]), old), strict=True):
            self._prepared[block] = new.retyped(held)

    def _bucket(self, block: Block) -> Hashable:
        """Return what blocks have in common that are treated together: where launching kernels costs more than copies."""
        small = max(block.placement.shape[1:]) <= SMALL
        if block.parameter.device.type == "cpu" and not small:
            return block
        f = self.factors[block]
        return (
            id(block.group),
            block.placement.shape[1:],
            type(f.K),
            type(f.C),
            f.K.torch_dtype,
            f.C.torch_dtype,
            f.m is None,
        )

    def settle(self, ok: Tensor) -> None:
        """Adopt the prepared factors where ``ok``."""
        for block, new in self._prepared.items():
            self.factors[block] = new.where_(ok, self.factors[block])
        self._prepared = {}

    def apply(self, arrays: dict[Block, Tensor], step: int) -> dict[Block, Tensor]:
        """Multiply by ``C C' · K K'``; blocks that have no factors yet stay as they are."""
        return {block: self._of(block).times(X) if block in self.factors else X for block, X in arrays.items()}

    # ---- as operators --------------------------------------------------------------------------
    def preconditioner(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return ``K K' ⊗ C C'`` on all parameters."""
        return on_all(params, [Part(b.placement, TwoSided(f, b)) for b, f in self._known().items()])

    def operator(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return the curvature that the factors stand for: inverses of ``K K'`` and ``C C'`` without what damping added."""
        return on_all(params, [Part(b.placement, undamped(f, b)) for b, f in self._known().items()])

    def _known(self) -> dict[Block, Factors]:
        return {b: self._of(b) for b in self._blocks if b in self.factors}

    # ---- saving --------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        blocks = []
        for block, f in self.factors.items():
            held = {"K": f.K, "C": f.C} | ({} if f.m is None else {"m_K": f.m[0], "m_C": f.m[1]})
            blocks.append(
                {
                    "placement": block.placement.state_dict(),
                    **{name: dict(M.named_tensors()) for name, M in held.items()},
                }
            )
        return {"blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`; what does not fit leaves the factors as they are."""
        found: dict[Block, Factors] = {}
        for saved in state["blocks"]:
            block = self._blocks.restore(Placement.from_state_dict(saved["placement"]))
            now = self._first(block)
            K, C = _loaded(now.K, saved["K"]), _loaded(now.C, saved["C"])
            m = (_loaded(now.K, saved["m_K"]), _loaded(now.C, saved["m_C"])) if "m_K" in saved else None
            found[block] = Factors(K, C, m, block.group["T"])
        self.factors, self._prepared = found, {}


def _dtypes(block: Block) -> tuple[torch.dtype, torch.dtype]:
    K, C = (dtype or block.parameter.dtype for dtype in block.group["preconditioner_dtype"])
    return K, C


def _per_block(numbers: list[float], factors: list[Factors]) -> float | Tensor:
    """Return numbers of blocks for every member of their joined batch."""
    if len(numbers) == 1:
        return numbers[0]
    held = accumulation_dtype(factors[0].K.torch_dtype)
    like = torch.empty(0, dtype=held, device=factors[0].K.device)
    return torch.cat([like.new_full(f.K.batch, x) for x, f in zip(numbers, factors, strict=True)])


def _loaded(like: StructuredMatrix, tensors: Mapping[str, Tensor]) -> StructuredMatrix:
    wanted = {n: (t.device, t.dtype) for n, t in like.named_tensors().items()}
    if set(tensors) != set(wanted):
        raise ValueError(
            f"state_dict: found tensors {sorted(tensors)}, expected {sorted(wanted)} of a {type(like).__name__}: the state "
            "belongs to another structure."
        )
    for n, t in like.named_tensors().items():
        if tuple(tensors[n].shape) != tuple(t.shape):
            raise ValueError(f"state_dict: found {n} {tuple(tensors[n].shape)}, expected {tuple(t.shape)}.")
    return like.with_tensors({n: t.to(*wanted[n], copy=True) for n, t in tensors.items()})
