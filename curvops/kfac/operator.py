"""KFAC as a linear operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvops._params import Model, Params
from curvops.kfac.collect import Collector
from curvops.kfac.estimate import Estimate
from curvops.kfac.factors import BlockFactors, factors_of
from curvops.kfac.options import FisherType, KFACType, Policy, choice
from curvops.kfac.statistics import Factors
from curvops.kfac.treatment import Treatment, treatments
from curvops.kfac.vectors import Fisher
from curvops.risk import EmpiricalRisk
from curvops.structured.direct_sum import DirectSum


class KFACLinearOperator(DirectSum):
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

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        fisher_type: str = "mc",
        mc_samples: int = 1,
        kfac_approx: str = "expand",
        separate_weight_and_bias: bool = False,
        num_per_example_loss_terms: int | None = None,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        seed: int = 2147483647,
        check_deterministic: bool = False,
        progressbar: bool = False,
        unsupported: str = "raise",
        reduction: str | None = None,
        class_dim: int | None = None,
        allow_train_mode: bool = False,
    ) -> None:
        fisher_type = choice("fisher_type", fisher_type, FisherType)
        kfac_approx = choice("kfac_approx", kfac_approx, KFACType)
        unsupported = choice("unsupported", unsupported, Policy)
        if isinstance(mc_samples, bool) or not hasattr(mc_samples, "__index__") or mc_samples < 1:
            raise ValueError(f"mc_samples: found {mc_samples!r}, expected a positive integer.")
        if not hasattr(seed, "__index__"):
            raise TypeError(f"seed: found {seed!r}, expected an integer.")
        self._risk: EmpiricalRisk | None = EmpiricalRisk(
            model,
            loss,
            params,
            data,
            reduction=reduction,
            class_dim=class_dim,
            num_data=num_data,
            num_per_example_loss_terms=num_per_example_loss_terms,
            batch_size_fn=batch_size_fn,
            progressbar=progressbar,
            allow_train_mode=allow_train_mode,
        )
        if check_deterministic:
            self._risk.check_deterministic()
        options = {
            "fisher_type": fisher_type,
            "mc_samples": int(mc_samples),
            "seed": (int(seed) + 2**63) % 2**64 - 2**63,  # what torch's generators accept
            "kfac_approx": kfac_approx,
            "separate_weight_and_bias": bool(separate_weight_and_bias),
            "unsupported": unsupported,
            "reduction": self._risk.loss.reduction,
        }
        self._adopt(_pass(self._risk, options, None, 0))

    def _adopt(self, estimate: Estimate) -> None:
        self._estimate = estimate
        names, shapes = tuple(estimate.shapes), tuple(estimate.shapes.values())
        super().__init__(shapes, names, estimate.parts(), dtype=estimate.dtype, device=estimate.device)

    # ---- what is in it -----------------------------------------------------------------------
    @property
    def factors(self) -> dict[str, BlockFactors]:
        """The factors of every block, by parameter name: weight and bias of a joint block answer with the same object."""
        result: dict[str, BlockFactors] = {}
        for part in self.parts:
            block = factors_of(part)
            for name in dict.fromkeys((part.label, *part.placement.names)):
                result.setdefault(name, block)
        return result

    @property
    def treatments(self) -> dict[str, Treatment]:
        """What became of every parameter, as :func:`curvops.explain` prints it."""
        return treatments(self._estimate)

    @property
    def num_data(self) -> float:
        """Number of data (an average of numbers after :meth:`update`)."""
        return self._estimate.num_data

    # ---- combining with other data --------------------------------------------------------------
    def update(self, data: Iterable[tuple[Any, Any]], decay: float) -> KFACLinearOperator:
        """Average in place with the factors of other data: ``decay * old + (1 - decay) * new``.

        Args:
            data: Batches, as at construction.
            decay: Weight of what is there, from 0 to 1.

        Returns:
            The operator itself.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: found {decay}, expected a number from 0 to 1.")
        if self._risk is None:
            raise ValueError("This operator was loaded without its model; build one from the new data and merge it.")
        data, decay = self._risk.checked_data(data), float(decay)
        offset = self._estimate.seen
        self._adopt(self._estimate.averaged(_pass(self._risk, self._estimate.options, data, offset), decay))
        return self

    def merge(self, other: KFACLinearOperator) -> KFACLinearOperator:
        """Add the sums and counts of an operator on other data, in place: the operator of both data sets together.

        Returns:
            The operator itself.
        """
        if not isinstance(other, KFACLinearOperator):
            raise TypeError(f"other: found {type(other).__name__}, expected a KFACLinearOperator.")
        self._adopt(self._estimate.merged(other._estimate))
        return self

    # ---- saving ---------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return plain data (tensors, numbers, strings, lists), readable by ``torch.load(..., weights_only=True)``."""
        return self._estimate.state_dict()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> KFACLinearOperator:
        """Return an operator with the saved factors, without model and data."""
        return cls._of(Estimate.from_state_dict(state))

    @classmethod
    def _of(cls, estimate: Estimate) -> KFACLinearOperator:
        self = cls.__new__(cls)
        self._risk = None
        self._adopt(estimate)
        return self

    def __reduce__(self) -> Any:
        # Models and losses need not pickle; the factors are what the operator is.
        return type(self)._of, (self._estimate,)


def _pass(risk: EmpiricalRisk, options: dict[str, Any], data: Any, offset: int) -> Estimate:
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
    shapes = dict(zip(risk.names, risk.shapes, strict=True))
    like: Tensor = torch.empty(0, dtype=risk.dtype, device=risk.device)
    return Estimate.from_pass(collector, shapes, like, options)
