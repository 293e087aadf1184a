"""Direct sums: operators on disjoint parts of the parameters, placed by isometries. Closed forms go part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvops._forms import Names, Shapes, join
from curvops._operator import LinearOperator
from curvops.structured._base import check_damping, check_how, det, logdet, multiple_of_identity
from curvops.structured.placement import Placement

#: One number for all parts, one by the label of a part or the name of a parameter, or a function of the label.
Damping = float | Tensor | Mapping[str, Any] | Callable[[str], Any]


@dataclass(frozen=True, eq=False)
class Part:
    """An operator on ``[G, o, i]``, and where the parameters sit in that array."""

    placement: Placement
    operator: LinearOperator

    def __post_init__(self) -> None:
        if self.operator.domain != (self.placement.shape,):
            raise ValueError(
                f"Got an operator on {self.operator.domain} for {self.placement.names}, expected one on the single "
                f"block {self.placement.shape}; pass `domain=({self.placement.shape},)` to it."
            )

    @property
    def label(self) -> str:
        """The operator's label, or the names of the parameters."""
        return getattr(self.operator, "label", "") or ", ".join(self.placement.names)


class DirectSum(LinearOperator):
    """A symmetric operator over parameters that acts on disjoint parts of them, each covered exactly once.

    Args:
        domain: Shapes of the parameters.
        names: Their names.
        parts: Operators and placements.
        dtype: Dtype of the vectors; by default that of the first part.
        device: Likewise.
    """

    def __init__(
        self,
        domain: Shapes,
        names: Names,
        parts: Sequence[Part],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        _order: dict[str, Tensor | None] | None = None,  # of a direct sum with the same placements, checked before
    ):
        if not parts and dtype is None:
            raise TypeError("A direct sum without parts needs a dtype.")
        dtype = dtype or parts[0].operator.torch_dtype
        device = parts[0].operator.device if parts else device or "cpu"
        super().__init__(domain, domain, dtype=dtype, device=device, symmetric=True, domain_names=names)
        self.parts = tuple(parts)
        for part in self.parts:
            if (part.operator.torch_dtype, part.operator.device) != (self.torch_dtype, self.device):
                raise TypeError(
                    f"Got {part.operator!r} for {part.label!r}, expected {self.torch_dtype} on {self.device}. "
                    "Convert it with `.to(...)`."
                )
        self._order = _orders(self) if _order is None else _order

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        blocks = dict(zip(self.domain_names, V, strict=True))
        return self._scatter([p.operator._apply([p.placement.gather(blocks)])[0] for p in self.parts])

    def _scatter(self, arrays: list[Tensor]) -> list[Tensor]:
        """Put one array ``[K, G, o, i]`` of every part back into parameters ``[K, *shape]``."""
        pieces: dict[str, list[Tensor]] = {name: [] for name in self.domain_names}
        for part, Y in zip(self.parts, arrays, strict=True):
            for slot, y in zip(part.placement.slots, part.placement.pieces(Y), strict=True):
                pieces[slot.name].append(y)
        return [
            _assemble(pieces[name], self._order[name], shape)
            for name, shape in zip(self.domain_names, self.domain, strict=True)
        ]

    # New direct sums from old ones

    def map_parts(self, f: Callable[[Part], LinearOperator]) -> DirectSum:
        """Return the direct sum of ``f(part)`` at the same places."""
        parts = [Part(p.placement, f(p)) for p in self.parts]
        return self._like(parts, self.device, self.torch_dtype)

    def _like(self, parts: list[Part], device: torch.device, dtype: torch.dtype) -> DirectSum:
        order = {n: None if at is None else at.to(device) for n, at in self._order.items()}
        return DirectSum(self.domain, self.domain_names, parts, dtype=dtype, device=device, _order=order)

    def inverse(self, damping: Damping = 0.0, how: str = "exact") -> DirectSum:
        """Return ``(op + damping I)^-1``, part by part.

        Args:
            damping: A number; a mapping from label of a part, or name of one of its parameters, to a number; or a
                callable of the label.
            how: See :meth:`Kronecker.inverse`; parts that are not Kronecker products are damped exactly.
        """
        check_how(how)
        dampings = self._dampings(damping)
        return self.map_parts(lambda p: p.operator.inverse(dampings[id(p)], how=how))

    def power(self, p: float) -> DirectSum:
        """Return the symmetric power; negative ones of singular operators are refused, naming the part."""
        return self.map_parts(lambda part: part.operator.power(p))

    def shift(self, c: float | Tensor) -> DirectSum:
        """Return ``op + c I``; closed forms survive."""
        return self.map_parts(lambda p: p.operator.shift(c))

    def block(self, name: str | int) -> DirectSum:
        """Return the part that holds a parameter (parts, if several do), on all parameters of that part."""
        name = self.domain_names[name] if isinstance(name, int) else name
        if name not in self.domain_names:
            raise ValueError(f"Got the parameter {name!r}, expected one of {self.domain_names}.")
        held: set[str] = set()
        grown = {name}
        while held != grown:  # several parts may hold pieces of one parameter
            held = grown
            parts = [p for p in self.parts if held.intersection(p.placement.names)]
            grown = {n for p in parts for n in p.placement.names}
        kept = {n: s for n, s in zip(self.domain_names, self.domain, strict=True) if n in held}
        return DirectSum(tuple(kept.values()), tuple(kept), parts)

    def _scale(self, s: float | Tensor) -> LinearOperator:
        if isinstance(s, Tensor) or s < 0:  # parts may need the sign for their closed forms
            return super()._scale(s)
        return self.map_parts(lambda p: p.operator._scale(s))

    def _plus(self, other: LinearOperator) -> LinearOperator:
        c = multiple_of_identity(other)
        return super()._plus(other) if c is None or other.domain != self.domain else self.shift(c)

    def _to(self, device: torch.device, dtype: torch.dtype) -> DirectSum:
        parts = [Part(p.placement.to(device), p.operator.to(device, dtype)) for p in self.parts]
        return self._like(parts, device, dtype)

    def _dampings(self, damping: Damping) -> dict[int, Any]:
        """Return the damping of every part, checked."""
        if callable(damping):
            return {id(p): check_damping(damping(p.label), p.label) for p in self.parts}
        if not isinstance(damping, Mapping):
            damping = check_damping(damping)
            return {id(p): damping for p in self.parts}
        unknown = [key for key in damping if not any(_answers(p, key) for p in self.parts)]
        missing = [p.label for p in self.parts if not any(_answers(p, key) for key in damping)]
        if unknown or missing:
            raise ValueError(f"Got dampings with unknown keys {unknown}, and none for the parts {missing}.")
        return {id(p): _one_damping(p, damping) for p in self.parts}

    # Closed forms

    def eigenvalues(self) -> Tensor:
        return torch.cat([p.operator.eigenvalues() for p in self.parts]).sort().values

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return the sign of the determinant and the logarithm of its size."""
        signs, sizes = zip(*(p.operator.slogdet() for p in self.parts), strict=True)
        return torch.stack(signs).prod(), torch.stack(sizes).sum()

    def logdet(self) -> Tensor:
        return logdet(self)

    def det(self) -> Tensor:
        return det(self)

    def trace(self) -> Tensor:
        return torch.stack([p.operator.trace() for p in self.parts]).sum()

    def frobenius_norm(self) -> Tensor:
        return torch.stack([p.operator.frobenius_norm() for p in self.parts]).norm()

    def diagonal(self) -> Tensor:
        diagonals = [p.operator.diagonal().reshape(1, *p.placement.shape) for p in self.parts]
        return join(self._scatter(diagonals)).squeeze(0)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[n, D]`` from N(0, op); without a generator, a fresh one is seeded by the operating system."""
        draws = [p.operator.sample(n, generator).reshape(n, *p.placement.shape) for p in self.parts]
        return join(self._scatter(draws))

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, readable by ``torch.load(..., weights_only=True)``."""
        return {
            "kind": "DirectSum",
            "domain": [list(s) for s in self.domain],
            "names": list(self.domain_names),
            "dtype": str(self.torch_dtype).removeprefix("torch."),
            "parts": [{"placement": p.placement.state_dict(), "operator": p.operator.state_dict()} for p in self.parts],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> DirectSum:
        """Undo :meth:`state_dict`."""
        from curvops.structured import from_state_dict

        parts = [
            Part(Placement.from_state_dict(p["placement"]), from_state_dict(p["operator"])) for p in state["parts"]
        ]
        return cls(state["domain"], state["names"], parts, dtype=getattr(torch, state["dtype"]))


def _answers(part: Part, key: str) -> bool:
    return key == part.label or key in part.placement.names


def _one_damping(part: Part, damping: Mapping[str, Any]) -> Any:
    """Return the damping under the part's label, or under the names of its parameters, which must agree."""
    names = part.placement.names
    if part.label in damping and part.label not in names:
        names = (part.label,)
    found = {n: check_damping(damping[n], part.label) for n in names if n in damping}
    if len({float(d) for d in found.values()}) > 1:
        raise ValueError(f"Got different dampings {found} for the part {part.label!r}, expected one.")
    return next(iter(found.values()))


