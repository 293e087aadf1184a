"""Matrices as named tensors: held, checked, converted, taken apart and put together again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype

Self = TypeVar("Self", bound="StoredMatrix")


class StoredMatrix(LinearOperator):
    """A batch of square matrices that is held in named tensors, and in parts that are such matrices themselves."""

    #: Names of the tensors; the constructor takes them by these names.
    TENSORS: ClassVar[tuple[str, ...]] = ()
    #: Names of the parts that are structured matrices themselves, and their classes.
    PARTS: ClassVar[tuple[str, ...]] = ()
    SUBSTRUCTURES: ClassVar[tuple[type[StoredMatrix], ...]] = ()
    #: Whether every matrix of the space is symmetric.
    SYMMETRIC: ClassVar[bool] = False

    dim: int
    batch: tuple[int, ...]

    @abstractmethod
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors behind the batch axes."""

    def _lay_out(self, dim: int, batch: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Set everything but the tensors."""
        self.dim, self.batch = dim, batch
        domain = ((*batch, dim),)
        LinearOperator.__init__(self, domain, domain, dtype=dtype, device=device, symmetric=self.SYMMETRIC)

    def _hold(self, dim: int, batch: tuple[int, ...], **tensors: Tensor) -> None:
        """Set everything, from tensors that are checked; what the constructors do."""
        first = next(iter(tensors.values()))
        for name, t in tensors.items():
            if t.dtype != first.dtype:
                raise TypeError(f"Got {name} in {t.dtype}, expected {first.dtype} as the other tensors.")
            if t.device != first.device:
                raise ValueError(f"Got {name} on {t.device}, expected {first.device} as the other tensors.")
        self._lay_out(dim, tuple(batch), first.dtype, first.device)
        for name, shape in self._shapes().items():
            if name in tensors and tuple(tensors[name].shape) != (*self.batch, *shape):
                raise ValueError(
                    f"Got {name} {tuple(tensors[name].shape)} for a {type(self).__name__} of dimension {dim} and batch "
                    f"{self.batch}, expected {(*self.batch, *shape)}."
                )
        self.__dict__.update(tensors)

    def _like(self: Self, **tensors: Any) -> Self:
        """Return a matrix of the same shape that holds other tensors, unchecked: the constructors cost more than a kernel."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(tensors)
        return new

    def _from(self: Self, f: Callable[..., Tensor], *matrices: StoredMatrix) -> Self:
        """Return a matrix shaped like ``self`` whose tensors are ``f`` of those of ``matrices``."""
        own = {n: f(*[getattr(m, n) for m in matrices]) for n in self.TENSORS}
        nested = {n: getattr(self, n)._from(f, *[getattr(m, n) for m in matrices]) for n in self.PARTS}
        return self._like(**own, **nested)

    def _zeros(self: Self) -> Self:
        tensors = {
            name: torch.zeros((*self.batch, *shape), dtype=self.torch_dtype, device=self.device)
            for name, shape in self._shapes().items()
        }
        return self._like(**tensors, **{n: getattr(self, n)._zeros() for n in self.PARTS})

    def _convert(self: Self, device: torch.device, dtype: torch.dtype) -> Self:
        if (device, dtype) == (self.device, self.torch_dtype):
            return self
        frame = frame_of(type(self), self.dim, self.batch, dtype, device)
        return frame._from(lambda t: t.to(device, dtype), self)

    def _retyped(self: Self, dtype: torch.dtype) -> Self:
        """Return the matrix in half or single precision; numpy sees no difference, so the constructors need not run."""
        if dtype == self.torch_dtype:
            return self
        own = {n: getattr(self, n).to(dtype) for n in self.TENSORS}
        return self._like(torch_dtype=dtype, **own, **{n: getattr(self, n)._retyped(dtype) for n in self.PARTS})

    def _wide(self: Self) -> Self:
        return self._retyped(accumulation_dtype(self.torch_dtype))

    @classmethod
    def tensor_names(cls) -> list[str]:
        """Return the names of all tensors, those of parts behind a dot."""
        nested = [f"{p}.{n}" for p, sub in zip(cls.PARTS, cls.SUBSTRUCTURES, strict=True) for n in sub.tensor_names()]
        return [*cls.TENSORS, *nested]

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the matrix holds, each with the batch axes first; no copies."""
        own = {n: getattr(self, n) for n in self.TENSORS}
        nested = {f"{p}.{n}": t for p in self.PARTS for n, t in getattr(self, p).named_tensors().items()}
        return {**own, **nested}

    @classmethod
    def from_tensors(cls: type[Self], tensors: Mapping[str, Tensor]) -> Self:
        """Undo :meth:`named_tensors`; dimension, batch, dtype and device are those of the tensors."""
        if set(tensors) != set(cls.tensor_names()):
            raise ValueError(f"Got tensors {list(tensors)} for a {cls.__name__}, expected {cls.tensor_names()}.")
        nested = {
            p: sub.from_tensors({n: tensors[f"{p}.{n}"] for n in sub.tensor_names()})
            for p, sub in zip(cls.PARTS, cls.SUBSTRUCTURES, strict=True)
        }
        own: dict[str, Any] = {n: tensors[n] for n in cls.TENSORS}
        return cls(**own, **nested)

    def with_tensors(self: Self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a matrix of this class that holds other tensors; they may have another batch, dtype or device."""
        mine = self.named_tensors()
        if tensors.keys() == mine.keys() and all(_alike(t, mine[n]) for n, t in tensors.items()):
            return self._filled(tensors)
        return type(self).from_tensors(tensors)

    def _filled(self: Self, tensors: Mapping[str, Tensor], prefix: str = "") -> Self:
        own = {n: tensors[prefix + n] for n in self.TENSORS}
        return self._like(**own, **{p: getattr(self, p)._filled(tensors, f"{prefix}{p}.") for p in self.PARTS})

    def _map(self: Self, f: Callable[[Tensor], Tensor]) -> Self:
        """Return the matrix with ``f`` applied to every tensor."""
        return self.with_tensors({n: f(t) for n, t in self.named_tensors().items()})

    def __reduce__(self) -> tuple:
        return _restore, (type(self), self.named_tensors())


# Constructors of scipy do not compile: classmethods break a compiled graph, methods do not.
@torch.compiler.disable
@lru_cache(maxsize=4096)
def frame_of(cls: type[Self], dim: int, batch: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
    """Return a matrix that lacks its tensors, to be filled by ``_like``; made once for each shape."""
    frame = cls.__new__(cls)
    frame._lay_out(dim, batch, dtype, device)
    return frame


def _restore(cls: type[Self], tensors: dict[str, Tensor]) -> Self:
    return cls.from_tensors(tensors)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
