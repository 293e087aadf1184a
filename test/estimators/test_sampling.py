"""R4: estimators are unbiased, their standard errors are what they say, and they stop where they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from operator_cases import F64, Matrix, normal
from scipy.sparse import csr_array
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvops.estimators import (
    Estimate,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_squared_row_norms,
    hutchinson_trace,
    hutchpp_trace,
    xdiag,
    xnystrace,
    xtrace,
)

N = 40
Q = torch.linalg.qr(normal(N, N)).Q


def symmetric(values: Tensor) -> Tensor:
    """Return a matrix with these eigenvalues and generic eigenvectors."""
    basis = torch.linalg.qr(normal(len(values), len(values))).Q
    M = (basis * values) @ basis.T
    return (M + M.T) / 2


SPECTRA = {
    "decaying": symmetric(10 * 0.8 ** torch.arange(N, dtype=F64)),
    "flat": symmetric(torch.linspace(1, 2, N, dtype=F64)),
    "algebraic": symmetric(1 / torch.arange(1, N + 1, dtype=F64)),
}
#: Neither symmetric nor definite.
GENERAL = symmetric(0.7 ** torch.arange(N, dtype=F64)) + 0.1 * normal(N, N, seed=3)

TRACES: dict[str, tuple[Callable[..., Estimate], int]] = {
    "hutchinson rademacher": (hutchinson_trace, 30),
    "hutchinson normal": (partial(hutchinson_trace, distribution="normal"), 30),
    "hutchinson sphere": (partial(hutchinson_trace, distribution="sphere"), 30),
    "hutch++": (hutchpp_trace, 39),
    "hutch++ sphere": (partial(hutchpp_trace, distribution="sphere"), 39),
    "xtrace": (xtrace, 36),
    "xtrace rademacher": (partial(xtrace, distribution="rademacher"), 36),
    "xtrace normal": (partial(xtrace, distribution="normal"), 36),
    "xnystrace": (xnystrace, 30),
    "xnystrace rademacher": (partial(xnystrace, distribution="rademacher"), 30),
}
TENSORS: dict[str, tuple[Callable[..., Estimate], int, Callable[[Tensor], Tensor]]] = {
    "hutchinson_diag": (hutchinson_diag, 30, Tensor.diagonal),
    "hutchinson_diag normal": (partial(hutchinson_diag, distribution="normal"), 39, Tensor.diagonal),
    "xdiag": (xdiag, 36, Tensor.diagonal),
    "squared_fro": (hutchinson_squared_fro, 30, lambda M: M.square().sum()),
    "squared_row_norms": (hutchinson_squared_row_norms, 39, lambda M: M.square().sum(1)),
}


def errors(f: Callable[..., Estimate], M: Tensor, m: int, truth: Tensor, seeds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return errors, standard errors and widths of 95 % intervals over seeds."""
    op = Matrix(M, symmetric=torch.equal(M, M.T))
    estimates = [f(op, m, seed=s) for s in range(seeds)]
    assert all(m - 3 < e.num_matvecs <= m for e in estimates)
    value, stderr = torch.stack([e.value for e in estimates]), torch.stack([e.stderr for e in estimates])
    upper = torch.stack([e.interval(0.95)[1] for e in estimates])
    return value - truth, stderr, upper - value


def unbiased(error: Tensor) -> bool:
    """Tell whether the mean over seeds is within four of its own standard errors, entry by entry."""
    z = error.mean(0).abs() / (error.std(0) / math.sqrt(len(error)))
    return bool((z <= 4).all())


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", TRACES)
def test_R4_traces_are_unbiased_and_calibrated(name: str, spectrum: str) -> None:
    """Of 400 intervals of 95 %, about 380 hold the truth, and errors are as large as said, on average.

    3.3 binomial deviations are 14; where eigenvalues decay, a dozen samples have heavy tails, which take up to 6 more.
    """
    f, m = TRACES[name]
    M = SPECTRA[spectrum]
    error, stderr, width = errors(f, M, m, M.trace(), 400)
    assert unbiased(error)
    assert 0.90 <= (error.abs() <= width).double().mean() <= 0.986
    assert 0.85 <= error.square().mean().sqrt() / stderr.square().mean().sqrt() <= 1.15


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", TENSORS)
def test_R4_other_estimates_are_unbiased_and_calibrated(name: str, spectrum: str) -> None:
    f, m, truth = TENSORS[name]
    M = SPECTRA[spectrum]
    error, stderr, width = errors(f, M, m, truth(M), 300)
    assert unbiased(error)
    assert 0.90 <= (error.abs() <= width).double().mean() <= 0.98
    assert 0.85 <= error.square().mean().sqrt() / stderr.square().mean().sqrt() <= 1.15


