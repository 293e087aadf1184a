"""Conformance suites that users can run on their own operators, too."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvops._check_structure import check_structure as check_structure
from curvops._operator import LinearOperator

#: Errors that rounding explains, relative to the largest entry that a product could have.
_RTOL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_operator(
    op: LinearOperator, dense: Tensor | None = None, *, rtol: float | None = None, seed: int = 0, copies: bool = True
) -> None:
    """Check that an operator keeps the contract: every form of vector, all algebra, queries, copies, refusals.

    Args:
        op: The operator.
        dense: The matrix it should be; by default what its own ``to_dense()`` says.
        rtol: Tolerance, relative to the size of the product; by default what rounding in the operator's dtype explains.
        seed: Seed of the vectors (the global generators are not touched).
        copies: Whether the operator should pickle, deepcopy, and go through ``torch.save``.

    Raises:
        AssertionError: Naming the expression and the form that failed.
    """
    M = (op.to_dense() if dense is None else torch.as_tensor(dense)).detach().cpu().double()
    rtol = _RTOL[op.torch_dtype] if rtol is None else rtol
    generator = torch.Generator().manual_seed(seed)
    _equal(tuple(M.shape), op.shape, "shape")
    assert isinstance(op, ScipyLinearOperator), "not a scipy LinearOperator"
    assert aslinearoperator(op) is op, "aslinearoperator should return the operator itself"
    for text, A, N in _expressions(op, M):
        assert isinstance(A, LinearOperator), f"{text} left torch: {type(A)}"
        _equal((A.torch_dtype, A.dtype, A.device), (op.torch_dtype, op.dtype, op.device), f"dtype or device of {text}")
        _check_products(text, A, N, rtol, generator)
        _check_adjoint(text, A, rtol, generator)
        _check_queries(text, A, N, rtol)
    _check_foreign(op, M, rtol, generator)
    _check_refusals(op, generator)
    if copies:
        for text, clone in _copies(op):
            _close(clone.to_dense(), M, M, rtol, f"to_dense of {text}")


def check_closed_forms(
    op: LinearOperator, dense: Tensor, *, rtol: float | None = None, singular: bool = False, seed: int = 0
) -> None:
    """Check every closed form of a symmetric positive semidefinite operator, of its shift, its double and its inverse.

    Args:
        op: The operator.
        dense: The matrix it should be.
        rtol: Tolerance, relative to the size of the result; by default what rounding in the operator's dtype explains.
        singular: Whether the matrix is singular; then ``logdet`` is ``-inf``, and inverses without damping are refused.
        seed: Seed of the samples (the global generators are not touched).

    Raises:
        AssertionError: Naming the closed form that failed.
    """
    M = torch.as_tensor(dense).detach().cpu().double()
    rtol = 10 * _RTOL[op.torch_dtype] if rtol is None else rtol
    damping = 0.1 * M.diagonal().mean().item() or 0.1
    eye = torch.eye(len(M), dtype=M.dtype)
    inverse = torch.linalg.inv(M + damping * eye)
    generator = torch.Generator(op.device).manual_seed(seed)
    _check_spectrum("op", op, M, rtol, generator, singular)
    _check_spectrum("op.shift", op.shift(damping), M + damping * eye, rtol, generator)
    double: Any = 2 * op
    _check_spectrum("2 * op", double, 2 * M, rtol, generator, singular)
    _check_spectrum("op.inverse", op.inverse(damping), inverse, rtol, generator)
    _check_spectrum("op.inverse.inverse", op.inverse(damping).inverse(), M + damping * eye, rtol, generator)
    if singular:
        _check_refused({"an inverse without damping": op.inverse, "a negative power": lambda: op.power(-0.5)})


def _check_spectrum(
    text: str, op: LinearOperator, M: Tensor, rtol: float, generator: torch.Generator, singular: bool = False
) -> None:
    values, Q = torch.linalg.eigh(M)
    values = values.clamp(min=0)
    half, minus = ((Q * values**p) @ Q.T for p in (1.5, -0.5))
    _check_queries(text, op, M, rtol)
    _close(op.eigenvalues(), values, values, rtol, f"eigenvalues of {text}")
    if singular:
        _equal((op.logdet().item(), op.det().item()), (-torch.inf, 0.0), f"logdet and det of singular {text}")
    else:
        logs = values.log()
        _close(op.logdet()[None], logs.sum()[None], logs.abs().sum()[None], rtol, f"logdet of {text}")
        det, limits = values.prod(), torch.finfo(op.torch_dtype)
        if limits.tiny < det < limits.max:
            _close(op.det()[None], det[None], det[None], rtol * len(M), f"det of {text}")
        _close(op.power(-0.5).to_dense(), minus, minus, rtol, f"power(-0.5) of {text}")
    _close(op.sqrt().to_dense() @ op.sqrt().to_dense(), M, M, rtol, f"sqrt of {text}")
    _close(op.power(1.5).to_dense(), half, half, rtol, f"power(1.5) of {text}")
    n = 4000
    samples = op.sample(n, generator)
    _equal((samples.dtype, samples.shape), (op.torch_dtype, (n, len(M))), f"dtype and shape of sample of {text}")
    samples = samples.cpu().double()
    error = torch.outer(M.diagonal(), M.diagonal()).add(M.square()).div(n).sqrt()
    excess = ((samples.T @ samples / n - M).abs() - rtol * M.abs().max() - 6 * error).max()
    assert excess <= 0, f"covariance of sample of {text}: off by more than six standard errors"


def _expressions(op: LinearOperator, M: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield expressions in the operator, and the same in its matrix."""
    yield "op", op, M
    yield "op.T", op.T, M.T
    yield "op.H", op.H, M.T
    yield "2 * op", 2 * op, 2 * M
    yield "op * numpy scalar", op * np.float64(0.5), M / 2
    yield "torch scalar * op", torch.tensor(3, device=op.device) * op, 3 * M
    yield "op / 3", op / 3, M / 3
    yield "-op", -op, -M
    yield "op + 2 * op", op + 2 * op, 3 * M
    yield "op - op / 4", op - op / 4, 0.75 * M
    yield "sum([op, op])", sum([op, op]), 2 * M
    yield "op.T @ op", op.T @ op, M.T @ M
    yield "(op @ op.T).T", (op @ op.T).T, M @ M.T
    if op.shape[0] == op.shape[1] and op.domain == op.range:
        eye = torch.eye(len(M), dtype=M.dtype)
        yield "op.shift(0.5)", op.shift(0.5), M + eye / 2
        yield "2 * op.shift(0.5).T - op", 2 * op.shift(0.5).T - op, 2 * M.T + eye - M
        yield "op ** 0", op**0, eye
        yield "op ** 3", op**3, M @ M @ M


