"""Losses without a second derivative: their curvature is zero, and the user is told so."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops.losses._base import Layout, OutputView, count, wide
from curvops.losses._module import register
from curvops.losses.categorical import ClassLoss
from curvops.losses.elementwise import Elementwise


class LinearView(OutputView):
    """Terms with a gradient (``slope [N, T, C]``) and no Hessian; one zero column."""

    def __init__(self, layout: Layout, normalizer: Tensor, slope: Tensor) -> None:
        super().__init__(layout, normalizer)
        self.slope = slope

    @property
    def columns(self) -> int:
        return 1

    def _column(self, index: Tensor) -> Tensor:
        return torch.zeros_like(self.slope)

    def _root(self, eps: Tensor) -> Tensor:
        return torch.zeros_like(self.slope)

    def _product(self, V: Tensor) -> Tensor:
        return torch.zeros_like(V)

    def _gradient(self) -> Tensor:
        return self.slope

    def hessian(self) -> Tensor:
        return self.slope.new_zeros(self.N, self.T, self.C, self.C)


def _warn(name: str, advice: str) -> None:
    warnings.warn(
        f"{name} has no second derivative: curvature built on its Hessian (exact or Monte-Carlo) is zero. {advice}",
        UserWarning,
        stacklevel=4,  # whoever called output_loss
    )


@register(nn.L1Loss, F.l1_loss)
class Absolute(Elementwise):
    """``|x - y|``."""

    integer_targets = True

    def __init__(self, loss: nn.L1Loss) -> None:
        super().__init__(loss)
        _warn(self.name, "Use HuberLoss or SmoothL1Loss, or fisher_type='empirical'.")

    def split_view(self, layout: Layout, normalizer: Tensor, x: Tensor, y: Tensor) -> OutputView:
        return LinearView(layout, normalizer, (x - y).sign())

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x - y).sign(), torch.zeros_like(x)


@register(nn.KLDivLoss, F.kl_div)
class KullbackLeibler(Elementwise):
    """``y (log y - x)`` of log-probabilities ``x``; ``batchmean`` divides by the number of data."""

    reductions = ("mean", "sum", "batchmean")

    def __init__(self, loss: nn.KLDivLoss) -> None:
        super().__init__(loss)
        _warn(self.name, "Use CrossEntropyLoss on logits with class probabilities as target: it has the same gradient.")

    def split_view(self, layout: Layout, normalizer: Tensor, x: Tensor, y: Tensor) -> OutputView:
        if self.loss.reduction == "batchmean":
            normalizer = count(layout.shape[0], x)
        return LinearView(layout, normalizer, self.derivatives(x, y)[0])

    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return -(y.exp() if self.loss.log_target else y), torch.zeros_like(x)


@register(nn.NLLLoss, F.nll_loss)
class NegativeLogLikelihood(ClassLoss):
    """``- w_y x_y`` of log-probabilities ``x``."""

    def __init__(self, loss: nn.NLLLoss, class_dim: int | None = None) -> None:
        super().__init__(loss, class_dim)
        _warn(self.name, "Use CrossEntropyLoss on logits (without LogSoftmax): it has the same gradient.")

    @torch.no_grad()
    def view(self, output: Tensor, target: Any) -> OutputView:
        layout = self.layout(output)
        x = layout.split(wide(output))
        weight = self.class_weights(x)
        label, valid = self.labels(output, target)
        picked = weight[label] * valid
        slope = torch.zeros_like(x).scatter_(-1, label.unsqueeze(-1), -picked.unsqueeze(-1))
        return LinearView(layout, picked.sum(dtype=torch.float64), slope)
