"""The output vectors of a batch for every kind of Fisher, and their way back to the outputs of the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from curvops.kfac._autograd import graph_edges
from curvops.kfac.uses import Use
from curvops.losses import OutputView


@dataclass(frozen=True)
class Fisher:
    """Which vectors are back-propagated.

    Attributes:
        kind: ``"type-2"``, ``"mc"``, ``"signs"``, ``"empirical"``, ``"empirical-per-term"`` or ``"forward-only"``.
        samples: Draws per datum, for ``"mc"`` and ``"signs"``.
        seed: Seed of the draws; a draw depends on the seed and on the index of its datum in the data.
    """

    kind: str
    samples: int
    seed: int

    @property
    def unit(self) -> str:
        """What a gradient of the definition belongs to: a loss ``"term"``, or a ``"datum"``."""
        return "term" if self.kind in ("type-2", "empirical-per-term") else "datum"

    @property
    def back_propagates(self) -> bool:
        """Whether there are output factors to form; without, a vector only finds out which rows belong to which datum."""
        return self.kind != "forward-only"

    @property
    def mixes_freely(self) -> bool:
        """Random vectors with mean zero have no cross terms in expectation, so all data may share them."""
        return self.kind in ("mc", "signs") or not self.back_propagates


class Vectors:
    """Output vectors with ``sum_v g g'`` equal to the batch's share of the chosen Fisher, times the normaliser.

    Args:
        fisher: The kind of Fisher.
        view: The loss of the batch at its output.
        offset: Index of the batch's first datum in the data.
    """

    def __init__(self, fisher: Fisher, view: OutputView, offset: int) -> None:
        self.fisher, self._view = fisher, view
        self._data = torch.arange(offset, offset + view.N, device=view.layout.device)
        self._draws: dict[int, Tensor] = {}
        counts = {"type-2": view.columns, "mc": fisher.samples, "signs": fisher.samples}
        self.count = counts.get(fisher.kind, 1)  #: vectors per unit; "forward-only" has one that only finds rows

    def at(self, index: Tensor) -> Tensor:
        """Return the output vector in which every loss term takes its ``index``-th vector (``[N, T]``, -1: none)."""
        index = index.reshape(self._view.N, self._view.T).to(self._data.device)
        if self.fisher.kind == "type-2":
            return self._view.column(index)
        picks = [self._view.pick(self._draw(v), index == v) for v in index.unique().tolist() if v >= 0]
        return sum(picks[1:], picks[0]) if picks else torch.zeros_like(self._draw(0))

    def all(self, i: int) -> Tensor:
        """Return the output vector in which every loss term takes its ``i``-th vector."""
        if self.fisher.kind == "type-2":
            return self._view.column(self._data.new_full((self._view.N, self._view.T), i))
        return self._draw(i)

    def combined(self, coefficients: Tensor) -> Tensor:
        """Return for every loss term its vectors, combined with coefficients ``[N, T, count]``."""
        coefficients = coefficients.reshape(self._view.N, self._view.T, self.count)
        if self.fisher.kind == "type-2":
            return self._view.root(coefficients)
        split, join = self._view.layout.split, self._view.layout.join
        terms = [coefficients[..., v, None] * split(self._draw(v)) for v in range(self.count)]
        return join(sum(terms[1:], terms[0]))

    def probe(self, terms: Tensor) -> Tensor:
        """Return a generic vector on some loss terms (bool ``[N, T]``): it finds out what they reach."""
        return self._view.pick(self._noise, terms.reshape(self._view.N, self._view.T).to(self._data.device))

    @cached_property
    def _noise(self) -> Tensor:
        layout = self._view.layout
        generator = torch.Generator().manual_seed(self.fisher.seed)
        return torch.randn(layout.shape, generator=generator, dtype=torch.float64).to(layout.device, layout.dtype)

    def _draw(self, i: int) -> Tensor:
        if i not in self._draws:
            self._draws[i] = self._vector(i)
        return self._draws[i]

    def _vector(self, i: int) -> Tensor:
        if self.fisher.kind == "mc":
            return self._view.sample(self.fisher.seed, self._data, i) / sqrt(self.fisher.samples)
        if self.fisher.kind == "signs":
            return self._view.signs(self.fisher.seed, self._data, i) / sqrt(self.fisher.samples)
        return self._view.gradient() if self.fisher.back_propagates else self._noise


@dataclass(eq=False)
class Batch:
    """One observed forward pass.

    Attributes:
        uses: What the recorder saw.
        output: The prediction, attached to the graph.
        vectors: The output vectors.
        num_data, terms: ``N`` data with ``T`` loss terms each.
        lent: The graph is the user's, and stays.
    """

    uses: list[Use]
    output: Tensor
    vectors: Vectors
    num_data: int
    terms: int
    lent: bool = False

    def backward(self, vector: Tensor, visit: Callable[[Use, Tensor], None], *, keep: bool = True) -> None:
        """Send ``vector`` back; call ``visit`` with every use and the gradient of its output as soon as it is there.

        Weight gradients are never formed, and a gradient lives no longer than in training: uses that lie on the way to
        others are visited by hooks on their nodes, and autograd is asked for the others only. Without ``keep`` it is the last
        pass: the graph goes, too.
        """
        if not self.uses or not self.output.requires_grad:
            return
        last, between = self._ends
        handles = [use.edge.node.register_prehook(partial(_arrived, use, visit)) for use in between]
        try:
            edges = [use.edge for use in last]
            grads = torch.autograd.grad(self.output, edges, vector, retain_graph=keep or self.lent, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for use, g in zip(last, grads, strict=True):
            if g is not None:
                visit(use, g.reshape(use.shape))

    @cached_property
    def _ends(self) -> tuple[list[Use], list[Use]]:
        """Split the uses into those that lead to no other use, and those between them and the output."""
        nodes = {use.edge.node for use in self.uses}
        above: dict[Any, list[Any]] = {target: [] for target in nodes}
        for source, target in graph_edges(self.output):
            above.setdefault(target, []).append(source)
        leading, stack = set(), [source for node in nodes for source in above[node]]
        while stack:
            node = stack.pop()
            if node not in leading:
                leading.add(node)
                stack += above.get(node, ())
        return (
            [u for u in self.uses if u.edge.node not in leading],
            [u for u in self.uses if u.edge.node in leading],
        )


def _arrived(use: Use, visit: Callable[[Use, Tensor], None], gradients: tuple[Tensor | None, ...]) -> None:
    g = gradients[use.edge.output_nr]
    if g is not None:
        visit(use, g.reshape(use.shape))
