"""The negative log likelihood of a normal distribution, its variance given or learned."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops.losses._base import Layout, OutputView, check_tensor, count, wide
from curvops.losses._module import ModuleLoss, register
from curvops.losses.elementwise import DiagonalView


@register(nn.GaussianNLLLoss, F.gaussian_nll_loss)
class Gaussian(ModuleLoss):
    """``(log v + (x - y)^2 / v) / 2`` in two forms.

    * Given variance: the target is a pair ``(y, v)``. The Hessian in ``x`` is ``1 / v``.
    * Learned variance: the model returns a pair ``(mean, v)``, which :meth:`prepare` stacks on a new last axis. The
      Hessian in both has determinant ``-1 / (2 v^3)``, it is indefinite everywhere; its expectation under the model,
      ``diag(1 / v, 1 / (2 v^2))``, replaces it.

    As in torch, ``v`` is clamped at ``eps`` for values only: gradients pass.
    """

    def prepare(self, output: Any) -> Tensor:
        if not isinstance(output, (tuple, list)):
            return super().prepare(output)
        if len(output) != 2:
            raise ValueError(
                f"{self.name}: the model returned {len(output)} tensors, expected a pair (mean, variance)."
            )
        mean, variance = self._checked(output[0]), output[1]
        if isinstance(variance, (int, float)):
            variance = mean.new_tensor(variance)
        if not isinstance(variance, Tensor):
            raise TypeError(f"{self.name}: the model returned a variance of type {type(variance).__name__}.")
        return torch.stack([mean, self._expand(variance, mean)], -1)

    @torch.no_grad()
    def view(self, output: Tensor, target: Any) -> OutputView:
        self.check(output, target)
        x, y, v = self._parts(wide(output), target)
        layout, r, v = Layout.of(output, -1), x - y, v.clamp(min=self.loss.eps)
        if isinstance(target, (tuple, list)):
            slope, curvature = r / v, 1 / v
        else:
            slope = torch.stack([r / v, (1 / v - r.square() / v.square()) / 2], -1)
            curvature = torch.stack([1 / v, 1 / (2 * v.square())], -1)
        return DiagonalView(layout, count(r.numel(), r), layout.split(slope), layout.split(curvature))

    def check(self, output: Tensor, target: Any) -> None:
        given = isinstance(target, (tuple, list))
        if given and len(target) != 2:
            raise ValueError(f"{self.name}: the target has {len(target)} entries, expected the pair (y, variance).")
        y = target[0] if given else target
        check_tensor(output, y, self.name)
        if not y.is_floating_point():
            raise TypeError(f"{self.name} needs a floating point target, found {y.dtype}: use .to({output.dtype}).")
        learned = not given and output.shape == (*y.shape, 2)
        if not learned and (not given or y.shape != output.shape):
            raise ValueError(
                f"{self.name}: the output has shape {tuple(output.shape)} but the target {tuple(y.shape)}. Either "
                "the target is a pair (y, variance) with y shaped like the output, or the model returns a pair "
                "(mean, variance) with a mean shaped like the target."
            )

    def _parts(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, target and variance of equal shape."""
        if isinstance(target, (tuple, list)):
            mean, (y, v) = output, target
            v = self._expand(torch.as_tensor(v, dtype=output.dtype, device=output.device), output)
        else:
            (mean, v), y = output.unbind(-1), target
        if (v < 0).any():
            raise ValueError(f"{self.name}: found a variance {float(v.min()):g}, expected values >= 0.")
        return mean, y.detach().to(mean.dtype), v

    def _expand(self, variance: Tensor, mean: Tensor) -> Tensor:
        """Broadcast a variance as torch does: a missing last axis is one variance for all its entries."""
        if variance.shape != mean.shape and variance.shape == mean.shape[:-1] and variance.ndim:
            variance = variance.unsqueeze(-1)
        try:
            return variance.expand_as(mean)
        except RuntimeError:
            raise ValueError(
                f"{self.name}: the variance has shape {tuple(variance.shape)}, which does not broadcast to the mean's "
                f"{tuple(mean.shape)}."
            ) from None

    def _total(self, output: Tensor, target: Any) -> Tensor:
        mean, y, v = self._parts(output, target)
        return self.summed(output)(mean, y, v)
