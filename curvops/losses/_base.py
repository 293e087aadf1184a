"""What a loss offers to the rest of the package: :class:`OutputLoss`, and one batch of it, :class:`OutputView`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops import _random, _scalars


def wide(t: Tensor) -> Tensor:
    """Return ``t`` detached, in float32 or better."""
    return _scalars.wide(t.detach())


def count(n: int, like: Tensor) -> Tensor:
    """Return a normalizer that is a number of terms or entries."""
    return torch.full((), n, dtype=torch.float64, device=like.device)


def check_tensor(output: Tensor, target: Any, name: str) -> None:
    """Raise unless the target is a tensor on the output's device."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{name} needs a tensor as target, found {type(target).__name__}.")
    if target.device != output.device:
        raise ValueError(f"{name}: the output is on {output.device} but the target on {target.device}: move your data.")


@dataclass(frozen=True)
class Layout:
    """How an output ``[N, ...]`` splits into ``N * T`` loss terms of ``C`` entries.

    ``axis`` holds the entries of a term; ``None``: a term is a datum's whole output. In ``[N]`` every entry is a term.
    """

    shape: tuple[int, ...]
    axis: int | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, output: Tensor, axis: int | None) -> Layout:
        """Return the layout of an output, whose first axis is the data."""
        if axis is not None:
            axis = axis % output.ndim if output.ndim > 1 else None
        return cls(tuple(output.shape), axis, output.dtype, output.device)

    @property
    def split_shape(self) -> tuple[int, int, int]:
        """``(N, T, C)``."""
        if self.axis is None:
            return self.shape[0], 1, math.prod(self.shape[1:])
        return self.shape[0], math.prod(self.shape[1 : self.axis] + self.shape[self.axis + 1 :]), self.shape[self.axis]

    def split(self, t: Tensor) -> Tensor:
        """Arrange a tensor shaped like the output as ``[N, T, C]``."""
        return (t if self.axis is None else t.movedim(self.axis, -1)).reshape(self.split_shape)

    def split_columns(self, t: Tensor) -> Tensor:
        """Arrange ``K`` tensors shaped like the output, ``[K, N, ...]``, as ``[K, N, T, C]``."""
        axis = None if self.axis is None else self.axis + 1
        return (t if axis is None else t.movedim(axis, -1)).reshape(len(t), *self.split_shape)

    def join_columns(self, t: Tensor) -> Tensor:
        """Undo :meth:`split_columns`, in the dtype of the output."""
        return torch.stack([self.join(column) for column in t]) if len(t) else t.new_empty(0, *self.shape)

    def join(self, t: Tensor) -> Tensor:
        """Undo :meth:`split`, in the dtype of the output."""
        t = t.to(self.dtype)
        if self.axis is None:
            return t.reshape(self.shape)
        moved = self.shape[: self.axis] + self.shape[self.axis + 1 :] + (self.shape[self.axis],)
        return t.reshape(moved).movedim(-1, self.axis)


