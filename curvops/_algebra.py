"""Sums, multiples, products and parts of operators. All stay in torch; linear queries pass through."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvops._forms import Names, Shapes, regroup
from curvops._operator import LinearOperator
from curvops._scalars import scalar_on


def _agree(A: LinearOperator, B: LinearOperator, what: str) -> None:
    """Refuse operands of different dtype or device."""
    if (A.torch_dtype, A.device) != (B.torch_dtype, B.device):
        raise TypeError(
            f"Cannot {what} operators in {A.torch_dtype} on {A.device} and {B.torch_dtype} on {B.device}. "
            f"Convert one with `.to('{A.device}', {A.torch_dtype})`."
        )


def _meet(a: Shapes, an: Names | None, b: Shapes, bn: Names | None, what: str) -> tuple[Shapes, Names | None]:
    """Return the blocks two operands have in common; one flat unnamed block meets every cut of its length."""
    if a == b:
        if an is not None and bn is not None and an != bn:
            raise ValueError(f"Cannot {what} operators whose blocks are {an} and {bn}; give both the same order.")
        return a, bn if an is None else an
    if sum(map(prod, a)) == sum(map(prod, b)):
        if len(a) == len(a[0]) == 1 and an is None:
            return b, bn
        if len(b) == len(b[0]) == 1 and bn is None:
            return a, an
    raise ValueError(f"Cannot {what} operators with blocks {a} and {b}; expected the same shapes (or one flat block).")


class Sum(LinearOperator):
    """The sum of two operators."""

    def __init__(self, A: LinearOperator, B: LinearOperator):
        _agree(A, B, "add")
        domain, names = _meet(A.domain, A.domain_names, B.domain, B.domain_names, "add")
        range_, range_names = _meet(A.range, A.range_names, B.range, B.range_names, "add")
        symmetric = A.symmetric and B.symmetric
        super().__init__(
            domain,
            range_,
            dtype=A.torch_dtype,
            device=A.device,
            symmetric=symmetric,
            domain_names=names,
            range_names=range_names,
        )
        self.args = (A, B)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        Y = [regroup(A._apply(regroup(V, A.domain)), self.range) for A in self.args]
        return [a + b for a, b in zip(*Y, strict=True)]

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else Sum(*(A._adjoint() for A in self.args))

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return Sum(*(A.to(device, dtype) for A in self.args))

    def to_dense(self) -> Tensor:
        return self.args[0].to_dense() + self.args[1].to_dense()

    def diagonal(self) -> Tensor:
        return self.args[0].diagonal() + self.args[1].diagonal()

    def trace(self) -> Tensor:
        return self.args[0].trace() + self.args[1].trace()


class Scaled(LinearOperator):
    """A multiple of an operator; the scalar may be a 0-dim tensor that requires grad."""

    def __init__(self, A: LinearOperator, s: float | Tensor):
        super().__init__(
            A.domain,
            A.range,
            dtype=A.torch_dtype,
            device=A.device,
            symmetric=A.symmetric,
            domain_names=A.domain_names,
            range_names=A.range_names,
        )
        self.arg = A
        self.scalar: Any = s

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [y * self.scalar for y in self.arg._apply(V)]

    def _scale(self, s: float | Tensor) -> LinearOperator:
        return Scaled(self.arg, s * self.scalar)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        return _shifted(other, self.arg, self.scalar) or super()._plus(other)

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else Scaled(self.arg._adjoint(), self.scalar)

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return self.arg.to(device, dtype) * scalar_on(self.scalar, device)

    def to_dense(self) -> Tensor:
        return self.arg.to_dense() * self.scalar

    def diagonal(self) -> Tensor:
        return self.arg.diagonal() * self.scalar

    def trace(self) -> Tensor:
        return self.arg.trace() * self.scalar

    def frobenius_norm(self) -> Tensor:
        return self.arg.frobenius_norm() * abs(self.scalar)


class Product(LinearOperator):
    """The product of two operators."""

    def __init__(self, A: LinearOperator, B: LinearOperator):
        _agree(A, B, "multiply")
        _meet(A.domain, A.domain_names, B.range, B.range_names, "multiply")
        # Powers of one symmetric operator are symmetric; of other products this is not known.
        symmetric = A.symmetric and B.symmetric and _base(A) is _base(B)
        super().__init__(
            B.domain,
            A.range,
            dtype=A.torch_dtype,
            device=A.device,
            symmetric=symmetric,
            domain_names=B.domain_names,
            range_names=A.range_names,
        )
        self.args = (A, B)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        A, B = self.args
        return A._apply(regroup(B._apply(V), A.domain))

    def _adjoint(self) -> LinearOperator:
        A, B = self.args
        return self if self.symmetric else Product(B._adjoint(), A._adjoint())

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        A, B = self.args
        return Product(A.to(device, dtype), B.to(device, dtype))

    def to_dense(self) -> Tensor:
        A, B = self.args
        return A @ B.to_dense()


def _base(A: LinearOperator) -> LinearOperator:
    """Return the operator that a power is a power of."""
    return _base(A.args[0]) if isinstance(A, Product) and A.symmetric else A


class Identity(LinearOperator):
    """The identity.

    Args:
        like: An operator to take everything from, or the shapes of the blocks, or their number of entries.
        dtype: Torch dtype; needed unless ``like`` is an operator.
        device: Device.
        names: Names of the blocks.
    """

    def __init__(
        self,
        like: LinearOperator | Shapes | int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        names: Names | None = None,
    ):
        if isinstance(like, LinearOperator):
            if like.shape[0] != like.shape[1]:
                raise ValueError(f"Got an operator of shape {like.shape}, expected a square one.")
            dtype, device, names = dtype or like.torch_dtype, device or like.device, like.domain_names
            shapes = like.domain
        else:
            shapes = ((like,),) if isinstance(like, int) else like
        if dtype is None:
            raise TypeError("Identity needs a dtype, for example `Identity(n, dtype=torch.float64)` or `Identity(op)`.")
        super().__init__(shapes, shapes, dtype=dtype, device=device or "cpu", symmetric=True, domain_names=names)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        return _shifted(other, self, 1.0) or super()._plus(other)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [v.clone() for v in V]  # answers do not share memory with questions

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return Identity(self.domain, dtype=dtype, device=device, names=self.domain_names)

    def to_dense(self) -> Tensor:
        return torch.eye(self.shape[0], dtype=self.torch_dtype, device=self.device)

    def diagonal(self) -> Tensor:
        return torch.ones(self.shape[0], dtype=self.torch_dtype, device=self.device)


def _shifted(op: LinearOperator, other: LinearOperator, c: float | Tensor) -> LinearOperator | None:
    """Return ``op + c I`` if ``other`` is the identity on the same blocks: ``op`` may know better than a sum."""
    same = (op.domain, op.torch_dtype, op.device) == (other.domain, other.torch_dtype, other.device)
    if not same or not isinstance(other, Identity) or isinstance(op, Identity | Scaled) or op.range != op.domain:
        return None
    return op.shift(c)


class SubmatrixLinearOperator(LinearOperator):
    """The rows and columns of an operator that two lists of indices pick.

    Args:
        op: The operator.
        rows: Indices of rows, without repetition.
        cols: Likewise of columns.
    """

    def __init__(self, op: LinearOperator, rows: Sequence[int] | Tensor, cols: Sequence[int] | Tensor):
        r, c = _indices(rows, op.shape[0], "row"), _indices(cols, op.shape[1], "column")
        self.arg, self._rows_at, self._cols_at = op, r.to(op.device), c.to(op.device)
        symmetric = op.symmetric and torch.equal(r, c)
        super().__init__(((len(c),),), ((len(r),),), dtype=op.torch_dtype, device=op.device, symmetric=symmetric)

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        X = V[0].new_zeros(len(V[0]), self.arg.shape[1]).index_copy(1, self._cols_at, V[0])
        return [self.arg._rows(X).index_select(1, self._rows_at)]

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else SubmatrixLinearOperator(self.arg._adjoint(), self._cols_at, self._rows_at)

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return SubmatrixLinearOperator(self.arg.to(device, dtype), self._rows_at, self._cols_at)


def _indices(indices: Sequence[int] | Tensor, n: int, what: str) -> Tensor:
    index = torch.as_tensor(indices, device="cpu")
    if index.numel() == 0:
        index = index.to(torch.int64)
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"Got {what} indices {indices}, expected a list of integers.")
    index = index.to(torch.int64)
    if ((index < 0) | (index >= n)).any():
        raise ValueError(f"Got {what} indices out of bounds, expected 0 <= index < {n}: {index.tolist()}.")
    if len(index.unique()) != len(index):
        raise ValueError(f"Got repeated {what} indices, expected each once: {index.tolist()}.")
    return index


class Block(LinearOperator):
    """The diagonal block of one block of the domain."""

    def __init__(self, op: LinearOperator, name: str | int):
        names = op.domain_names or ()
        keys = [*range(len(op.domain)), *names]
        if name not in keys:
            raise ValueError(f"Got the block {name!r}, expected one of {names or tuple(keys)}.")
        if op.domain != op.range:
            raise ValueError(f"A diagonal block needs the same blocks on both sides, got {op.domain} and {op.range}.")
        self.arg, self._at = op, keys.index(name) % len(op.domain)
        shape = (op.domain[self._at],)
        named = (names[self._at],) if names else None
        super().__init__(
            shape, shape, dtype=op.torch_dtype, device=op.device, symmetric=op.symmetric, domain_names=named
        )
        self.range_names = named

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        X = [V[0].new_zeros(len(V[0]), *shape) for shape in self.arg.domain]
        X[self._at] = V[0]
        return [self.arg._apply(X)[self._at]]

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else Block(self.arg._adjoint(), self._at)

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return Block(self.arg.to(device, dtype), self._at)


class Converted(LinearOperator):
    """An operator for vectors of another dtype or device: they are moved, products run where the operator lives."""

    def __init__(self, op: LinearOperator, device: torch.device, dtype: torch.dtype):
        super().__init__(
            op.domain,
            op.range,
            dtype=dtype,
            device=device,
            symmetric=op.symmetric,
            domain_names=op.domain_names,
            range_names=op.range_names,
        )
        self.arg = op

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        Y = self.arg._apply([v.to(self.arg.device, self.arg.torch_dtype) for v in V])
        return [y.to(self.device, self.torch_dtype) for y in Y]

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else Converted(self.arg._adjoint(), self.device, self.torch_dtype)

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return self.arg.to(device, dtype)
