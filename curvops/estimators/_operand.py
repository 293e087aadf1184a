"""What estimators are given: operators of this package, matrices, and operators of scipy, all seen as products of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvops import _random
from curvops._forms import NUMPY_DTYPE, join, split
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype

#: Entries of vectors that are multiplied at once, and vectors at most.
_ENTRIES, _VECTORS = 1 << 25, 32
#: Differences between ``u'Av`` and ``v'Au`` are rounding up to this power of machine epsilon, relative to their size.
_ASYMMETRY = 0.4


class Matrix(LinearOperator):
    """A matrix that is given as a tensor."""

    def __init__(self, M: Tensor):
        rounding = 100 * torch.finfo(M.dtype).eps
        symmetric = M.shape[0] == M.shape[1] and bool(((M - M.T).abs() <= rounding * M.norm()).all())
        super().__init__(((M.shape[1],),), ((M.shape[0],),), dtype=M.dtype, device=M.device, symmetric=symmetric)
        self.M = M

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [V[0] @ self.M.T]

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else Matrix(self.M.T)


class Foreign(LinearOperator):
    """An operator of scipy; whether it is symmetric is not known."""

    def __init__(self, op: ScipyLinearOperator):
        if np.issubdtype(op.dtype, np.complexfloating):
            raise TypeError(f"Got an operator of dtype {op.dtype}, expected a real one.")
        dtype = torch.float32 if op.dtype == np.float32 else torch.float64
        super().__init__(((op.shape[1],),), ((op.shape[0],),), dtype=dtype, device="cpu")
        self.op = op

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        Y = self.op.matmat(V[0].T.numpy().astype(NUMPY_DTYPE[self.torch_dtype]))
        return [torch.from_numpy(np.ascontiguousarray(Y.T)).to(self.torch_dtype)]

    def _adjoint(self) -> LinearOperator:
        return Foreign(self.op.adjoint())


class AssumedSymmetric(LinearOperator):
    """An operator that is its own adjoint, though it does not say so."""

    def __init__(self, op: LinearOperator):
        super().__init__(
            op.domain,
            op.domain,
            dtype=op.torch_dtype,
            device=op.device,
            symmetric=True,
            domain_names=op.domain_names,
        )
        self.arg = op

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return split(join(self.arg._apply(V)), self.domain)

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return AssumedSymmetric(self.arg.to(device, dtype))


def as_operator(A: Any) -> LinearOperator:
    """Return an operator: one of this package, or what stands for a matrix or an operator of scipy."""
    if isinstance(A, LinearOperator):
        return A
    if isinstance(A, Tensor):
        if A.ndim != 2 or A.dtype not in NUMPY_DTYPE:
            raise ValueError(f"Got a {A.dtype} tensor of shape {tuple(A.shape)}, expected a real matrix [M, N].")
        return Matrix(A.detach())
    if isinstance(A, (ScipyLinearOperator, np.ndarray)) or issparse(A):
        return Foreign(aslinearoperator(A))
    raise TypeError(
        f"Got {type(A).__name__}, expected a linear operator, or a matrix as a tensor, numpy array or scipy sparse array."
    )


def assume_symmetric(A: Any, seed: int = 0) -> LinearOperator:
    """Return an operator that says it is symmetric, for estimators that need to hear it.

    One random pair ``u, v`` must satisfy ``u'Av = v'Au`` up to rounding; this costs two products.

    Args:
        A: An operator whose matrix is symmetric although it does not say so, such as a product ``J @ J.T``.
        seed: Seed of the pair.
    """
    op = as_operator(A)
    if op.symmetric:
        return op
    op._require_square("A symmetric operator")
    products = Operand(op)
    V = products.probes("normal", seed, (0,), 0, 2)
    AV = products(V).double()
    a, b = (V.flip(0).double() * AV).sum(1)
    if not (a - b).abs() <= torch.finfo(op.torch_dtype).eps ** _ASYMMETRY * AV.norm(dim=1).max():
        raise ValueError(
            f"Found {a:.6g} for u'Av and {b:.6g} for v'Au of a random pair: {op!r} is not symmetric. "
            "Use `A.T @ A`, or the symmetric part `(A + A.T) / 2` with `assume_symmetric`."
        )
    return AssumedSymmetric(op)


class Operand:
    """Products of an operator with rows, counted and checked; vectors are rows ``[K, N]`` in float32 or better.

    Args:
        A: What the user gave.
        symmetric: Whether the caller needs a symmetric operator.
        square: Whether it needs a square one.
    """

    def __init__(self, A: Any, *, symmetric: str = "", square: str = ""):
        self.op, self.count = as_operator(A), 0
        if symmetric or square:
            self.op._require_square(symmetric or square)
        if symmetric and isinstance(self.op, Foreign):
            self.op, self.count = assume_symmetric(self.op), 2
        if symmetric and not self.op.symmetric:
            raise ValueError(
                f"{symmetric} needs a symmetric operator, and {self.op!r} does not say it is one. If its matrix is "
                "symmetric, say so with `curvops.estimators.assume_symmetric(A)`; else use `A.T @ A` or its symmetric part."
            )
        if min(self.op.shape) == 0:
            raise ValueError(f"Got {self.op!r}, expected an operator with at least one row and one column.")
        self.M, self.N = self.op.shape
        self.dtype, self.device = accumulation_dtype(self.op.torch_dtype), self.op.device

    def __call__(self, V: Tensor) -> Tensor:
        """Return rows ``A v``."""
        return self._multiply(self.op, V)

    def adjoint(self, V: Tensor) -> Tensor:
        """Return rows ``A' v``."""
        return self._multiply(self.op._adjoint(), V)

    def _multiply(self, op: LinearOperator, V: Tensor) -> Tensor:
        self.count += len(V)
        if len(V) == 0:
            return V.new_zeros(0, op.shape[0])
        size = self.chunk()
        parts = [op._rows(v.to(op.torch_dtype)).detach().to(self.dtype) for v in V.split(size)]
        Y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not torch.isfinite(Y.sum()) and not torch.isfinite(Y).all():
            raise ValueError(
                f"Found {int((~torch.isfinite(Y)).sum())} non-finite entries in products with {op!r}; check the data, the "
                "model and the loss."
            )
        return Y

    def chunk(self) -> int:
        """Return how many vectors are multiplied at once."""
        return max(1, min(_VECTORS, _ENTRIES // max(self.M, self.N)))

    def eye(self, n: int) -> Iterator[Tensor]:
        """Yield unit vectors of length ``n`` as rows, a chunk at a time."""
        for start in range(0, n, size := self.chunk()):
            E = torch.zeros(min(size, n - start), n, dtype=self.dtype, device=self.device)
            E.diagonal(start).fill_(1.0)
            yield E

    def probes(self, distribution: str, seed: int, stream: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Return random rows ``[stop - start, N]``: functions of the seed and their index, however many come at once."""
        kinds = {"rademacher": _random.signs, "normal": _random.normal, "sphere": _random.normal}
        entries = torch.arange(self.N, device=self.device)
        V = torch.empty(stop - start, self.N, dtype=self.dtype, device=self.device)
        step = max(1, (_ENTRIES >> 5) // self.N)
        for at in range(start, stop, step):
            index = torch.arange(at, min(at + step, stop), device=self.device)[:, None]
            V[at - start : at - start + len(index)] = kinds[distribution](seed, *stream, index, entries)
        return V * (self.N**0.5 / V.norm(dim=1, keepdim=True)) if distribution == "sphere" else V


def check_distribution(distribution: str, allowed: tuple[str, ...] = ("rademacher", "normal", "sphere")) -> str:
    """Return the name of a distribution, or raise listing those there are."""
    if distribution not in allowed:
        raise ValueError(f"Got distribution={distribution!r}, expected one of {allowed}.")
    return distribution


def check_count(n: Any, what: str, least: int = 1) -> int:
    """Return a count as an int, or raise."""
    if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < least:
        raise ValueError(f"Got {what}={n!r}, expected an integer >= {least}.")
    return int(n)
