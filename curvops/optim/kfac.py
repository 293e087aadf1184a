"""KFAC as an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvops.kfac.operator import KFACLinearOperator
from curvops.optim.blocks import Blocks
from curvops.optim.check import check_hyperparameters
from curvops.optim.damping import LevenbergMarquardt
from curvops.optim.decompositions import ComputeMethod
from curvops.optim.hyperparameters import Hyperparameters
from curvops.optim.kfac_options import Number, checked_options, skipped
from curvops.optim.kronecker_factored import KroneckerFactored, predicted
from curvops.optim.shell import PreconditionedSGD
from curvops.optim.start import checked_curvature, factors_of


class KFAC(PreconditionedSGD):
    """Gradient descent on gradients that KFAC preconditions; every parameter is trained (see ``fallback``).

    Args:
        model: Its forward and backward passes are observed.
        params: Parameters or groups of them; by default all that require a gradient.
        lr: Learning rate.
        momentum, weight_decay: See :class:`PreconditionedSGD`.
        damping, factor_update_steps, inv_update_steps, factor_decay, kl_clip, compute_method,
        compute_eigenvalue_outer_product, factor_dtype, inv_dtype, skip_layers, kfac_approx, loss_average, curvature: See
            :class:`KFACPreconditioner`; skipped layers go to the fallback.
        fallback, fallback_lr, grad_scaler: See :class:`PreconditionedSGD`.

    Raises:
        ValueError, TypeError: For invalid hyperparameters, groups that tear a block apart, a model that is observed already.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        damping: Number | LevenbergMarquardt = 0.001,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 1,
        factor_decay: Number = 0.95,
        kl_clip: Number | None = 0.001,
        compute_method: str | ComputeMethod = "eigen",
        compute_eigenvalue_outer_product: bool = True,
        factor_dtype: torch.dtype | None = None,
        inv_dtype: torch.dtype | None = torch.float32,
        skip_layers: Sequence[str] | None = None,
        kfac_approx: str = "expand",
        loss_average: str | int | None = "batch",
        curvature: KFACLinearOperator | None = None,
        fallback: Any = "adamw",
        fallback_lr: float | None = None,
        grad_scaler: Any = None,
    ) -> None:
        self.hyperparameters = Hyperparameters(
            {
                "factor_update_steps": factor_update_steps,
                "inv_update_steps": inv_update_steps,
                "damping": damping,
                "factor_decay": factor_decay,
                "kl_clip": kl_clip,
            }
        )
        options = checked_options(
            compute_method, compute_eigenvalue_outer_product, kfac_approx, loss_average, factor_dtype, inv_dtype
        )
        self._deltas: dict[str, Tensor] = {}

        def make(blocks: Blocks) -> KroneckerFactored:
            blocks.refused.update(skipped(getattr(model, "_orig_mod", model), skip_layers))
            if curvature is not None:
                checked_curvature(curvature, options.kfac_approx, {n: p for p, n in self._names.items()})
            return KroneckerFactored(
                blocks,
                self.hyperparameters,
                options,
                lambda block, step: block.group["lr"],
                lambda block: factors_of(curvature, block, options.kfac_approx),
            )

        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            model, params, defaults, make, fallback=fallback, fallback_lr=fallback_lr, grad_scaler=grad_scaler
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        check_hyperparameters(group, least={"lr": 0, "momentum": 0, "weight_decay": 0})

    @property
    def clip_scale(self) -> Tensor | None:
        """What ``kl_clip`` multiplied the last preconditioned gradients by."""
        return self._engine.method.scale

    def _moved(self, grads: Mapping[str, Tensor], deltas: Mapping[str, Tensor]) -> None:
        damping = self.hyperparameters.values["damping"]
        if isinstance(damping, LevenbergMarquardt):
            damping.expect(predicted(self._engine, grads, deltas))

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings and lists only, readable by ``torch.load(..., weights_only=True)``."""
        return {**super().state_dict(), **self.hyperparameters.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`; the argument stays as it is, and hyperparameters that are functions here stay functions."""
        super().load_state_dict(state_dict)
        self.hyperparameters.load_state_dict(state_dict)
