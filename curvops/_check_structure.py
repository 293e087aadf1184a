"""Conformance of structured matrices: projection law, closure, dense twins, batches, copies, refusals."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from curvops.structured.dense_matrix import DenseMatrix
from curvops.structured.diagonal_matrix import DiagonalMatrix
from curvops.structured.matrix import StructuredMatrix

F64 = torch.float64
#: Errors that rounding explains, relative to the largest entry that a result could have.
_RTOL = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Classes of so few tensors are compared with the least squares solution of least norm, too.
_FEW = 100


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
    for text, found, expected, size in _matrices(A, B, draw):
        assert type(found) is cls, f"{text} left the class: {type(found).__name__}"
        _same(
            (found.dim, found.batch, found.torch_dtype, found.device), (dim, batch, dtype, A.device), f"place of {text}"
        )
        check_tensors(found, text)
        _close(found.to_dense_blocks(), expected, size, rtol, text)
    _check_queries(A, rtol)
    _check_products(A, draw, rtol)
    _check_copies(A)
    _check_refusals(A, draw)


def element(
    cls: type[StructuredMatrix], dim: int, batch: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> StructuredMatrix:
    """Return the product of two random elements, scaled to entries of about one."""

    def drawn() -> StructuredMatrix:
        zeros = cls.zeros(dim, batch=batch, dtype=dtype)
        return zeros._map(lambda t: torch.randn(t.shape, generator=generator, dtype=F64).to(t.dtype))

    return drawn().compose(drawn()) * (1 / max(dim, 1) ** 0.5)


def check_projection(cls: type[StructuredMatrix], dim: int, *, rtol: float = 1e-12, seed: int = 0) -> None:
    """Check the projection law: the symmetric part of ``Π(S)`` is the projection of ``S`` onto symmetric parts.

    That is so if and only if what it leaves of ``S`` is orthogonal to the symmetric part of every basis element. Of all such
    elements ``Π(S)`` is the one of least norm: small classes are compared with the pseudoinverse.
    """
    S = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
    S = S + S.mT
    before = S.clone()
    found = cls.from_dense(S)
    m = found.to_dense_blocks()
    elements = basis(cls, dim)
    symmetric = (elements + elements.mT) / 2
    left = S - (m + m.mT) / 2
    inner = symmetric.flatten(1) @ left.flatten()
    _close(inner, torch.zeros_like(inner), S.norm().reshape(1), rtol, "projection law: what from_dense(S) leaves of S")
    if len(elements) <= _FEW:
        weights = elements.flatten(1).norm(dim=1).clamp(min=1e-300)
        theta = torch.linalg.pinv((symmetric.flatten(1) / weights[:, None]).T) @ S.flatten() / weights
        expected = (theta @ elements.flatten(1)).reshape(dim, dim)
        _close(m, expected, S, rtol, "from_dense(S) against least squares")
    for t in found.named_tensors().values():
        t.add_(1.0)
    assert torch.equal(S, before), "from_dense shares memory with its argument"


def basis(cls: type[StructuredMatrix], dim: int) -> Tensor:
    """Return what one unit in each stored number adds to the zero matrix, ``[numbers, dim, dim]``."""
    zeros = cls.zeros(dim, dtype=F64)
    tensors = zeros.named_tensors()
    total = sum(t.numel() for t in tensors.values())
    stacked, start = {}, 0
    for name, t in tensors.items():
        units = torch.zeros(total, t.numel(), dtype=t.dtype)
        units[start : start + t.numel()].fill_diagonal_(1.0)
        stacked[name] = units.reshape(total, *t.shape) + t
        start += t.numel()
    return cls.from_tensors(stacked).to_dense_blocks() - zeros.to_dense_blocks()


def check_tensors(M: StructuredMatrix, text: str) -> None:
    """Check that tensors can be reduced in place, and that saving them saves nothing else."""
    for name, t in M.named_tensors().items():
        assert t.is_contiguous(), f"{name} of {text} is not contiguous"
        _same(t.untyped_storage().nbytes(), t.numel() * t.element_size(), f"bytes of the storage of {name} of {text}")


def _matrices(A: Any, B: Any, draw: Callable) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
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


def _check_queries(A: StructuredMatrix, rtol: float) -> None:
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
        _same(found.dtype, wide, f"dtype of {text}")
        _close(found, expected, size, rtol, text)
    _close(A.diagonals(), diagonals, diagonals, rtol, "diagonals")
    _close(A.diagonal(), diagonals.flatten(), diagonals, rtol, "diagonal")
    _close(A.to_dense(), torch.block_diag(*M.reshape(members, A.dim, A.dim)), M, rtol, "to_dense")


def _check_products(A: StructuredMatrix, draw: Callable, rtol: float) -> None:
    """Multiply blocks of columns, and vectors as every operator does; members of a batch do not mix."""
    members = prod(A.batch)
    M, X = A.to_dense_blocks().double(), draw(*A.batch, A.dim, 3)
    W = X.double()
    _close(A.times(X), M @ W, M.abs() @ W.abs(), rtol, "times")
    _close(A.adjoint_times(X), M.mT @ W, M.mT.abs() @ W.abs(), rtol, "adjoint_times")
    _same((A.times(X).dtype, A.adjoint_times(X).dtype), (X.dtype, X.dtype), "dtype of times and adjoint_times")
    for text, op, N in (("@", A, M), (".T @", A.T, M.mT)):
        (found,) = op @ [X]
        _close(found, N @ W, N.abs() @ W.abs(), rtol, text)
        _close(op @ X[..., 0].flatten(), (N @ W)[..., 0].flatten(), N.abs() @ W.abs(), rtol, f"{text} a vector")
    flat = A._map(lambda t: t.flatten(0, len(A.batch) - 1) if A.batch else t.unsqueeze(0))
    for k, (x, dense) in enumerate(zip(X.reshape(members, A.dim, 3), M.reshape(members, A.dim, A.dim), strict=True)):
        one = flat._map(itemgetter(k))
        _same(one.batch, (), "batch of a member")
        _close(one.to_dense_blocks(), dense, dense, rtol, "a member of the batch")
        _close(
            one.times(x),
            (M @ W).reshape(members, A.dim, 3)[k],
            dense.abs() @ x.double().abs(),
            rtol,
            "times of a member",
        )
        through = A.gram_through(X).to_dense_blocks().reshape(members, A.dim, A.dim)[k]
        size = dense.mT.abs() @ x.double().abs() @ x.double().mT.abs() @ dense.abs()
        _close(one.gram_through(x).to_dense_blocks(), through.double(), 2 * size, rtol, "gram_through of a member")


def _check_copies(A: StructuredMatrix) -> None:
    """Rebuild the matrix from its tensors, by pickle, deepcopy, and a file that holds nothing but tensors."""
    buffer = io.BytesIO()
    torch.save(A.named_tensors(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    copies = {
        "tensors from a file": type(A).from_tensors(state),
        "with_tensors of zeros": type(A).zeros(A.dim, batch=A.batch, dtype=A.torch_dtype).with_tensors(state),
        "a pickled copy": pickle.loads(pickle.dumps(A)),
        "a deep copy": copy.deepcopy(A),
        "a clone": A._map(torch.clone),
    }
    for text, found in copies.items():
        assert type(found) is type(A), f"{text} is a {type(found).__name__}"
        _same((found.domain, found.torch_dtype), (A.domain, A.torch_dtype), f"domain and dtype of {text}")
        assert torch.equal(found.to_dense_blocks(), A.to_dense_blocks()), f"{text} differs"
        assert not any(
            t.numel() and t.data_ptr() == s.data_ptr()
            for t, s in zip(found.named_tensors().values(), A.named_tensors().values(), strict=True)
        ), f"{text} shares memory"
    stacked = A.with_tensors({n: torch.stack([t, t]) for n, t in A.named_tensors().items()})
    _same(stacked.batch, (2, *A.batch), "batch of a stack")
    _same(type(A.to(dtype=torch.float32)), type(A), "class of op.to(dtype)")
    _same(A.to(dtype=torch.float32).torch_dtype, torch.float32, "dtype of op.to(dtype)")


def _check_refusals(A: Any, draw: Callable) -> None:
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
        _refused(error, f"add {what}", A.add, B)
        _refused(error, f"compose {what}", A.compose, B)
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
            _refused(error, f"{method.__name__} of {what}", method, Y)
    if cls.congruence is StructuredMatrix.congruence:
        _same(cls.MOMENT, "rows", "MOMENT of a class without congruence")
        _refused(NotImplementedError, "congruence without rows", A.congruence, draw(*batch, dim, dim))
    else:
        U = draw(*batch, dim) if cls.MOMENT == "squares" else draw(*batch, dim, dim)
        _refused(TypeError, "congruence of another dtype", A.congruence, U.to(other))
        _refused(ValueError, "congruence of another shape", A.congruence, draw(*batch, 2, dim + 1))
    _refused(ValueError, "a scalar of another shape", A.shift, torch.ones(*batch, 7))
    _refused(ValueError, "alpha of another shape", A.add, A, torch.ones(*batch, 7))
    _refused(ValueError, "from_dense of no square", cls.from_dense, draw(dim, dim + 1))
    _refused(TypeError, "from_dense of integers", cls.from_dense, torch.ones(dim, dim, dtype=torch.int64))
    _refused(ValueError, "a negative dimension", cls.zeros, -1)
    tensors = A.named_tensors()
    name = next(iter(tensors))
    _refused(ValueError, "a missing tensor", A.with_tensors, {n: t for n, t in tensors.items() if n != name})
    _refused(ValueError, "an unknown tensor", A.with_tensors, {**tensors, "unknown": X})
    _refused(ValueError, "a tensor of another shape", A.with_tensors, {**tensors, name: torch.zeros((), dtype=dtype)})
    if len(tensors) > 1:
        wrong = {**tensors, name: tensors[name].to("meta")}
        _refused(ValueError, "tensors on two devices", A.with_tensors, wrong)


def _refused(error: type[Exception], what: str, ask: Callable, *arguments: Any) -> None:
    try:
        ask(*arguments)
    except error as refusal:
        reason = str(refusal)
    else:
        raise AssertionError(f"{what} is accepted")
    assert len(reason) > 20, f"{what} is refused without a reason: {reason!r}"


def _same(found: Any, expected: Any, what: str) -> None:
    assert found == expected, f"{what}: found {found}, expected {expected}"


def _close(found: Tensor, expected: Tensor, size: Tensor, rtol: float, what: str) -> None:
    """Compare up to ``rtol`` times the largest entry of ``size``."""
    found = found.detach().cpu().double()
    _same(tuple(found.shape), tuple(expected.shape), f"shape of {what}")
    if found.numel() == 0:
        return
    largest = size.abs().max().item() if size.numel() else 0.0
    error, allowed = (found - expected).abs().max().item(), rtol * max(largest, 1e-300)
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"