@pytest.mark.parametrize("f", [hutchinson_trace, hutchpp_trace, xtrace, hutchinson_diag, xdiag])
def test_R4_operators_that_are_not_symmetric(f: Callable[..., Estimate]) -> None:
    truth = GENERAL.diagonal() if "diag" in f.__name__ else GENERAL.trace()
    error, stderr, _ = errors(f, GENERAL, 24, truth, 300)
    assert unbiased(error)
    assert 0.85 <= error.square().mean().sqrt() / stderr.square().mean().sqrt() <= 1.15


def test_R4_the_usual_error_of_xnystrace_is_far_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gained by looking at the correlation of the samples: without it, errors are more than twice what is said."""
    from curvops.estimators import _sampling, exchangeable

    monkeypatch.setattr(exchangeable, "spread_out", lambda h, left: _sampling.moments(h))
    M = SPECTRA["decaying"]
    error, stderr, _ = errors(xnystrace, M, 30, M.trace(), 200)
    assert error.square().mean().sqrt() / stderr.square().mean().sqrt() > 2


@pytest.mark.parametrize("name", [*TRACES, "hutchinson_diag", "xdiag", "squared_fro", "squared_row_norms"])
def test_R4_stops_at_the_tolerance(name: str) -> None:
    f, truth = TRACES[name][0] if name in TRACES else TENSORS[name][0], Tensor.trace
    truth = TENSORS[name][2] if name in TENSORS else truth
    M = symmetric(0.9 ** torch.arange(200, dtype=F64))
    op = Matrix(M, symmetric=True)
    for tol, relative in ((1.0, False), (0.3, True)):
        estimate = f(op, **({"rtol": tol} if relative else {"tol": tol}), max_matvecs=150, seed=1)
        size = estimate.value.abs().max() if relative else 1.0
        assert estimate.converged
        assert estimate.num_matvecs <= 150
        assert estimate.stderr.max() <= tol * size
        assert (estimate.value - truth(M)).abs().max() <= 5 * tol * size
    with pytest.warns(UserWarning, match=r"stopped at max_matvecs=\d+ with a standard error of .*raise `max_matvecs`"):
        short = f(op, tol=1e-3, max_matvecs=33, seed=1)
    assert short.converged is False
    assert short.num_matvecs <= 33
    assert short.stderr.max() > 1e-3
    assert "not converged" in repr(short)


@pytest.mark.parametrize("name", [*TRACES, *TENSORS])
def test_R4_a_budget_of_the_size_of_the_operator_gives_the_exact_value(name: str) -> None:
    f = TRACES[name][0] if name in TRACES else TENSORS[name][0]
    truth = TENSORS[name][2] if name in TENSORS else Tensor.trace
    for n in (1, 2, 7):
        M = symmetric(1 + torch.arange(n, dtype=F64))
        for estimate in (f(M, n), f(M, 10 * n), f(M, tol=0.0, max_matvecs=100)):
            torch.testing.assert_close(estimate.value.reshape(-1), truth(M).reshape(-1), rtol=1e-12, atol=1e-12)
            assert estimate.stderr.max() == 0
            assert estimate.num_matvecs in (n, n + 2)  # two for a look at symmetry
            assert estimate.converged in (None, True)
    # An impossible tolerance ends in the exact value, within the budget.
    M = SPECTRA["flat"]
    estimate = f(M, tol=0.0, max_matvecs=100)
    assert estimate.num_matvecs <= 100
    assert estimate.converged
    torch.testing.assert_close(estimate.value.reshape(-1), truth(M).reshape(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_R4_zero_identity_and_low_rank(n: int, dtype: torch.dtype) -> None:
    """A23: random subspaces that are smaller than asked for are no reason to fail, or to be less exact."""
    Z = normal(n, 2, seed=2)
    rtol = 1e-9 if dtype == F64 else 2e-4
    for M in (torch.zeros(n, n, dtype=F64), torch.eye(n, dtype=F64), Z @ Z.T):
        for m in (2, 12, 24, 36):
            for f in (xtrace, xnystrace):
                estimate = f(Matrix(M.to(dtype), symmetric=True), m, seed=m)
                if m >= 12 or f is xtrace:
                    torch.testing.assert_close(estimate.value, M.trace(), rtol=rtol, atol=rtol * n) if m >= 12 else None
                assert torch.isfinite(estimate.value)
            diagonal = xdiag(Matrix(M.to(dtype), symmetric=True), m, seed=m)
            assert torch.isfinite(diagonal.value).all()
            if m >= 12 and not torch.equal(M, torch.eye(n, dtype=F64)):
                torch.testing.assert_close(diagonal.value.double(), M.diagonal(), rtol=rtol, atol=rtol * n)
        hutchpp = hutchpp_trace(Matrix(M.to(dtype), symmetric=True), 24, distribution="sphere")
        torch.testing.assert_close(hutchpp.value, M.trace(), rtol=rtol, atol=rtol * n)


def test_R4_wide_and_tall_operators() -> None:
    for shape in ((5, 70), (70, 5), (1, 9), (9, 1)):
        M = normal(*shape)
        op = Matrix(M)
        rows = M.square().sum(1)
        exact = hutchinson_squared_fro(op, min(shape))
        torch.testing.assert_close(exact.value, M.square().sum(), rtol=1e-12, atol=0)
        assert exact.num_matvecs == min(shape)
        torch.testing.assert_close(hutchinson_squared_row_norms(op, shape[1]).value, rows, rtol=1e-12, atol=0)
    error, stderr, _ = errors(hutchinson_squared_fro, normal(35, 70), 30, normal(35, 70).square().sum(), 300)
    assert unbiased(error)
    assert 0.85 <= error.square().mean().sqrt() / stderr.square().mean().sqrt() <= 1.15
    error, _, _ = errors(hutchinson_squared_row_norms, normal(5, 70), 30, normal(5, 70).square().sum(1), 300)
    assert unbiased(error)


@pytest.mark.parametrize("f", [hutchinson_trace, hutchpp_trace, xtrace, xnystrace, hutchinson_diag, xdiag])
def test_R4_draws_are_functions_of_the_seed(f: Callable[..., Estimate], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of how many are drawn at once, nor of torch's generators; and other seeds give other draws."""
    M = SPECTRA["decaying"]
    state = torch.get_rng_state()
    first = f(M, 24, seed=5).value
    torch.testing.assert_close(torch.get_rng_state(), state)
    torch.manual_seed(7)
    torch.testing.assert_close(f(M, 24, seed=5).value, first, rtol=0, atol=0)
    assert not torch.equal(f(M, 24, seed=6).value, first)
    monkeypatch.setattr("curvops.estimators._operand._ENTRIES", 32 * N)
    monkeypatch.setattr("curvops.estimators._operand._VECTORS", 3)
    torch.testing.assert_close(f(M, 24, seed=5).value, first, rtol=1e-11, atol=1e-11)


