"""An ordinary optimizer for the parameters that have no block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

Kind = str | Callable[..., Optimizer]


class Fallback:
    """Trains what no rule covers, by a declared rule; its learning rate follows the schedule of the groups.

    Args:
        kind: ``"adamw"``, ``"sgd"``, ``"raise"``, or a function from parameter groups to an optimizer.
        lr: The learning rate; by default 1e-3 for AdamW, and that of the group for the others.
        group_of: The parameter group of every name.

    Attributes:
        reasons: Why a parameter is here, by name.
    """

    def __init__(self, kind: Kind, lr: float | None, group_of: Mapping[str, dict[str, Any]]) -> None:
        if not callable(kind) and kind not in ("adamw", "sgd", "raise"):
            raise ValueError(
                f"fallback: found {kind!r}, expected 'adamw', 'sgd', 'raise', or a function to an optimizer."
            )
        self.reasons: dict[str, str] = {}
        self._kind, self._lr, self._group_of = kind, lr, group_of
        self._first: dict[str, Any] = {}
        self.include(group_of)
        self._optimizer: Optimizer | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.reasons

    def include(self, names: Iterable[str]) -> None:
        """Remember the first learning rates of parameters, which later ones are in proportion to."""
        self._first.update({name: self._group_of[name]["lr"] for name in names})

    def take(self, name: str, p: Tensor, reason: str) -> None:
        """Take over a parameter."""
        if name in self.reasons:
            return
        if self._kind == "raise":
            raise NotImplementedError(
                f"Parameter {name!r} has no block ({reason}), and fallback='raise'. Choose fallback='adamw' or 'sgd', or leave "
                "the parameter out of params."
            )
        if p.is_complex() and not callable(self._kind):
            raise NotImplementedError(
                f"Parameter {name!r} is complex, which fallback={self._kind!r} cannot train here. Give a function, such as "
                "fallback=lambda groups: torch.optim.AdamW(groups), or leave the parameter out of params."
            )
        self.reasons[name] = f"fallback {self._kind if isinstance(self._kind, str) else 'optimizer'}: {reason}"
        group = {"params": [p], "lr": self._initial(name), "weight_decay": self._group_of[name]["weight_decay"]}
        if self._optimizer is None:
            self._optimizer = self._make([group], name)
        else:
            self._optimizer.add_param_group(group)

    def _initial(self, name: str) -> Any:
        if self._lr is not None:
            return self._lr
        return 1e-3 if self._kind == "adamw" else self._first[name]

    def _make(self, groups: list[dict[str, Any]], name: str) -> Optimizer:
        if callable(self._kind):
            return self._kind(groups)
        if self._kind == "adamw":
            return AdamW(groups, fused=True)  # fused: it can skip a step on the device
        return SGD(groups, lr=self._initial(name), momentum=self._group_of[name]["momentum"], fused=True)

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], ok: Tensor) -> None:
        """Make a step on gradients that are clean, where ``ok``."""
        optimizer = self._optimizer
        if optimizer is None or not grads:
            return
        for group, name in zip(optimizer.param_groups, self.reasons, strict=True):
            first = self._first[name]
            group["lr"] = self._initial(name) * (self._group_of[name]["lr"] / first if first else 1.0)
        own = {name: params[name] for name in self.reasons}
        _follow(optimizer, own.values())
        with _gradients(own, grads):
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                _step_where(optimizer, ok)
            else:
                _step_and_undo(optimizer, list(own.values()), ok)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        state = {} if self._optimizer is None else self._optimizer.state_dict()
        return {"reasons": dict(self.reasons), "optimizer": state}

    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Undo :meth:`state_dict`."""
        self.reasons, self._optimizer = {}, None
        for name, reason in state["reasons"].items():
            self.take(name, params[name], reason.partition(": ")[2])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])


def _follow(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Bring what is kept for every entry of a parameter to where the parameter is now, as it is after ``model.to``."""
    for p in params:
        state = optimizer.state.get(p, {})
        for name, t in state.items():
            if isinstance(t, Tensor) and t.shape == p.shape and (t.dtype, t.device) != (p.dtype, p.device):
                state[name] = t.to(p.device, p.dtype)


@contextmanager
def _gradients(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Iterator[None]:
    """Lend other gradients to parameters."""
    before = {name: p.grad for name, p in params.items()}
    try:
        for name, p in params.items():
            p.grad = grads.get(name)
        yield
    finally:
        for name, p in params.items():
            p.grad = before[name]


def _step_where(optimizer: Any, ok: Tensor) -> None:
    """Make a step of an optimizer that can skip it on the device."""
    optimizer.found_inf, optimizer.grad_scale = (~ok).float(), None
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def _step_and_undo(optimizer: Optimizer, params: list[Tensor], ok: Tensor) -> None:
    """Make a step of any optimizer, and take it back where not ``ok``."""
    known = {id(t): (t, t.clone()) for t in _tensors(optimizer, params)}
    optimizer.step()
    for t in _tensors(optimizer, params):
        before = known[id(t)][1] if id(t) in known else torch.zeros_like(t)
        t.copy_(torch.where(ok.to(t.device), t, before))


def _tensors(optimizer: Optimizer, params: list[Tensor]) -> list[Tensor]:
    states = [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    return params + states
