"""R9: an operator is a scipy operator, and maps torch tensors in every form; the algebra is closed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from operator_cases import F64, NAMES, Matrix, direct_sum, eigen, normal, psd
from scipy.sparse import csr_array
from scipy.sparse.linalg import aslinearoperator, cg, eigsh, gmres, lobpcg, lsmr, svds

from curvops._algebra import Block, Identity, SubmatrixLinearOperator
from curvops._operator import LinearOperator
from curvops.structured import Dense, Diagonal, Kronecker, LowRank
from curvops.testing import check_closed_forms, check_operator

SQUARE = {"domain": ((2, 3), (4,)), "range_": ((2, 3), (4,))}


def rectangular() -> Matrix:
    blocks = {"domain": ((2, 3), (1,), (4,)), "range_": ((3, 1), (2,))}
    return Matrix(normal(5, 11), **blocks, domain_names=("a", "b", "c"), range_names=("y", "z"))


OPERATORS = {
    "flat": lambda: Matrix(normal(3, 7)),
    "one row": lambda: Matrix(normal(1, 7)),
    "one entry": lambda: Matrix(normal(1, 1)),
    "rectangular with names": rectangular,
    "range without names": lambda: Matrix(normal(5, 4), ((4,),), ((5,),), domain_names=("a",)),
    "square": lambda: Matrix(normal(10, 10), **SQUARE, domain_names=("a", "b"), range_names=("a", "b")),
    "square without names": lambda: Matrix(normal(10, 10), **SQUARE),
    "symmetric": lambda: Matrix(psd(10)[0], **SQUARE, symmetric=True, domain_names=("a", "b")),
    "identity": lambda: Identity(((2, 3), (4,)), dtype=F64, names=("a", "b")),
    "submatrix": lambda: SubmatrixLinearOperator(Matrix(normal(9, 8)), [7, 0, 3], [2, 5]),
    "principal submatrix": lambda: SubmatrixLinearOperator(Dense(psd(9)[0]), [7, 0, 3], [7, 0, 3]),
    "block": lambda: Block(Matrix(normal(10, 10), **SQUARE), 0),
    "kronecker": lambda: Kronecker(psd(3), psd(5, seed=1)),
    "kronecker with groups": lambda: Kronecker(psd(3, 2), psd(5, 2), domain=((2, 5), (20,)), names=("a", "b")),
    "dense": lambda: Dense(psd(10)[0], domain=SQUARE["domain"], names=("a", "b")),
    "diagonal": lambda: Diagonal(normal(7), domain=((2, 1), (5,))),
    "eigen": eigen,
    "shifted": lambda: Kronecker(psd(3), psd(5)).shift(0.3),
    "low rank": lambda: LowRank(torch.linalg.qr(normal(9, 3)).Q, normal(3).square(), 0.3, domain=((2, 2), (5,))),
    "direct sum": lambda: direct_sum(scale=0.1)[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_R9_every_form_and_expression(name: str) -> None:
    op = OPERATORS[name]()
    check_operator(op, op.to_dense(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_R9_every_form_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Values of order one, so that no power of the operator overflows float16."""
    op = OPERATORS[name]()
    op = op / op.to_dense().norm().item()
    dense = op.to_dense()
    check_operator(op.to(dtype=dtype), dense, rtol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("default", "dtype"), [(torch.float32, F64), (F64, torch.float32), (torch.bfloat16, F64)])
@pytest.mark.parametrize("name", ["rectangular with names", "kronecker with groups", "direct sum"])
def test_R9_default_dtype_is_never_used(name: str, default: torch.dtype, dtype: torch.dtype) -> None:
    op = OPERATORS[name]()
    dense = op.to_dense()
    torch.set_default_dtype(default)
    check_operator(op.to(dtype=dtype), dense, rtol=None if dtype == F64 else 1e-5)
    if name != "rectangular with names":
        check_closed_forms(op.to(dtype=dtype), dense)
        for how in ("factors", "heuristic"):
            inverse = op.inverse(0.1, how=how).to_dense()
            torch.testing.assert_close(op.to(dtype=dtype).inverse(0.1, how=how).to_dense(), inverse.to(dtype))


