"""Any callable ``(output, target) -> scalar``: derivatives at the output by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvops import _random, _scalars
from curvops.losses._base import Layout, OutputLoss, OutputView, count, wide

_CHUNK = 2**24  # entries of the Hessians that are decomposed in one call


class CallableView(OutputView):
    """Terms are the data's whole outputs, ``T = 1`` and ``C = D`` entries; Hessians ``[N, D, D]`` are dense.

    Args:
        layout: The split into terms.
        normalizer: What ``mean`` divides by.
        name: What errors call the loss.
        x: The output, detached.
        value: The sum of loss terms as a function of the output.
    """

    def __init__(
        self, layout: Layout, normalizer: Tensor, name: str, x: Tensor, value: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(layout, normalizer)
        self.name, self.x, self.value = name, x, value

    def _column(self, index: Tensor) -> Tensor:
        at = index.clamp(min=0).view(-1, 1, 1).expand(-1, self.C, 1)
        return self._factor.gather(-1, at).mT * (index >= 0).unsqueeze(-1)

    def _root(self, eps: Tensor) -> Tensor:
        with self._exact():
            return (self._factor @ eps.to(self.x.dtype).mT).mT

    def _gradient(self) -> Tensor:
        with self._exact():
            return self._slope(create_graph=False)[1].detach().reshape(self.N, 1, self.C)

    def _product(self, V: Tensor) -> Tensor:
        """Differentiate twice at the output: no Hessian is formed, and loss terms may be coupled."""
        with self._exact():
            leaf, slope = self._slope(create_graph=True)
            rows = [self._times(slope, leaf, v.to(leaf.dtype)).reshape(v.shape) for v in V]
        return torch.stack(rows) if rows else V

    def _times(self, slope: Tensor, leaf: Tensor, v: Tensor) -> Tensor:
        """Return the Hessian at the output, times ``v``, shaped like the output."""
        if not slope.requires_grad:
            return torch.zeros_like(leaf)
        try:
            (hv,) = torch.autograd.grad(slope, leaf, v.view_as(leaf), retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise NotImplementedError(
                f"{self.name} cannot be differentiated twice at the output ({error}): use "
                "fisher_type='empirical', or write it with operations that can."
            ) from error
        return torch.zeros_like(leaf) if hv is None else hv.detach()

    def hessian(self) -> Tensor:
        return self._hessian[0].unsqueeze(1)

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """Let autograd work whatever mode the caller is in, without autocast."""
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self.layout.device.type, enabled=False),
        ):
            yield

    def _slope(self, create_graph: bool) -> tuple[Tensor, Tensor]:
        """Return a leaf and the gradient of the value with respect to it, zero where autograd finds no path."""
        leaf = self.x.clone().requires_grad_()
        # A copy, because a callable may work in place on its argument.
        value = self.value(leaf.clone())
        slope = None
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value, leaf, create_graph=create_graph, allow_unused=True)
        slope = torch.zeros_like(leaf) if slope is None else slope
        if not slope.isfinite().all():
            raise ValueError(f"The gradient of {self.name} at the output is not finite: check outputs and targets.")
        return leaf, slope

    @cached_property
    def _hessian(self) -> tuple[Tensor, Tensor]:
        """Hessians ``[N, D, D]`` and what counts as zero in their spectra.

        D products with all data at once are exact if no datum meets another, which one more product checks.
        """
        with self._exact():
            leaf, slope = self._slope(create_graph=True)

            def product(v: Tensor) -> Tensor:
                """Return the Hessian times ``v [N, D]``."""
                return self._times(slope, leaf, v).reshape(v.shape)

            unit = torch.eye(self.C, dtype=self.x.dtype, device=self.x.device)
            H = self.x.new_empty(self.N, self.C, self.C)
            for j in range(self.C):
                H[..., j] = product(unit[j].expand(self.N, self.C).contiguous())
            n = torch.arange(self.N, device=self.x.device).unsqueeze(-1)
            v = _random.normal(0, n, torch.arange(self.C, device=self.x.device)).to(self.x.dtype)
            coupled = product(v) - (H @ v.unsqueeze(-1)).squeeze(-1)
        if not H.isfinite().all():
            raise ValueError(f"The Hessian of {self.name} at the output is not finite: check outputs and targets.")
        round_off = self._round_off(H, slope.detach())
        if coupled.numel() and coupled.abs().max() > round_off:
            raise ValueError(
                f"{self.name} couples data: its Hessian at the output has entries between different rows of a batch "
                "(as in contrastive losses), expected a sum or mean of one loss per datum: put what belongs together "
                "into one datum."
            )
        return (H + H.mT) / 2, round_off

    def _round_off(self, H: Tensor, slope: Tensor) -> Tensor:
        """Bound the round-off in products and eigenvalues; the gradient's share matters if the Hessian is zero."""
        eps = torch.finfo(H.dtype).eps
        size = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in (H, slope)]
        return self.C * (eps**0.5 * size[0] + 100 * eps * size[1])

    @cached_property
    def _factor(self) -> Tensor:
        """Symmetric square roots ``[N, D, D]``."""
        H, round_off = self._hessian
        if not H.numel():
            return H
        parts = [torch.linalg.eigh(h) for h in H.split(max(1, _CHUNK // self.C**2))]
        values, vectors = (torch.cat(p) for p in zip(*parts, strict=True))
        if values.min() < -round_off:
            raise ValueError(
                f"The Hessian of {self.name} at the output is indefinite: eigenvalues from {float(values.min()):g} "
                f"to {float(values.max()):g}, expected a loss convex in the output. Use fisher_type='empirical' "
                "(gradients only), or write the loss in a convex parametrization (nn.GaussianNLLLoss uses its expected "
                "Hessian)."
            )
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2) @ vectors.mT


class CallableLoss(OutputLoss):
    """Any callable; with ``reduction="mean"`` a batch of ``b`` data weighs ``b / N`` in the data set."""

    def __init__(self, loss: Callable[[Tensor, Any], Tensor], reduction: str) -> None:
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self.loss = loss
        self.reduction = reduction

    def view(self, output: Tensor, target: Any) -> OutputView:
        return by_autograd(self, output, target)

    def total(self, output: Tensor, target: Any) -> Tensor:
        if not len(output):
            return output.sum()  # a mean of nothing is not a number
        if isinstance(target, Tensor) and target.is_floating_point():
            target = wide(target)
        with torch.autocast(output.device.type, enabled=False):
            value = self.loss(_scalars.wide(output), target)
        if not isinstance(value, Tensor) or value.ndim:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{self.name} returned {found}, expected a 0-dim tensor: use .mean() or .sum() in it.")
        return value * len(output) if self.reduction == "mean" else value


def by_autograd(loss: OutputLoss, output: Tensor, target: Any) -> CallableView:
    """View any loss as what autograd makes of its total: exact second derivatives, never an expectation."""
    layout, normalizer = Layout.of(output, None), count(len(output), output)
    return CallableView(layout, normalizer, loss.name, wide(output), lambda x: loss.total(x, target))
