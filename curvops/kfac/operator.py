"""KFAC as a linear operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from curvops.kfac.collect import Collector
from curvops.kfac.estimate import Estimate
from curvops.kfac.estimated import EstimatedOperator, geometry
from curvops.kfac.statistics import Factors
from curvops.kfac.vectors import Fisher
from curvops.risk import EmpiricalRisk


class KFACLinearOperator(EstimatedOperator):
    """Kronecker-factored approximate curvature of an empirical risk: a block ``B ⊗ A`` for every layer.

    ``A`` averages ``x x'`` over the rows of the layer's inputs, ``B`` sums ``g g'`` over the chosen gradients of its outputs
    and carries the scale of the risk. Factors are computed, and every refusal happens, at construction.

    Sources: Martens and Grosse (2015), Optimizing Neural Networks with Kronecker-factored Approximate Curvature; Grosse and
    Martens (2016), A Kronecker-factored approximate Fisher matrix for convolution layers; Eschenhagen et al. (2023),
    Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures.

    Args:
        model, loss, params, data: See :class:`curvops.risk.EmpiricalRisk`.
        fisher_type: ``"type-2"`` (exact loss Hessian), ``"mc"`` (sampled targets), ``"signs"`` (random signs through the root
            of the exact Hessian: unbiased, few passes at any output size), ``"empirical"`` (gradients of data),
            ``"empirical-per-term"`` (gradients of loss terms) or ``"forward-only"`` (``B = I``).
        mc_samples: Draws per datum for ``"mc"`` and ``"signs"``.
        kfac_approx: ``"expand"`` or ``"reduce"``.
        separate_weight_and_bias: Whether a bias is a block of its own.
        seed: Seed of the draws, which depend on it and on the position of a datum in the data only.
        check_deterministic: Compare two readings of the first batch and two predictions on it before the pass.
        unsupported: For parameters that no rule covers: ``"raise"``, ``"exact"`` (dense block), ``"diagonal"`` or ``"zero"``.
        num_per_example_loss_terms, num_data, batch_size_fn, progressbar, reduction, class_dim, allow_train_mode: See
            :class:`curvops.risk.EmpiricalRisk`.

    Attributes:
        factors: The factors of every block, by the names of its parameters.
        treatments: What became of every parameter.

    Raises:
        ValueError: For bad arguments, non-finite data, predictions or factors, and data that disagree with ``num_data``.
        NotImplementedError: For uses of a parameter that no rule covers, or that cannot be seen.
    """

    kind = "KFAC"

    def _observe(self, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int) -> Estimate:
        return kronecker_factors(self._risk, options, data, offset)


def kronecker_factors(
    risk: EmpiricalRisk, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int
) -> Estimate:
    """Return the estimate that one pass over the data leaves behind."""
    approx = options["kfac_approx"]
    collector = Collector(
        risk,
        Fisher(options["fisher_type"], options["mc_samples"], options["seed"]),
        lambda: Factors(approx),
        by_datum=approx == "reduce",
        separate=options["separate_weight_and_bias"],
        policy=options["unsupported"],
        offset=offset,
    ).run(data)
    return Estimate.from_pass(collector, list(collector.statistic.sums.values()), *geometry(risk), options)
