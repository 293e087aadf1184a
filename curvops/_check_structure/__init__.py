"""Conformance of structured matrices: projection law, closure, dense twins, batches, copies, refusals."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops._check_structure.compare import F64, close, same
from curvops._check_structure.copies import check_copies
from curvops._check_structure.operations import check_products, check_queries, check_tensors, matrices
from curvops._check_structure.projection import basis as basis
from curvops._check_structure.projection import check_projection as check_projection
from curvops._check_structure.refusals import check_refusals
from curvops.structured.matrix import StructuredMatrix

#: Errors that rounding explains, relative to the largest entry that a result could have.
_RTOL = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check_structure(
    cls: type[StructuredMatrix],
    dim: int,
    *,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = F64,
    rtol: float | None = None,
    seed: int = 0,
) -> None:
    """Check that a class of structured matrices keeps the contract in one dimension.

    Elements are products of random elements, so not symmetric. Results are compared with dense arithmetic in float64.

    Args:
        cls: The class.
        dim: Dimension of the matrices.
        batch: Batch axes.
        dtype: Dtype of the tensors.
        rtol: Tolerance, relative to the size of the result; by default what rounding explains.
        seed: Seed of the elements (the global generators are not touched).

    Raises:
        AssertionError: Naming the operation that failed.
    """
    rtol = _RTOL[dtype] if rtol is None else rtol
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    if dtype == F64:
        check_projection(cls, dim, rtol=rtol, seed=seed)
    A, B = (element(cls, dim, batch, dtype, generator) for _ in range(2))
    for text, found, expected, size in matrices(A, B, draw):
        assert type(found) is cls, f"{text} left the class: {type(found).__name__}"
        same(
            (found.dim, found.batch, found.torch_dtype, found.device), (dim, batch, dtype, A.device), f"place of {text}"
        )
        check_tensors(found, text)
        close(found.to_dense_blocks(), expected, size, rtol, text)
    check_queries(A, rtol)
    check_products(A, draw, rtol)
    check_copies(A)
    check_refusals(A, draw)


def element(
    cls: type[StructuredMatrix], dim: int, batch: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> StructuredMatrix:
    """Return the product of two random elements, scaled to entries of about one."""

    def drawn() -> StructuredMatrix:
        zeros = cls.zeros(dim, batch=batch, dtype=dtype)
        return zeros._map(lambda t: torch.randn(t.shape, generator=generator, dtype=F64).to(t.dtype))

    return drawn().compose(drawn()) * (1 / max(dim, 1) ** 0.5)