def test_R4_going_on_is_the_same_as_starting_with_more() -> None:
    from curvops.estimators import _operand, exchangeable, hutchpp

    M = Matrix(SPECTRA["decaying"], symmetric=True)
    for make in (
        lambda p: exchangeable.XTrace(p, "sphere", 1),
        lambda p: exchangeable.XNysTrace(p, "sphere", 1),
        lambda p: exchangeable.XDiag(p, 1),
        lambda p: hutchpp.HutchPlusPlus(p, "sphere", 1),
    ):
        one, many = make(_operand.Operand(M)), make(_operand.Operand(M))
        one.add(13)
        for n in (1, 4, 7, 1):
            many.add(n)
        for a, b in zip(one.estimate(), many.estimate(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
        assert one.products.count == many.products.count == 13 * one.cost


def test_R4_what_may_be_given() -> None:
    """Operators of this package in every dtype, tensors, numpy arrays, scipy's matrices and operators."""
    M = SPECTRA["decaying"]
    truth = xtrace(Matrix(M, symmetric=True), 20).value
    for A in (M, M.numpy(), csr_array(M.numpy()), aslinearoperator(M.numpy())):
        torch.testing.assert_close(xtrace(A, 20).value, truth, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(xnystrace(A, 20).value, xnystrace(M, 20).value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(xdiag(aslinearoperator(GENERAL.numpy()), 20).value, xdiag(GENERAL, 20).value)
    float32 = xtrace(aslinearoperator(M.numpy().astype(np.float32)), 20)
    torch.testing.assert_close(float32.value, truth, rtol=1e-4, atol=0)
    half = xtrace(Matrix(M.bfloat16(), symmetric=True), 20)
    torch.testing.assert_close(half.value, truth, rtol=5e-2, atol=0)


def test_R4_an_estimate_is_a_number() -> None:
    scalar, vector = (
        Estimate(torch.tensor(2.5, dtype=F64), torch.tensor(0.25, dtype=F64), 7, 4),
        hutchinson_diag(GENERAL, 8),
    )
    assert float(scalar) == 2.5
    assert repr(scalar) == "2.5 ± 0.25 (7 products)"
    assert repr(vector).startswith("Estimate of 40 values, each ± ")
    assert math.isinf(hutchinson_trace(GENERAL, 1).stderr)
    torch.testing.assert_close(torch.as_tensor(scalar), scalar.value)
    torch.testing.assert_close(torch.as_tensor(vector), vector.value)
    np.testing.assert_array_equal(np.asarray(vector), vector.value.numpy())
    assert np.asarray(vector, dtype=np.float32).dtype == np.float32
    low, high = scalar.interval(0.95)
    torch.testing.assert_close(high - low, torch.tensor(2 * 3.182446305284263 * 0.25, dtype=F64), rtol=1e-9, atol=0)
    for found, value, stderr in (
        (2 * scalar, 5.0, 0.5),
        (scalar / -5, -0.5, 0.05),
        (scalar + 1, 3.5, 0.25),
        (1 - scalar, -1.5, 0.25),
        (-scalar - 0.5, -3.0, 0.25),
    ):
        assert (found.item(), found.stderr.item()) == (value, stderr)
    assert f"{scalar:.2f}" == "2.50 ± 0.25"
    assert f"{scalar}" == repr(scalar)
    for bad in (lambda: scalar + scalar, lambda: scalar * scalar, lambda: scalar - "1", lambda: scalar / True):
        with pytest.raises(TypeError, match="estimate"):
            bad()
    with pytest.raises(ValueError, match="expected a probability"):
        scalar.interval(95)


BAD = {
    "budget and tolerance": (lambda f: f(GENERAL, 4, tol=0.1), "Give either `num_matvecs`"),
    "no budget": (lambda f: f(GENERAL), "Give either `num_matvecs`"),
    "zero": (lambda f: f(GENERAL, 0), "expected an integer >= 1"),
    "negative": (lambda f: f(GENERAL, -3), "expected an integer >= 1"),
    "fraction": (lambda f: f(GENERAL, 2.5), "expected an integer >= 1"),
    "no limit": (lambda f: f(GENERAL, tol=0.1, max_matvecs=0), "max_matvecs=0, expected an integer"),
    "negative tolerance": (lambda f: f(GENERAL, tol=-0.1), r"tol=-0\.1, expected a number >= 0"),
    "nan as tolerance": (lambda f: f(GENERAL, rtol=math.nan), "rtol=nan, expected"),
    "nan": (lambda f: f(GENERAL * math.nan, 12), "non-finite entries in products"),
    "infinite": (lambda f: f(GENERAL / 0, 12), "non-finite entries in products"),
    "vector": (lambda f: f(GENERAL[0], 12), r"shape \(40,\), expected a real matrix"),
    "integers": (lambda f: f(GENERAL.long(), 12), "expected a real matrix"),
    "empty": (lambda f: f(GENERAL[:0, :0], 12), "at least one row"),
}


@pytest.mark.parametrize("f", [hutchinson_trace, hutchpp_trace, xtrace, hutchinson_diag, xdiag, hutchinson_squared_fro])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, f: Callable[..., Estimate]) -> None:
    ask, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        ask(f)


@pytest.mark.parametrize("f", [hutchinson_trace, hutchpp_trace, xtrace, xnystrace])
def test_bad_input_of_traces(f: Callable[..., Estimate]) -> None:
    with pytest.raises(ValueError, match="needs a square operator"):
        f(normal(3, 4), 2)
    with pytest.raises(
        ValueError, match=r"distribution='uniform', expected one of \('rademacher', 'normal', 'sphere'\)"
    ):
        f(SPECTRA["flat"], 8, distribution="uniform")
    with pytest.raises(TypeError, match="Got str, expected a linear operator"):
        f("matrix", 8)
    with pytest.raises(TypeError, match="expected a real one"):
        f(1j * SPECTRA["flat"].numpy(), 8)


def test_bad_input_too_few_products() -> None:
    with pytest.raises(ValueError, match="num_matvecs=2, expected at least 3: a probe of hutchpp_trace takes 3"):
        hutchpp_trace(GENERAL, 2)
    with pytest.raises(ValueError, match="max_matvecs=1, expected at least 2: a probe of xtrace takes 2"):
        xtrace(GENERAL, tol=0.1, max_matvecs=1)


def test_bad_input_not_symmetric_or_indefinite() -> None:
    with pytest.raises(ValueError, match=r"xnystrace needs a symmetric operator.*assume_symmetric"):
        xnystrace(Matrix(GENERAL), 10)
    with pytest.raises(ValueError, match=r"is not symmetric"):
        xnystrace(aslinearoperator(GENERAL.numpy()), 10)
    with pytest.raises(ValueError, match=r"positive semidefinite operator, found negative curvature"):
        xnystrace(symmetric(torch.linspace(-1, 1, N, dtype=F64)), 10)
