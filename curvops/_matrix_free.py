"""What all matrix-free operators share: a loop over the batches, one division at the end, graphs that may be kept."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvops._compiled import Compiled, Pieces
from curvops._forms import Adjacent
from curvops._linearize import Dual, Graph, differentiable_kernels, lacks_forward_mode
from curvops._operator import LinearOperator
from curvops._scalars import wide
from curvops._traceless import plain, random_state_kept, swapped
from curvops.losses import OutputView
from curvops.risk import EmpiricalRisk

Self = TypeVar("Self", bound="RiskOperator")
Partition = str | Sequence[Sequence[str]] | None


@dataclass(eq=False)
class Point:
    """One batch at which an operator is linearised.

    Attributes:
        X, y: The batch.
        start: Index of its first datum (first row of the prediction) in the data.
        leaves: What is differentiated.
        graph: The linearisation; made by the operator.
        view: The loss at the output.
    """

    X: Any
    y: Any
    start: int
    leaves: dict[str, Tensor]
    graph: Any = None
    view: OutputView | None = None


@dataclass(eq=False)
class Cache:
    """Linearised batches, as far as a budget of ``memory`` bytes goes; ``None`` where one did not fit."""

    memory: float
    points: list[Point | None] = field(default_factory=list)
    complete: bool = False

    def add(self, point: Point) -> None:
        """Keep a batch if there is room."""
        size = point.graph.bytes() if self.memory > 0 else 0
        kept = self.memory - size > 0
        self.memory -= size if kept else 0
        self.points.append(point if kept else None)


class RiskOperator(LinearOperator):
    """An operator over parameters whose products loop over the data of an :class:`~curvops.EmpiricalRisk`.

    Args:
        risk: Model, loss, parameters and data.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(self, risk: EmpiricalRisk, *, check_deterministic: bool = False) -> None:
        self._risk = risk
        self._cache: Cache | None = None
        self._blocks: list[list[int]] = [list(range(len(risk.names)))]
        self._pieces: Pieces | None = None
        #: How products with the Jacobian are formed: ``"forward"`` mode, or double ``"backward"``.
        self.linearization = "forward"
        if check_deterministic:
            risk.check_deterministic()
        super().__init__(
            risk.shapes, risk.shapes, dtype=risk.dtype, device=risk.device, symmetric=True, domain_names=risk.names
        )

    # ---- what a subclass says --------------------------------------------------------------------
    @abstractmethod
    def _linearize(self, point: Point, output_of: Any, keep: bool) -> None:
        """Put a graph, and what else a product needs, into ``point``."""

    @abstractmethod
    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        """Return the batch's share of the product, in units of the loss's total, for the parameters ``which``."""

    # ---- products ----------------------------------------------------------------------------------
    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        data = terms = 0
        with torch.inference_mode(False), torch.enable_grad():
            normalizer = torch.zeros((), dtype=torch.float64, device=self.device)
            V = [plain(v).contiguous() for v in V]  # columns of a matrix lie far apart
            totals: dict[int, Tensor] = {}
            for point in self._points():
                for which in self._blocks:
                    for i, share in zip(which, self._times(point, [V[i] for i in which], which), strict=True):
                        share = wide(share.detach())
                        totals[i] = totals[i] + share if i in totals else share
                assert point.view is not None
                normalizer += point.view.normalizer
                data += self._risk.batch_size(point.X, point.view.layout.shape) or self._rows_of(point)
                terms += point.view.N * point.view.T
        self._risk.check_counts(data, terms)
        scale = 1.0
        if self._risk.loss.reduction == "mean":
            scale = 1 / float(normalizer) if float(normalizer) else 0.0  # every target was ignored
        with torch.no_grad():
            rows = torch.empty(len(V[0]), self.shape[0], dtype=self.torch_dtype, device=self.device)
            answer = Adjacent(rows, self.range)
            for i, block in enumerate(answer):
                torch.mul(totals[i], scale, out=block)
        return answer

    def _points(self) -> Iterator[Point]:
        """Yield the batches, linearised, with the values of ``params`` in the model's place."""
        full_precision = torch.autocast(self.device.type, enabled=False)  # backward passes, too
        with random_state_kept(self.device), differentiable_kernels(self.device), full_precision:
            cache = self._cache
            ready = cache.points if cache is not None and cache.complete else []
            if ready and all(p is not None for p in ready):
                for point in ready:
                    with swapped(self._risk.model, self._risk.params, point.leaves):
                        yield point
                return
            fresh, start = Cache(0.0 if cache is None else cache.memory), 0
            for i, (X, y) in enumerate(self._risk.batches()):
                known = ready[i] if i < len(ready) else None
                with self._risk.leaves(known.leaves if known else None) as leaves:
                    keep = cache is not None and not ready
                    point = known or self._linearized(Point(X, y, start, leaves), keep)
                    yield point
                    if keep:
                        fresh.add(point)  # now that all it will hold is there
                start += self._rows_of(point)
            if cache is not None and not ready:
                fresh.complete, self._cache = True, fresh

    def _rows_of(self, point: Point) -> int:
        """Return how many rows of the prediction a batch has: where the random draws of the next one begin."""
        return point.view.layout.shape[0] if point.view is not None else 0

    def _linearized(self, point: Point, keep: bool) -> Point:
        names = list(point.leaves)

        def output_of(tensors: Sequence[Tensor]) -> Tensor:
            """Run the model with ``tensors`` in the place of the leaves."""
            replaced = dict(zip(names, tensors, strict=True))
            same = all(replaced[n] is point.leaves[n] for n in names)
            place = nullcontext() if same else swapped(self._risk.model, self._risk.params, replaced)
            with place:
                raw = self._risk.predict(replaced, point.X)
            return self._risk.loss.prepare(raw)

        self._linearize(point, output_of, keep)
        return point

    def _jacobian(self, point: Point, output_of: Any, keep: bool) -> Graph:
        """Choose how to multiply by the Jacobian."""
        leaves = list(point.leaves.values())
        if self._pieces is not None:
            return Compiled(self._pieces, leaves, point.X)
        # A pass with tangents for every block of parameters would cost more than one graph for all.
        if self.linearization == "forward" and len(self._blocks) == 1:
            return Dual(output_of, leaves, keep)
        return Graph(output_of(leaves), leaves)

    def _tangents(self, point: Point, V: list[Tensor], which: list[int]) -> Tensor:
        """Return ``J v``; operations without forward mode send everything to double backward from here on."""
        try:
            return point.graph.jvp(V, which)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(point.graph, Dual) or not lacks_forward_mode(error):
                raise
        self.linearization = "backward"
        point.graph = Graph(point.graph.output, point.graph.leaves)
        return point.graph.jvp(V, which)

    # ---- keeping graphs ------------------------------------------------------------------------------
    @contextmanager
    def cached(self: Self, memory: float = 2**30) -> Iterator[Self]:
        """Keep the linearised graphs of the batches: products inside the context do not run the model again.

        Operators made of this one (``op.shift(c)``, ``op.T``, sums) profit, too. Parameters, model and data must not
        change meanwhile.

        Args:
            memory: Budget in bytes; batches beyond it are linearised anew for every product.
        """
        outer, self._cache = self._cache, Cache(float(memory))
        try:
            yield self
        finally:
            self._cache = outer

    def compiled(self: Self, **options: Any) -> Self:
        """Return the operator with compiled products: model and derivatives without graph breaks, the loss in between.

        Compiling takes its time, and once for every shape of a batch. Compiled products run the model every time;
        ``cached()`` keeps nothing for them.

        Args:
            **options: For ``torch.compile``, for example ``backend``, ``mode`` or ``dynamic``.
        """
        result = copy.copy(self)
        result._cache, result._pieces = None, Pieces(self._risk, options)
        result.linearization = "compiled"
        return result

    # ---- parts of it -----------------------------------------------------------------------------------
    def block_diagonal(self: Self, partition: Partition = "module") -> Self:
        """Return the operator without the blocks between parts of the parameters.

        Args:
            partition: ``"parameter"``: every parameter is a part; ``"module"``: the parameters of one module are; or lists
                of names that cover every parameter once.
        """
        names = list(self._risk.names)
        if partition in ("parameter", "module", None):
            key = (lambda n: n) if partition == "parameter" else (lambda n: n.rpartition(".")[0])
            groups: dict[str, list[str]] = {}
            for name in names:
                groups.setdefault(key(name), []).append(name)
            parts: Iterable[Sequence[str]] = groups.values()
        else:
            parts = partition
        if isinstance(parts, str) or sorted(n for part in parts for n in part) != sorted(names):
            raise ValueError(
                f"partition: found {partition!r}, expected 'parameter', 'module', or lists that name each of {names} once."
            )
        result = copy.copy(self)
        result._blocks = [[names.index(n) for n in part] for part in parts]
        result._cache = None
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None, "_pieces": None}


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Pick the keyword arguments that belong to the risk."""
    names = "reduction class_dim num_data num_per_example_loss_terms batch_size_fn progressbar allow_train_mode".split()
    return {n: arguments[n] for n in names if n in arguments}
