"""Forward mode, recorded: the operations on tangents are linear, and run again on other tangents without the model.

A dispatch mode sees what autograd's rules for tangents call, below autograd. Operations that touch a tangent, or what came
of one, go on a tape; everything else they read is a constant of the linearisation, shared with the graph of the adjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Hashes of the programs that were proved: which operations, on what.
_PROVED: set[int] = set()


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor that depends on the tangents: where replaying keeps it."""

    index: int


@dataclass(slots=True)
class Step:
    """One operation: arguments with places for what depends on tangents, and the places of its results."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[int | None]


class Tape(TorchDispatchMode):
    """Records the operations on tangents that run inside, from the tangents of the inputs on.

    Args:
        tangents: Those of the inputs, as autograd holds them.

    Attributes:
        valid: Whether replaying computes what ran: no constant was written to, no number was read off a tangent.
    """

    def __init__(self, tangents: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.valid = True
        self._alive = list(tangents)  # so that no identity is used twice while recording
        self._places = {id(t): i for i, t in enumerate(tangents)}
        self._versions: list[tuple[Tensor, int]] = []
        self._results: list[int | None] = []
        self._dropped: dict[int, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        linear = any(isinstance(a, Tensor) and id(a) in self._places for a in _flat([args, list(kwargs.values())]))
        if linear and self._writes_constant(function, args):
            self.valid = False
        result = function(*args, **kwargs)
        if linear and self.valid:
            self._record(function, args, kwargs, result)
        return result

    def _writes_constant(self, function: Any, args: Any) -> bool:
        written = [a for a, s in zip(args, function._schema.arguments, strict=False) if _is_written(s)]
        return any(isinstance(t, Tensor) and id(t) not in self._places for t in _flat(written))

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.valid = False  # a number read off a tangent would stay as it is
            return
        kept = [self._argument(a) for a in args], {k: self._argument(v) for k, v in kwargs.items()}
        places = [self._place(t) if isinstance(t, Tensor) else None for t in _flat([result])]
        if any(p is not None for p in places):  # autograd also compares shapes and storages
            self.steps.append(Step(function, *kept, places))

    def _place(self, t: Tensor) -> int:
        if id(t) not in self._places:
            self._places[id(t)] = len(self._alive)
            self._alive.append(t)
        return self._places[id(t)]

    def _argument(self, a: Any) -> Any:
        if isinstance(a, list | tuple):
            return [self._argument(x) for x in a]
        if not isinstance(a, Tensor):
            return a
        if id(a) in self._places:
            return Place(self._places[id(a)])
        constant = a.detach()
        self._versions.append((constant, constant._version))
        return constant

    def finish(self, tangents: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> bool:
        """Say what the tangents of the outputs are, and prove the tape: twice the inputs must give twice the outputs.

        Args:
            tangents: Those of the outputs; ``None`` for zero.
            inputs: Tangents that were recorded.

        Returns:
            Whether the tape can be replayed.
        """
        self.valid &= all(t._version == version for t, version in self._versions)
        self._results = [None if t is None else self._places.get(id(t), -1) for t in tangents]
        self.valid &= -1 not in self._results  # a tangent that came from elsewhere
        self._alive, self._places, self._versions = [], {}, []
        if not self.valid:
            self.steps = []
            return False
        self._plan(len(inputs))
        program = hash(tuple((str(s.function), str(s.results), str(_places(s))) for s in self.steps))
        if program not in _PROVED:
            doubled = self.replay([2 * v for v in inputs])
            pairs = [(a, b) for a, b in zip(doubled, tangents, strict=True) if a is not None and b is not None]
            self.valid = all(torch.allclose(a, 2 * b, equal_nan=True) for a, b in pairs)
            if self.valid:
                _PROVED.add(program)
        return self.valid

    def _plan(self, inputs: int) -> None:
        """Keep the steps that a result needs, and note after which step a tensor is needed no more."""
        needed, kept = {r for r in self._results if r is not None}, []
        for step in reversed(self.steps):
            if _mutates(step.function) or any(r in needed for r in step.results):
                needed.update(_places(step))
                kept.append(step)
        self.steps = kept[::-1]
        last = {
            place: i
            for i, step in enumerate(self.steps)
            for place in (*step.results, *_places(step))
            if place is not None
        }
        self._dropped = {}
        for place, i in last.items():
            if place not in self._results and place >= inputs:
                self._dropped.setdefault(i, []).append(place)

    @torch.no_grad()
    def replay(self, tangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the tangents of the outputs for other tangents of the inputs."""
        held: dict[int, Tensor] = dict(enumerate(tangents))
        for i, step in enumerate(self.steps):
            args, kwargs = _filled(step.args, held), {k: _filled(v, held) for k, v in step.kwargs.items()}
            result = step.function(*args, **kwargs)
            for place, t in zip(step.results, _flat([result]), strict=True):
                if place is not None:
                    held[place] = t
            for place in self._dropped.get(i, ()):
                del held[place]
        return [None if r is None else held[r] for r in self._results]

    def constants(self) -> list[Tensor]:
        """Return what the tape keeps alive."""
        arguments = (_flat([s.args, list(s.kwargs.values())]) for s in self.steps)
        return [a for step in arguments for a in step if isinstance(a, Tensor)]


def _flat(x: Any) -> Iterator[Any]:
    for a in x:
        if isinstance(a, list | tuple):
            yield from _flat(a)
        else:
            yield a


def _filled(a: Any, held: dict[int, Tensor]) -> Any:
    if type(a) is Place:
        return held[a.index]
    return [_filled(x, held) for x in a] if type(a) is list else a


def _places(step: Step) -> list[int]:
    return [a.index for a in _flat([step.args, list(step.kwargs.values())]) if isinstance(a, Place)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _mutates(function: Any) -> bool:
    return any(_is_written(a) for a in function._schema.arguments)
