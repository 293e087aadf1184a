"""Training with KFAC in either form, with all that has a state."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from optim.kfac_cases import flattened
from torch import Tensor, nn

from curvops.optim import KFAC, KFACPreconditioner, LambdaParamScheduler, LevenbergMarquardt

MAKE = [KFACPreconditioner, KFAC]


def net() -> nn.Sequential:
    """Groups, a layer without rule, a bias-free layer."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(120)),
        *(nn.Linear(120, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
    ).double()


class Trainer:
    """A model, its optimizer, and what goes with it; one state for all of it."""

    def __init__(self, make: Any, model: nn.Module | None = None, scheduled: bool = False, **options: Any) -> None:
        self.model = net() if model is None else model
        self.method = make(self.model, lr=0.05, damping=options.pop("damping", 0.02), **options)
        self.sgd = torch.optim.SGD(self.model.parameters(), 0.05, 0.9) if make is KFACPreconditioner else None
        self.scheduler = self.schedule() if scheduled else None

    def schedule(self) -> LambdaParamScheduler:
        return LambdaParamScheduler(self.method, damping_lambda=lambda t: 0.9**t, factor_decay_lambda=lambda t: 0.99**t)

    def train(self, data: Iterable[tuple[Tensor, Tensor]]) -> Trainer:
        for X, y in data:
            X = X.to(next(self.model.parameters()).dtype)
            self.model.zero_grad()
            before = flattened(self.model(X), y)
            before.backward()
            self.method.step()
            if self.sgd:
                self.sgd.step()
            damping = self.method.hyperparameters.values["damping"]
            if isinstance(damping, LevenbergMarquardt):
                damping.update(before, flattened(self.model(X), y))
            if self.scheduler:
                self.scheduler.step()
        return self

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "method": self.method, "sgd": self.sgd}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load(self, state: dict[str, Any]) -> Trainer:
        for name, saved in state.items():
            getattr(self, name).load_state_dict(saved)
        return self


def through_a_file(state: Any) -> Any:
    """Save, and read without pickled code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(a: Any, b: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b