def test_R9_the_dense_twin_is_checked() -> None:
    """The suite must notice operators that break the contract."""

    class WrongAdjoint(Matrix):
        def _adjoint(self) -> LinearOperator:
            return Matrix(2 * self.M.T)

    class Numpy(Matrix):
        def _product(self, x: object, leading: bool = False) -> object:
            return super()._product(x, leading).numpy() if isinstance(x, torch.Tensor) else super()._product(x, leading)

    class Leading(Matrix):
        def _product(self, x: object, leading: bool = False) -> object:
            y = super()._product(x, leading)
            return [v.movedim(-1, 0) for v in y] if isinstance(x, list) and x[0].ndim == 2 else y

    class Careless(Matrix):
        def _product(self, x: object, leading: bool = False) -> object:
            x = x.double() if isinstance(x, torch.Tensor) else x
            return super()._product(x, leading)

    class Private(Matrix):
        def __getstate__(self) -> dict:
            raise AssertionError("cannot pickle")

    M = normal(4, 6)
    check_operator(Matrix(M), M)
    with pytest.raises(AssertionError, match="off by"):
        check_operator(Matrix(M + 1e-6), M)
    for cls, text in (
        (WrongAdjoint, "off by"),
        (Numpy, "form of"),
        (Leading, "columns trail"),
        (Careless, "another dtype is accepted"),
        (Private, "cannot pickle"),
    ):
        with pytest.raises(AssertionError, match=text):
            check_operator(cls(M), M)