def _check_products(text: str, op: LinearOperator, M: Tensor, rtol: float, generator: torch.Generator) -> None:
    """Multiply from both sides, in every form, by one vector and by several."""
    X, Y = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (M.shape[1], M.shape[0]))
    X, Y = (V.to(op.torch_dtype).double() for V in (X, Y))
    for form, ask in _forms(op.domain, op.domain_names, op.torch_dtype, op.device):
        for columns, V in (("a vector", X[:, 0]), ("columns", X)):
            question = ask(V, False)
            products = [("@", op @ question), ("dot", op.dot(question))]
            products += [("matvec", op.matvec(question))] if V.ndim == 1 else [("matmat", op.matmat(question))]
            for how, answer in products:
                what = f"{text} times {columns} as {form} ({how})"
                _same_form(question, answer, op.range_names, op, what)
                _close(_flat(answer, op.range, V.ndim == 2, False), M @ V, M.abs() @ V.abs(), rtol, what)
    for form, ask in _forms(op.range, op.range_names, op.torch_dtype, op.device):
        for columns, V in (("a vector", Y[:, 0]), ("rows", Y)):
            what = f"{columns} as {form} times {text}"
            answer = ask(V, True) @ op
            _close(_flat(answer, op.domain, V.ndim == 2, True), M.T @ V, M.T.abs() @ V.abs(), rtol, what)
            rmul = op.rmatvec if V.ndim == 1 else op.rmatmat
            answer = _flat(rmul(ask(V, False)), op.domain, V.ndim == 2, False)
            _close(answer, M.T @ V, M.T.abs() @ V.abs(), rtol, f"{text}: {rmul.__name__} of {columns} as {form}")


