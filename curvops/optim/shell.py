"""Stochastic gradient descent with momentum on preconditioned gradients: all that has nothing to do with curvature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvops._operator import LinearOperator
from curvops.optim.blocks import Blocks
from curvops.optim.engine import Engine, Preconditioner
from curvops.optim.fallback import Fallback


class PreconditionedSGD(Optimizer):
    """Gradient descent on preconditioned gradients, with momentum and weight decay; a fallback for the other parameters.

    ``p̂ = P g + weight_decay p``, ``buffer = momentum buffer + p̂``, ``p = p - lr buffer``.

    Subclasses make the preconditioner. A step reads nothing back from the device. Learning-rate schedulers, ``GradScaler``
    and closures work as with torch's optimizers.

    Args:
        model: Its forward and backward passes are observed.
        params: Parameters or groups of them; by default all that require a gradient.
        defaults: Hyperparameters of the groups.
        make: Makes the preconditioner.
        fallback: For parameters that no rule covers: ``"adamw"``, ``"sgd"``, ``"raise"``, or a function from parameter groups
            to an optimizer.
        fallback_lr: Its learning rate; it follows the schedule of ``lr``. Default: 1e-3 for AdamW, ``lr`` for SGD.
        grad_scaler: A ``GradScaler`` whose ``unscale_`` is called before :meth:`step`.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        make: Callable[[Blocks], Preconditioner],
        *,
        fallback: str | Callable[..., Optimizer] = "adamw",
        fallback_lr: float | None = None,
        grad_scaler: Any = None,
    ) -> None:
        model = getattr(model, "_orig_mod", model)
        super().__init__(_groups(params, model), defaults)
        self._names = _names(self.param_groups, model)
        self._params = {n: p for p, n in self._names.items()}
        group_of = {self._names[p]: group for group in self.param_groups for p in group["params"]}
        self._fallback = Fallback(fallback, fallback_lr, group_of)
        self._engine = Engine(model, self._params, group_of, make, grad_scaler)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, also while training."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            if hasattr(self, "_engine"):
                self._include(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters that cannot be."""

    def _include(self, group: dict[str, Any]) -> None:
        names = _names([group], self._engine.model)
        params = {n: p for p, n in names.items()}
        self._engine.include(params, group)
        self._names |= names
        self._fallback.include(params)

    # ---- observation ---------------------------------------------------------------------------
    @contextmanager
    def observe(
        self: Any,  # KFACPreconditioner has it, too
        *,
        loss_terms: int | None = None,
        fisher_type: str = "empirical",
        loss: Any = None,
        target: Any = None,
        mc_samples: int = 1,
        seed: int = 2147483647,
    ) -> Iterator[None]:
        """Observe the forward pass inside, also of a model that is not called as a whole.

        Args:
            loss_terms: How many terms the loss averages over, where padding or masks leave some out.
            fisher_type: ``"empirical"``: the gradients of the user's own backward pass. Any other kind of
                :class:`curvops.FisherType` sends vectors of its own back through the layers, and needs:
            loss: The loss function.
            target: Its targets.
            mc_samples, seed: See :class:`curvops.KFACLinearOperator`.
        """
        with self._engine.observing(loss_terms, fisher_type, loss, target, mc_samples, seed):
            yield

    def close(self) -> None:
        """Take every hook off the model; the optimizer makes no further steps that need observation."""
        self._engine.observer.close()

    def __enter__(self) -> PreconditionedSGD:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and forget what was observed together with them."""
        super().zero_grad(set_to_none)
        self._engine.observer.forget_committed()

    # ---- the step ------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; return what the closure returned.

        Raises:
            RuntimeError: If the curvature is due and no forward and backward pass was observed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = gradients(self._params)
        if grads:
            self._descend(grads)
        self._engine.advance()
        return loss

    def _descend(self, grads: dict[str, Tensor]) -> None:
        updating = self._engine.look(grads)
        reasons = self._engine.reasons()
        self._assign(grads if updating else {n: g for n, g in grads.items() if n in reasons})
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        ok, clean, directions = self._engine.precondition(grads, updating, **scaling)
        fallback = {n: directions.pop(n) for n in grads if n in self._fallback}
        deltas: dict[str, Tensor] = {}
        for group in self.param_groups:
            own = {n: directions[n] for n in map(self._names.__getitem__, group["params"]) if n in directions}
            if own:
                deltas |= zip(own, self._move(group, own, ok), strict=True)
        self._moved(clean, deltas)
        self._fallback.step(self._params, fallback, ok)

    def _moved(self, grads: Mapping[str, Tensor], deltas: Mapping[str, Tensor]) -> None:
        """Be told of clean gradients, and of what was added to parameters."""

    def _assign(self, grads: Mapping[str, Tensor]) -> None:
        """Give parameters that have a gradient but no block to the fallback, once the model has been seen."""
        reasons, blocks = self._engine.reasons(), self._engine.blocks
        for name in grads:
            if name not in blocks.names:
                reason = reasons.get(name, "the observed passes did not use it")
                blocks.refused[name] = reason
                self._fallback.take(name, self._params[name], reason)

    def _move(self, group: dict[str, Any], directions: dict[str, Tensor], ok: Tensor) -> Sequence[Tensor]:
        """Move parameters along directions; return what was added."""
        params = [self._params[n] for n in directions]
        steps = list(directions.values())
        one = ok.to(torch.float32 if ok.device.type == "mps" else torch.float64)  # a number, whatever it multiplies
        if group["weight_decay"] != 0:
            steps = torch._foreach_add(steps, torch._foreach_mul(params, one * group["weight_decay"]))
        if group["momentum"] != 0:
            buffers = [self._buffer(p) for p in params]
            torch._foreach_mul_(buffers, torch.where(ok, torch.full_like(one, group["momentum"]), 1.0))
            torch._foreach_add_(buffers, steps)
            steps = buffers
        deltas = torch._foreach_mul(steps, one * -group["lr"])
        torch._foreach_add_(params, deltas)
        return deltas

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        elif state["momentum_buffer"].dtype != p.dtype or state["momentum_buffer"].device != p.device:
            state["momentum_buffer"] = state["momentum_buffer"].to(p.device, p.dtype)
        return state["momentum_buffer"]

    # ---- what it knows -------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Number of steps made."""
        return self._engine.steps

    @property
    def operator(self) -> LinearOperator:
        """The current estimate of the curvature, without damping."""
        return self._engine.method.operator(self._params)

    @property
    def preconditioner(self) -> LinearOperator:
        """What multiplies gradients; the identity on parameters of the fallback."""
        return self._engine.method.preconditioner(self._params)

    @property
    def treatments(self) -> dict[str, str]:
        """What became of every parameter that was seen: its block, or the fallback and why."""
        covered = {n: f"block {b.label!r}" for b in self._engine.blocks for n in b.placement.names}
        return {**covered, **self._fallback.reasons}

    # ---- saving --------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers, strings and lists only, readable by ``torch.load(..., weights_only=True)``."""
        state = super().state_dict()
        state["param_groups"] = [{k: v for k, v in g.items() if is_plain(v)} for g in state["param_groups"]]
        state["names"] = [self._names[p] for group in self.param_groups for p in group["params"]]
        return {**state, **self._engine.state_dict(), "fallback": self._fallback.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`; the argument stays as it is, hyperparameters that cannot be saved are those here.

        Raises:
            ValueError: For the state of another model.
        """
        names = [self._names[p] for group in self.param_groups for p in group["params"]]
        if "preconditioner" not in state_dict or state_dict.get("names") != names:
            found = sorted(set(state_dict.get("names", [])) ^ set(names))[:6]
            raise ValueError(
                f"state_dict: found the state of another {'model' if found else 'optimizer'}, expected the parameters of this "
                f"one, in its order; they differ in {found}."
            )
        before, state = [dict(group) for group in self.param_groups], self.state
        groups = [{**live, **saved} for live, saved in zip(before, state_dict["param_groups"], strict=True)]
        live = self.param_groups
        super().load_state_dict({"state": copied(state_dict["state"]), "param_groups": groups})
        self._renew(live, self.param_groups)
        try:
            self._engine.load_state_dict(state_dict)
        except Exception:
            self._renew(live, before)
            self.state = state
            raise
        self._fallback.load_state_dict(copied(state_dict["fallback"]), self._params)
        self._engine.blocks.refused.update(self._fallback.reasons)

    def _renew(self, live: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Give the groups other contents; blocks refer to them, so they stay."""
        for group, new in zip(live, groups, strict=True):
            content = dict(new)
            group.clear()
            group.update(content)
        self.param_groups = live


def _groups(params: Iterable[Any] | None, model: nn.Module) -> list[Any]:
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise ValueError("The model has no parameter that requires a gradient.")
        return params
    params = list(params)
    if not params:
        raise ValueError("params: found none, expected parameters or groups of them.")
    return params


def _names(groups: list[dict[str, Any]], model: nn.Module) -> dict[Tensor, str]:
    names = {id(p): n for n, p in model.named_parameters()}
    found = {}
    for p in (p for group in groups for p in group["params"]):
        if id(p) not in names:
            raise ValueError(f"params: found a tensor of shape {tuple(p.shape)} that is not a parameter of the model.")
        found[p] = names[id(p)]
    return found


def gradients(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients that are there, dense."""
    found = {n: p.grad for n, p in params.items() if p.grad is not None}
    return {n: g if g.layout is torch.strided else g.to_dense() for n, g in found.items()}


def copied(state: Any) -> Any:
    """Return a state with tensors of its own."""
    if isinstance(state, Mapping):
        return {k: copied(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(copied, state))
    return state.clone() if isinstance(state, Tensor) else state


def is_plain(value: Any) -> bool:
    """Whether ``torch.load(..., weights_only=True)`` reads a value."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