def test_R9_closed_forms_are_checked() -> None:
    M = psd(5)[0]
    check_closed_forms(Dense(M), M)
    with pytest.raises(AssertionError, match="off by"):
        check_closed_forms(Dense(M), M + 1e-6 * torch.eye(5, dtype=F64))

    class WrongSample(Dense):
        def sample(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
            return 1.2 * super().sample(n, generator)

    with pytest.raises(AssertionError, match="covariance of sample"):
        check_closed_forms(WrongSample(M), M)


# scipy on the object itself


def test_R9_scipy_algorithms_on_the_object() -> None:
    op, dense = direct_sum()
    M, b = dense.numpy(), normal(65).numpy()
    assert aslinearoperator(op) is op
    largest = np.linalg.eigvalsh(M)[-3:]
    np.testing.assert_allclose(np.sort(eigsh(op, k=3, v0=b)[0]), largest, rtol=1e-10)
    X = normal(65, 3, seed=5).numpy()
    np.testing.assert_allclose(np.sort(lobpcg(op, X, tol=1e-9, maxiter=200)[0]), largest, rtol=1e-8)
    damped, solution = op.shift(0.5), np.linalg.solve(M + 0.5 * np.eye(65), b)
    for solver in (cg, gmres):
        x, failed = solver(damped, b, rtol=1e-12, atol=0.0, maxiter=1000)
        assert not failed
        np.testing.assert_allclose(x, solution, atol=1e-9)
    J = rectangular()
    np.testing.assert_allclose(svds(J, k=2, v0=b[:5])[1], np.linalg.svd(J.M.numpy())[1][1::-1], rtol=1e-10)
    least = np.linalg.lstsq(J.T.to_dense().numpy(), b[:11], rcond=None)[0]
    np.testing.assert_allclose(lsmr(J.T, b[:11], atol=1e-14, btol=1e-14)[0], least, atol=1e-10)


def test_R9_foreign_operands_sparse_and_odd_numpy() -> None:
    op = rectangular()
    M, x = op.M.numpy(), normal(11, seed=2).numpy()
    np.testing.assert_allclose(op @ x.astype(np.float32), M @ x.astype(np.float32).astype(float), rtol=1e-12)
    np.testing.assert_allclose(op @ np.arange(11), M @ np.arange(11), rtol=1e-12)
    np.testing.assert_allclose(op @ list(x), M @ x, rtol=1e-12)
    np.testing.assert_allclose(op @ (x + 2j * x), M @ (x + 2j * x), rtol=1e-12)
    np.testing.assert_allclose(op @ np.asfortranarray(np.stack([x, -x]).T), M @ np.stack([x, -x]).T, rtol=1e-12)
    np.testing.assert_allclose(op.matvec(x[:, None]), (M @ x)[:, None], rtol=1e-12)
    np.testing.assert_allclose((op + csr_array(M)) @ x, 2 * M @ x, rtol=1e-12)
    assert (op @ np.zeros((11, 0))).shape == (5, 0)
    assert (op @ torch.zeros(11, 0, dtype=F64)).shape == (5, 0)
    with pytest.raises(TypeError, match=r"sparse matri.*aslinearoperator"):
        op @ csr_array(M.T)


def test_R9_to_scipy_only_changes_the_declared_dtype() -> None:
    op = Matrix(normal(4, 6, dtype=torch.float32))
    view = op.to_scipy(np.float64)
    assert not isinstance(view, LinearOperator)
    assert (view.shape, view.dtype, op.dtype) == (op.shape, np.float64, np.float32)
    x = normal(6).numpy()
    np.testing.assert_array_equal(view @ x, op @ x)
    np.testing.assert_array_equal(view.H @ x[:4], op.H @ x[:4])


# Errors say what was found, what was expected, what to do


def ask_for(text: str, error: type[Exception] = ValueError):
    return pytest.raises(error, match=re.escape(text))


def test_R9_errors_of_tensors() -> None:
    op = rectangular()
    with ask_for("Got a torch.float32 tensor, expected torch.float64. Convert it with `.to(torch.float64)`", TypeError):
        op @ torch.zeros(11, dtype=torch.float32)
    with ask_for("or the operator with `.to(dtype=torch.float32)`", TypeError):
        torch.zeros(5, dtype=torch.float32) @ op
    with ask_for("Got a torch.int64 tensor", TypeError):
        op @ torch.arange(11)
    with ask_for("Got a tensor on meta, expected cpu. Move it with `.to('cpu')`"):
        op @ torch.zeros(11, dtype=F64, device="meta")
    with ask_for("Got a tensor of shape (5,), expected (11,) or (11, K)"):
        op @ torch.zeros(5, dtype=F64)
    with ask_for("expected (5,) or (K, 5)"):
        torch.zeros(5, 2, dtype=F64) @ op


def test_R9_errors_of_lists_and_dicts() -> None:
    op = rectangular()
    a, b, c = (torch.zeros(s, dtype=F64) for s in op.domain)
    with ask_for("Got 2 blocks, expected 3 with shapes [(2, 3), (1,), (4,)]"):
        op @ [a, b]
    with ask_for("Got shape (3, 2) for block 'a', expected (2, 3)"):
        op @ [a.T, b, c]
    with ask_for("Got shape (4, 2) for block 'c', expected (4,), or (4, 'K') with columns in every block"):
        op @ {"a": a, "b": b, "c": torch.zeros(4, 2, dtype=F64)}
    with ask_for("Got shape (4, 2) for block 'c', expected (4,), or (4, 3) with columns in every block"):
        op @ [a[..., None].expand(2, 3, 3), b[..., None].expand(1, 3), torch.zeros(4, 2, dtype=F64)]
    with ask_for("missing keys ['b'] and unknown keys ['d']; expected ('a', 'b', 'c')"):
        op @ {"a": a, "c": c, "d": b}
    with ask_for("Got a ndarray as block 'b'", TypeError):
        op @ [a, b.numpy(), c]
    with ask_for("Got a torch.float32 block 'b', expected torch.float64", TypeError):
        op @ [a, b.float(), c]
    with ask_for("have no names; pass a list"):
        Matrix(normal(3, 4)) @ {"a": c}


def test_R9_errors_of_algebra() -> None:
    op, K = rectangular(), direct_sum()[0]
    for ask in (lambda: K + 0.1, lambda: 0.1 + K, lambda: K - 0.1, lambda: K + torch.tensor(0.0)):
        with pytest.raises(TypeError, match="shift"):
            ask()
    for scalar in (1j, np.complex64(1j), torch.tensor(1j)):
        with ask_for("complex scalar", TypeError):
            scalar * K
    with ask_for("structured.Dense", TypeError):
        K + torch.eye(65, dtype=F64)
    with ask_for("divide by scalars only", TypeError):
        K / K
    with pytest.raises(TypeError, match="unsupported operand"):
        K + "K"
    with ask_for("Multiply by a scalar with *"):
        2 @ K
    for p in (-1, 0.5, 2.0):
        with ask_for("expected an integer >= 0"):
            K**p
    for ask in (lambda: op.shift(1.0), lambda: op**2, op.trace, op.diagonal):
        with ask_for("needs a square operator"):
            ask()
    with ask_for("expected one of"):
        K.block("missing")
    with ask_for("one distinct name"):
        Matrix(normal(3, 4), domain_names=("a", "b"))
    with ask_for("A symmetric operator maps to its domain"):
        Matrix(normal(3, 4), symmetric=True)
    with ask_for("expected one of", TypeError):
        Matrix(normal(3, 4).to(torch.complex128))


@pytest.mark.parametrize("query", ["eigenvalues", "logdet", "det", "inverse", "sqrt", "sample"])
def test_R9_missing_closed_forms_name_the_way_out(query: str) -> None:
    op = Matrix(psd(4)[0], symmetric=True)
    with pytest.raises(NotImplementedError, match=r"structured.*for others use"):
        getattr(op, query)(*([3] if query == "sample" else []))


def test_R9_missing_adjoint() -> None:
    class OneWay(Matrix):
        def _adjoint(self) -> LinearOperator:
            return LinearOperator._adjoint(self)

    op = OneWay(normal(3, 4))
    for ask in (lambda: op.T, lambda: op.rmatvec(np.ones(3)), lambda: torch.ones(3, dtype=F64) @ op):
        with pytest.raises(NotImplementedError, match="implement `_adjoint`"):
            ask()


# torch


def test_R9_autograd_and_vmap_go_through_products() -> None:
    op, dense = direct_sum()
    A = 2 * op - op.T @ op / 3 + op.shift(0.1)
    N = 2 * dense - dense @ dense / 3 + dense + 0.1 * torch.eye(65, dtype=F64)
    x, w = normal(65).requires_grad_(), normal(65, seed=1)
    (gradient,) = torch.autograd.grad((A @ x) @ w, x)
    torch.testing.assert_close(gradient, N @ w, rtol=1e-12, atol=1e-12)
    blocks = [normal(*s).requires_grad_() for s in op.domain]
    gradients = torch.autograd.grad((op @ blocks)[2].sum(), blocks, materialize_grads=True)
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]), dense[27:39].sum(0), rtol=1e-12, atol=1e-12)
    X = normal(4, 65)
    torch.testing.assert_close(torch.vmap(lambda v: A @ v)(X), X @ N.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.vjp(lambda v: A @ v, X[0])[1](w)[0], N.T @ w, rtol=1e-12, atol=1e-12)