def _forms(shapes: Any, names: Any, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable]]:
    """Yield functions that bring a float64 ``[D]`` or ``[D, K]`` into a form, with leading or trailing columns."""

    def numpy(V: Tensor, leading: bool) -> np.ndarray:
        return (V.T if leading and V.ndim == 2 else V).numpy()

    def tensor(V: Tensor, leading: bool) -> Tensor:
        return (V.T if leading and V.ndim == 2 else V).to(device, dtype)

    def blocks(V: Tensor, leading: bool) -> list[Tensor]:
        parts = [v.reshape(*s, *V.shape[1:]) for v, s in zip(V.split([prod(s) for s in shapes]), shapes, strict=True)]
        parts = [v.movedim(-1, 0) for v in parts] if leading and V.ndim == 2 else parts
        return [v.to(device, dtype) for v in parts]

    yield "numpy", numpy
    yield "a tensor", tensor
    yield "a list", blocks
    yield "a tuple", lambda V, leading: tuple(blocks(V, leading))
    if names is not None:  # the order of the keys does not matter
        yield "a dict", lambda V, leading: dict(reversed(list(zip(names, blocks(V, leading), strict=True))))


def _flat(x: Any, shapes: Any, columns: bool, leading: bool) -> Tensor:
    """Return an answer of any form as ``[D]`` or ``[D, K]``."""
    if isinstance(x, (np.ndarray, Tensor)):
        x = torch.as_tensor(np.array(x)) if isinstance(x, np.ndarray) else x
        return x.T if columns and leading else x
    parts = list(x.values()) if isinstance(x, dict) else list(x)
    parts = [v.movedim(0, -1) for v in parts] if columns and leading else parts
    for v, s in zip(parts, shapes, strict=True):
        _equal((tuple(v.shape[: len(s)]), v.ndim), (s, len(s) + columns), "shape of a block (columns trail), and axes")
    return torch.cat([v.flatten(0, len(s) - 1) if s else v[None] for v, s in zip(parts, shapes, strict=True)])


def _same_form(question: Any, answer: Any, names: Any, op: LinearOperator, what: str) -> None:
    if isinstance(question, dict) and names is None:
        return
    _equal(type(answer), type(question), f"form of {what}")
    if isinstance(question, np.ndarray):
        _equal(answer.dtype, op.dtype, f"numpy dtype of {what}")
        return
    if isinstance(question, dict):
        _equal(tuple(answer), names, f"keys of {what}")
    for y in [answer] if isinstance(answer, Tensor) else answer.values() if isinstance(answer, dict) else answer:
        _equal((y.dtype, y.device), (op.torch_dtype, op.device), f"dtype and device of {what}")


def _check_adjoint(text: str, op: LinearOperator, rtol: float, generator: torch.Generator) -> None:
    u, v = (torch.randn(n, generator=generator, dtype=torch.float64).to(op.torch_dtype) for n in op.shape)
    right, left = (op @ v.to(op.device)).cpu().double(), (u.to(op.device) @ op).cpu().double()
    size = (right.norm() * u.double().norm() + left.norm() * v.double().norm()).reshape(1)
    _close((u.double() @ right).reshape(1), (left @ v.double()).reshape(1), size, rtol, f"adjoint identity of {text}")


def _check_queries(text: str, op: LinearOperator, M: Tensor, rtol: float) -> None:
    # A matrix that was rounded once more in a product is judged by its size.
    _close(op.to_dense(), M, M, rtol, f"to_dense of {text}")
    _close(op.frobenius_norm().reshape(1), M.norm().reshape(1), M.norm().reshape(1), rtol, f"frobenius_norm of {text}")
    if M.shape[0] == M.shape[1]:
        _close(op.diagonal(), M.diagonal(), M, rtol, f"diagonal of {text}")
        size = M.diagonal().abs().sum() + M.abs().max()
        _close(op.trace().reshape(1), M.trace().reshape(1), size.reshape(1), rtol, f"trace of {text}")


