"""KFAC and EKFAC as a method of the engine: averages of Kronecker factors, decomposed on schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype, wide
from curvops.kfac.ekfac import EKFACLinearOperator
from curvops.kfac.estimate import Estimate
from curvops.kfac.gradients import Together
from curvops.kfac.operator import KFACLinearOperator
from curvops.kfac.reducers import Kept
from curvops.kfac.statistics import Factors, Sums
from curvops.optim.averages import Averages
from curvops.optim.blocks import Block, Blocks, gathered
from curvops.optim.decompositions import ComputeMethod, Solution, eigenvectors, inverses, products, seen_from, solved
from curvops.optim.engine import Group, Occasion
from curvops.optim.hyperparameters import Hyperparameters
from curvops.optim.kfac_options import Options
from curvops.optim.operators import Damped, on_all
from curvops.optim.passes import Counts, loss_scale
from curvops.optim.second_moments import EachPass, second_moments
from curvops.structured import Part


class KroneckerFactored:
    """What the engine asks for: see :class:`curvops.optim.engine.Preconditioner`.

    Args:
        blocks: The blocks of the engine.
        hyperparameters: Functions of the step, or numbers.
        options: What does not change.
        lr_of: The learning rate of a block in a step, for ``kl_clip``.
        start: Returns the first factors ``(A, B)`` of a block and its operations, or ``None``.
    """

    separate: bool = False

    def __init__(
        self,
        blocks: Blocks,
        hyperparameters: Hyperparameters,
        options: Options,
        lr_of: Callable[[Block, int], Any],
        start: Callable[[Block], tuple[Tensor | None, Tensor, tuple[str, ...]] | None],
    ) -> None:
        self._blocks, self._hyper, self._options = blocks, hyperparameters, options
        self._lr_of, self._start = lr_of, start
        self.averages = Averages(options.factor_dtype)
        self.solutions: dict[Block, Solution] = {}
        self._squares: dict[Block, Callable[[Solution], Tensor]] = {}
        self._weights: dict[Block, Tensor] = {}
        self._fresh, self._ok = False, torch.ones((), dtype=torch.bool)
        self.patient = False  #: blocks without decompositions wait until those are due
        self.scale: Tensor | None = None

    @property
    def by_datum(self) -> bool:
        """Whether rows must be told apart by datum."""
        return self._options.kfac_approx == "reduce" or self._corrected

    @property
    def _corrected(self) -> bool:
        return self._options.compute_method == ComputeMethod.EKFAC

    def due(self, group: Group, step: int) -> bool:
        """Whether factors are updated in a step."""
        return step % self._hyper.at("factor_update_steps", step) == 0

    def statistic(self) -> Any:
        """Return an empty statistic."""
        factors = Factors(self._options.kfac_approx)
        return Together(factors, EachPass(Kept(float("inf")))) if self._corrected else factors

    def register(self, statistic: Any) -> None:
        """Make a block of everything that was observed."""
        for sums in _factors(statistic).sums.values():
            block = self._blocks.add(sums.placement)
            if block is not None and block not in self.averages.of:
                found = self._start(block)
                if found is not None:
                    self.averages.start(block, *found)

    # ---- the update ----------------------------------------------------------------------------
    def update(self, statistic: Any, counts: Counts, occasion: Occasion) -> dict[str, Tensor]:
        """Prepare new averages."""
        scale = loss_scale(self._options.loss_average, counts, occasion.scale)
        decay = self._hyper.at("factor_decay", occasion.step)
        numbers, keys = {}, {}
        for key, sums in _factors(statistic).sums.items():
            block = self._blocks.add(sums.placement)
            if block is not None and sums.B is not None:
                numbers[f"the statistics of {block.label!r}"] = self.averages.prepare(block, sums, scale, decay)
                keys[block] = key
        if self._corrected:
            self._prepare_squares(statistic.statistics[1].kept, keys, scale, decay)
        self._fresh = occasion.owed
        return numbers

    def _prepare_squares(self, kept: Kept, keys: dict[Block, Hashable], scale: Any, decay: float) -> None:
        """Remember how to average second moments of the gradients, in whatever eigenvectors there will be."""
        for block, key in keys.items():
            old = self.averages.of.get(block)
            self._weights[block] = torch.ones(()) if old is None else 1.0 - decay * old.begun
            self._squares[block] = partial(second_moments, [b for k, b in kept.blocks if k == key], scale)

    def settle(self, ok: Tensor) -> None:
        """Adopt the prepared averages where ``ok``."""
        self.averages.settle(ok)
        self._ok = ok

    def apply(self, arrays: dict[Block, Tensor], step: int) -> dict[Block, Tensor]:
        """Multiply gradients by the damped inverse, and clip; blocks that have no factors yet stay as they are."""
        damping = self._hyper.at("damping", step)
        self._refresh(step, damping)
        known = {b: X for b, X in arrays.items() if b in self.solutions}
        found = solved([self._solution(b) for b in known], list(known.values()), damping)
        result = self._clipped(dict(zip(known, found, strict=True)), known, step)
        return {b: result.get(b, X) for b, X in arrays.items()}

    def _refresh(self, step: int, damping: float | Tensor) -> None:
        """Decompose what is due; average the eigenvalues of EKFAC."""
        due = self._fresh or step % self._hyper.at("inv_update_steps", step) == 0
        stale = [b for b in self.averages.of if due or not (b in self.solutions or self.patient)]
        new = self._decomposed(stale, damping)
        for block in stale:
            old = self._solution(block) if block in self.solutions else None
            self.solutions[block] = self._held(block, new[block.label])
            if self._corrected:
                values = products(new[block.label]) if old is None else seen_from(self.solutions[block], old)
                found = self.solutions[block]
                self.solutions[block] = replace(found, values=values.to(found.B.dtype))
        for block, squares in self._squares.items():
            if block in self.solutions:
                found = self._solution(block)
                weight = self._weights[block].to(wide(found.values))
                mean = torch.lerp(wide(found.values), wide(squares(found)).to(wide(found.values)), weight)
                self.solutions[block] = replace(
                    found, values=torch.where(self._ok, mean.to(found.values), found.values)
                )
        self._fresh, self._squares, self._weights = False, {}, {}

    def _decomposed(self, blocks: list[Block], damping: float | Tensor) -> dict[str, Solution]:
        factors = {b.label: self.averages.wide(b) for b in blocks}
        if not factors:
            return {}
        if self._options.compute_method == ComputeMethod.INVERSE:
            return inverses(factors, damping)
        found = eigenvectors(factors)
        if self._options.compute_method == ComputeMethod.EIGEN and self._options.prediv:
            return {n: Solution(f.A, f.B, reciprocals=1.0 / (products(f) + damping)) for n, f in found.items()}
        return found

    def _held(self, block: Block, found: Solution) -> Solution:
        """Return a decomposition where the parameters of a block are now, in the dtype that it is kept in."""
        kept, device = accumulation_dtype(block.parameter.dtype), block.parameter.device
        if self._options.inv_dtype is not None:  # half precision if asked for; float64 stays
            wider = torch.promote_types(kept, self._options.inv_dtype)
            kept = wider if self._options.inv_dtype.itemsize >= 4 else self._options.inv_dtype
        if (found.B.device, found.B.dtype) == (device, kept):
            return found
        return found.map(lambda t: t.to(device, kept))

    def _solution(self, block: Block) -> Solution:
        return self._held(block, self.solutions[block])

    def _clipped(self, P: dict[Block, Tensor], X: dict[Block, Tensor], step: int) -> dict[Block, Tensor]:
        """Scale all of it down so that the expected change of the prediction stays below ``kl_clip``."""
        clip = self._hyper.at("kl_clip", step)
        if clip is None or not P:
            self.scale = None
            return P
        sizes = [(P[b] * X[b]).sum(dtype=accumulation_dtype(X[b].dtype)) * self._lr_of(b, step) ** 2 for b in P]
        total = sizes[0] if len(sizes) == 1 else torch.stack(sizes).sum()
        self.scale = torch.where(total == 0, torch.ones_like(total), (clip / total.abs()).sqrt().clamp(max=1.0))
        return {b: (p * self.scale).to(p.dtype) for b, p in P.items()}

    def predicted(self, X: Mapping[Block, Tensor], steps: Mapping[Block, Tensor], step: int) -> Tensor:
        """Return ``∇'δ + δ'(F + λI)δ / 2`` of gradients ``X`` and steps ``δ``."""
        damping, total = self._hyper.at("damping", step), []
        for block, d in steps.items():
            if block in self.averages.of:
                A, B = self.averages.wide(block)
                wide = d.to(B.dtype)
                Fd = B @ wide if A is None else B @ wide @ A
                total.append((X[block].to(B.dtype) * wide).sum() + (wide * (Fd + damping * wide)).sum() / 2)
        return torch.stack(total).sum() if total else torch.zeros(())

    # ---- as operators --------------------------------------------------------------------------
    def operator(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return the averages as a KFAC operator (EKFAC: with its eigenvalues)."""
        kind = EKFACLinearOperator if self._corrected else KFACLinearOperator
        first = next(iter(params.values()))
        options = {
            "kind": kind.kind,
            "fisher_type": "empirical",
            "mc_samples": 1,
            "kfac_approx": self._options.kfac_approx,
            "separate_weight_and_bias": False,
            "seed": 0,
            "unsupported": "zero",
            "reduction": "sum" if self._options.loss_average is None else "mean",
        }
        blocks = [self._as_sums(b) for b in self.averages.of]
        shapes = {n: tuple(p.shape) for n, p in params.items()}
        return kind._of(Estimate(options, shapes, first.dtype, first.device, blocks, {}, 1.0, 1.0, 1))

    def _as_sums(self, block: Block) -> Sums:
        A, B = self.averages.wide(block)
        sums = Sums(block.placement, self.averages.of[block].uses, A, B, 1.0)
        if self._corrected and block in self.solutions:
            found = self._solution(block)
            sums.basis, sums.values = (found.B, found.A), found.values
        return sums

    def preconditioner(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return what multiplies gradients before clipping; the identity on parameters without a block."""
        damping = self._hyper.at("damping", self._blocks.step())
        return on_all(params, [Part(b.placement, Damped(self._solution(b), b, damping)) for b in self.solutions])

    # ---- saving --------------------------------------------------------------------------------
    def memory(self, statistic: Any) -> dict[str, int]:
        """Return bytes of factors, of what is observed for the next ones, and of decompositions."""
        averages, found, batch = self.averages.of.values(), self.solutions.values(), _factors(statistic).sums.values()
        inputs, gradients = statistic.statistics[1].memory() if self._corrected else (0, 0)
        return {
            "a_factors": _bytes(f.A for f in averages),
            "g_factors": _bytes(f.B for f in averages),
            "a_batch": inputs + _bytes(f.A for f in batch),
            "g_batch": gradients + _bytes(f.B for f in batch),
            "a_inverses": _bytes(t for s in found for t in (s.A, s.a)),
            "g_inverses": _bytes(t for s in found for t in (s.B, s.b, s.values, s.reciprocals)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        order = {b: k for k, b in enumerate(self.averages.of)}
        solutions = {order[b]: s.tensors() for b, s in self.solutions.items()}
        return {"factors": self.averages.state_dict(), "solutions": solutions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`; without decompositions, or with those of another method, they are made in the next step."""
        self.averages.load_state_dict(state["factors"], self._blocks)
        blocks = list(self.averages.of)
        self.solutions = {}
        for k, tensors in state.get("solutions", {}).items():
            device = blocks[k].parameter.device
            found = Solution(**{"A": None, **{n: t.to(device, copy=True) for n, t in tensors.items()}})
            if found.made_by(self._options.compute_method, self._options.prediv):
                self.solutions[blocks[k]] = found
        self._squares, self._weights, self._fresh = {}, {}, False


def predicted(engine: Any, grads: Mapping[str, Tensor], deltas: Mapping[str, Tensor]) -> Tensor:
    """Return the change of the loss that the damped quadratic model expects of a step."""
    blocks = [b for b in engine.blocks if all(n in deltas and n in grads for n in b.placement.names)]
    X, steps = ({b: gathered(b, tensors) for b in blocks} for tensors in (grads, deltas))
    return engine.method.predicted(X, steps, engine.steps)


def _factors(statistic: Any) -> Factors:
    return statistic.statistics[0] if isinstance(statistic, Together) else statistic


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
