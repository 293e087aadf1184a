"""R5: spectral moments, densities, functions of operators and their traces, against dense ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from operator_cases import F64, Matrix, direct_sum, normal, psd
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvops import Identity
from curvops._operator import LinearOperator
from curvops.estimators import (
    Density,
    FunctionLinearOperator,
    LanczosSpectrum,
    assume_symmetric,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    lanczos_logdet,
    trace_of_function,
)
from curvops.structured import Dense
from curvops.testing import check_operator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports is deprecated
    import curvlinops


def symmetric(values: Tensor, seed: int = 0) -> Matrix:
    """Return an operator with these eigenvalues."""
    basis = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    M = (basis * values) @ basis.T
    return Matrix((M + M.T) / 2, symmetric=True)


def mass(density: Density, low: float = -math.inf, high: float = math.inf) -> float:
    """Integrate a density between two points of its grid."""
    grid, values = density
    inside = (grid >= low) & (grid <= high)
    return float(torch.trapezoid(values[inside], grid[inside]))


INDEFINITE = symmetric(torch.cat([torch.linspace(-1, 1, 27, dtype=F64), torch.tensor([3.0, 8.0], dtype=F64)]))


@pytest.mark.parametrize("ncv", [3, 7, 29])
def test_R5_moments_are_exact_from_a_basis(ncv: int) -> None:
    """The quadrature of every start is exact below degree 2 ncv, so the columns of an orthogonal matrix give traces."""
    M = INDEFINITE.M
    for start in (torch.eye(29, dtype=F64), torch.linalg.qr(normal(29, 29, seed=4)).Q):
        spectrum = LanczosSpectrum(INDEFINITE, ncv, start=start)
        assert spectrum.num_repeats == 29
        for p in range(min(2 * ncv, 12)):
            moment = torch.linalg.matrix_power(M, p).trace() / 29
            torch.testing.assert_close(spectrum.moment(p).value, moment, rtol=1e-10, atol=1e-10)


def test_R5_moments_are_unbiased_and_calibrated() -> None:
    M = INDEFINITE.M
    for p in (1, 2, 3):
        truth = torch.linalg.matrix_power(M, p).trace() / 29
        moments = [LanczosSpectrum(INDEFINITE, 5, 20, seed=s).moment(p) for s in range(60)]
        error = torch.stack([m.value for m in moments]) - truth
        stderr = torch.stack([m.stderr for m in moments])
        assert error.mean().abs() <= 4 * error.std() / math.sqrt(60)
        assert 0.75 <= error.square().mean().sqrt() / stderr.square().mean().sqrt() <= 1.25


def test_R5_no_ghosts() -> None:
    """A20b: without re-orthogonalisation, 160 comes a dozen times."""
    values = torch.cat([torch.linspace(0, 1, 299, dtype=F64), torch.tensor([160.0], dtype=F64)])
    op = symmetric(values)
    spectrum = LanczosSpectrum(op, 150, 2)
    nodes, weights = spectrum.quadrature()
    for x, w in zip(nodes, weights, strict=True):
        assert ((x - 160).abs() < 1).sum() == 1
        assert ((x > 1 + 1e-9) & ((x - 160).abs() > 1e-9)).sum() == 0
        assert (x >= -1e-9).all()
        torch.testing.assert_close(w.sum(), torch.tensor(1.0, dtype=F64))
    run = spectrum._runs[0]
    assert (run.steps == 150).all()
    # Each start weighs the isolated eigenvalue by its own component, known from the eigenvector.
    start = spectrum.products.probes("sphere", 0, (6,), 0, 2)
    vector = torch.linalg.eigh(op.M)[1][:, -1]
    torch.testing.assert_close(weights[:, -1], (start @ vector).square() / 300, rtol=1e-8, atol=1e-12)


def test_R5_the_process_is_orthogonal() -> None:
    """A V = V T + residual, with orthonormal V: the identities that define it."""
    from curvops.estimators._operand import Operand
    from curvops.estimators.lanczos import tridiagonalize

    op = symmetric(0.5 ** torch.arange(60, dtype=F64))
    run = tridiagonalize(Operand(op), normal(3, 60), 25, keep=True)
    V, T = run.basis, run.matrix()
    torch.testing.assert_close(V @ V.mT, torch.eye(25, dtype=F64).expand(3, -1, -1), rtol=0, atol=1e-13)
    torch.testing.assert_close(V @ op.M @ V.mT, T, rtol=0, atol=1e-13)
    residual = V @ op.M - T @ V
    torch.testing.assert_close(residual[:, :-1], torch.zeros_like(residual[:, :-1]), rtol=0, atol=1e-13)
    torch.testing.assert_close(residual[:, -1].norm(dim=1), run.beta[:, -1], rtol=1e-6, atol=1e-13)


LOW_RANK = normal(30, 2, seed=1) @ normal(30, 2, seed=1).T
BREAKDOWNS = {
    "identity": (torch.eye(30, dtype=F64), 1),
    "zero": (torch.zeros(30, 30, dtype=F64), 1),
    "low rank": (LOW_RANK, 3),
    "two values": (torch.diag(torch.tensor([1.0, -2.0], dtype=F64).repeat(15)), 2),
    "one entry": (torch.tensor([[3.0]], dtype=F64), 1),
    "tiny": (1e-30 * torch.eye(30, dtype=F64) + 1e-30 * LOW_RANK, 3),
}


@pytest.mark.parametrize("name", BREAKDOWNS)
def test_R5_exhausted_krylov_spaces(name: str) -> None:
    M, steps = BREAKDOWNS[name]
    op = Matrix(M, symmetric=True)
    spectrum = LanczosSpectrum(op, 20, 4)
    assert (spectrum._runs[0].steps == steps).all()
    assert spectrum.num_matvecs == 4 * steps
    exact = torch.linalg.matrix_exp(M).trace()
    value = LanczosSpectrum(op, 20, start=torch.eye(len(M), dtype=F64)).trace_of(torch.exp).value
    torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)
    for density in (spectrum.density(), spectrum.log_density(), spectrum.density(kappa=1.04)):
        assert torch.isfinite(density.density).all()
        assert 0.4 < mass(density) < 1.001
    low, high = spectrum.boundaries()
    values = torch.linalg.eigvalsh(M)
    assert low <= values[0] + 1e-12
    assert high >= values[-1] - 1e-12
    x = normal(len(M), 3)
    function = FunctionLinearOperator(op, torch.exp, 20)
    torch.testing.assert_close(function @ x, torch.linalg.matrix_exp(M) @ x, rtol=1e-11, atol=1e-11)


def smoothed(values: Tensor, grid: Tensor, sigma: float) -> Tensor:
    """Return the density of all eigenvalues, each a Gaussian."""
    bumps = torch.exp(-0.5 * ((grid[:, None] - values) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    return bumps.mean(1)


def test_R5_density_is_that_of_the_eigenvalues() -> None:
    """With all Lanczos vectors and a basis to start from: to rounding, also the width of the Gaussians."""
    values = torch.linalg.eigvalsh(INDEFINITE.M)
    spectrum = LanczosSpectrum(INDEFINITE, 29, start=torch.eye(29, dtype=F64))
    grid, density = result = spectrum.density(num_points=500, boundaries=(-1.5, 8.0))
    assert len(grid) == len(density) == 500
    torch.testing.assert_close(grid[[0, -1]], torch.tensor([-1.5 - 0.475, 8.0 + 0.475], dtype=F64))
    sigma = 10.45 / 28 / math.sqrt(8 * math.log(3))
    torch.testing.assert_close(density, smoothed(values, grid, sigma), rtol=1e-10, atol=1e-12)
    assert abs(mass(result) - 1) < 1e-3
    grid, density = spectrum.log_density(num_points=500, boundaries=(0.0, 8.0), epsilon=1e-3)
    width = (math.log(8.001) - math.log(1e-3)) * 1.1
    log = smoothed((values.abs() + 1e-3).log(), grid.log(), width / 28 / math.sqrt(8 * math.log(1.04)))
    torch.testing.assert_close(density * grid, log, rtol=1e-9, atol=1e-12)


def test_R5_density_of_random_starts() -> None:
    op = symmetric(torch.cat([torch.linspace(0, 1, 90, dtype=F64), torch.full((10,), 5.0, dtype=F64)]))
    for seed in range(3):
        density = lanczos_approximate_spectrum(op, 40, num_repeats=20, seed=seed)
        bump = mass(density, 4.0, 6.0)
        assert abs(bump - 0.1) < 0.03
        assert abs(mass(density) - 1) < 0.05
        grid, values = density
        truth = smoothed(torch.linalg.eigvalsh(op.M), grid, 5.5 / 39 / math.sqrt(8 * math.log(3)))
        covered = ((values - truth).abs() <= 4 * density.stderr + 2e-2).double().mean()
        assert covered > 0.9
    assert torch.isinf(lanczos_approximate_spectrum(op, 40).stderr).all()


def test_R5_densities_agree_with_curvlinops() -> None:
    """Where it is right: no isolated eigenvalues, few vectors, the same boundaries. Both average over starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from curvlinops.examples import TensorLinearOperator

    op = symmetric(torch.linspace(0.5, 2, 60, dtype=F64))
    theirs = TensorLinearOperator(op.M)
    for ours_of, theirs_of in (
        (lanczos_approximate_spectrum, curvlinops.lanczos_approximate_spectrum),
        (lanczos_approximate_log_spectrum, curvlinops.lanczos_approximate_log_spectrum),
    ):
        options = {"num_points": 200, "num_repeats": 400, "boundaries": (0.5, 2.0)}
        grid, density = ours_of(op, 10, **options)
        grid_, density_ = theirs_of(theirs, 10, **options)
        torch.testing.assert_close(grid, grid_)
        torch.testing.assert_close(density, density_, rtol=0.1, atol=0.05 * density.max().item())


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "exp": (torch.exp, torch.linalg.matrix_exp),
    "inverse": (torch.reciprocal, torch.linalg.inv),
    "square": (torch.square, lambda M: M @ M),
}
POSITIVE = symmetric(torch.linspace(1, 10, 40, dtype=F64), seed=3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_R5_functions_against_dense(name: str) -> None:
    f, dense = FUNCTIONS[name]
    M = dense(POSITIVE.M)
    x = normal(40, 2)
    torch.testing.assert_close(FunctionLinearOperator(POSITIVE, f, 30) @ x, M @ x, rtol=1e-9, atol=1e-9)
    estimate = trace_of_function(POSITIVE, f, 25 * 40, ncv=25)
    assert (estimate.value - M.trace()).abs() <= 4 * estimate.stderr
    assert estimate.num_matvecs == 1000
    stopped = trace_of_function(POSITIVE, f, ncv=20, rtol=0.06, seed=2)
    assert stopped.converged
    assert stopped.stderr <= 0.06 * stopped.value
    assert (stopped.value - M.trace()).abs() <= 4 * stopped.stderr


def test_R5_logdet() -> None:
    estimate = lanczos_logdet(POSITIVE, 1200, damping=0.5)
    truth = torch.logdet(POSITIVE.M + 0.5 * torch.eye(40, dtype=F64))
    assert 0 < estimate.stderr < 1
    assert (estimate.value - truth).abs() <= 4 * estimate.stderr
    errors = []
    for s in range(100):
        e = lanczos_logdet(POSITIVE, 300, damping=0.5, seed=s)
        errors.append((e.value - truth) / e.stderr)
    z = torch.stack(errors)
    assert (z.abs() <= 2.3).double().mean() >= 0.88
    assert z.mean().abs() <= 4 * z.std() / 10


def test_R5_what_a_short_quadrature_misses_is_in_the_error() -> None:
    """Three vectors know little about the logarithm of a matrix of condition 1e6, however many repeats."""
    op = symmetric(torch.logspace(-6, 0, 50, dtype=F64))
    estimate = lanczos_logdet(op, 3 * 300, ncv=3)
    truth = torch.logdet(op.M)
    assert (estimate.value - truth).abs() <= 4 * estimate.stderr
    samples = 50 * LanczosSpectrum(op, 3, 300, distribution="rademacher")._means(torch.log, 3)
    assert (estimate.value - truth).abs() > 4 * samples.std() / math.sqrt(300)


def test_R5_function_operator_keeps_the_contract() -> None:
    M = psd(5)[0]
    op = Dense(M, domain=((2, 2), (1,)), names=("a", "b"))
    values, Q = torch.linalg.eigh(M)
    root = FunctionLinearOperator(op, partial(torch.pow, exponent=0.5), 5)
    check_operator(root, (Q * values.clamp(min=0).sqrt()) @ Q.T, rtol=1e-8)
    op32 = FunctionLinearOperator(op, torch.exp, 5).to(dtype=torch.float32)
    torch.testing.assert_close(op32.to_dense().double(), torch.linalg.matrix_exp(M), rtol=1e-5, atol=1e-5)
    op = direct_sum(scale=0.1)[0]
    zero = torch.zeros(65, 2, dtype=F64)
    zero[0, 1] = 1.0
    answer = FunctionLinearOperator(op, torch.log1p, 65) @ zero
    assert answer[:, 0].abs().max() == 0
    assert answer[:, 1].norm() > 0
    with pytest.warns(UserWarning, match=r"still changes by .* raise `ncv`"):
        FunctionLinearOperator(op, lambda x: 1 / (x + 1e-6), 3) @ normal(65)


def test_R5_float32_and_bfloat16() -> None:
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        op = POSITIVE.to(dtype=dtype)
        value = LanczosSpectrum(op, 12, 5).trace_of(torch.log).value
        torch.testing.assert_close(value, LanczosSpectrum(POSITIVE, 12, 5).trace_of(torch.log).value, rtol=rtol, atol=0)


def test_R5_draws_do_not_depend_on_how_many_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = LanczosSpectrum(POSITIVE, 6, 5).quadrature()
    monkeypatch.setattr("curvops.estimators.spectrum._ENTRIES", 2 * 6 * 40)
    apart = LanczosSpectrum(POSITIVE, 6, 2)
    apart.extend(3)
    for a, b in zip(together, apart.quadrature(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_R5_starts_in_other_forms() -> None:
    op, dense = direct_sum()
    flat = torch.linalg.qr(normal(65, 65)).Q
    parts = [p.reshape(*s, 65) for p, s in zip(flat.split([3, 24, 12, 12, 14]), op.domain, strict=True)]
    named = dict(zip(op.domain_names, parts, strict=True))
    for start in (flat, parts, named):
        value = LanczosSpectrum(op, 4, start=start).moment(3).value
        torch.testing.assert_close(value, torch.linalg.matrix_power(dense, 3).trace() / 65, rtol=1e-10, atol=0)


def ask(op: LinearOperator, *args: object, **options: object) -> Callable[[], object]:
    return lambda: LanczosSpectrum(op, *args, **options)  # type: ignore[arg-type]


GENERAL = Matrix(normal(8, 8))
SPECTRUM = LanczosSpectrum(POSITIVE, 5, 2)
BAD = {
    "moment": (lambda: SPECTRUM.moment(10), "p=10, expected less than 2 ncv = 10"),
    "not symmetric": (ask(GENERAL, 3), r"symmetric operator.*assume_symmetric"),
    "not symmetric scipy": (ask(aslinearoperator(GENERAL.M.numpy()), 3), "is not symmetric"),
    "not square": (ask(Matrix(normal(3, 4)), 2), "needs a square operator"),
    "one vector": (ask(POSITIVE, 1), "ncv=1, expected an integer >= 2"),
    "no vector": (ask(POSITIVE, 0), "ncv=0, expected an integer >= 2"),
    "no repeats": (lambda: LanczosSpectrum(POSITIVE, 3, 0).density(), "expected at least 1"),
    "negative repeats": (ask(POSITIVE, 3, -1), "num_repeats=-1"),
    "nan": (ask(Matrix(math.nan * POSITIVE.M, symmetric=True), 3), "non-finite entries"),
    "distribution": (ask(POSITIVE, 3, distribution="uniform"), "expected one of"),
    "start": (ask(POSITIVE, 3, start=normal(7)), r"shape \(7,\)"),
    "kappa": (lambda: SPECTRUM.density(kappa=1.0), "kappa=1.0, expected a number larger than 1"),
    "points": (lambda: SPECTRUM.density(1), "num_points=1"),
    "margin": (lambda: SPECTRUM.density(margin=-0.1), "margin"),
    "order": (lambda: SPECTRUM.density(boundaries=(2.0, 1.0)), "the smaller one first"),
    "three": (lambda: SPECTRUM.density(boundaries=(2.0, 1.0, 3.0)), "each a number or None"),
    "epsilon": (lambda: SPECTRUM.log_density(epsilon=0.0), "epsilon=0.0, expected a positive"),
    "sizes": (lambda: SPECTRUM.log_density(boundaries=(-2.0, 1.0)), "not negative"),
    "log of negative": (lambda: trace_of_function(INDEFINITE, torch.log, 60), "not finite at -"),
    "log of zero": (lambda: lanczos_logdet(torch.zeros(3, 3), 60), r"log\(x \+ damping\)"),
    "shape": (lambda: trace_of_function(POSITIVE, torch.sum, 60), "expected .2, 30"),
    "budget": (lambda: trace_of_function(POSITIVE, torch.log, 10), "expected at least 30"),
    "damping": (lambda: lanczos_logdet(POSITIVE, 60, damping=-1.0), "damping=-1.0"),
    "function": (lambda: FunctionLinearOperator(GENERAL, torch.exp), "symmetric operator"),
    "function ncv": (lambda: FunctionLinearOperator(POSITIVE, torch.exp, 0), "ncv=0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    question, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        question()


def test_more_vectors_than_columns_are_cut() -> None:
    spectrum = LanczosSpectrum(POSITIVE, 1000, 1)
    assert spectrum.ncv == spectrum.num_matvecs == 40
    torch.testing.assert_close(spectrum.quadrature()[0][0], torch.linspace(1, 10, 40, dtype=F64), rtol=1e-8, atol=0)
    assert Identity(3, dtype=F64).symmetric
    assert LanczosSpectrum(Identity(1, dtype=F64), 1).moment(2).value == 1


def test_assume_symmetric() -> None:
    J = Matrix(normal(5, 9))
    product = J @ J.T
    assert not product.symmetric
    op = assume_symmetric(product)
    check_operator(op, J.M @ J.M.T)
    assert assume_symmetric(op) is op
    values = torch.linalg.eigvalsh(J.M @ J.M.T)
    torch.testing.assert_close(LanczosSpectrum(op, 5).quadrature()[0][0], values, rtol=1e-9, atol=1e-9)
    assume_symmetric(Matrix(psd(50)[0].bfloat16()))
    with pytest.raises(ValueError, match=r"u'Av and .* is not symmetric"):
        assume_symmetric(GENERAL)
    with pytest.raises(ValueError, match="square"):
        assume_symmetric(J)
