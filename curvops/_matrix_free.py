"""What all matrix-free operators share: a loop over the batches, one division at the end, graphs that may be kept."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvops._compiled import Compiled, Pieces
from curvops._forms import Adjacent, Shapes
from curvops._linearize import Dual, Graph, differentiable_kernels, lacks_forward_mode
from curvops._operator import LinearOperator
from curvops._scalars import wide
from curvops._traceless import plain, random_state_kept, swapped
from curvops.losses import OutputView, scale_of
from curvops.risk import EmpiricalRisk

T = TypeVar("T")
Self = TypeVar("Self", bound="BatchOperator")
Compilable = TypeVar("Compilable", bound="ParameterOperator")
Divisible = TypeVar("Divisible", bound="RiskOperator")
Partition = str | Sequence[Sequence[str]]


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

    @property
    def rows(self) -> int:
        """Rows of the prediction: where the random draws of the next batch begin."""
        return self.view.layout.shape[0] if self.view is not None else 0


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


class BatchOperator(LinearOperator):
    """An operator whose products go through the batches of an :class:`~curvops.EmpiricalRisk`, linearised one by one.

    Args:
        risk: Model, loss, parameters and data.
        domain: See :class:`~curvops.LinearOperator`, also for the other keywords.
        range_: Likewise.
    """

    _PASSES_ON = (EmpiricalRisk,)

    def __init__(self, risk: EmpiricalRisk, domain: Shapes, range_: Shapes, **keywords: Any) -> None:
        self._risk = risk
        self._cache: Cache | None = None
        super().__init__(domain, range_, dtype=risk.dtype, device=risk.device, **keywords)

    @abstractmethod
    def _linearized(self, point: Point, keep: bool) -> Point:
        """Return the batch with its graph, while the values of ``params`` are in the model's place."""

    def _points(self) -> Iterator[Point]:
        """Yield the batches, linearised, with the values of ``params`` in the model's place."""
        with undisturbed(self.device):
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
                start += point.rows
            if cache is not None and not ready:
                fresh.complete, self._cache = True, fresh

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run a model outside of the caller's modes, in full precision and with kernels that have all derivatives."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        random_state_kept(device),
        differentiable_kernels(device),
    ):
        yield


