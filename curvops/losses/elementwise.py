"""Losses that act on every entry of the output by itself: diagonal Hessians."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops import _random
from curvops.losses._base import Layout, OutputView, check_tensor, count, wide
from curvops.losses._module import ModuleLoss, register


class DiagonalView(OutputView):
    """Terms with diagonal Hessians: the entries' first and second derivatives ``[N, T, C]`` are all there is."""

    def __init__(self, layout: Layout, normalizer: Tensor, slope: Tensor, curvature: Tensor) -> None:
        super().__init__(layout, normalizer)
        self.slope = slope
        self.curvature = curvature

    def _column(self, index: Tensor) -> Tensor:
        return self._root(index.unsqueeze(-1) == torch.arange(self.C, device=index.device))

    def _root(self, eps: Tensor) -> Tensor:
        return self.curvature.sqrt() * eps.to(self.curvature.dtype)

    def _product(self, V: Tensor) -> Tensor:
        return self.curvature * V

    def _gradient(self) -> Tensor:
        return self.slope

    def hessian(self) -> Tensor:
        return torch.diag_embed(self.curvature)


class BernoulliView(DiagonalView):
    """Losses ``- a log s(x) - b log s(-x)``; a draw is ``sqrt(a + b) (s(x) - y)`` with ``y`` drawn from ``s(x)``."""

    def __init__(self, layout: Layout, normalizer: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        # 1 - s(x) as s(-x): the difference has no digits left for large x.
        self.on, self.off, self.mass = x.sigmoid(), (-x).sigmoid(), a + b
        super().__init__(layout, normalizer, b * self.on - a * self.off, self.mass * self.on * self.off)

    def _sample(self, seed: int, data: Tensor, draw: int) -> Tensor:
        u = _random.uniform(seed, data, draw, *self._entries(self.C))
        return self.mass.sqrt() * torch.where(u < self.on, -self.off, self.on)


class Elementwise(ModuleLoss):
    """A loss of every entry of the output against the same entry of the target; ``mean`` divides by their number.

    To add one: subclass, define :meth:`derivatives`, and ``register`` it for the module's type.
    """

    integer_targets = False  #: what torch's own loss accepts

    def check(self, output: Tensor, target: Any) -> None:
        check_tensor(output, target, self.name)
        integer = self.integer_targets and not target.is_complex() and target.dtype != torch.bool
        if not (target.is_floating_point() or integer):
            raise TypeError(
                f"{self.name} needs a floating point target, found {target.dtype}: call target.to({output.dtype})."
            )
        if target.shape != output.shape:
            raise ValueError(
                f"{self.name}: the output has shape {tuple(output.shape)} but the target {tuple(target.shape)}. They "
                "must be equal (nothing is broadcast): reshape one of them, for example with squeeze(-1)."
            )

    @torch.no_grad()
    def view(self, output: Tensor, target: Any) -> OutputView:
        self.check(output, target)
        layout, x = Layout.of(output, -1), wide(output)
        y = target.detach().to(x.dtype)
        return self.split_view(layout, count(output.numel(), output), layout.split(x), layout.split(y))

    def split_view(self, layout: Layout, normalizer: Tensor, x: Tensor, y: Tensor) -> OutputView:
        """Return the view for output and target as ``[N, T, C]``."""
        return DiagonalView(layout, normalizer, *self.derivatives(x, y))

    @abstractmethod
    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and second derivatives of the entries' losses, entry by entry."""


@register(nn.MSELoss, F.mse_loss)
class Squared(Elementwise):
    """``(x - y)^2``, without a factor one half."""

    integer_targets = True

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * (x - y), torch.full_like(x, 2)


@register(nn.SmoothL1Loss, F.smooth_l1_loss)
class SmoothAbsolute(Elementwise):
    """``(x - y)^2 / (2 beta)`` within ``beta``, else ``|x - y| - beta / 2``."""

    integer_targets = True

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        r, beta = x - y, self.loss.beta
        if beta == 0:
            return r.sign(), torch.zeros_like(r)
        return (r / beta).clamp(-1, 1), (r.abs() < beta).to(r.dtype) / beta


@register(nn.HuberLoss, F.huber_loss)
class Huber(Elementwise):
    """``(x - y)^2 / 2`` within ``delta``, else ``delta (|x - y| - delta / 2)``."""

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        r, delta = x - y, self.loss.delta
        return r.clamp(-delta, delta), (r.abs() < delta).to(r.dtype)


@register(nn.PoissonNLLLoss, F.poisson_nll_loss)
class Poisson(Elementwise):
    """``exp(x) - y x`` of log-rates, or ``x - y log(x + eps)`` of rates; ``full`` adds a constant."""

    integer_targets = True

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.loss.log_input:
            return x.exp() - y, x.exp()
        if (y < 0).any():
            raise ValueError(f"{self.name}: found a target {float(y.min()):g}, expected counts >= 0.")
        x = x + self.loss.eps
        return 1 - y / x, y / x.square()


@register(nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits)
class BinaryCrossEntropy(Elementwise):
    """``- a log s(x) - b log s(-x)`` with ``a = weight pos_weight y``, ``b = weight (1 - y)``."""

    def __init__(self, loss: nn.BCEWithLogitsLoss) -> None:
        super().__init__(loss)
        self.check_nonnegative("weight")
        self.check_nonnegative("pos_weight")

    def split_view(self, layout: Layout, normalizer: Tensor, x: Tensor, y: Tensor) -> OutputView:
        weight, positive = self._broadcast("weight", x, layout), self._broadcast("pos_weight", x, layout)
        a, b = weight * positive * y, weight * (1 - y)
        if (a + b < 0).any():
            raise ValueError(f"{self.name}: found targets that make the loss concave, expected values in [0, 1].")
        return BernoulliView(layout, normalizer, x, a, b)

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("Weights depend on the place of an entry: see split_view.")

    def _broadcast(self, name: str, x: Tensor, layout: Layout) -> Tensor:
        """Return an option as ``[N, T, C]``; torch broadcasts it to the output."""
        value = self.option(name, x)
        if value is None:
            return x.new_ones(())
        try:
            return layout.split(value.expand(layout.shape))
        except RuntimeError:
            raise ValueError(
                f"{self.name}: {name} has shape {tuple(value.shape)}, expected one that broadcasts to the output's "
                f"{layout.shape}."
            ) from None
