"""Sums over gradients of single output vectors ``G_k``, block by block.

``G_k`` is formed for a chunk at most, and only if the result is not cheaper without.

============================  ==========================================  ==========================
reducer                       result                                      who asks
============================  ==========================================  ==========================
:class:`Squares`              ``sum_k (Q_B' G_k Q_A)^2``                  EKFAC; the diagonal
:class:`Contractions`         ``sum_k G_k A G_k'``, ``sum_k G_k' B G_k``  KFOC, TNT
:class:`UnitBlocks`           ``sum_k G_k[o] G_k[o]'`` per output ``o``   unit-wise
:class:`Kept`                 the blocks themselves                       whoever reads them again
============================  ==========================================  ==========================
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from weakref import ReferenceType, ref

from torch import Tensor

from curvops.kfac.joined import Block, Chunk, Source

Basis = tuple[Tensor | None, Tensor | None]


class Squares:
    """``sum_k (Q_B' G_k Q_A)^2``: the diagonal of the curvature in a basis of every block.

    Args:
        bases: ``(Q_B [G, o, o], Q_A [G, i, i])`` for every block, ``None`` for the identity; all identities if missing.

    Attributes:
        sums: ``[G, o, i]`` for every block.
    """

    def __init__(self, bases: Mapping[Hashable, Basis] | None = None) -> None:
        self._bases = bases
        self.sums: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, block: Block) -> None:
        """Add the squares of a block."""
        QB, QA = (None, None) if self._bases is None else self._bases[key]
        for chunk in block.chunks():
            accumulate(self.sums, key, squares(chunk, QB, QA))

    def merge(self, other: Squares) -> None:
        """Add the sums of other data."""
        for key, value in other.sums.items():
            accumulate(self.sums, key, value)


def accumulate(sums: dict[Hashable, Tensor], key: Hashable, value: Tensor) -> None:
    """Add to one of several sums."""
    sums[key] = sums[key].add_(value) if key in sums else value


def squares(chunk: Chunk, QB: Tensor | None, QA: Tensor | None, order: str | None = None) -> Tensor:
    """Return ``sum_k (Q_B' G_k Q_A)^2`` of a chunk as ``[G, o, i]``.

    Args:
        chunk: Units and vectors.
        QB, QA: The basis; ``None`` for the identity.
        order: What is rotated before the gradient is formed: ``"none"``, ``"inputs"``, ``"outputs"``, ``"both"``; or
            ``"outer"``, where gradients are outer products: they need not be formed. By default what costs least.
    """
    order = order or cheapest_order(chunk, QB, QA)
    if order == "outer":
        b = _rotated_outputs(chunk.c, QB).square().sum((2, 3))
        return b.mT @ chunk.inputs(QA).square().squeeze(2)
    x = chunk.inputs(QA) if order in ("inputs", "both") and QA is not None else None
    c = _rotated_outputs(chunk.c, QB) if order in ("outputs", "both") else None
    D = chunk.gradients(x, c)
    if x is None and QA is not None:
        G, n, P, o, i = D.shape
        D = (D.reshape(G, n * P * o, i) @ QA).reshape(D.shape)
    if c is None and QB is not None:
        D = QB.mT[:, None, None] @ D
    return D.square_().sum((1, 2))


def _rotated_outputs(c: Tensor, QB: Tensor | None) -> Tensor:
    if QB is None:
        return c
    G, n, P, S, o = c.shape
    if c.stride(-1) == 1 or S == 1:
        return (c.reshape(G, n * P * S, o) @ QB).reshape(c.shape)
    return (QB.mT[:, None, None] @ c.mT).mT


def cheapest_order(chunk: Chunk, QB: Tensor | None, QA: Tensor | None) -> str:
    """Count the multiplications of every order for one unit, and choose."""
    if chunk.single:
        return "outer"
    if chunk.turned is not None:  # both sides are inputs and outputs
        return "none"
    _, _, P, S, o = chunk.c.shape
    i = chunk.x.shape[-1] + chunk.ones.shape[-1]
    inputs = QA is not None and S * i * i < P * o * i * i
    outputs = QB is not None and P * S * o * o < P * o * o * i
    return {(False, False): "none", (True, False): "inputs", (False, True): "outputs", (True, True): "both"}[
        inputs, outputs
    ]


class Contractions:
    """``sum_k G_k A G_k'`` and ``sum_k G_k' B G_k``: products with the rearranged curvature, and its partial traces.

    Args:
        inner: ``A [G, i, i]`` for every block whose ``[G, o, o]`` is wanted; ``None`` for the identity.
        outer: ``B [G, o, o]`` for every block whose ``[G, i, i]`` is wanted; ``None`` for the identity.
        everything: Do both with the identity for every block.

    Attributes:
        outputs, inputs: The results, by block.
    """

    def __init__(
        self,
        inner: Mapping[Hashable, Tensor | None] | None = None,
        outer: Mapping[Hashable, Tensor | None] | None = None,
        *,
        everything: bool = False,
    ) -> None:
        self._inner, self._outer, self._everything = inner or {}, outer or {}, everything
        self.outputs: dict[Hashable, Tensor] = {}
        self.inputs: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, block: Block) -> None:
        """Add the contractions of a block."""
        out, into = self._everything or key in self._inner, self._everything or key in self._outer
        if not (out or into):
            return
        for chunk in block.chunks():
            D = None if chunk.single else chunk.gradients()
            if out:
                accumulate(self.outputs, key, _with_inputs(chunk, D, self._inner.get(key)))
            if into:
                accumulate(self.inputs, key, _with_outputs(chunk, D, self._outer.get(key)))

    def merge(self, other: Contractions) -> None:
        """Add the sums of other data."""
        for key, value in other.outputs.items():
            accumulate(self.outputs, key, value)
        for key, value in other.inputs.items():
            accumulate(self.inputs, key, value)


def _with_inputs(chunk: Chunk, D: Tensor | None, A: Tensor | None) -> Tensor:
    """Return ``sum_k G_k A G_k'``."""
    if D is None:
        x = chunk.inputs()[:, :, 0]
        weights = (x * (x if A is None else x @ A)).sum(-1)  # [G, n]
        c = chunk.c[:, :, :, 0]
        return (c * weights[:, :, None, None]).flatten(1, 2).mT @ c.flatten(1, 2)
    G, n, P, o, i = D.shape
    flat = D.reshape(G, n * P, o, i).transpose(1, 2)  # [G, o, nP, i]
    right = flat if A is None else flat @ A.unsqueeze(1)
    return right.reshape(G, o, -1) @ flat.reshape(G, o, -1).mT


def _with_outputs(chunk: Chunk, D: Tensor | None, B: Tensor | None) -> Tensor:
    """Return ``sum_k G_k' B G_k``."""
    if D is None:
        c = chunk.c[:, :, :, 0]
        left = c if B is None else (c.flatten(1, 2) @ B).reshape(c.shape)
        weights = (c * left).sum((2, 3))  # [G, n]
        x = chunk.inputs()[:, :, 0]
        return (x * weights[..., None]).mT @ x
    G, i = D.shape[0], D.shape[-1]
    left = D if B is None else B[:, None, None] @ D
    return left.reshape(G, -1, i).mT @ D.reshape(G, -1, i)


class UnitBlocks:
    """``sum_k G_k[o] G_k[o]'``: the exact curvature of the incoming weights of every output unit.

    Attributes:
        sums: ``[G, o, i, i]`` for every block.
    """

    def __init__(self) -> None:
        self.sums: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, block: Block) -> None:
        """Add the blocks of all units."""
        for chunk in block.chunks():
            if chunk.single:
                x = chunk.inputs()[:, :, 0]
                total = self._total(key, block, x)
                weights = chunk.c[:, :, :, 0].square().sum(2)  # [G, n, o]
                for j, w in enumerate(weights.unbind(-1)):
                    total[:, j].baddbmm_((x * w[..., None]).mT, x)
            else:
                D = chunk.gradients().flatten(1, 2).transpose(1, 2).flatten(0, 1)  # [Go, nP, i]
                self._total(key, block, D).flatten(0, 1).baddbmm_(D.mT, D)

    def _total(self, key: Hashable, block: Block, like: Tensor) -> Tensor:
        # The sums are all that is large: they grow in place.
        if key not in self.sums:
            self.sums[key] = like.new_zeros(*block.shape, block.shape[2])
        return self.sums[key]

    def merge(self, other: UnitBlocks) -> None:
        """Add the sums of other data."""
        for key, value in other.sums.items():
            accumulate(self.sums, key, value)


class Kept:
    """The blocks themselves, to be read again; nothing at all once they exceed a budget.

    Inputs that may be the user's memory are copied: only what is kept must outlive the batch.

    Args:
        budget: Bytes.

    Attributes:
        blocks: Everything that was seen, or ``None``: too much.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._held: dict[int, int] = {}  # bytes of storages
        #: Copies of inputs that were only lent, by where those are.
        self._own: dict[tuple, tuple[ReferenceType[Source], Tensor]] = {}
        self.blocks: list[tuple[Hashable, Block]] | None = []

    def add(self, key: Hashable, block: Block) -> None:
        """Keep a block."""
        if self.blocks is not None:
            self._take([(key, replace(block, sources=[self._owned(s) for s in block.sources]))])

    def _owned(self, source: Source) -> Source:
        if not source.lent:
            return source
        x = source.x
        place = x.data_ptr(), x.dtype, x.shape, x.stride()
        if place not in self._own or self._own[place][0]() is None:  # of another batch: other numbers may be there
            self._own[place] = ref(source), x.clone()
        return replace(source, x=self._own[place][1], lent=False)

    def merge(self, other: Kept) -> None:
        """Keep the blocks of other data."""
        self._take(other.blocks)

    def _take(self, blocks: list[tuple[Hashable, Block]] | None) -> None:
        if self.blocks is None or blocks is None:
            self.blocks = None
            return
        for key, block in blocks:
            self.blocks.append((key, block))
            for t in block.tensors():
                storage = t.untyped_storage()
                self._held[storage.data_ptr()] = storage.nbytes()
        if sum(self._held.values()) > self._budget:
            self.blocks, self._held, self._own = None, {}, {}