def side_by_side(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of arrays that are concatenated on their first axis, or flat ones where the others differ."""
    rests = {s[1:] for s in shapes}
    if len(rests) == 1 and all(shapes):
        return (sum(s[0] for s in shapes), *rests.pop())
    return (sum(map(prod, shapes)),)


class ParameterOperator(BatchOperator):
    """An operator whose batches are linearised in the parameters. Arguments as for :class:`BatchOperator`.

    Attributes:
        linearization: How products with derivatives are formed: ``"forward"`` mode, double ``"backward"``, ``"compiled"``.
        refusal: What torch said of an operation without forward mode, where that decided.
    """

    def __init__(self, risk: EmpiricalRisk, domain: Shapes, range_: Shapes, **keywords: Any) -> None:
        self.linearization, self.refusal = "forward", ""
        self._blocks: list[list[int]] = [list(range(len(risk.names)))]
        self._pieces: Pieces | None = None
        super().__init__(risk, domain, range_, domain_names=risk.names, **keywords)

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

        point.graph = self._graph(point, output_of, list(point.leaves.values()), keep)
        return point

    def _graph(self, point: Point, output_of: Any, leaves: list[Tensor], keep: bool) -> Graph:
        """Choose how to multiply by the Jacobian."""
        if self._pieces is not None:
            return Compiled(self._pieces, leaves, point.X)
        return Dual(output_of, leaves, keep) if self._forward else Graph(output_of(leaves), leaves)

    @property
    def _forward(self) -> bool:
        # A pass with tangents for every block of parameters would cost more than one graph for all.
        return self.linearization == "forward" and len(self._blocks) == 1

    def _multiply(self, point: Point, product: Callable[[Any], T]) -> T:
        """Return a product with the graph; operations without forward mode send everything to backward from here on."""
        try:
            return product(point.graph)
        except (NotImplementedError, RuntimeError) as error:
            backward = point.graph.backward() if lacks_forward_mode(error) else None
            if backward is None:
                raise
            refusal = str(error)
        self.linearization, self.refusal, point.graph = "backward", refusal, backward
        return product(backward)

    def compiled(self: Compilable, **options: Any) -> Compilable:
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

    def __getstate__(self) -> dict[str, Any]:
        mode = "forward" if self._pieces is not None else self.linearization
        return {**super().__getstate__(), "_pieces": None, "linearization": mode}


class RiskOperator(ParameterOperator):
    """A symmetric operator over parameters: a sum over the batches, divided by what the loss divides by.

    Args:
        risk: Model, loss, parameters and data.
        check_deterministic: Read the first batch twice and insist that data and predictions agree.
    """

    def __init__(self, risk: EmpiricalRisk, *, check_deterministic: bool = False) -> None:
        if check_deterministic:
            risk.check_deterministic()
        super().__init__(risk, risk.shapes, risk.shapes, symmetric=True)

    @abstractmethod
    def _times(self, point: Point, V: list[Tensor], which: list[int]) -> list[Tensor]:
        """Return the batch's share of the product, in units of the loss's total, for the parameters ``which``."""

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False):
            V = [plain(v).contiguous() for v in V]  # columns of a matrix lie far apart
        totals: dict[int, Tensor] = {}
        counts = Counts(self._risk)
        for point in self._points():
            for which in self._blocks:
                for i, share in zip(which, self._times(point, [V[i] for i in which], which), strict=True):
                    share = wide(share.detach())
                    totals[i] = totals[i] + share if i in totals else share
            counts.add(point)
        scale = counts.scale()
        with torch.no_grad():
            rows = torch.empty(len(V[0]), self.shape[0], dtype=self.torch_dtype, device=self.device)
            answer = Adjacent(rows, self.range)
            for i, block in enumerate(answer):
                torch.mul(totals[i], scale, out=block)
        return answer

    def block_diagonal(self: Divisible, partition: Partition = "module") -> Divisible:
        """Return the operator without the blocks between parts of the parameters.

        Args:
            partition: ``"parameter"``: every parameter is a part; ``"module"``: the parameters of one module are; or lists
                of names that cover every parameter once.
        """
        names = list(self._risk.names)
        parts = [] if partition is None or (isinstance(partition, str) and partition not in _KEYS) else partition
        if isinstance(parts, str):
            groups: dict[str, list[str]] = {}
            for name in names:
                groups.setdefault(_KEYS[parts](name), []).append(name)
            parts = list(groups.values())
        if sorted(n for part in parts for n in part) != sorted(names):
            raise ValueError(
                f"partition: found {partition!r}, expected 'parameter', 'module', or lists that name each of {names} once."
            )
        result = copy.copy(self)
        result._blocks = [[names.index(n) for n in part] for part in parts]
        result._cache = None
        return result


_KEYS: dict[str, Callable[[str], str]] = {"parameter": lambda n: n, "module": lambda n: n.rpartition(".")[0]}


class Counts:
    """What a loop over the batches counts, and what its sums are multiplied by in the end."""

    def __init__(self, risk: EmpiricalRisk) -> None:
        self._risk, self._data, self._terms = risk, 0, 0
        self._normalizer = torch.zeros((), dtype=torch.float64, device=risk.device)

    def add(self, point: Point) -> None:
        """Count a batch."""
        view = point.view
        assert view is not None
        self._normalizer = self._normalizer + view.normalizer
        self._data += self._risk.batch_size(point.X, view.layout.shape) or point.rows
        self._terms += view.N * view.T

    def scale(self) -> float:
        """Return the factor of sums; raise where the user was told other counts."""
        self._risk.check_counts(self._data, self._terms)
        return scale_of(self._risk.loss.reduction, float(self._normalizer))
