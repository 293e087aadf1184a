"""Losses over classes: cross entropy of logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops import _random
from curvops.losses._base import Layout, OutputView, check_tensor, count, wide
from curvops.losses._module import ModuleLoss, register

_CHUNK = 2**24  # probabilities that are summed in float64 at a time


class CategoricalView(OutputView):
    """Terms ``sum_c q_c (- log p_c)`` with ``p = softmax(x)``: gradient ``m p - q``, Hessian ``m (diag p - p p')``.

    Args:
        layout: The split into terms.
        normalizer: What ``mean`` divides by.
        x: Logits, ``[N, T, C]``.
        mass: ``m = sum_c q_c``, ``[N, T]``; zero where the target is ignored.
        weights: Makes ``q [N, T, C]``, which only the gradient needs.
    """

    def __init__(
        self, layout: Layout, normalizer: Tensor, x: Tensor, mass: Tensor, weights: Callable[[], Tensor]
    ) -> None:
        super().__init__(layout, normalizer)
        self.p = x.softmax(-1)
        self.mass = mass.unsqueeze(-1)
        self.weights = weights
        self.classes = torch.arange(self.C, device=x.device)

    @cached_property
    def pivot(self) -> Tensor:
        """The largest class of every term."""
        return self.p.argmax(-1, keepdim=True)

    @property
    def columns(self) -> int:
        return max(self.C - 1, 1)

    # diag p - p p' = R R' with R = diag(s) - p s', s = sqrt(p), and R s = 0: one of R's C columns is spare. With an
    # orthonormal basis Q of the complement of s, (R Q)(R Q)' = R R', which saves 1/C of the backward passes. As
    # s'Q = 0, R Q = diag(s) Q. Q are the columns j != k of the Householder reflection I - v v' / (1 + s_k),
    # v = s + e_k; with the largest class as k nothing cancels, however close p is to 0 or 1.
    def _basis(self, z: Tensor) -> Tensor:
        """Return ``sqrt(m) R Q z``, for ``z [N, T, C]`` that is zero at the pivot."""
        s, v, scale, denominator = self._frame
        return scale * (z - (s * z).sum(-1, keepdim=True) / denominator * v)

    @cached_property
    def _frame(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``s``, ``v``, ``sqrt(m) s`` and ``1 + s_k``."""
        s = self.p.sqrt()
        return s, s + (self.classes == self.pivot), self.mass.sqrt() * s, 1 + s.gather(-1, self.pivot)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Which column every class takes its entry from, and whether it is not the pivot."""
        place = (self.classes - (self.classes > self.pivot).long()).clamp(max=self.columns - 1)
        return place, self.classes != self.pivot

    def _column(self, index: Tensor) -> Tensor:
        index = index.unsqueeze(-1)
        chosen = torch.where(index < 0, -1, index + (index >= self.pivot))
        return self._basis((self.classes == chosen).to(self.p.dtype))

    def _root(self, eps: Tensor) -> Tensor:
        place, moved = self._places
        return self._basis(eps.to(self.p.dtype).gather(-1, place) * moved)

    def _sample(self, seed: int, data: Tensor, draw: int) -> Tensor:
        """Draw labels from ``p`` by inverting its distribution function; the mass stays that of the actual target."""
        u = _random.uniform(seed, data, draw, self._entries(1)[0]).reshape(-1, 1)
        rows = max(1, _CHUNK // self.C)
        labels = [_invert(*pu) for pu in zip(self.p.flatten(0, 1).split(rows), u.split(rows), strict=True)]
        label = torch.cat(labels).view(self.N, self.T, 1)
        return self.mass.sqrt() * self.p.scatter_add(-1, label, -torch.ones_like(self.p[..., :1]))

    def _product(self, V: Tensor) -> Tensor:
        weighted = self.p * V
        return self.mass * (weighted - self.p * weighted.sum(-1, keepdim=True))

    def _gradient(self) -> Tensor:
        return self.mass * self.p - self.weights()

    def hessian(self) -> Tensor:
        p = self.p
        return self.mass.unsqueeze(-1) * (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))


def _invert(p: Tensor, u: Tensor) -> Tensor:
    """Return the classes at which the distribution functions of ``p [rows, C]`` pass ``u [rows, 1]``, in float64."""
    cdf = p.to(torch.float64).cumsum(-1)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp(max=p.shape[1] - 1)


class ClassLoss(ModuleLoss):
    """A loss over the classes on one axis of the output, with class weights and ignored targets."""

    def __init__(self, loss: nn.Module, class_dim: int | None = None) -> None:
        super().__init__(loss)
        self.class_dim = 1 if class_dim is None else class_dim
        self.check_nonnegative("weight")

    def layout(self, output: Tensor) -> Layout:
        """Return the split into terms."""
        if output.ndim < 2 or not -output.ndim <= self.class_dim < output.ndim or self.class_dim % output.ndim == 0:
            raise ValueError(
                f"{self.name} needs an output [N, C, d1, ...], classes on axis {self.class_dim}, found shape "
                f"{tuple(output.shape)}: add a batch axis in front, or say class_dim=."
            )
        return Layout.of(output, self.class_dim)

    def class_weights(self, x: Tensor) -> Tensor:
        """Return one weight per class."""
        weight = self.option("weight", x)
        if weight is not None and weight.shape != x.shape[-1:]:
            raise ValueError(
                f"{self.name}: weight has shape {tuple(weight.shape)} but the output has {x.shape[-1]} classes on axis "
                f"{self.class_dim}: give one weight per class, or say class_dim=."
            )
        return x.new_ones(x.shape[-1]) if weight is None else weight

    def labels(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """Return class indices ``[N, T]`` (0 where ignored), and which of them are valid."""
        check_tensor(output, target, self.name)
        axis, C = self.class_dim % output.ndim, output.shape[self.class_dim]
        expected = output.shape[:axis] + output.shape[axis + 1 :]
        if target.shape != expected:
            raise ValueError(
                f"{self.name}: the output has shape {tuple(output.shape)} with classes on axis {axis}, expected class "
                f"indices of shape {tuple(expected)}, found a target of shape {tuple(target.shape)}: reshape it, or "
                "say class_dim=."
            )
        if target.dtype not in (torch.int64, torch.uint8):
            raise TypeError(f"{self.name} needs class indices of dtype torch.int64, found {target.dtype}: use .long().")
        target = target.long().reshape(Layout.of(output, axis).split_shape[:2])
        valid = target != self.loss.ignore_index
        wrong = valid & ((target < 0) | (target >= C))
        if wrong.any():
            raise ValueError(
                f"{self.name}: target class {int(target[wrong][0])} is out of range, expected 0 to {C - 1}"
                f" or ignore_index={self.loss.ignore_index}."
            )
        return torch.where(valid, target, 0), valid

    def check(self, output: Tensor, target: Any) -> None:
        self.layout(output)
        self.labels(output, target)

    def _total(self, output: Tensor, target: Any) -> Tensor:
        if self.class_dim % output.ndim == output.ndim - 1:  # without a copy of the logits
            x, y = output.reshape(-1, output.shape[-1]), target.reshape(-1)
        else:
            # torch's backward pass of nll_loss fails on what movedim returns.
            x, y = output.movedim(self.class_dim, 1).contiguous(), target
        return self.summed(output)(x, y.long())


@register(nn.CrossEntropyLoss, F.cross_entropy)
class CrossEntropy(ClassLoss):
    """``sum_c w_c y_c (- log p_c)`` with ``y`` one-hot or class probabilities, smoothed."""

    @torch.no_grad()
    def view(self, output: Tensor, target: Any) -> OutputView:
        layout = self.layout(output)
        x = layout.split(wide(output))
        if _soft(output, target):
            return self._soft_view(output, target, layout, x)
        weight, smoothing = self.class_weights(x), self.loss.label_smoothing
        label, valid = self.labels(output, target)
        picked = weight[label] * valid
        uniform = smoothing / layout.split_shape[2] * weight

        def weights() -> Tensor:
            q = uniform * valid.unsqueeze(-1)
            return q.scatter_add(-1, label.unsqueeze(-1), (1 - smoothing) * picked.unsqueeze(-1))

        mass = (1 - smoothing) * picked + uniform.sum() * valid
        return CategoricalView(layout, picked.sum(dtype=torch.float64), x, mass, weights)

    def _soft_view(self, output: Tensor, target: Tensor, layout: Layout, x: Tensor) -> OutputView:
        """Class probabilities: ``mean`` divides by the number of terms, whatever the weights."""
        self.check(output, target)
        smoothing = self.loss.label_smoothing
        y = (1 - smoothing) * layout.split(target.detach().to(x.dtype)) + smoothing / x.shape[-1]
        q = self.class_weights(x) * y
        mass = q.sum(-1)
        if (mass < 0).any():
            raise ValueError(f"{self.name}: class probabilities with a negative sum make the loss concave.")
        return CategoricalView(layout, count(mass.numel(), x), x, mass, lambda: q)

    def check(self, output: Tensor, target: Any) -> None:
        if not _soft(output, target):
            super().check(output, target)
            return
        check_tensor(output, target, self.name)
        if not target.is_floating_point():
            raise TypeError(
                f"{self.name}: a target shaped like the output holds class probabilities and must be floating point, "
                f"found {target.dtype}: call target.to({output.dtype}), or give class indices."
            )
        if self.loss.ignore_index >= 0:
            raise ValueError(
                f"{self.name}: ignore_index={self.loss.ignore_index} means nothing to probabilities: leave it out."
            )

    def _total(self, output: Tensor, target: Any) -> Tensor:
        if not _soft(output, target):
            return super()._total(output, target)
        axis = self.class_dim
        return self.summed(output)(output.movedim(axis, 1), target.movedim(axis, 1).to(output.dtype))


def _soft(output: Tensor, target: Any) -> bool:
    """Whether the target holds class probabilities, as torch tells: by its shape."""
    return isinstance(target, Tensor) and target.shape == output.shape
