"""Operations of structured matrices against dense arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from curvops._check_structure.compare import F64, close, same
from curvops.structured.matrix import StructuredMatrix


def matrices(A: Any, B: Any, draw: Callable) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """Yield operations with a result in the class, what it should be, and how large it could be."""
    cls, dim, batch, dtype = type(A), A.dim, A.batch, A.torch_dtype
    M, N = A.to_dense_blocks().double(), B.to_dense_blocks().double()
    eye = torch.eye(dim, dtype=F64).expand(*batch, dim, dim)
    few, many = draw(*batch, dim, 3), draw(*batch, dim, 2 * dim + 3)
    S = draw(*batch, dim, dim)
    S = (S + S.mT).to(dtype)
    c = draw(*batch).to(torch.promote_types(dtype, torch.float32))
    C, one = c.double()[..., None, None], c.flatten()[:1].sum()

    def projected(T: Tensor) -> Tensor:
        return cls.from_dense(T).to_dense_blocks()

    def gram(T: Tensor) -> Tensor:
        return projected(T @ T.mT)

    def sizes(*Ts: Tensor) -> Tensor:
        product = Ts[0].abs().double()
        for T in Ts[1:]:
            product = product @ T.abs().double()
        return 2 * product

    yield "zeros", cls.zeros(dim, batch=batch, dtype=dtype), 0 * eye, eye
    yield "eye", cls.eye(dim, batch=batch, dtype=dtype), eye, eye
    yield "from_dense", cls.from_dense(S), projected(S.double()), 2 * S
    yield "compose", A.compose(B), M @ N, sizes(M, N)
    yield "A @ B @ A", A @ B @ A, M @ N @ M, sizes(M, N, M)
    yield "self_gram", A.self_gram(), projected(M.mT @ M), sizes(M.mT, M)
    for X in (few, many):
        W = X.double()
        yield "gram", cls.gram(X), gram(W), sizes(X, X.mT)
        yield "gram_through", A.gram_through(X), gram(M.mT @ W), sizes(M.mT, X, X.mT, M)
        transposed = X.mT.contiguous().mT
        yield "gram of transposed rows", cls.gram(transposed), gram(W), sizes(X, X.mT)
    if cls.congruence is not StructuredMatrix.congruence:
        U = S.diagonal(dim1=-2, dim2=-1) if cls.MOMENT == "squares" else S
        yield "congruence", A.congruence(U.clone()), projected(M.mT @ S.double() @ M), sizes(M.mT, S, M)
    yield "A + B", A + B, M + N, M.abs() + N.abs()
    yield "A - B", A - B, M - N, M.abs() + N.abs()
    yield "add with a number", A.add(B, -0.3), M - 0.3 * N, M.abs() + N.abs()
    yield "add with tensors", A.add(B, c), M + C * N, M.abs() + (C * N).abs()
    yield "add with one tensor", A.add(B, one), M + one.double() * N, M.abs() + (one.double() * N).abs()
    yield "2 * A", 2 * A, 2 * M, 2 * M
    yield "-A / 3", -A / 3, -M / 3, M
    yield "A * tensor", A * c, C * M, C * M
    yield "tensor * A", c * A, C * M, C * M
    yield "A / tensor", A / c, M / C, M / C
    yield "scale", A.scale(c), C * M, C * M
    yield "shift by a number", A.shift(-0.5), M - 0.5 * eye, M.abs() + eye
    yield "shift by tensors", A.shift(c), M + C * eye, M.abs() + (C * eye).abs()
    yield "with_tensors", A.with_tensors(B.named_tensors()), N, N


def check_queries(A: StructuredMatrix, rtol: float) -> None:
    """Ask for traces, norms, diagonals and the dense matrix."""
    members = prod(A.batch)
    M, wide, nb = A.to_dense_blocks().double(), torch.promote_types(A.torch_dtype, torch.float32), len(A.batch)
    diagonals = M.diagonal(dim1=-2, dim2=-1)
    stored = torch.stack([M.abs().flatten(nb).amax(-1)] if A.dim else [M.new_zeros(A.batch)]).amax(0)
    norms = M.flatten(nb).norm(dim=-1)
    total = diagonals.abs().sum(-1)
    for text, found, expected, size in (
        ("traces", A.traces(), diagonals.sum(-1), total),
        ("mean_trace", A.mean_trace(), diagonals.sum(-1) / max(A.dim, 1), total / max(A.dim, 1)),
        ("frobenius_norms", A.frobenius_norms(), norms, norms),
        ("max_abs", A.max_abs(), stored, stored),
        ("trace", A.trace(), diagonals.sum(), total),
        ("frobenius_norm", A.frobenius_norm(), norms.norm(), norms),
    ):
        same(found.dtype, wide, f"dtype of {text}")
        close(found, expected, size, rtol, text)
    close(A.diagonals(), diagonals, diagonals, rtol, "diagonals")
    close(A.diagonal(), diagonals.flatten(), diagonals, rtol, "diagonal")
    close(A.to_dense(), torch.block_diag(*M.reshape(members, A.dim, A.dim)), M, rtol, "to_dense")


def check_products(A: StructuredMatrix, draw: Callable, rtol: float) -> None:
    """Multiply blocks of columns, and vectors as every operator does; members of a batch do not mix."""
    members = prod(A.batch)
    M, X = A.to_dense_blocks().double(), draw(*A.batch, A.dim, 3)
    W = X.double()
    close(A.times(X), M @ W, M.abs() @ W.abs(), rtol, "times")
    close(A.adjoint_times(X), M.mT @ W, M.mT.abs() @ W.abs(), rtol, "adjoint_times")
    same((A.times(X).dtype, A.adjoint_times(X).dtype), (X.dtype, X.dtype), "dtype of times and adjoint_times")
    for text, op, N in (("@", A, M), (".T @", A.T, M.mT)):
        (found,) = op @ [X]
        close(found, N @ W, N.abs() @ W.abs(), rtol, text)
        close(op @ X[..., 0].flatten(), (N @ W)[..., 0].flatten(), N.abs() @ W.abs(), rtol, f"{text} a vector")
    flat = A._map(lambda t: t.flatten(0, len(A.batch) - 1) if A.batch else t.unsqueeze(0))
    for k, (x, dense) in enumerate(zip(X.reshape(members, A.dim, 3), M.reshape(members, A.dim, A.dim), strict=True)):
        one = flat._map(itemgetter(k))
        same(one.batch, (), "batch of a member")
        close(one.to_dense_blocks(), dense, dense, rtol, "a member of the batch")
        close(
            one.times(x),
            (M @ W).reshape(members, A.dim, 3)[k],
            dense.abs() @ x.double().abs(),
            rtol,
            "times of a member",
        )
        through = A.gram_through(X).to_dense_blocks().reshape(members, A.dim, A.dim)[k]
        size = dense.mT.abs() @ x.double().abs() @ x.double().mT.abs() @ dense.abs()
        close(one.gram_through(x).to_dense_blocks(), through.double(), 2 * size, rtol, "gram_through of a member")


def check_tensors(M: StructuredMatrix, text: str) -> None:
    """Check that tensors can be reduced in place, and that saving them saves nothing else."""
    for name, t in M.named_tensors().items():
        assert t.is_contiguous(), f"{name} of {text} is not contiguous"
        same(t.untyped_storage().nbytes(), t.numel() * t.element_size(), f"bytes of the storage of {name} of {text}")
