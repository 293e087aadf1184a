"""SINGD: structured inverse-free natural gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvops.kfac.operator import KFACLinearOperator
from curvops.kfac.options import KFACType, choice
from curvops.optim.blocks import Block, Blocks
from curvops.optim.check import check_hyperparameters, check_loss_average
from curvops.optim.inverse_free import InverseFree
from curvops.optim.shell import PreconditionedSGD
from curvops.optim.start import checked_curvature, roots_of
from curvops.structured import StructuredMatrix, structure


class SINGD(PreconditionedSGD):
    """Structured inverse-free natural gradient descent (Lin et al. 2024), with the arguments of ``singd``.

    Every block of parameters is preconditioned by ``K K' ⊗ C C'``, where ``K`` and ``C`` follow the curvature without an
    inverse or a decomposition. ``kfac_like=True`` is IKFAC, which tends to KFAC with small ``lr_cov``; else INGD (Lin et al.
    2023).

    Args:
        model: Its forward and backward passes are observed every ``T`` steps.
        params: Parameters or groups of them; by default all that require a gradient. What no rule covers goes to ``fallback``.
        lr: Learning rate.
        momentum: Of the steps.
        damping: Added to the factors of the curvature.
        alpha1: Riemannian momentum of ``K`` and ``C``; 0 in IKFAC.
        weight_decay: Multiple of the parameters that is added to the natural gradient.
        T: Steps from one update of the preconditioner to the next.
        loss_average: What the loss averages over: ``"batch"``, ``"batch+sequence"`` (all axes of the prediction but the last),
            ``None`` (a sum), or the number of loss terms of a step. :meth:`observe` tells of masked terms.
        lr_cov: Step size of ``K`` and ``C``, or a function of the step.
        structures: Structures of ``K`` and ``C``: names (:data:`curvops.structured.STRUCTURES`) or classes.
        kfac_approx: ``"expand"`` or ``"reduce"``.
        warn_unsupported: Kept for users of ``singd``: parameters without a rule are in :attr:`treatments`.
        kfac_like: IKFAC instead of INGD.
        preconditioner_dtype: Dtypes of ``K`` and ``C``; ``None`` is that of the parameters.
        init_grad_scale: Kept for users of ``singd``: statistics are scaled back by the scale of their own step.
        normalize_lr_cov: Divide ``lr_cov`` by the largest entry of the momentum where that exceeds 1.
        curvature: A KFAC operator whose damped inverse root is the start of ``K`` and ``C``; else they start as identities.
        fallback, fallback_lr, grad_scaler: See :class:`PreconditionedSGD`.

    Raises:
        ValueError: For invalid hyperparameters, groups that tear a block apart, and a model that is observed already.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        damping: float = 1e-3,
        alpha1: float = 0.5,
        weight_decay: float = 0.0,
        T: int = 10,
        loss_average: str | int | None = "batch",
        lr_cov: float | Callable[[int], float] = 1e-2,
        structures: tuple[str | type[StructuredMatrix], str | type[StructuredMatrix]] = ("dense", "dense"),
        kfac_approx: str = "expand",
        warn_unsupported: bool = True,
        kfac_like: bool = False,
        preconditioner_dtype: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
        init_grad_scale: float = 1.0,
        normalize_lr_cov: bool = False,
        *,
        curvature: KFACLinearOperator | None = None,
        fallback: str | Callable[..., Optimizer] = "adamw",
        fallback_lr: float | None = None,
        grad_scaler: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "damping": damping,
            "alpha1": alpha1,
            "weight_decay": weight_decay,
            "T": T,
            "loss_average": loss_average,
            "lr_cov": lr_cov,
            "structures": structures,
            "kfac_approx": kfac_approx,
            "kfac_like": kfac_like,
            "preconditioner_dtype": preconditioner_dtype,
            "normalize_lr_cov": normalize_lr_cov,
        }

        def start(block: Block) -> tuple[Tensor, Tensor] | None:
            return None if curvature is None else roots_of(curvature, block)

        def make(blocks: Blocks) -> InverseFree:
            if curvature is not None:
                params = {n: p for p, n in self._names.items()}
                for approx in {group["kfac_approx"] for group in self.param_groups}:
                    checked_curvature(curvature, approx, params)
            return InverseFree(blocks, self.param_groups, start)

        super().__init__(
            model, params, defaults, make, fallback=fallback, fallback_lr=fallback_lr, grad_scaler=grad_scaler
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        _check(group)


def _check(group: dict[str, Any]) -> None:
    check_hyperparameters(
        group, least={"lr": 0, "momentum": 0, "damping": 0, "alpha1": 0, "weight_decay": 0, "lr_cov": 0}
    )
    if isinstance(group["T"], bool) or not isinstance(group["T"], int) or group["T"] < 1:
        raise ValueError(f"T: found {group['T']!r}, expected a positive integer.")
    check_loss_average(group["loss_average"])
    if not isinstance(group["structures"], tuple | list) or len(group["structures"]) != 2:
        raise ValueError(f"structures: found {group['structures']!r}, expected a pair, of K and of C.")
    for what in group["structures"]:
        structure(what)
    group["kfac_approx"] = choice("kfac_approx", group["kfac_approx"], KFACType)
    dtypes = group["preconditioner_dtype"]
    pair = isinstance(dtypes, tuple | list) and len(dtypes) == 2
    if not pair or not all(d is None or (isinstance(d, torch.dtype) and d.is_floating_point) for d in dtypes):
        raise ValueError(f"preconditioner_dtype: found {dtypes!r}, expected a pair of floating point dtypes or None.")
