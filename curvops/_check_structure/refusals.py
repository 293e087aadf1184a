"""What structured matrices must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from curvops._check_structure.compare import F64, refused, same
from curvops.structured.dense_matrix import DenseMatrix
from curvops.structured.diagonal_matrix import DiagonalMatrix
from curvops.structured.matrix import StructuredMatrix


def check_refusals(A: Any, draw: Callable) -> None:
    """Offer other classes, shapes, dtypes and devices to every operation."""
    cls, dim, batch, dtype = type(A), A.dim, A.batch, A.torch_dtype
    other = F64 if dtype != F64 else torch.float32
    another: type[StructuredMatrix] = DenseMatrix if cls is DiagonalMatrix else DiagonalMatrix
    X = draw(*batch, dim, 2)
    strangers = {
        "a larger one": (ValueError, cls.zeros(dim + 1, batch=batch, dtype=dtype)),
        "another batch": (ValueError, cls.zeros(dim, batch=(*batch, 2), dtype=dtype)),
        "another dtype": (TypeError, cls.zeros(dim, batch=batch, dtype=other)),
        "another device": (ValueError, cls.zeros(dim, batch=batch, dtype=dtype, device="meta")),
        "another class": (TypeError, another.zeros(dim, batch=batch, dtype=dtype)),
        "a tensor": (TypeError, X),
    }
    for what, (error, B) in strangers.items():
        refused(error, f"add {what}", A.add, B)
        refused(error, f"compose {what}", A.compose, B)
    columns = {
        "other rows": (ValueError, draw(*batch, dim + 1, 2)),
        "a vector": (ValueError, draw(dim)),
        "another batch": (ValueError, draw(*batch, 2, dim, 2)),
        "another dtype": (TypeError, X.to(other)),
        "integers": (TypeError, X.long()),
        "another device": (ValueError, X.to("meta")),
        "a list": (TypeError, [X]),
    }
    for what, (error, Y) in columns.items():
        for method in (A.times, A.adjoint_times, A.gram_through):
            refused(error, f"{method.__name__} of {what}", method, Y)
    if cls.congruence is StructuredMatrix.congruence:
        same(cls.MOMENT, "rows", "MOMENT of a class without congruence")
        refused(NotImplementedError, "congruence without rows", A.congruence, draw(*batch, dim, dim))
    else:
        U = draw(*batch, dim) if cls.MOMENT == "squares" else draw(*batch, dim, dim)
        refused(TypeError, "congruence of another dtype", A.congruence, U.to(other))
        refused(ValueError, "congruence of another shape", A.congruence, draw(*batch, 2, dim + 1))
    refused(ValueError, "a scalar of another shape", A.shift, torch.ones(*batch, 7))
    refused(ValueError, "alpha of another shape", A.add, A, torch.ones(*batch, 7))
    refused(ValueError, "from_dense of no square", cls.from_dense, draw(dim, dim + 1))
    refused(TypeError, "from_dense of integers", cls.from_dense, torch.ones(dim, dim, dtype=torch.int64))
    refused(ValueError, "a negative dimension", cls.zeros, -1)
    tensors = A.named_tensors()
    name = next(iter(tensors))
    refused(ValueError, "a missing tensor", A.with_tensors, {n: t for n, t in tensors.items() if n != name})
    refused(ValueError, "an unknown tensor", A.with_tensors, {**tensors, "unknown": X})
    refused(ValueError, "a tensor of another shape", A.with_tensors, {**tensors, name: torch.zeros((), dtype=dtype)})
    if len(tensors) > 1:
        wrong = {**tensors, name: tensors[name].to("meta")}
        refused(ValueError, "tensors on two devices", A.with_tensors, wrong)
