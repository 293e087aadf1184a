"""KFOC: the Kronecker product nearest to a block of the curvature; and the one with the same partial traces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from curvops._params import Model, Params
from curvops._scalars import accumulation_dtype
from curvops.kfac.blocks import factor_pair, labelled
from curvops.kfac.estimate import Estimate, block_key
from curvops.kfac.estimated import EstimatedOperator, geometry
from curvops.kfac.options import FisherType, KFACType, choice, refuse_forward_only
from curvops.kfac.rank_one import Bidiagonalization
from curvops.kfac.reading import BUDGET, Reading, checked_budget, reduced
from curvops.kfac.reducers import Contractions
from curvops.kfac.statistics import Sums
from curvops.kfac.tied import nearest_kronecker
from curvops.losses import scale_of

Pair = tuple[Tensor, Tensor | None]


class KFOCLinearOperator(EstimatedOperator):
    """The Kronecker product ``B ⊗ A`` nearest in Frobenius norm to every layer's block of the curvature, over all data.

    Rearranged, a block is ``R = sum_k G_k ⊗ G_k`` over the gradients of single output vectors, and the nearest Kronecker
    product is its best approximation of rank one. ``R`` is never formed: ``R A = sum_k G_k A G_k'`` and
    ``R' B = sum_k G_k' B G_k`` are reductions over the data, and a Golub-Kahan bidiagonalization that begins with KFAC's
    input factor finds the largest singular value. Both maps keep matrices positive semidefinite, hence so are the factors,
    and the operator inverts.

    Sources: Van Loan and Pitsianis (1993), Approximation with Kronecker Products; Schnaus, Lee and Triebel (2021),
    Kronecker-Factored Optimal Curvature; Koroko et al. (2022), Efficient Approximations of the Fisher Matrix in Neural
    Networks using Kronecker Product Singular Value Decomposition.

    Args:
        model, loss, params, data: See :class:`curvops.risk.EmpiricalRisk`.
        tolerance: Stop at ``|R' B - s A| <= tolerance * s`` for unit factors; by default 1e-10 in float64, 1e-5 in float32.
        max_iterations: Most iterations; each reads the data twice, from memory where they fit.
        memory_budget: Bytes of layer inputs and gradients that may be kept rather than computed again.
        **options: Those of :class:`curvops.KFACLinearOperator`, without ``"forward-only"``. ``kfac_approx`` chooses where the
            iteration begins, and does not change the result.

    Attributes:
        factors: The factors of every block; the trace of the input factor is that of KFAC's.
        treatments: What became of every parameter.
        residuals: Relative residual of every block (empty after loading).
    """

    kind = "KFOC"

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        tolerance: float | None = None,
        max_iterations: int = 100,
        memory_budget: float = BUDGET,
        **options: Any,
    ) -> None:
        if tolerance is not None and not (isinstance(tolerance, Real) and 0 < tolerance < 1):
            raise ValueError(f"tolerance: found {tolerance!r}, expected a number between 0 and 1.")
        if isinstance(max_iterations, bool) or not hasattr(max_iterations, "__index__") or max_iterations < 1:
            raise ValueError(f"max_iterations: found {max_iterations!r}, expected a positive integer.")
        refuse_forward_only(options.get("fisher_type", FisherType.MC))
        self._tolerance, self._limit, self._budget = tolerance, max_iterations, checked_budget(memory_budget)
        super().__init__(model, loss, params, data, **options)

    @classmethod
    def _of(cls, estimate: Estimate) -> KFOCLinearOperator:
        self = super()._of(estimate)
        self.residuals = {}
        return self

    def merge(self, other: Any) -> Any:
        """Refuse: the nearest Kronecker product of all data is known from all data only."""
        raise NotImplementedError(
            "The nearest Kronecker product of a sum is not made of the nearest ones of its terms. Merge KFAC or TNT operators, "
            "or build one KFOC operator from all data."
        )

    def _averaged(self, data: Iterable[tuple[Any, Any]], decay: float) -> Estimate:
        """Average the matrices: the nearest Kronecker product of ``decay * old + (1 - decay) * new``."""
        old = self._estimate
        new = self._observe(old.options, data, old.seen)
        blocks = {block_key(b.placement): b for b in new.blocks}
        mixed = old.averaged(new, decay)
        before = {block_key(b.placement): b for b in old.blocks}
        for b in mixed.blocks:
            first, second = before.get(block_key(b.placement)), blocks.get(block_key(b.placement))
            if b.A is not None and first is not None and second is not None:
                pairs = [(w * s.B, s.A) for w, s in ((decay, first), (1 - decay, second)) if w]
                b.B, b.A = _scaled(*nearest_kronecker(*pairs), second.A) if len(pairs) == 2 else pairs[0]
        return mixed

    def _observe(self, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int) -> Estimate:
        reading = Reading(self._risk, options, data, offset, self._budget)
        reading.check_orientations()
        estimate, starts = reading.estimate, {}
        keys = {id(sums): key for key, sums in reading.sums.items()}
        groups = {label: (keys[id(m[0])], m) for label, m in labelled(estimate).items()}
        for label, (key, members) in groups.items():
            starts[key] = label, factor_pair(estimate, label, *members)
        found = self._nearest(reading, starts)
        for key, members in groups.values():
            first, (_, (_, A)) = members[0], starts[key]
            first.B, first.A = found[key]
            first.B = first.B * estimate.scale
            if A is not None:
                first.B, first.A = _scaled(first.B, first.A, A)
        estimate.blocks = [members[0] for _, members in groups.values()]
        return estimate

    def _nearest(self, reading: Reading, starts: dict[Hashable, tuple[str, Pair]]) -> dict[Hashable, Pair]:
        """Return the nearest factors of every block, up to the scale of the risk."""
        alone = {key: B for key, (_, (B, A)) in starts.items() if A is None}
        result: dict[Hashable, Pair] = {}
        if alone:  # a bias alone is all output factor
            exact = reading.reduce(lambda: Contractions(inner=dict.fromkeys(alone))).outputs
            result |= {key: (exact.get(key, torch.zeros_like(B)), None) for key, B in alone.items()}
        runs = {key: (Bidiagonalization(A), B) for key, (_, (B, A)) in starts.items() if A is not None}
        self._iterate(reading, runs, {key: label for key, (label, _) in starts.items()})
        self.residuals = {starts[key][0]: run.residual for key, (run, _) in runs.items()}
        for key, (run, _) in runs.items():
            result[key] = _symmetric(run.value[:, None, None] * run.left), _symmetric(run.right)
        return result

    def _iterate(
        self, reading: Reading, runs: dict[Hashable, tuple[Bidiagonalization, Tensor]], labels: dict[Hashable, str]
    ) -> None:
        going = dict(runs)
        for _ in tqdm(range(self._limit), disable=not self._risk.progressbar, desc="KFOC", unit="iteration"):
            inner = {key: run.inner for key, (run, _) in going.items()}
            found = reading.reduce(partial(Contractions, inner)).outputs
            for key, (run, B) in going.items():
                run.take_left(_finite(found.get(key, torch.zeros_like(B)), labels[key]))
            outer = {key: run.outer for key, (run, _) in going.items()}
            found = reading.reduce(partial(Contractions, outer=outer)).inputs
            for key, (run, _) in going.items():
                run.take_right(_finite(found.get(key, torch.zeros_like(run.right)), labels[key]))
            going = {k: (run, B) for k, (run, B) in going.items() if run.residual > self._tolerance_of(B)}
            if not going:
                return
        worst = max(run.residual for run, _ in going.values())
        warnings.warn(
            f"KFOC stopped after {self._limit} iterations with relative residuals up to {worst:.1e}; raise max_iterations or "
            "tolerance.",
            stacklevel=5,
        )

    def _tolerance_of(self, B: Tensor) -> float:
        if self._tolerance is not None:
            return self._tolerance
        return 1e-10 if B.dtype == torch.float64 else 1e-5


class TNTLinearOperator(EstimatedOperator):
    """For every layer the Kronecker product with the trace and the partial traces of its block of the curvature.

    ``B ⊗ A / tr`` with ``B = sum_k G_k G_k'``, ``A = sum_k G_k' G_k`` and ``tr = sum_k |G_k|^2`` over the gradients of single
    output vectors. The input factor has unit trace. It is exact where gradients are tensor-normal, and additive over data.

    Sources: Ren and Goldfarb (2021), Tensor Normal Training for Deep Learning Models; Gao et al. (2021), A Trace-restricted
    Kronecker-Factored Approximation to Natural Gradient (TKFAC; the same matrix where a weight is used once per datum).

    Args:
        model, loss, params, data: See :class:`curvops.risk.EmpiricalRisk`.
        **options: Those of :class:`curvops.KFACLinearOperator`, without ``kfac_approx`` and ``"forward-only"``.

    Attributes:
        factors: The factors of every block.
        treatments: What became of every parameter.
    """

    kind = "TNT"

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        **options: Any,
    ) -> None:
        refuse_forward_only(options.get("fisher_type", FisherType.MC))
        if choice("kfac_approx", options.get("kfac_approx", KFACType.EXPAND), KFACType) != KFACType.EXPAND:
            raise ValueError(
                f"kfac_approx: found {options['kfac_approx']!r}, but gradients of single output vectors hold all sharing "
                "exactly; leave it out."
            )
        super().__init__(model, loss, params, data, **options)

    def _observe(self, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int) -> Estimate:
        collector, reducer = reduced(self._risk, options, data, offset, lambda: Contractions(everything=True))
        _, like = geometry(self._risk)
        like = like.to(accumulation_dtype(like.dtype))
        # Both factors on one scale, that of the risk: so they keep the trace in common when estimates are averaged.
        rows = 1.0 / scale_of(options["reduction"], collector.counts.normalizer)
        blocks = []
        for key, (placement, functions) in collector.statistic.blocks.items():
            G, o, i = placement.shape
            B, A = (sums.get(key, like.new_zeros(G, n, n)) for sums, n in ((reducer.outputs, o), (reducer.inputs, i)))
            blocks.append(Sums(placement, functions, A, B, rows=rows))
        return Estimate.from_pass(collector, blocks, *geometry(self._risk), options)

    def _averaged(self, data: Iterable[tuple[Any, Any]], decay: float) -> Estimate:
        """Average the partial traces: a block that one side never saw fades on both sides of its product."""
        mixed = super()._averaged(data, decay)
        for b in mixed.blocks:
            if b.A is not None and b.B is not None:
                have, want = (F.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] for F in (b.A, b.B))
                b.A = b.A * torch.where(have > 0, want / have, 1.0)
        return mixed


def _scaled(B: Tensor, A: Tensor, like: Tensor) -> Pair:
    """Give ``A`` the trace of another input factor, and ``B`` the rest; a zero product keeps that factor."""
    have, want = (F.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] for F in (A, like))
    good = (have > 0) & (want > 0)
    ratio = torch.where(good, want / torch.where(good, have, 1.0), 1.0)
    return B / ratio, torch.where(good, A * ratio, like)


def _finite(M: Tensor, label: str) -> Tensor:
    if not torch.isfinite(M).all():
        raise ValueError(
            f"Block {label!r}: sums of its squared gradients have NaN or infinite entries; rescale the data, or use float64."
        )
    return M


def _symmetric(M: Tensor) -> Tensor:
    return M / 2 + M.mT / 2
