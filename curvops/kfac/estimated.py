"""Operators that are an estimate from passes over the data: what they have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvops._params import Model, Params
from curvops.kfac.blocks import factor_pair, labelled, parts_of
from curvops.kfac.estimate import Estimate
from curvops.kfac.factors import BlockFactors, factors_of
from curvops.kfac.options import FisherType, KFACType, Policy, choice
from curvops.kfac.treatment import Treatment, treatments
from curvops.risk import EmpiricalRisk
from curvops.structured.direct_sum import DirectSum

Self = TypeVar("Self", bound="EstimatedOperator")


class EstimatedOperator(DirectSum):
    """A direct sum of blocks that are made of layer inputs and of gradients of layer outputs.

    Subclasses name their ``kind`` and say in :meth:`_observe` what a pass over data makes of them. The arguments are those
    of :class:`curvops.KFACLinearOperator`.
    """

    kind: str  #: what an estimate calls it; estimates of different kinds do not combine

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
            "kind": self.kind,
            "fisher_type": fisher_type,
            "mc_samples": int(mc_samples),
            "seed": (int(seed) + 2**63) % 2**64 - 2**63,  # what torch's generators accept
            "kfac_approx": kfac_approx,
            "separate_weight_and_bias": bool(separate_weight_and_bias),
            "unsupported": unsupported,
            "reduction": self._risk.loss.reduction,
        }
        with _ordinary_tensors():
            self._adopt(self._observe(options, None, 0))

    @abstractmethod
    def _observe(self, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int) -> Estimate:
        """Return the estimate of some data (``None``: those of the risk); draws begin at ``offset``."""

    def _averaged(self, data: Iterable[tuple[Any, Any]], decay: float) -> Estimate:
        """Return ``decay * old + (1 - decay) * new``."""
        estimate = self._estimate
        return estimate.averaged(self._observe(estimate.options, data, estimate.seen), decay)

    def _adopt(self, estimate: Estimate) -> None:
        self._estimate = estimate
        names, shapes = tuple(estimate.shapes), tuple(estimate.shapes.values())
        super().__init__(shapes, names, parts_of(estimate), dtype=estimate.dtype, device=estimate.device)

    # ---- what is in it -----------------------------------------------------------------------
    @property
    def factors(self) -> dict[str, BlockFactors]:
        """The factors of every block, by parameter name: weight and bias of a joint block answer with the same object."""
        result: dict[str, BlockFactors] = {}
        estimate = self._estimate
        held = labelled(estimate) if estimate.structure == "eigen" else {}
        for part in self.parts:
            block = factors_of(
                part, factor_pair(estimate, part.label, *held[part.label]) if part.label in held else None
            )
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
    def update(self: Self, data: Iterable[tuple[Any, Any]], decay: float) -> Self:
        """Average in place with the estimate of other data: ``decay * old + (1 - decay) * new``.

        Args:
            data: Batches, as at construction.
            decay: Weight of what is there, from 0 to 1.

        Returns:
            The operator itself.
        """
        if not (isinstance(decay, Real) and 0 <= decay <= 1):
            raise ValueError(f"decay: found {decay!r}, expected a number from 0 to 1.")
        if self._risk is None:
            raise ValueError(
                "This operator was loaded without its model, so it cannot read data; build one from them (and merge it, if its "
                "kind merges)."
            )
        with _ordinary_tensors():
            self._adopt(self._averaged(self._risk.checked_data(data), float(decay)))
        return self

    def merge(self: Self, other: Self) -> Self:
        """Add the sums and counts of an operator on other data, in place: the operator of both data sets together.

        Returns:
            The operator itself.
        """
        if not isinstance(other, type(self)):
            raise TypeError(f"other: found {type(other).__name__}, expected a {type(self).__name__}.")
        with _ordinary_tensors():
            self._adopt(self._estimate.merged(other._estimate))
        return self

    # ---- saving ---------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return plain data (tensors, numbers, strings, lists), readable by ``torch.load(..., weights_only=True)``."""
        return self._estimate.state_dict()

    @classmethod
    def from_state_dict(cls: type[Self], state: Mapping[str, Any]) -> Self:
        """Return an operator with the saved estimate, without model and data."""
        estimate = Estimate.from_state_dict(state)
        if estimate.options["kind"] != cls.kind:
            found = estimate.options["kind"]
            raise ValueError(f"state_dict: found that of a {found}LinearOperator, expected a {cls.__name__}.")
        return cls._of(estimate)

    @classmethod
    def _of(cls: type[Self], estimate: Estimate) -> Self:
        self = cls.__new__(cls)
        self._risk = None
        self._adopt(estimate)
        return self

    def __reduce__(self) -> Any:
        # Models and losses need not pickle; the estimate is what the operator is.
        return type(self)._of, (self._estimate,)


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Make tensors that outlive the user's inference mode: products with them may have to be differentiated."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


def geometry(risk: EmpiricalRisk) -> tuple[dict[str, tuple[int, ...]], Tensor]:
    """Return the parameters' shapes by name, and an empty tensor like them."""
    shapes = dict(zip(risk.names, risk.shapes, strict=True))
    return shapes, torch.empty(0, dtype=risk.dtype, device=risk.device)