class OutputView(ABC):
    """One batch of a loss as a function of the output: ``N * T`` loss terms with ``C`` entries each.

    The Hessian is block-diagonal over terms. Nothing here is divided by the normalizer: the caller sums normalizers
    over the whole data set and divides once, at the end (``reduction="mean"``), or not at all (``"sum"``).

    Attributes:
        N: Number of data.
        T: Loss terms per datum.
        C: Entries per term.
        normalizer: This batch's share of what ``"mean"`` divides by; float64, 0-dim.
    """

    def __init__(self, layout: Layout, normalizer: Tensor) -> None:
        self.layout = layout
        self.N, self.T, self.C = layout.split_shape
        self.normalizer = normalizer

    @property
    def columns(self) -> int:
        """Columns ``V`` of the square root of a term's Hessian; at least one, even if they are all zero."""
        return self.C

    def column(self, index: Tensor) -> Tensor:
        """Return, for every term, one column of the square root of its Hessian.

        Args:
            index: ``[N, T]``, which column of each term; ``-1`` gives zeros.

        Returns:
            A tensor shaped like the output.
        """
        return self.layout.join(self._column(index.to(self.layout.device)))

    def root(self, eps: Tensor) -> Tensor:
        """Return ``H^{1/2} eps`` shaped like the output, for ``eps [N, T, columns]``."""
        return self.layout.join(self._root(eps))

    def product(self, V: Tensor) -> Tensor:
        """Return ``H v`` for every ``v`` in ``V [K, *output.shape]``."""
        return self.layout.join_columns(self._product(self.layout.split_columns(V)))

    def _product(self, V: Tensor) -> Tensor:
        """Multiply ``V [K, N, T, C]``."""
        return torch.einsum("ntcd,kntd->kntc", self.hessian(), V.to(torch.promote_types(V.dtype, torch.float32)))

    def sample(self, seed: int, data_index: Tensor, draw: int) -> Tensor:
        """Return one Monte-Carlo vector ``g`` with ``E[g g'] = H``, shaped like the output.

        Args:
            seed: Any integer.
            data_index: ``[N]``, the position of each datum in the data set: what the draws depend on.
            draw: The number of the draw.
        """
        return self.layout.join(self._sample(seed, self._data(data_index), draw))

    def signs(self, seed: int, data_index: Tensor, draw: int) -> Tensor:
        """Return ``H^{1/2} eps`` with random signs ``eps``; arguments as for :meth:`sample`."""
        return self.root(_random.signs(seed, self._data(data_index), draw, *self._entries(self.columns)))

    def gradient(self) -> Tensor:
        """Return the gradient of every loss term, shaped like the output; weights included, not averaged."""
        return self.layout.join(self._gradient())

    def pick(self, values: Tensor, terms: Tensor) -> Tensor:
        """Return ``values`` (shaped like the output) with zeros outside of the ``terms`` (bool ``[N, T]``)."""
        split = self.layout.split(values)
        return self.layout.join(torch.where(terms.unsqueeze(-1), split, torch.zeros_like(split)))

    @abstractmethod
    def hessian(self) -> Tensor:
        """Return the Hessians of all terms, dense: ``[N, T, C, C]``."""

    @abstractmethod
    def _column(self, index: Tensor) -> Tensor: ...

    @abstractmethod
    def _root(self, eps: Tensor) -> Tensor: ...

    @abstractmethod
    def _gradient(self) -> Tensor: ...

    def _sample(self, seed: int, data: Tensor, draw: int) -> Tensor:
        """Losses without a likelihood of their own: normal noise through the square root."""
        return self._root(_random.normal(seed, data, draw, *self._entries(self.columns)))

    def _data(self, data_index: Tensor) -> Tensor:
        if tuple(data_index.shape) != (self.N,):
            raise ValueError(
                f"data_index has shape {tuple(data_index.shape)}, expected ({self.N},): one index per datum."
            )
        return data_index.to(self.layout.device).view(-1, 1, 1)

    def _entries(self, width: int) -> tuple[Tensor | int, Tensor]:
        """Return the keys of terms and entries; a number hashes like a tensor, and faster."""
        device = self.layout.device
        terms = torch.arange(self.T, device=device).view(-1, 1) if self.T > 1 else 0
        return terms, torch.arange(width, device=device)


def scale_of(reduction: str, normalizer: float) -> float:
    """Return what sums over the data are multiplied by: the one place where a mean loss is divided."""
    if reduction == "sum":
        return 1.0
    if not normalizer > 0:
        raise ValueError(
            f"The mean loss divides by {normalizer:g} over this data set (all targets ignored, or all weights zero); "
            "expected a positive number."
        )
    return 1 / normalizer


class OutputLoss(ABC):
    """A loss as a function of the model's output.

    Attributes:
        name: What errors call it.
        reduction: ``"mean"`` or ``"sum"``.
    """

    name: str
    reduction: str

    def prepare(self, output: Any) -> Tensor:
        """Return the tensor ``[N, ...]`` in a model's output: ``.logits``, else the first entry, else itself."""
        if not isinstance(output, Tensor):
            if getattr(output, "logits", None) is not None:
                output = output.logits
            elif isinstance(output, Mapping) and output:
                output = output["logits"] if "logits" in output else next(iter(output.values()))
            elif isinstance(output, (tuple, list)) and output:
                output = output[0]
        return self._checked(output)

    def _checked(self, output: Any) -> Tensor:
        """Raise unless the output is a floating point tensor with a data axis."""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{self.name}: the model returned {type(output).__name__}, expected a tensor, a tuple or mapping that "
                "starts with one, or an object with .logits: wrap the model in a function that returns the prediction."
            )
        if not output.is_floating_point():
            raise TypeError(f"{self.name}: the output has dtype {output.dtype}, expected a real floating point dtype.")
        if output.ndim == 0:
            raise ValueError(f"{self.name}: the output is a 0-dim tensor, expected [N, ...], data first.")
        return output

    @abstractmethod
    def view(self, output: Tensor, target: Any) -> OutputView:
        """Return a batch of the loss at its output (prepared); values only, no graph to the model."""

    @abstractmethod
    def total(self, output: Tensor, target: Any) -> Tensor:
        """Return the sum of all loss terms of a batch, differentiable in ``output`` (prepared).

        Divided by the sum of normalizers over the data set it is the batch's share of a ``"mean"`` loss; as it is, of a
        ``"sum"`` loss. Same units as :meth:`OutputView.gradient`.
        """
