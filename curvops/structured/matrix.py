"""Matrices of a linear space that contains the identity and is closed under sums and products."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype, wide
from curvops.structured._base import multiple_of_identity
from curvops.structured._batched import norms, plus, scaled
from curvops.structured._checks import check_tensor, checked_dim
from curvops.structured.adjoint import Adjoint
from curvops.structured.stored import StoredMatrix, frame_of

Self = TypeVar("Self", bound="StructuredMatrix")


class StructuredMatrix(StoredMatrix):
    """A batch of square matrices ``[*batch, dim, dim]`` in a space ``L``, acting on one block ``(*batch, dim)``.

    ``L`` contains the identity and is closed under sums, multiples and products, seldom under transposes. A symmetric
    ``S`` is brought into it by ``Π``: the symmetric part of ``Π(S)`` is the projection, orthogonal for the Frobenius inner
    product, of ``S`` onto the symmetric parts of ``L``; what of ``Π(S)`` may be symmetric is. So diagonal entries are kept,
    entries without a free mirror image count twice, and entries that are equal in ``L`` are averages.

    Everything is done for each member of the batch, without a look at the numbers: steps made of these operations stay
    on the device, and compile: methods without a break of the graph, classmethods with one. Results are new matrices; half
    precision adds up in float32.

    A subclass names its tensors, says their shapes, and multiplies. What it does for ``_gram``, ``_project``,
    ``_self_gram`` and ``_gram_through`` is asked in float32 or better.
    """

    #: What :meth:`congruence` takes in place of ``X X'``: the ``"gram"``, its diagonal (``"squares"``); or ``"rows"``, where
    #: ``X`` itself is cheaper, or needed.
    MOMENT: str = "rows"

    # What a subclass says

    @abstractmethod
    def _times(self, X: Tensor) -> Tensor:
        """Return ``M X`` for ``X [*batch, dim, n]``."""

    @abstractmethod
    def _adjoint_times(self, X: Tensor) -> Tensor:
        """Return ``M' X``."""

    @abstractmethod
    def _times_matrix(self: Self, other: Self) -> Self:
        """Return the product in the class."""

    @abstractmethod
    def _project(self: Self, S: Tensor) -> Self:
        """Return ``Π(S)``; uses nothing of ``self`` but its shape."""

    @abstractmethod
    def _gram(self: Self, X: Tensor) -> Self:
        """Return ``Π(X X')``; uses nothing of ``self`` but its shape."""

    @abstractmethod
    def _self_gram(self: Self) -> Self:
        """Return ``Π(M' M)``."""

    def _gram_through(self: Self, X: Tensor) -> Self:
        return self._gram(self._adjoint_times(X))

    def congruence(self: Self, U: Tensor) -> Self:
        """Return ``Π(M' X X' M)``, given what ``MOMENT`` says of ``X X'``, whose memory may be used."""
        raise NotImplementedError(f"A {type(self).__name__} needs X itself, not sums over it; use gram_through(X).")

    @abstractmethod
    def _shifted(self: Self, c: float | Tensor) -> Self:
        """Return ``M + c I``."""

    @abstractmethod
    def diagonals(self) -> Tensor:
        """Return the diagonals ``[*batch, dim]``."""

    # Construction

    @classmethod
    def zeros(
        cls: type[Self],
        dim: int,
        *,
        batch: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Return zero matrices; dtype and device default to torch's."""
        like = torch.empty(0, dtype=dtype, device=device)
        return frame_of(cls, checked_dim(dim), tuple(batch), like.dtype, like.device)._zeros()

    @classmethod
    def eye(
        cls: type[Self],
        dim: int,
        *,
        batch: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Return identity matrices; dtype and device default to torch's."""
        return cls.zeros(dim, batch=batch, dtype=dtype, device=device)._shifted(1.0)

    @classmethod
    def from_dense(cls: type[Self], S: Tensor) -> Self:
        """Return ``Π(S)`` of symmetric matrices ``S [*batch, dim, dim]``; shares no memory with them."""
        check_tensor(S, "S", "(*batch, dim, dim)")
        if S.shape[-1] != S.shape[-2]:
            raise ValueError(f"Got S of shape {tuple(S.shape)}, expected (*batch, dim, dim).")
        frame = frame_of(cls, S.shape[-1], tuple(S.shape[:-2]), accumulation_dtype(S.dtype), S.device)
        return frame._project(wide(S))._retyped(S.dtype)

    @classmethod
    def gram(cls: type[Self], X: Tensor) -> Self:
        """Return ``Π(X X')`` for ``X [*batch, dim, n]``."""
        check_tensor(X, "X", "(*batch, dim, n)")
        frame = frame_of(cls, X.shape[-2], tuple(X.shape[:-2]), accumulation_dtype(X.dtype), X.device)
        return frame._gram(wide(X))._retyped(X.dtype)

    # Algebra

    def compose(self: Self, other: Self) -> Self:
        """Return the product ``self @ other`` in the class."""
        return self._times_matrix(self._checked(other, "multiply"))

    def times(self, X: Tensor) -> Tensor:
        """Return ``M X`` for ``X [*batch, dim, n]``."""
        return self._times(self._checked_columns(X))

    def adjoint_times(self, X: Tensor) -> Tensor:
        """Return ``M' X`` for ``X [*batch, dim, n]``."""
        return self._adjoint_times(self._checked_columns(X))

    def self_gram(self: Self) -> Self:
        """Return ``Π(M' M)``."""
        return self._wide()._self_gram()._retyped(self.torch_dtype)

    def gram_through(self: Self, X: Tensor) -> Self:
        """Return ``Π(M' X X' M)`` for ``X [*batch, dim, n]``."""
        X = wide(self._checked_columns(X))
        return self._wide()._gram_through(X)._retyped(self.torch_dtype)

    def add(self: Self, other: Self, alpha: float | Tensor = 1.0) -> Self:
        """Return ``self + alpha other``; ``alpha`` is a number, or a tensor with one for each batch member."""
        other, alpha = self._checked(other, "add"), self._factor(alpha)
        return self._from(lambda t, o: plus(t, o, alpha), self, other)

    def minus_product(self: Self, other: Self, step: float | Tensor) -> Self:
        """Return ``self - step self @ other``; ``step`` is a number, or a tensor with one for each batch member."""
        return self.add(self.compose(other), alpha=-step)

    def shift(self: Self, c: float | Tensor) -> Self:
        """Return ``M + c I``; ``c`` is a number, or a tensor with one for each batch member."""
        return self._shifted(self._factor(c))

    def scale(self: Self, s: float | Tensor) -> Self:
        """Return ``s M``; ``s`` is a number, or a tensor with one for each batch member. As ``*``, and compiles."""
        s = self._factor(s)
        return self._from(lambda t: scaled(t, s), self)

    def _scale(self, s: float | Tensor) -> LinearOperator:
        return self.scale(s)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        if type(other) is type(self):
            return self.add(other)
        c = multiple_of_identity(other) if other.domain == self.domain else None
        return super()._plus(other) if c is None else self.shift(c)

    def _compose(self, other: LinearOperator) -> LinearOperator:
        return self.compose(other) if type(other) is type(self) else super()._compose(other)

    def __mul__(self, x: Any) -> Any:
        return self.scale(x) if self._is_batch_of_scalars(x) else super().__mul__(x)

    def __rmul__(self, x: Any) -> Any:
        return self.scale(x) if self._is_batch_of_scalars(x) else super().__rmul__(x)

    def __truediv__(self, x: Any) -> LinearOperator:
        return self.scale(1.0 / self._factor(x)) if self._is_batch_of_scalars(x) else super().__truediv__(x)

    def _is_batch_of_scalars(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.ndim > 0 and tuple(x.shape) == self.batch

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else Adjoint(self)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [self._times(V[0].movedim(0, -1)).movedim(-1, 0)]

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return self._convert(device, dtype)

    # Queries

    def traces(self) -> Tensor:
        """Return the traces ``[*batch]``, in float32 or better."""
        return self.diagonals().sum(-1, dtype=accumulation_dtype(self.torch_dtype))

    def mean_trace(self) -> Tensor:
        """Return the averages ``[*batch]`` of the diagonals, in float32 or better."""
        return self.traces() / max(self.dim, 1)

    def frobenius_norms(self) -> Tensor:
        """Return the Frobenius norms ``[*batch]``, in float32 or better."""
        parts = [norms(getattr(self, n), len(self.batch)) for n in self.TENSORS]
        parts += [getattr(self, n).frobenius_norms() for n in self.PARTS]
        return parts[0] if len(parts) == 1 else norms(torch.stack(parts, -1), len(self.batch))

    def max_abs(self) -> Tensor:
        """Return the sizes ``[*batch]`` of the largest stored entries, in float32 or better."""
        parts = [norms(getattr(self, n), len(self.batch), torch.inf) for n in self.TENSORS]
        return reduce(torch.maximum, parts + [getattr(self, n).max_abs() for n in self.PARTS])

    def to_dense_blocks(self) -> Tensor:
        """Return the matrices ``[*batch, dim, dim]``."""
        eye = torch.eye(self.dim, dtype=self.torch_dtype, device=self.device)
        return self._times(eye.expand(*self.batch, self.dim, self.dim))

    def to_dense(self) -> Tensor:
        blocks = self.to_dense_blocks().to(self.torch_dtype)
        return torch.block_diag(*blocks.reshape(prod(self.batch), self.dim, self.dim))

    def diagonal(self) -> Tensor:
        return self.diagonals().flatten().to(self.torch_dtype)

    def trace(self) -> Tensor:
        return self.traces().sum()

    def frobenius_norm(self) -> Tensor:
        return self.frobenius_norms().norm()

    # Checks

    def _factor(self, s: Any) -> float | Tensor:
        s = self._scalar(s)
        if isinstance(s, Tensor) and s.ndim and tuple(s.shape) != self.batch:
            raise ValueError(f"Got a scalar of shape {tuple(s.shape)}, expected one number or shape {self.batch}.")
        return s

    def _checked(self: Self, other: Any, what: str) -> Self:
        if type(other) is not type(self):
            raise TypeError(f"Cannot {what} a {type(other).__name__}, expected a {type(self).__name__}.")
        if (other.dim, other.batch) != (self.dim, self.batch):
            raise ValueError(
                f"Cannot {what} a {type(self).__name__} of dimension {other.dim} and batch {other.batch}, expected "
                f"dimension {self.dim} and batch {self.batch}."
            )
        self._check_place(other.torch_dtype, other.device, f"a {type(self).__name__}")
        return other

    def _checked_columns(self, X: Tensor) -> Tensor:
        check_tensor(X, "X", "(*batch, dim, n)")
        if tuple(X.shape[:-1]) != (*self.batch, self.dim):
            raise ValueError(f"Got X of shape {tuple(X.shape)}, expected {(*self.batch, self.dim)} and a last axis.")
        self._check_place(X.dtype, X.device, "X")
        return X

    def _checked_gram(self, U: Tensor) -> Tensor:
        if self._checked_columns(U).shape[-1] != self.dim:
            raise ValueError(f"Got U of shape {tuple(U.shape)}, expected {(*self.batch, self.dim, self.dim)}.")
        return U

    def _check_place(self, dtype: torch.dtype, device: torch.device, what: str) -> None:
        if dtype != self.torch_dtype:
            raise TypeError(f"Got {what} in {dtype}, expected {self.torch_dtype}; convert it with `.to`.")
        if device != self.device:
            raise ValueError(f"Got {what} on {device}, expected {self.device}; move it with `.to`.")
