"""The factors of an operator as users read them: by parameter name, with named roles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvops._operator import LinearOperator
from curvops.structured.direct_sum import Part
from curvops.structured.kronecker import Kronecker


@dataclass(frozen=True, eq=False)
class BlockFactors:
    """One block: ``output ⊗ input`` in row-major ``vec(W)``, or another kind of matrix.

    Attributes:
        kind: ``"kronecker"``, ``"eigen"`` (Kronecker factors whose eigenvalues are corrected), ``"dense"``, ``"diagonal"`` or
            ``"zero"``.
        input: Input factor ``A [d_in, d_in]``, with groups ``[G, d_in, d_in]``; ``None`` for a bias alone and for other kinds.
            The bias of a joint block is the last row and column.
        output: Output factor ``B [d_out, d_out]``, with groups ``[G, d_out, d_out]``; ``None`` for other kinds.
        names: Parameters in the block.
        operator: The block as an operator on its canonical form ``[G, d_out, d_in]``.
    """

    kind: str
    input: Tensor | None
    output: Tensor | None
    names: tuple[str, ...]
    operator: LinearOperator

    @property
    def dense(self) -> Tensor:
        """The block as a matrix on its canonical form."""
        return self.operator.to_dense()


def factors_of(part: Part, pair: tuple[Tensor, Tensor | None] | None = None) -> BlockFactors:
    """Read the factors of a part; the tensors are the operator's own.

    Args:
        part: The part.
        pair: ``(B, A)``, where the part's operator does not hold them.
    """
    op, names = part.operator, part.placement.names
    if isinstance(op, Kronecker):
        return BlockFactors("kronecker", _ungrouped(op.A), _ungrouped(op.B), names, op)
    if pair is not None:
        return BlockFactors("eigen", _ungrouped(pair[1]), _ungrouped(pair[0]), names, op)
    kind = type(op).__name__.lower()
    if kind == "diagonal" and not torch.count_nonzero(op.diagonal()):
        kind = "zero"
    return BlockFactors(kind, None, None, names, op)


def _ungrouped(factor: Tensor | None) -> Tensor | None:
    return factor.squeeze(0) if factor is not None and len(factor) == 1 else factor
