"""R5: eigenpairs at the ends of the spectrum, with every copy, and the residuals they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operator_cases import F64, Matrix, direct_sum, normal, psd
from scipy.sparse.linalg import aslinearoperator, eigsh
from torch import Tensor

from curvops.estimators import top_eigenpairs
from curvops.structured import Dense, LowRank


def symmetric(values: Tensor, seed: int = 0) -> Matrix:
    """Return an operator with these eigenvalues."""
    basis = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    M = (basis * values) @ basis.T
    return Matrix((M + M.T) / 2, symmetric=True)


#: Large enough for restarts; the ends are apart from a bulk that is not.
BULK = torch.linspace(-1, 1, 390, dtype=F64)
ENDS = torch.tensor([7.0, 5.0, 4.5, 3.0, 2.0, -1.5, -2.5, -4.8, -6.0], dtype=F64)
LARGE = symmetric(torch.cat([BULK, ENDS]))
WANTED = {
    "LM": [7.0, -6.0, 5.0, -4.8, 4.5],
    "LA": [7.0, 5.0, 4.5, 3.0, 2.0],
    "SA": [-6.0, -4.8, -2.5, -1.5, -1.0],
    "BE": [7.0, -6.0, 5.0, -4.8, 4.5],
}


@pytest.mark.parametrize(("which", "method"), [*((w, "lanczos") for w in WANTED), ("LA", "lobpcg"), ("SA", "lobpcg")])
@pytest.mark.parametrize("k", [1, 4])
def test_R5_eigenpairs(which: str, method: str, k: int) -> None:
    pairs = top_eigenpairs(LARGE, k, which, method, tol=1e-9, max_matvecs=2000)
    truth = torch.tensor(WANTED[which][:k], dtype=F64)
    torch.testing.assert_close(pairs.values, truth, rtol=1e-10, atol=1e-10)
    values, vectors = pairs
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(k, dtype=F64), rtol=0, atol=1e-10)
    residuals = (LARGE.M @ vectors - vectors * values).norm(dim=0)
    torch.testing.assert_close(pairs.residuals, residuals, rtol=1e-3, atol=1e-12)
    assert (residuals <= 1e-9 * 7.01).all()
    assert pairs.converged.all()
    assert pairs.num_matvecs < (200 if method == "lanczos" else 400)


@pytest.mark.parametrize("block_size", [1, 3, 5])
@pytest.mark.parametrize("ncv", [None, 15, 399, 5000])
def test_R5_sizes_of_lanczos(block_size: int, ncv: int | None) -> None:
    pairs = top_eigenpairs(LARGE, 5, "LM", tol=1e-9, ncv=ncv, block_size=block_size, max_matvecs=1000)
    torch.testing.assert_close(pairs.values, torch.tensor(WANTED["LM"], dtype=F64), rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", ["lanczos", "lobpcg"])
def test_R5_every_copy_of_an_eigenvalue(method: str) -> None:
    values = torch.cat([torch.tensor([5.0, 5.0, 5.0, 3.0], dtype=F64), torch.linspace(0, 1, 400, dtype=F64)])
    pairs = top_eigenpairs(symmetric(values), 4, "LA", method, max_matvecs=500)
    torch.testing.assert_close(pairs.values, values[:4], rtol=1e-8, atol=0)
    # More copies than vectors in a block, in a Krylov space that is soon exhausted.
    copies = torch.cat([torch.full((20,), 5.0, dtype=F64), torch.full((300,), 1.0, dtype=F64)])
    pairs = top_eigenpairs(symmetric(copies), 12, "LA", method, max_matvecs=500)
    torch.testing.assert_close(pairs.values, copies[:12], rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", ["lanczos", "lobpcg"])
@pytest.mark.parametrize("n", [1, 2, 5, 300])
def test_R5_zero_identity_and_small(n: int, method: str) -> None:
    for M in (torch.zeros(n, n, dtype=F64), torch.eye(n, dtype=F64)):
        pairs = top_eigenpairs(M, min(n, 3), "LA", method)
        torch.testing.assert_close(pairs.values, M.diagonal()[:3], rtol=1e-12, atol=1e-12)
        assert pairs.converged.all()
    if n <= 5:
        M = psd(n)[0]
        pairs = top_eigenpairs(M, n, "SA", method, tol=1e-10)
        torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(M), rtol=1e-9, atol=1e-12)


def test_R5_scipy_works_on_the_object() -> None:
    op, dense = direct_sum()
    ours = top_eigenpairs(op, 4, "LA", tol=1e-10)
    torch.testing.assert_close(ours.values, torch.linalg.eigvalsh(dense).flip(0)[:4], rtol=1e-10, atol=0)
    theirs = torch.from_numpy(eigsh(op, 4, which="LA")[0]).flip(0)
    torch.testing.assert_close(ours.values, theirs, rtol=1e-10, atol=0)
    foreign = top_eigenpairs(aslinearoperator(dense.numpy()), 4, "LA", tol=1e-10)
    torch.testing.assert_close(foreign.values, theirs, rtol=1e-9, atol=0)
    approximation = LowRank(ours.vectors, ours.values)
    torch.testing.assert_close(approximation.trace(), ours.values.sum())


def test_R5_other_dtypes() -> None:
    truth = torch.tensor(WANTED["LM"][:3], dtype=F64)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        pairs = top_eigenpairs(LARGE.to(dtype=dtype), 3)
        assert pairs.vectors.dtype == dtype
        torch.testing.assert_close(pairs.values.double(), truth, rtol=rtol, atol=0)


def test_R5_a_preconditioner_saves_products() -> None:
    values = torch.logspace(0, 3, 300, dtype=F64)
    op = symmetric(values)
    plain = top_eigenpairs(op, 2, "SA", "lobpcg", tol=1e-7, max_matvecs=5000)
    near = Dense(op.M + 0.3 * torch.eye(300, dtype=F64)).inverse()
    helped = top_eigenpairs(op, 2, "SA", "lobpcg", tol=1e-7, max_matvecs=5000, preconditioner=near)
    for pairs in (plain, helped):
        torch.testing.assert_close(pairs.values, values[:2], rtol=1e-5, atol=0)
    assert helped.num_matvecs < plain.num_matvecs / 5


@pytest.mark.parametrize("method", ["lanczos", "lobpcg"])
def test_R5_says_when_it_did_not_converge(method: str) -> None:
    with pytest.warns(
        UserWarning, match=r"stopped after \d+ products with \d of 3 pairs converged.*Raise `max_matvecs`"
    ):
        pairs = top_eigenpairs(symmetric(torch.linspace(0, 1, 400, dtype=F64)), 3, "LA", method, max_matvecs=30)
    assert not pairs.converged.all()
    assert pairs.num_matvecs <= 30
    assert (pairs.residuals[~pairs.converged] > 1e-6).all()


OP = symmetric(torch.linspace(0, 1, 30, dtype=F64))
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "not symmetric": (lambda: top_eigenpairs(Matrix(normal(4, 4))), "symmetric operator"),
    "not square": (lambda: top_eigenpairs(Matrix(normal(4, 5))), "square"),
    "k": (lambda: top_eigenpairs(OP, 0), "k=0, expected an integer >= 1"),
    "too many": (lambda: top_eigenpairs(OP, 31), "k=31, expected at most 30"),
    "which": (lambda: top_eigenpairs(OP, 2, "SM"), r"which='SM', expected one of \('LM'"),
    "lobpcg": (lambda: top_eigenpairs(OP, 2, "LM", "lobpcg"), "expected 'LA' or 'SA'"),
    "method": (lambda: top_eigenpairs(OP, 2, method="arpack"), "method='arpack', expected 'lanczos' or 'lobpcg'"),
    "ncv": (lambda: top_eigenpairs(OP, 4, ncv=5), "ncv=5, expected at least 12"),
    "block": (lambda: top_eigenpairs(OP, 4, block_size=0), "block_size=0"),
    "tol": (lambda: top_eigenpairs(OP, 4, tol=-1.0), "tol=-1.0"),
    "budget": (lambda: top_eigenpairs(OP, 4, max_matvecs=0), "max_matvecs=0"),
    "preconditioner": (lambda: top_eigenpairs(OP, 4, preconditioner=OP), "of use to method='lobpcg' only"),
    "preconditioner size": (
        lambda: top_eigenpairs(OP, 4, "LA", "lobpcg", preconditioner=torch.eye(3, dtype=F64)),
        "size 3, expected 30",
    ),
    "nan": (lambda: top_eigenpairs(Matrix(torch.nan * OP.M, symmetric=True)), "non-finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    question, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        question()


@pytest.mark.parametrize(
    ("method", "which"), [("lanczos", w) for w in ("LM", "LA", "SA")] + [("lobpcg", "LA"), ("lobpcg", "SA")]
)
def test_R5_small_operators_keep_all_that_is_wanted(method: str, which: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 13):
        M = torch.randn(n, n, dtype=F64, generator=generator)
        M = M + M.T
        values = torch.linalg.eigvalsh(M)
        order = {
            "LM": values.abs().argsort(descending=True),
            "LA": values.argsort(descending=True),
            "SA": values.argsort(),
        }
        for k in range(1, n + 1):
            found = top_eigenpairs(M, k, which, method, tol=1e-10).values
            torch.testing.assert_close(found, values[order[which][:k]], rtol=0, atol=1e-9 * values.abs().max())


def test_pairs_print_in_one_line() -> None:
    text = repr(top_eigenpairs(torch.diag(torch.arange(9.0, dtype=F64)), 6))
    assert "6 eigenpairs: 8, 7, 6, 5, 4, ...; residuals at most" in text
    assert "all converged" in text