def _orders(op: DirectSum) -> dict[str, Tensor | None]:
    """Return for every parameter where its entries are in the concatenated pieces; None where one piece is all."""
    slots: dict[str, list] = {name: [] for name in op.domain_names}
    for slot in (s for p in op.parts for s in p.placement.slots):
        if slot.name not in slots:
            raise ValueError(f"Got a part with the parameter {slot.name!r}, expected one of {op.domain_names}.")
        slots[slot.name].append(slot)
    return {n: _order(n, s, slots[n], op.device) for n, s in zip(op.domain_names, op.domain, strict=True)}


def _order(name: str, shape: tuple[int, ...], slots: list, device: torch.device) -> Tensor | None:
    for slot in slots:
        if slot.shape != shape:
            raise ValueError(f"Got shape {slot.shape} for {name!r} in a part, expected {shape}.")
    if len(slots) == 1 and slots[0].index is None:
        return None
    everything = torch.arange(prod(shape), device=device)
    at = torch.cat([everything[:0], *(everything if s.index is None else s.index.to(device) for s in slots)])
    if len(at) != len(everything) or not torch.equal(at.sort().values, everything):
        raise ValueError(
            f"The parts cover {len(at.unique())} of {len(everything)} entries of {name!r}, {len(at)} in total; "
            "expected every entry exactly once. Cover the rest with `Diagonal(torch.zeros(...))`."
        )
    return at.argsort()


def _assemble(pieces: list[Tensor], order: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if order is None:
        return pieces[0]
    flat = join(pieces)
    return flat.index_select(1, order).reshape(len(flat), *shape)
