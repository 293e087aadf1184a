"""The contract of an operator: products in torch, numpy at one door, and an algebra that stays in torch."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import reduce
from math import prod
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from scipy.sparse import issparse
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvops._forms import NUMPY_DTYPE, Shapes, Space, checked_names, is_torch, join, read, split, write
from curvops._keywords import check_keywords
from curvops._scalars import accumulation_dtype, is_scalar, real_scalar, wide

#: Unit vectors multiplied at once by the queries that need columns.
_CHUNK = 512


def algebra() -> Any:
    """Return the module of sums and products, which itself builds on this one."""
    from curvops import _algebra

    return _algebra


class LinearOperator(ScipyLinearOperator, ABC):
    """A scipy linear operator whose products run in torch.

    Subclasses implement :meth:`_apply` and, unless ``symmetric``, :meth:`_adjoint`. ``op @ x`` accepts numpy arrays,
    flat tensors (``[D]``, ``[D, K]``), lists and dicts of blocks (``[*shape]``, or ``[*shape, K]`` in all of them), and
    answers in the same form. In ``x @ op``, the product with the adjoint, several vectors lead (``[K, D]``).

    Args:
        domain: Shapes of the blocks the operator accepts.
        range_: Shapes of the blocks it returns.
        dtype: Torch dtype of the vectors.
        device: Device of the vectors.
        symmetric: Whether the operator is its own adjoint.
        domain_names: Names of the blocks in the dict form.
        range_names: Likewise for the answer.
    """

    #: Classes whose constructors take the keywords that this one does not know itself.
    _PASSES_ON: ClassVar[tuple[type, ...]] = ()

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        check_keywords(cls, keywords)
        return super().__new__(cls)

    def __init__(
        self,
        domain: Shapes,
        range_: Shapes,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        symmetric: bool = False,
        domain_names: tuple[str, ...] | None = None,
        range_names: tuple[str, ...] | None = None,
    ):
        if dtype not in NUMPY_DTYPE:
            raise TypeError(f"Got dtype {dtype}, expected one of {list(NUMPY_DTYPE)}.")
        self.domain = tuple(tuple(map(int, s)) for s in domain)
        self.range = tuple(tuple(map(int, s)) for s in range_)
        if symmetric and self.domain != self.range:
            raise ValueError(f"A symmetric operator maps to its domain, got {self.domain} and {self.range}.")
        if symmetric and range_names is None:
            range_names = domain_names
        self.symmetric = symmetric
        self.torch_dtype = dtype
        self.device = torch.empty(0, dtype=dtype, device=device).device  # "cuda" becomes "cuda:0", as tensors say it
        self.domain_names = checked_names(domain_names, self.domain)
        self.range_names = checked_names(range_names, self.range)
        shape = sum(map(prod, self.range)), sum(map(prod, self.domain))
        super().__init__(np.dtype(NUMPY_DTYPE[dtype]), shape)  # dtype None would cost scipy a probing product

    @abstractmethod
    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        """Map K vectors at once: blocks ``[K, *domain[i]]`` to blocks ``[K, *range[i]]``."""

    def _adjoint(self) -> LinearOperator:
        if self.symmetric:
            return self
        raise NotImplementedError(f"{type(self).__name__} does not define its adjoint; implement `_adjoint`.")

    def _transpose(self) -> LinearOperator:
        return self._adjoint()  # operators are real

    def __repr__(self) -> str:
        return f"<{self.shape[0]}x{self.shape[1]} {type(self).__name__}, {self.torch_dtype} on {self.device}>"

    # Products

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        """Multiply a numpy matrix: the one place where vectors leave torch."""
        if issparse(X):
            raise TypeError("Products with sparse matrices are dense; pass `X.toarray()`.")
        if np.iscomplexobj(X):
            return self._matmat(X.real) + 1j * self._matmat(X.imag)
        rows = torch.from_numpy(np.array(X.T, dtype=self.dtype, order="C")).to(self.device, self.torch_dtype)
        return self._rows(rows).detach().to("cpu", accumulation_dtype(self.torch_dtype)).numpy().T

    def _rows(self, V: Tensor) -> Tensor:
        """Map the rows of ``V [K, N]`` to rows ``[K, M]``."""
        return join(self._apply(split(V, self.domain)))

    def _product(self, x: Any, leading: bool = False) -> Any:
        V, form = read(x, Space(self.domain, self.domain_names, self.torch_dtype, self.device), leading)
        return write(self._apply(V), form, self.range_names, leading)

    def matvec(self, x: Any) -> Any:
        """Multiply a vector of any form."""
        return self._product(x) if is_torch(x) else super().matvec(x)

    def matmat(self, X: Any) -> Any:
        """Multiply a matrix: vectors of any form, with trailing columns."""
        return self._product(X) if is_torch(X) else super().matmat(X)

    def rmatvec(self, x: Any) -> Any:
        """Multiply a vector of any form by the adjoint."""
        return self._adjoint().matvec(x)

    def rmatmat(self, X: Any) -> Any:
        """Multiply a matrix by the adjoint; columns trail."""
        return self._adjoint().matmat(X)

    def dot(self, x: Any) -> Any:
        """Multiply by a scalar, an operator, or a vector (numpy's word for ``*`` and ``@``)."""
        return self * x if is_scalar(x) else self @ x

    def __matmul__(self, x: Any) -> Any:
        if isinstance(x, LinearOperator):
            return self._compose(x)
        if is_scalar(x):
            raise ValueError("Multiply by a scalar with *, not @.")
        # Not scipy's __matmul__: it would come back here through dot.
        return self._product(x) if is_torch(x) else super().dot(self._foreign(x, self.shape[1]))

    def __rmatmul__(self, x: Any) -> Any:
        if is_scalar(x):
            raise ValueError("Multiply by a scalar with *, not @.")
        if is_torch(x):
            return self._adjoint()._product(x, leading=True)
        return super()._rdot(self._foreign(x, None))

    @staticmethod
    def _foreign(x: Any, length: int | None) -> Any:
        """Return something that scipy can multiply; ``length`` is that of the first axis of an array."""
        if issparse(x) or isinstance(x, ScipyLinearOperator):
            return x
        array = np.asarray(x)
        if array.dtype.kind not in "biufc":
            raise TypeError(
                f"Cannot multiply by {type(x).__name__}; expected an operator, a numpy array, a tensor, or a list or dict of "
                "tensors."
            )
        if length is not None and (array.ndim not in (1, 2) or array.shape[0] != length):
            raise ValueError(f"Got an array of shape {array.shape}, expected ({length},) or ({length}, K).")
        return array

    def __mul__(self, x: Any) -> Any:
        return self._scale(self._scalar(x)) if is_scalar(x) else self @ x

    def __rmul__(self, x: Any) -> Any:
        return self._scale(self._scalar(x)) if is_scalar(x) else self.__rmatmul__(x)

    def __truediv__(self, x: Any) -> LinearOperator:
        if not is_scalar(x):
            raise TypeError(f"Operators divide by scalars only, got {type(x).__name__}.")
        return self._scale(1.0 / self._scalar(x))

    def __neg__(self) -> LinearOperator:
        return self._scale(-1.0)

    def __add__(self, x: Any) -> Any:
        if isinstance(x, LinearOperator):
            return self._plus(x)
        if isinstance(x, ScipyLinearOperator):
            return super().__add__(x)
        if is_scalar(x):
            if not isinstance(x, Tensor) and x == 0:  # the start of sum([...])
                return self
            raise TypeError(f"`op + {x}` is ambiguous; write `op.shift({x})` for op + {x} I.")
        if isinstance(x, Tensor):
            raise TypeError("Cannot add a tensor to an operator; wrap a symmetric matrix as `structured.Dense(x)`.")
        if isinstance(x, np.ndarray) or issparse(x):
            return super().__add__(aslinearoperator(x))
        return NotImplemented

    def __radd__(self, x: Any) -> Any:
        return self + x

    def __sub__(self, x: Any) -> Any:
        return self + (-x)

    def __rsub__(self, x: Any) -> Any:
        return -self + x

    def __pow__(self, p: int) -> LinearOperator:
        if not hasattr(p, "__index__") or (p := operator.index(p)) < 0:
            raise ValueError(f"Got the power {p!r}, expected an integer >= 0; see `power(p)` for others.")
        self._require_square("**")
        if p == 0:
            return self._identity()
        return reduce(lambda A, B: A._compose(B), [self] * p)

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``."""
        self._require_square("shift")
        return self._plus(self._identity() * c)

    def _scalar(self, x: Any) -> float | Tensor:
        return real_scalar(x, accumulation_dtype(self.torch_dtype))

    def _identity(self) -> LinearOperator:
        return algebra().Identity(self)

    # A structure overrides the next three where the result has the structure, too.
    def _plus(self, other: LinearOperator) -> LinearOperator:
        return algebra().Sum(self, other)

    def _scale(self, s: float | Tensor) -> LinearOperator:
        return algebra().Scaled(self, s)

    def _compose(self, other: LinearOperator) -> LinearOperator:
        return algebra().Product(self, other)

    # Queries

    def _unit_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the columns of the matrix as rows ``[k, M]``, a chunk at a time, with their positions."""
        N = self.shape[1]
        for start in range(0, N, _CHUNK):
            stop = min(start + _CHUNK, N)
            E = torch.zeros(stop - start, N, dtype=self.torch_dtype, device=self.device)
            E.diagonal(start).fill_(1.0)
            yield slice(start, stop), self._rows(E)

    def to_dense(self) -> Tensor:
        """Return the matrix ``[M, N]``; costs N products unless the operator knows better."""
        return torch.cat([rows for _, rows in self._unit_rows()]).T

    def diagonal(self) -> Tensor:
        """Return the diagonal ``[N]``; costs N products unless the operator knows better."""
        self._require_square("diagonal")
        return torch.cat([rows[:, at].diagonal() for at, rows in self._unit_rows()])

    def trace(self) -> Tensor:
        """Return the trace; costs N products unless the operator knows better."""
        self._require_square("trace")
        return wide(self.diagonal()).sum()

    def frobenius_norm(self) -> Tensor:
        """Return the Frobenius norm; costs N products unless the operator knows better."""
        return torch.stack([wide(rows).norm() for _, rows in self._unit_rows()]).norm()

    def block(self, name: str | int) -> LinearOperator:
        """Return the diagonal block of one block of the domain, by name or position."""
        return algebra().Block(self, name)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LinearOperator:
        """Return the operator for vectors of another device or dtype.

        Operators that hold their numbers move them. Others keep computing where they are, and move the vectors.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        device = self.device if device is None else torch.empty(0, dtype=self.torch_dtype, device=device).device
        dtype = self.torch_dtype if dtype is None else dtype
        return self if (device, dtype) == (self.device, self.torch_dtype) else self._to(device, dtype)

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return algebra().Converted(self, device, dtype)

    def to_scipy(self, dtype: Any = None) -> ScipyLinearOperator:
        """Return a plain scipy operator that declares ``dtype`` (ARPACK picks its routines by it)."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        return ScipyLinearOperator(self.shape, self.matvec, self.rmatvec, self.matmat, dtype, self.rmatmat)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, ascending."""
        self._no_closed_form("eigenvalues", "scipy.sparse.linalg.eigsh(op)")

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant; ``-inf`` for a singular operator."""
        self._no_closed_form("logdet", "torch.linalg.slogdet(op.to_dense())")

    def det(self) -> Tensor:
        """Return the determinant."""
        self._no_closed_form("det", "torch.linalg.det(op.to_dense())")

    def inverse(self, damping: Any = 0.0, how: str = "exact") -> LinearOperator:
        """Return ``(op + damping I)^-1``."""
        iterative = "MINRESInverseLinearOperator, LSMRInverseLinearOperator or NeumannInverseLinearOperator"
        self._no_closed_form("inverse", f"curvops.CGInverseLinearOperator(op.shift(damping)), or {iterative}")

    def power(self, p: float) -> LinearOperator:
        """Return the symmetric power ``op^p``."""
        self._no_closed_form("power", "op ** n for integers")

    def sqrt(self) -> LinearOperator:
        """Return the symmetric positive semidefinite square root."""
        return self.power(0.5)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[n, D]`` from N(0, op)."""
        self._no_closed_form("sample", "a KFAC operator of the same risk")

    def _no_closed_form(self, what: str, instead: str) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} has no closed form for {what}. Operators of `curvops.structured` and the KFAC "
            f"family have one; for others use {instead}."
        )

    def _require_square(self, what: str) -> None:
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"{what} needs a square operator, got shape {self.shape}.")