def test_R9_gradient_of_scalars_and_factors() -> None:
    s = torch.tensor(0.7, dtype=F64, requires_grad=True)
    op, dense = direct_sum()
    x = normal(65)
    (gradient,) = torch.autograd.grad((s * op.shift(0.3 * s) @ x).sum(), s)
    torch.testing.assert_close(gradient, (dense @ x + 0.6 * s * x).sum().detach(), rtol=1e-12, atol=1e-12)
    B = psd(3).requires_grad_()
    (gradient,) = torch.autograd.grad((Kronecker(B, psd(5)) @ normal(15)).sum(), B)
    assert gradient.abs().sum() > 0


def test_R9_products_never_read_the_device() -> None:
    """On the meta device every host read raises."""
    op = direct_sum()[0].to("meta")
    s = torch.tensor(2.0, device="meta")
    for A in (op, s * op, op / s - op.T @ op + op**3 + op.shift(0.1), op.block("conv") @ op.block("conv")):
        v = torch.zeros(A.shape[1], dtype=F64, device="meta")
        assert (A @ v).device.type == "meta"
        assert (v @ A).shape == v.shape
        assert (A @ v[:, None].expand(-1, 3)).shape == (len(v), 3)
    K = Kronecker(psd(3), psd(5)).to("meta")
    assert (2 * K + K.shift(1.0)).shape == (15, 15)


def test_R9_answers_do_not_alias_the_operator() -> None:
    op, _ = direct_sum()
    before = op.to_dense()
    for y in op @ [normal(*s) for s in op.domain]:
        y.zero_()
    op.diagonal().zero_()
    torch.testing.assert_close(op.to_dense(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPERATORS)
def test_R9_answers_do_not_share_memory_with_questions(name: str) -> None:
    op = OPERATORS[name]()
    for A in (op, op**0, 1.0 * op) if op.domain == op.range else (op,):
        flat, blocks = normal(A.shape[1]), [normal(*s) for s in A.domain]
        columns = flat[:, None]
        before = flat.clone(), [v.clone() for v in blocks]
        for y in (A @ flat, A @ columns, *(A @ blocks), torch.as_tensor(A @ flat.numpy())):
            y.zero_()
        assert torch.equal(flat, before[0])
        assert all(torch.equal(a, b) for a, b in zip(blocks, before[1], strict=True))


def test_R9_methods_compile_without_a_graph_break() -> None:
    op, dense = direct_sum()
    x = normal(65)
    A = op.shift(0.5) - op.T @ op
    compiled = torch.compile(lambda v: op.matvec(v) + A.matvec(v), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), 2 * dense @ x + x / 2 - dense @ dense @ x, rtol=1e-12, atol=1e-12)


def test_R9_dict_of_a_module_and_order_of_keys() -> None:
    op, dense = direct_sum()
    blocks = torch.nn.ParameterDict({n: torch.nn.Parameter(normal(*s)) for n, s in zip(NAMES, op.domain, strict=True)})
    flat = torch.cat([blocks[n].flatten() for n in NAMES])
    answer = op @ dict(sorted(blocks.items()))
    assert tuple(answer) == NAMES
    torch.testing.assert_close(torch.cat([y.flatten() for y in answer.values()]), dense @ flat)


def test_R9_repr_and_chunks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvops._operator._CHUNK", 4)
    M = normal(10, 10)
    op = Matrix(M, **SQUARE)
    assert repr(op) == "<10x10 Matrix, torch.float64 on cpu>"
    torch.testing.assert_close(op.to_dense(), M, rtol=0, atol=0)
    assert op.calls == 3
    torch.testing.assert_close(op.diagonal(), M.diagonal(), rtol=0, atol=0)
    torch.testing.assert_close(op.frobenius_norm(), M.norm())
    torch.testing.assert_close(op.trace(), M.trace())
