"""KFAC as a preconditioner for any optimizer, with the arguments of ``kfac-pytorch``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvops._operator import LinearOperator
from curvops.kfac.operator import KFACLinearOperator
from curvops.optim.damping import LevenbergMarquardt
from curvops.optim.decompositions import ComputeMethod
from curvops.optim.engine import Engine
from curvops.optim.hyperparameters import Hyperparameters
from curvops.optim.kfac_options import Number, checked_options, skipped
from curvops.optim.kronecker_factored import KroneckerFactored, predicted
from curvops.optim.shell import PreconditionedSGD, gradients
from curvops.optim.start import checked_curvature, factors_of


class KFACPreconditioner:
    """Preconditions ``.grad`` by damped inverses of Kronecker factors; call :meth:`step` before the optimizer's.

    The arguments are those of ``kfac-pytorch``. What differs: factors are those of the Fisher of the loss, whatever the batch
    size, number of positions or accumulation; averages begin with the first batch, not with an identity; ``"inverse"``,
    ``"eigen"`` and ``"ekfac"`` work in float64 if the model does; a batch that is not finite is skipped with a warning.

    Args:
        model: Its forward and backward passes are observed.
        factor_update_steps, inv_update_steps: Steps from one update of factors, and of decompositions, to the next.
        damping: Added to the curvature; also :class:`LevenbergMarquardt`.
        factor_decay: Weight of the old factors in the running average.
        kl_clip: Bound of ``sum lr² <P g, g>``, above which all is scaled down; ``None``: no clipping.
        lr: The learning rate of the optimizer, for ``kl_clip``; a function of the step keeps up with schedules.
        accumulation_steps: Forward and backward passes before each step, at least.
        compute_method: ``"eigen"`` (``(B ⊗ A + λI)^-1``), ``"inverse"`` (``(B + λI)^-1 ⊗ (A + λI)^-1``) or ``"ekfac"``.
        compute_eigenvalue_outer_product: Keep ``1 / (eigenvalues + λ)``, with the damping of the last inverse update.
        grad_scaler: A ``GradScaler``, or a function that returns its scale. Call its ``unscale_`` before :meth:`step`.
        factor_dtype: What factors are stored in; by default float32 or better.
        inv_dtype: What decompositions are stored in; float64 ones stay.
        skip_layers: Regular expressions, searched in names and classes of layers in any case; their gradients stay.
        kfac_approx: ``"expand"`` or ``"reduce"``.
        loss_average: See :class:`curvops.optim.SINGD`.
        curvature: A KFAC operator whose factors are the first ones.

    Attributes:
        hyperparameters: Numbers, or functions of the step.
        steps: Number of steps made.
        treatments: What became of every parameter.

    Raises:
        ValueError, TypeError: For invalid hyperparameters, and a model that is observed already.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 1,
        damping: Number | LevenbergMarquardt = 0.001,
        factor_decay: Number = 0.95,
        kl_clip: Number | None = 0.001,
        lr: Number = 0.1,
        accumulation_steps: int = 1,
        compute_method: str | ComputeMethod = "eigen",
        compute_eigenvalue_outer_product: bool = True,
        grad_scaler: Any = None,
        factor_dtype: torch.dtype | None = None,
        inv_dtype: torch.dtype | None = torch.float32,
        skip_layers: Sequence[str] | None = None,
        kfac_approx: str = "expand",
        loss_average: str | int | None = "batch",
        curvature: KFACLinearOperator | None = None,
    ) -> None:
        model = getattr(model, "_orig_mod", model)
        self.hyperparameters = Hyperparameters(
            {
                "factor_update_steps": factor_update_steps,
                "inv_update_steps": inv_update_steps,
                "damping": damping,
                "factor_decay": factor_decay,
                "kl_clip": kl_clip,
                "lr": lr,
            }
        )
        if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
            raise ValueError(f"accumulation_steps: found {accumulation_steps!r}, expected a positive integer.")
        self._accumulation_steps = accumulation_steps
        options = checked_options(
            compute_method, compute_eigenvalue_outer_product, kfac_approx, loss_average, factor_dtype, inv_dtype
        )
        self._skipped = skipped(model, skip_layers)
        params = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in self._skipped}
        if not params:
            raise ValueError("The model has no parameter to precondition: all are frozen, or in skip_layers.")
        if curvature is not None:
            checked_curvature(curvature, options.kfac_approx, params)
        group: dict[str, Any] = {}
        self._engine = Engine(
            model,
            params,
            dict.fromkeys(params, group),
            lambda blocks: KroneckerFactored(
                blocks,
                self.hyperparameters,
                options,
                lambda block, step: self.hyperparameters.at("lr", step),
                lambda block: factors_of(curvature, block, options.kfac_approx),
            ),
            grad_scaler,
        )

    # ---- observation: as the optimizers ----------------------------------------------------------
    observe = PreconditionedSGD.observe

    def close(self) -> None:
        """Take every hook off the model."""
        self._engine.observer.close()

    def __enter__(self) -> KFACPreconditioner:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def reset_batch(self) -> None:
        """Forget what was observed since the last step."""
        self._engine.observer.forget_committed()

    # ---- the step ------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self) -> None:
        """Update the curvature, if it is due, and precondition the gradients.

        Raises:
            RuntimeError: If factors are due and no forward and backward pass was observed, or fewer than accumulation_steps.
        """
        engine = self._engine
        grads = gradients(engine.params)
        if grads:
            updating = engine.look(grads)
            passes = engine.observer.counts.passes
            if updating and passes < self._accumulation_steps:
                raise RuntimeError(
                    f"accumulation_steps: found {passes} forward and backward passes before this step, expected "
                    f"{self._accumulation_steps}."
                )
            ok, clean, found = engine.precondition(grads, updating, grad_scale=None, found_inf=None)
            for name in found.keys() & engine.blocks.names:
                engine.params[name].grad = torch.where(ok, found[name], grads[name])
            self._expect(clean, found)
        engine.advance()

    def _expect(self, grads: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        damping, step = self.hyperparameters.values["damping"], self.steps
        if isinstance(damping, LevenbergMarquardt):
            lr = self.hyperparameters.at("lr", step)
            damping.expect(predicted(self._engine, grads, {n: -lr * g for n, g in found.items()}))

    # ---- what it knows -------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Number of steps made."""
        return self._engine.steps

    @property
    def operator(self) -> KFACLinearOperator:
        """The current factors, without damping, as a KFAC operator."""
        return self._engine.method.operator(self._engine.params)

    @property
    def preconditioner(self) -> LinearOperator:
        """What multiplies gradients before clipping; the identity on parameters without a block."""
        return self._engine.method.preconditioner(self._engine.params)

    @property
    def clip_scale(self) -> Tensor | None:
        """What ``kl_clip`` multiplied the last preconditioned gradients by."""
        return self._engine.method.scale

    @property
    def treatments(self) -> dict[str, str]:
        """What became of every parameter that was seen: its block, or the gradient as it was and why."""
        covered = {n: f"block {b.label!r}" for b in self._engine.blocks for n in b.placement.names}
        plain = {n: f"gradient as it is: {why}" for n, why in self._engine.reasons().items()}
        return {**plain, **covered, **{n: f"gradient as it is: {why}" for n, why in self._skipped.items()}}

    def memory_usage(self) -> dict[str, int]:
        """Return bytes of factors, of decompositions (inverses), of what is observed for the next step, and the total."""
        found = self._engine.method.memory(self._engine.observer.statistic)
        return {**found, "total": sum(found.values())}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(self.hyperparameters.values.items()))
        return f"<KFACPreconditioner of {len(self._engine.blocks)} blocks, {self.steps} steps, {values}>"

    # ---- saving --------------------------------------------------------------------------------
    def state_dict(self, include_factors: bool = True, include_inverses: bool = True) -> dict[str, Any]:
        """Return tensors, numbers and lists only.

        Args:
            include_factors: Also the factors.
            include_inverses: Also the decompositions, without which a resumed run makes them anew at once; the second moments
                of EKFAC then begin with products of eigenvalues.
        """
        state: dict[str, Any] = {"steps": self.steps, **self.hyperparameters.state_dict()}
        if include_factors:
            state["preconditioner"] = self._engine.method.state_dict()
            if not include_inverses:
                state["preconditioner"].pop("solutions")
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], compute_inverses: bool = True) -> None:
        """Undo :meth:`state_dict`; the argument stays as it is, and hyperparameters that are functions here stay functions.

        Args:
            state_dict: The state.
            compute_inverses: Whether to decompose factors that come without decompositions, in the next step; else they wait
                for ``inv_update_steps``, with gradients as they are.

        Raises:
            ValueError: For the state of another model.
        """
        if "steps" not in state_dict or "hyperparameters" not in state_dict:
            raise ValueError(f"state_dict: found entries {sorted(state_dict)}, expected those of a KFACPreconditioner.")
        method = state_dict.get("preconditioner", {"factors": []})
        self._engine.load_state_dict({"steps": state_dict["steps"], "preconditioner": method})
        self._engine.method.patient = not compute_inverses
        self.hyperparameters.load_state_dict(state_dict)
        if not method["factors"]:
            warnings.warn(
                "The state has no factors: gradients stay as they are until the next update of factors.", stacklevel=2
            )