def _check_foreign(op: LinearOperator, M: Tensor, rtol: float, generator: torch.Generator) -> None:
    """Mix with scipy's own operators and with numpy matrices, on either side."""
    F = torch.randn(M.shape, generator=generator, dtype=torch.float64)
    foreign, array = aslinearoperator(F.numpy()), F.numpy()
    right, left = aslinearoperator(array.T.copy()), aslinearoperator(array.T.copy())
    for text, A, N in (
        ("op + foreign", op + foreign, M + F),
        ("foreign + op", foreign + op, M + F),
        ("op - foreign", op - foreign, M - F),
        ("foreign - op", foreign - op, F - M),
        ("op + array", op + array, M + F),
        ("array - op", array - op, F - M),
        ("op @ foreign", op @ right, M @ F.T),
        ("foreign @ op", left @ op, F.T @ M),
    ):
        x = torch.randn(N.shape[1], generator=generator, dtype=torch.float64)
        size = (M.abs().sum() + F.abs().sum()) * (1 + F.abs().max()) * x.abs()
        _close(torch.as_tensor(A @ x.numpy()), N @ x, size, rtol, text)
    _close(torch.as_tensor(op @ array.T.copy()), M @ F.T, M.abs() @ F.T.abs(), rtol, "op @ array")
    _close(torch.as_tensor(array.T @ op), F.T @ M, F.T.abs() @ M.abs(), rtol, "array @ op")


def _check_refusals(op: LinearOperator, generator: torch.Generator) -> None:
    """Ask wrong questions; each must be refused with a reason."""
    x = torch.randn(op.shape[1], generator=generator, dtype=torch.float64).to(op.device, op.torch_dtype)
    blocks = [torch.zeros(s, dtype=op.torch_dtype, device=op.device) for s in op.domain]
    other = torch.float64 if op.torch_dtype != torch.float64 else torch.float32
    questions = {
        "a tensor of another dtype": lambda: op @ x.to(other),
        "an integer tensor": lambda: op @ x.long(),
        "a tensor that is too long": lambda: op @ torch.cat([x, x]),
        "a tensor with three axes": lambda: op @ x[None, None],
        "a block too many": lambda: op @ [*blocks, x],
        "a block of another shape": lambda: op @ [b[None, None] for b in blocks],
        "unknown names": lambda: op @ {f"unknown {j}": b for j, b in enumerate(blocks)},
        "a number on the right of +": lambda: op + 0.1,
        "a complex multiple": lambda: 1j * op,
        "a scalar on the right of @": lambda: op @ 2.0,
        "a negative power": lambda: op**-1,
    }
    _check_refused(questions)


def _check_refused(questions: dict[str, Callable]) -> None:
    for what, ask in questions.items():
        try:
            ask()
        except (TypeError, ValueError) as error:
            reason = str(error)
        else:
            raise AssertionError(f"{what} is accepted")
        assert len(reason) > 20, f"{what} is refused without a reason: {reason!r}"


def _copies(op: LinearOperator) -> Iterator[tuple[str, LinearOperator]]:
    yield "a pickled copy", pickle.loads(pickle.dumps(op))
    yield "a deep copy", copy.deepcopy(op)
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    yield "a saved copy", torch.load(buffer, weights_only=False)
    yield "op.to(dtype=...)", op.to(dtype=torch.float64).to(dtype=op.torch_dtype)


def _equal(found: Any, expected: Any, what: str) -> None:
    assert found == expected, f"{what}: found {found}, expected {expected}"


def _close(found: Tensor, expected: Tensor, size: Tensor, rtol: float, what: str) -> None:
    """Compare up to ``rtol`` times the largest entry of ``size``."""
    found = found.detach().cpu().double()
    _equal(tuple(found.shape), tuple(expected.shape), f"shape of {what}")
    error, allowed = (found - expected).abs().max().item(), rtol * max(size.abs().max().item(), 1e-300)
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}"
