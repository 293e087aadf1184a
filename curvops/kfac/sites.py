"""A site is one block of parameters treated as a unit: a weight with its biases, or a bias alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from curvops.kfac.uses import Operand, Unsupported, Use
from curvops.structured.placement import Placement, Slot

Key = tuple[str, Hashable]


@dataclass(eq=False)
class Site:
    """One block of parameters, in the canonical form ``[G, d_out, d_in]`` with one more column for each joint bias.

    It is complete once :func:`find_sites` returns it.

    Attributes:
        weight: The weight (or part of one), if it is tracked.
        biases: The biases in the block; each has a column of its own.
        members: The uses, each with the column of its bias (``None``: this use has none).
    """

    weight: Operand | None
    biases: tuple[Operand, ...]
    members: list[tuple[Use, int | None]] = field(default_factory=list)

    @cached_property
    def key(self) -> tuple[Key, ...]:
        """Identify the block across batches."""
        weight = () if self.weight is None else (_weight_key(self.members[0][0]),)
        return weight + tuple(map(_key, self.biases))

    @property
    def name(self) -> str:
        """Name of the weight, or of the bias that stands alone."""
        return self.key[0][0]

    @cached_property
    def placement(self) -> Placement:
        """Where the parameters sit in the block."""
        form = self.members[0][0].form
        G, d_out, d_in = self.weight_shape
        slots = []
        if self.weight is not None:
            slots.append(_slot(self.weight, (G, d_out, d_in), 0, form.transposed, _arrangement(self.members[0][0])))
        for j, bias in enumerate(self.biases):
            slots.append(_slot(bias, (G, d_out, 1), d_in + j, False))
        return Placement(tuple(slots), (G, d_out, d_in + len(self.biases)))

    @cached_property
    def weight_shape(self) -> tuple[int, int, int]:
        """Shape ``[G, d_out, d_in]`` of the weight alone."""
        form = self.members[0][0].form
        if self.weight is None:
            return form.groups, self.biases[0].tensor.numel() // form.groups, 0
        return form.weight_shape(tuple(self.weight.tensor.shape))


def find_sites(uses: Sequence[Use], separate: bool) -> list[Site]:
    """Group uses into blocks.

    A bias joins the block of its weight if all its uses are with that weight; otherwise it stands alone. A weight used in
    both orientations has a block for each, without biases.

    Args:
        uses: The uses of one forward pass, without :func:`conflicts`.
        separate: Every bias stands alone.
    """
    alone = _lonely_biases(uses, separate)
    sites: dict[Key, Site] = {}
    for use in uses:
        joint = use.bias is not None and _key(use.bias) not in alone
        if use.weight is not None:
            site = sites.setdefault(_weight_key(use), Site(use.weight, ()))
            site.members.append((use, _column(site, use.bias) if joint else None))
        if use.bias is not None and not joint:
            sites.setdefault(_key(use.bias), Site(None, (use.bias,))).members.append((use, 0))
    return list(sites.values())


def _lonely_biases(uses: Sequence[Use], separate: bool) -> set[Key]:
    """Return the biases that cannot, or shall not, share a block with a weight."""
    partners: dict[Key, set[Key | None]] = {}
    turns: dict[Key, set[Key]] = {}
    for use in uses:
        weight = None if use.weight is None else _weight_key(use)
        if use.bias is not None:
            partners.setdefault(_key(use.bias), set()).add(weight)
        if use.weight is not None:
            turns.setdefault(_key(use.weight), set()).add(weight)
    turned = {key for keys in turns.values() if len(keys) > 1 for key in keys}
    return {bias for bias, weights in partners.items() if separate or len(weights) > 1 or weights & (turned | {None})}


def _column(site: Site, bias: Operand) -> int:
    keys = [_key(b) for b in site.biases]
    if _key(bias) not in keys:
        site.biases += (bias,)
        keys.append(_key(bias))
    return keys.index(_key(bias))


def _key(operand: Operand) -> Key:
    return slot_key(operand.name, operand.shape.numel(), operand.entries)


def slot_key(name: str, numel: int, entries: torch.Tensor | None) -> Key:
    """Identify a parameter, or a part of it by the set of its entries: another arrangement is the same part."""
    if entries is None or entries.numel() == numel:
        return name, None
    return name, entries.flatten().sort().values.cpu().numpy().tobytes()


def _weight_key(use: Use) -> Key:
    """Identify a weight with its orientation."""
    assert use.weight is not None
    name, part = _key(use.weight)
    plain = use.weight.entries is None
    return name, (part, use.form.transposed if plain else _weight_slot(use).transposed)


def _weight_slot(use: Use) -> Slot:
    assert use.weight is not None
    shape = use.form.weight_shape(tuple(use.weight.tensor.shape))
    return _slot(use.weight, shape, 0, use.form.transposed, _arrangement(use))


def _arrangement(use: Use) -> torch.Tensor | None:
    assert use.weight is not None
    found = use.form.arrangement(tuple(use.weight.tensor.shape))
    return found if found is None else found.to(use.weight.tensor.device)


def conflicts(uses: Sequence[Use]) -> Iterator[Unsupported]:
    """Yield the parameters whose uses do not fit into one block each, and why."""
    parts: dict[str, dict[Key, Operand]] = {}
    first: dict[Key, Use] = {}
    for use in uses:
        for operand in filter(None, (use.weight, use.bias)):
            parts.setdefault(operand.name, {})[_key(operand)] = operand
        if use.weight is None:
            continue
        other = first.setdefault(_weight_key(use), use)
        if not _same_arrangement(other, use):
            reason = f"{other.function} uses it in an arrangement that does not fit one Kronecker product with this one"
            yield Unsupported(use.weight.name, use.function, reason)
    for name, operands in parts.items():
        entries = [o.entries.flatten() for o in operands.values() if o.entries is not None]
        taken = sum(o.tensor.numel() for o in operands.values())
        if entries and (taken > len(torch.cat(entries).unique()) or len(entries) < len(operands)):
            function = next(u.function for u in uses if name in u.names)
            yield Unsupported(name, function, "some of its entries are used in more than one part of it")


def _same_arrangement(a: Use, b: Use) -> bool:
    if a is b:
        return True
    shapes = [u.form.weight_shape(tuple(u.weight.tensor.shape)) for u in (a, b)]
    return _same(_weight_slot(a), _weight_slot(b), shapes[0] == shapes[1])


def _same(a: Slot, b: Slot, same_shape: bool) -> bool:
    if not same_shape or a.transposed != b.transposed or (a.index is None) != (b.index is None):
        return False
    return a.index is None or torch.equal(a.index, b.index)


def _slot(
    operand: Operand,
    shape: tuple[int, int, int],
    start: int,
    transposed: bool,
    arrangement: torch.Tensor | None = None,
) -> Slot:
    """Place an operand, seen by its operation as ``[G, d_out, width]`` or otherwise arranged, in terms of the parameter."""
    G, d_out, width = shape
    if operand.entries is None and arrangement is None:
        return Slot(operand.name, tuple(operand.tensor.shape), start, width, transposed)
    if arrangement is not None:
        entries = arrangement if operand.entries is None else operand.entries.flatten()[arrangement]
    else:
        entries = operand.entries
    canonical = entries.reshape(G, width, d_out).mT if transposed else entries.reshape(G, d_out, width)
    index = canonical.reshape(-1)
    natural = torch.arange(index.numel(), device=index.device)
    if operand.shape.numel() == index.numel():  # a rearrangement of the whole parameter: maybe a view after all
        if torch.equal(index, natural):
            return Slot(operand.name, tuple(operand.shape), start, width, False)
        if torch.equal(index, natural.reshape(G, width, d_out).mT.reshape(-1)):
            return Slot(operand.name, tuple(operand.shape), start, width, True)
    return Slot(operand.name, tuple(operand.shape), start, width, False, index)
