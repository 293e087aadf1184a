"""Damping that follows how well the quadratic model predicts the loss (Levenberg and Marquardt)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LevenbergMarquardt:
    """Adaptive damping: smaller where the model of the loss is right, larger where it is not.

    After a step ``δ``, ``ρ = (loss after - loss before) / (∇'δ + δ'(F + λI)δ / 2)``; ``ρ > 3/4`` multiplies ``λ`` by
    ``factor``, ``ρ < 1/4`` (or an increase of the loss) divides by it (Martens and Grosse 2015, section 6.5). Nothing is read
    back from the device. Pass it as ``damping=``, and call :meth:`update` after steps whose loss was evaluated once more.

    Args:
        damping: The first ``λ``.
        factor: Between 0 and 1; Martens and Grosse take ``(19/20)^T`` every ``T`` steps.
        least, most: Bounds.

    Attributes:
        damping: The current ``λ``, a number or a 0-dim tensor.
        ratio: The last ``ρ``.
    """

    def __init__(self, damping: float = 1e-2, factor: float = 0.95, least: float = 1e-8, most: float = 1e8) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor: found {factor!r}, expected a number between 0 and 1.")
        if not 0 < least <= damping <= most:
            raise ValueError(
                f"damping: found {damping!r}, expected 0 < least <= damping <= most ({least!r}, {most!r})."
            )
        self.damping: float | Tensor = damping
        self.ratio: Tensor | None = None
        self._factor, self._least, self._most = factor, least, most
        self._predicted: Tensor | None = None

    def __repr__(self) -> str:
        return f"LevenbergMarquardt({float(self.damping):.4g}, factor={self._factor})"

    def expect(self, change: Tensor) -> None:
        """Take note of the change of the loss that the model predicts for a step."""
        self._predicted = change

    @torch.no_grad()
    def update(self, before: Any, after: Any) -> None:
        """Change the damping.

        Args:
            before, after: The loss of the same data before and after the last step.
        """
        if self._predicted is None:
            raise RuntimeError("LevenbergMarquardt: no step was made since the last update.")
        before, after = (torch.as_tensor(x).detach().to(self._predicted) for x in (before, after))
        rho = (after - before) / self._predicted
        change = torch.where(rho > 0.75, torch.full_like(rho, self._factor), 1.0)
        # A model that expects an increase, and gets it, was right; the step was no good nevertheless.
        good = (rho >= 0.25) & rho.isfinite() & (after <= before)
        change = torch.where(good, change, 1.0 / self._factor)
        self.damping = (change * self.damping).clamp(self._least, self._most)
        self.ratio, self._predicted = rho, None

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"damping": self.damping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        damping = state["damping"]
        self.damping = damping.clone() if isinstance(damping, Tensor) else damping
        self._predicted = None
