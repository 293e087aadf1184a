"""Block-triangular matrices made of two structured blocks and one free one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from curvops.structured._batched import mm, plus_mm
from curvops.structured.dense_matrix import DenseMatrix
from curvops.structured.diagonal_matrix import DiagonalMatrix
from curvops.structured.matrix import StructuredMatrix
from curvops.structured.stored import frame_of

#: So many numbers are cheaper to multiply than to look at first.
FEW = 2**17


class BlockTriangularMatrix(StructuredMatrix):
    """``[[A, B], [0, C]]``, or ``[[A, 0], [B, C]]``, with structured ``A`` and ``C`` and any ``B``; ``Π`` doubles ``B``.

    Subclasses say how large ``A`` and ``C`` may be, and of which class they are. One size is a number, the other one
    ``math.inf``; what is too small to fill the first has nothing of the second.

    Args:
        A: The upper left block.
        B: The free block: ``[*batch, dim A, dim C]`` right of ``A``, or ``[*batch, dim C, dim A]`` below.
        C: The lower right block.
    """

    TENSORS = ("B",)
    PARTS = ("A", "C")
    #: Whether ``B`` is right of ``A`` or below it.
    UPPER: ClassVar[bool]
    MAX_DIMS: ClassVar[tuple[float, float]]
    A: StructuredMatrix
    B: Tensor
    C: StructuredMatrix
    #: Whether ``Π(M' S M)`` is a function of ``Π(S)``: what has ``B`` in its rows must be dense.
    PROJECTS: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "MAX_DIMS" in cls.__dict__ or "SUBSTRUCTURES" in cls.__dict__:
            _check_template(cls)
            above, beside = cls.SUBSTRUCTURES if cls.UPPER else reversed(cls.SUBSTRUCTURES)
            cls.PROJECTS = above is DenseMatrix and (
                beside in (DenseMatrix, DiagonalMatrix) or getattr(beside, "PROJECTS", False)
            )

    def __init__(self, A: StructuredMatrix, B: Tensor, C: StructuredMatrix):
        for name, part, expected in zip("AC", (A, C), self.SUBSTRUCTURES, strict=True):
            if type(part) is not expected:
                raise TypeError(f"Got a {type(part).__name__} as {name}, expected a {expected.__name__}.")
        if A.batch != C.batch or self._dims(A.dim + C.dim) != (A.dim, C.dim):
            raise ValueError(
                f"Got A of dimension {A.dim} and batch {A.batch}, and C of {C.dim} and {C.batch}, expected the same batch "
                f"and dimensions {self._dims(A.dim + C.dim)}."
            )
        if not isinstance(B, Tensor):
            raise TypeError(f"Got {type(B).__name__} as B, expected a tensor.")
        for name, part in (("A", A), ("C", C)):
            part._check_place(B.dtype, B.device, f"B, next to {name},")
        self._hold(A.dim + C.dim, A.batch, B=B)
        self.A, self.C = A, C

    @classmethod
    def _dims(cls, dim: int) -> tuple[int, int]:
        """Return the dimensions of ``A`` and ``C``."""
        first, second = cls.MAX_DIMS
        if math.isinf(second):
            p = min(dim, int(first))
            return p, dim - p
        q = min(dim, int(second))
        return dim - q, q

    def _lay_out(self, dim: int, batch: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super()._lay_out(dim, batch, dtype, device)
        for name, sub, size in zip(self.PARTS, self.SUBSTRUCTURES, self._dims(dim), strict=True):
            setattr(self, name, frame_of(sub, size, batch, dtype, device))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"B": (self._above.dim, self._beside.dim)}

    # B lies in the rows of one part and in the columns of the other: seen so, both triangles are one case.
    @property
    def _above(self) -> Any:
        """The part in whose rows ``B`` lies."""
        return self.A if self.UPPER else self.C

    @property
    def _beside(self) -> Any:
        """The part in whose columns ``B`` lies."""
        return self.C if self.UPPER else self.A

    def _of(self, above: StructuredMatrix, B: Tensor, beside: StructuredMatrix) -> BlockTriangularMatrix:
        return self._like(A=above if self.UPPER else beside, B=B, C=beside if self.UPPER else above)

    def _cut(self, X: Tensor, axis: int = -2) -> tuple[Tensor, Tensor]:
        """Return the entries of ``X`` that belong to the rows of ``B``, and those that belong to its columns."""
        first, second = X.split((self.A.dim, self.C.dim), axis)
        return (first, second) if self.UPPER else (second, first)

    def _join(self, above: Tensor, beside: Tensor) -> Tensor:
        return torch.cat((above, beside) if self.UPPER else (beside, above), -2)

    def _times(self, X: Tensor) -> Tensor:
        above, beside = self._cut(X)
        return self._join(plus_mm(self._above._times(above), self.B, beside), self._beside._times(beside))

    def _adjoint_times(self, X: Tensor) -> Tensor:
        above, beside = self._cut(X)
        Y = plus_mm(self._beside._adjoint_times(beside), self.B.mT, above)
        return self._join(self._above._adjoint_times(above), Y)

    def _times_matrix(self, other: Any) -> BlockTriangularMatrix:
        right = other._beside._adjoint_times(self.B.mT).mT
        return self._of(
            self._above._times_matrix(other._above),
            self._above._times(other.B) + right,
            self._beside._times_matrix(other._beside),
        )

    def _project(self, S: Tensor) -> BlockTriangularMatrix:
        above, beside = self._cut(S)
        (aa, ab), (_, bb) = self._cut(above, -1), self._cut(beside, -1)
        return self._of(self._above._project(aa), ab * 2, self._beside._project(bb))

    def _gram(self, X: Tensor) -> BlockTriangularMatrix:
        above, beside = self._cut(X)
        return self._of(self._above._gram(above), mm(above, beside.mT).mul_(2), self._beside._gram(beside))

    def _gram_through(self, X: Tensor) -> BlockTriangularMatrix:
        # Reading X twice, not making others of its size, is three to six times faster for d = 289 and n = 8192.
        if self.PROJECTS and X.numel() > FEW:
            return self._congruent(self._gram(X))
        return self._gram(self._adjoint_times(X))

    def _congruent(self, S: Any) -> BlockTriangularMatrix:
        """Return ``Π(M' S M)``, given ``Π(S)``."""
        right = self._beside._adjoint_times(S.B.mT / 2).mT
        left = mm(S._above.M, self.B)
        beside = self._beside._congruent(S._beside)
        more = self._beside._symmetric(self.B.mT, (left / 2 + right).mT)
        return self._of(
            self._above._congruent(S._above),
            self._above._adjoint_times(left + right).mul_(2),
            beside._from(torch.add, beside, more),
        )

    def _symmetric(self, P: Tensor, Q: Tensor) -> BlockTriangularMatrix:
        """Return ``Π(P Q' + Q P')``."""
        (pa, pb), (qa, qb) = self._cut(P), self._cut(Q)
        B = plus_mm(mm(pa, qb.mT), qa, pb.mT).mul_(2)
        return self._of(self._above._symmetric(pa, qa), B, self._beside._symmetric(pb, qb))

    def _self_gram(self) -> BlockTriangularMatrix:
        beside = self._beside._gram(self.B.mT)
        beside = beside._from(torch.add, beside, self._beside._self_gram())
        return self._of(self._above._self_gram(), self._above._adjoint_times(self.B).mul_(2), beside)

    def _shifted(self, c: float | Tensor) -> BlockTriangularMatrix:
        return self._like(A=self.A._shifted(c), C=self.C._shifted(c))

    def diagonals(self) -> Tensor:
        return torch.cat([self.A.diagonals(), self.C.diagonals()], -1)

    def traces(self) -> Tensor:
        return self.A.traces() + self.C.traces()

    def to_dense_blocks(self) -> Tensor:
        A, C = self.A.to_dense_blocks(), self.C.to_dense_blocks()
        dense = A.new_zeros(*self.batch, self.dim, self.dim)
        above, beside = self._cut(dense)
        self._cut(above, -1)[1].copy_(self.B)
        self._cut(above, -1)[0].copy_(A if self.UPPER else C)
        self._cut(beside, -1)[1].copy_(C if self.UPPER else A)
        return dense


def _check_template(cls: type[BlockTriangularMatrix]) -> None:
    """Refuse a template that does not say what its parts are."""
    sizes, parts = getattr(cls, "MAX_DIMS", ()), cls.SUBSTRUCTURES
    numbers = [s for s in sizes if isinstance(s, int) and s >= 0]
    if len(sizes) != 2 or len(numbers) != 1 or math.inf not in sizes:
        raise ValueError(
            f"Got MAX_DIMS = {sizes} in {cls.__name__}, expected an integer >= 0 and math.inf, in either order."
        )
    if len(parts) != 2 or not all(isinstance(p, type) and issubclass(p, StructuredMatrix) for p in parts):
        raise TypeError(f"Got SUBSTRUCTURES = {parts} in {cls.__name__}, expected two classes of structured matrices.")


class RecursiveTopRightMatrixTemplate(BlockTriangularMatrix):
    """``[[A, B], [0, C]]``; subclasses say ``MAX_DIMS`` and ``SUBSTRUCTURES``, of ``A`` and of ``C``."""

    UPPER = True


class RecursiveBottomLeftMatrixTemplate(BlockTriangularMatrix):
    """``[[A, 0], [B, C]]``; subclasses say ``MAX_DIMS`` and ``SUBSTRUCTURES``, of ``A`` and of ``C``."""

    UPPER = False
