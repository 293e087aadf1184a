"""Iterative inverses against dense ones, with scipy's solvers as second witnesses."""

from __future__ import annotations

import pickle
import warnings

import pytest
import scipy.sparse.linalg as sla
import torch
from kfac.nets import mlp
from operator_cases import Matrix, normal
from torch import nn

from curvops import (
    CGInverseLinearOperator,
    GGNLinearOperator,
    KFACLinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
)
from curvops.structured import Dense
from curvops.testing import check_operator

F64 = torch.float64
SYMMETRIC = [CGInverseLinearOperator, MINRESInverseLinearOperator]


def symmetric(n: int, condition: float, *, indefinite: bool = False) -> torch.Tensor:
    Q, _ = torch.linalg.qr(normal(n, n, seed=n))
    values = torch.logspace(0, -float(torch.tensor(condition).log10()), n, dtype=F64)
    if indefinite:
        values[::3] *= -1
    return (Q * values) @ Q.T


def operator(M: torch.Tensor) -> Matrix:
    return Matrix(M, symmetric=torch.equal(M, M.T))


def of(M: torch.Tensor):
    M = (M + M.T) / 2
    return Dense(M, domain=((len(M),),)), M


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_R6_inverse_against_dense(kind, n):
    A, M = of(symmetric(n, 1e2) if n > 1 else torch.full((1, 1), 2.5, dtype=F64))
    B = normal(n, 3, seed=1)
    inverse = kind(A, tol=1e-12)
    torch.testing.assert_close(inverse @ B, torch.linalg.solve(M, B), rtol=1e-8, atol=1e-9)
    assert inverse.last.converged.all()
    assert inverse.inverse() is A


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_tolerance_is_reached_at_condition_1e6_and_the_residual_is_true(kind):
    A, M = of(symmetric(60, 1e6))
    B = normal(60, 4, seed=2)
    inverse = kind(A, tol=1e-8, maxiter=20_000)
    X = inverse @ B
    true = (B - M @ X).norm(dim=0) / B.norm(dim=0)
    torch.testing.assert_close(inverse.last.residual, true, rtol=1e-6, atol=1e-10)  # rounding of products
    assert true.max() <= 1e-8
    assert inverse.last.converged.all()
    assert inverse.last.residuals.shape == (inverse.last.iterations + 1, 4)
    assert torch.equal(inverse.last.residuals[0], torch.ones(4, dtype=F64))
    assert torch.equal(inverse.last.residuals[-1], inverse.last.residual)
    # The error of a solution is bounded by the condition number times the residual.
    want = torch.linalg.solve(M, B)
    assert ((X - want).norm(dim=0) / want.norm(dim=0)).max() <= 1e6 * 1e-8


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_columns_at_once_equal_columns_alone(kind):
    A, _ = of(symmetric(30, 1e3))
    B = normal(30, 3, seed=3) * torch.tensor([1e-8, 1.0, 1e8], dtype=F64)
    B[:, 1] = 0
    inverse = kind(A, tol=1e-10)
    together = inverse @ B
    alone = torch.stack([inverse @ b for b in B.T], 1)
    torch.testing.assert_close(
        together / B.norm(dim=0).clamp(min=1), alone / B.norm(dim=0).clamp(min=1), rtol=1e-7, atol=1e-12
    )
    assert not together[:, 1].any()


def test_R6_witness_scipy():
    A, M = of(symmetric(25, 1e3))
    b = normal(25, seed=4)
    x, _ = sla.cg(M.numpy(), b.numpy(), rtol=1e-10, atol=0, maxiter=1000)
    torch.testing.assert_close(CGInverseLinearOperator(A, tol=1e-10) @ b, torch.from_numpy(x), rtol=1e-6, atol=1e-7)
    A, M = of(symmetric(25, 1e3, indefinite=True))
    x, _ = sla.minres(M.numpy(), b.numpy(), rtol=1e-14, maxiter=1000)
    torch.testing.assert_close(MINRESInverseLinearOperator(A, tol=1e-10) @ b, torch.from_numpy(x), rtol=1e-5, atol=1e-6)
    R = normal(9, 6, seed=5)
    b = normal(9, seed=6)
    for damp in (0.0, 0.7):
        x = torch.from_numpy(sla.lsmr(R.numpy(), b.numpy(), damp=damp, atol=1e-14, btol=1e-14)[0])
        torch.testing.assert_close(
            LSMRInverseLinearOperator(Matrix(R), damp=damp, tol=1e-10) @ b, x, rtol=1e-8, atol=1e-9
        )


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
@pytest.mark.parametrize("damp", [0.0, 0.3])
def test_R6_least_squares_and_minimal_norm(shape, damp):
    M = normal(*shape, seed=7)
    if shape == (6, 6):
        M[:, 0] = M[:, 1]  # singular
    B = normal(shape[0], 3, seed=8)
    inverse = LSMRInverseLinearOperator(Matrix(M), damp=damp, tol=1e-10)
    stacked = torch.cat([M, damp * torch.eye(shape[1], dtype=F64)])
    want = torch.linalg.pinv(stacked) @ torch.cat([B, torch.zeros(shape[1], 3, dtype=F64)])
    torch.testing.assert_close(inverse @ B, want, rtol=1e-7, atol=1e-8)
    assert inverse.T.shape == shape


def test_R6_minres_on_a_singular_consistent_system_has_minimal_norm():
    M = symmetric(12, 1e2, indefinite=True)
    values, vectors = torch.linalg.eigh(M)
    values[:3] = 0
    A, M = of((vectors * values) @ vectors.T)
    b = M @ normal(12, seed=9)
    torch.testing.assert_close(
        MINRESInverseLinearOperator(A, tol=1e-10) @ b, torch.linalg.pinv(M) @ b, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_preconditioning_by_kfac_lowers_the_count_and_changes_nothing_else(kind):
    torch.manual_seed(0)
    # LSMR meets the square of a condition number: there KFAC must be nearer, as it is for one layer; and it ends once it
    # has seen all of the space, so that must be large.
    sizes = (20, 10) if kind is LSMRInverseLinearOperator else (6, 8, 4)
    model = mlp(*sizes, act=nn.ReLU).double()
    scales = torch.logspace(0, -2, sizes[0], dtype=F64)
    X, y = torch.randn(200, sizes[0], dtype=F64) * scales, torch.randint(sizes[-1], (200,))
    loss, params = nn.CrossEntropyLoss(), dict(model.named_parameters())
    damping = 1e-5
    A = GGNLinearOperator(model, loss, params, [(X, y)]).shift(damping)
    A = Dense(A.to_dense(), domain=A.domain)  # the same matrix, quicker
    M = KFACLinearOperator(model, loss, params, [(X, y)], fisher_type="type-2").inverse(damping)
    b = normal(A.shape[0], seed=10)
    plain, helped = (kind(A, tol=1e-9, maxiter=5000, preconditioner=P) for P in (None, M))
    torch.testing.assert_close(plain @ b, helped @ b, rtol=1e-3, atol=1e-6 * float((plain @ b).abs().max()))
    assert helped.last.converged.all()
    assert helped.last.iterations < 0.8 * plain.last.iterations


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator, NeumannInverseLinearOperator])
def test_R2_the_contract(kind):
    A, M = of(symmetric(6, 3.0) + torch.eye(6, dtype=F64))
    # The eigenvalues are between 4/3 and 2, so each term of the series takes a factor of five.
    options = {"scale": 0.6, "num_terms": 18} if kind is NeumannInverseLinearOperator else {"tol": 1e-13}
    check_operator(kind(A, **options), torch.linalg.inv(M), rtol=1e-8)
    assert pickle.loads(pickle.dumps(kind(A, **options))).shape == (6, 6)


def test_R6_neumann_series():
    A, M = of(symmetric(5, 4.0))
    b = normal(5, seed=11)
    series = NeumannInverseLinearOperator(A, num_terms=3, scale=0.5)
    got = series @ b
    E = torch.eye(5, dtype=F64) - 0.5 * M
    want = 0.5 * sum(torch.linalg.matrix_power(E, k) for k in range(4)) @ b
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    partial = [0.5 * sum(torch.linalg.matrix_power(E, k) for k in range(n + 1)) @ b for n in range(4)]
    history = torch.stack([(b - M @ x).norm() / b.norm() for x in partial])
    torch.testing.assert_close(series.last.residuals[:, 0], history, rtol=1e-10, atol=1e-12)
    assert not series.last.converged.any()
    R = Matrix(normal(5, 5, seed=12) * 0.1 + torch.eye(5, dtype=F64))
    dense = torch.linalg.inv(R.to_dense())
    torch.testing.assert_close(
        NeumannInverseLinearOperator(R, num_terms=300).T.to_dense(), dense.T, rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("scale", [2.02, 10.0])  # the largest eigenvalue is 1: the first grows by 2 % a term
def test_R6_neumann_names_a_scale_that_converges(scale):
    A, _ = of(symmetric(5, 4.0))
    b = normal(5, seed=11)
    with pytest.raises(ValueError, match=r"diverges.*scale below 2, for example scale=1\.") as error:
        NeumannInverseLinearOperator(A, num_terms=200, scale=scale) @ b
    better = NeumannInverseLinearOperator(A, num_terms=200, scale=float(str(error.value).split("scale=")[1][:-1]))
    better @ b
    assert better.last.converged.all()
    indefinite, _ = of(symmetric(8, 10.0, indefinite=True))
    with pytest.raises(ValueError, match=r"eigenvalue is about -1\..*not positive definite"):
        NeumannInverseLinearOperator(indefinite) @ normal(8, seed=13)


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_a_tolerance_out_of_reach_ends_early_with_a_warning(kind):
    A, M = of(symmetric(40, 30.0 if kind is LSMRInverseLinearOperator else 1e5))
    inverse = kind(A, tol=1e-16, maxiter=100_000)
    with pytest.warns(RuntimeWarning, match=r"did not reach the relative residual 1\.0e-16"):
        x = inverse @ normal(40, seed=16)
    assert inverse.last.iterations < 20_000
    assert (normal(40, seed=16) - M @ x).norm() < 1e-9 * normal(40, seed=16).norm()


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_R6_as_many_iterations_as_scipy(kind):
    A, M = of(symmetric(60, 1e6))
    b, count = normal(60, seed=2), 0

    def step(_):
        nonlocal count
        count += 1

    sla.cg(M.numpy(), b.numpy(), rtol=1e-8, atol=0, maxiter=20_000, callback=step)
    inverse = kind(A, tol=1e-8, maxiter=20_000)
    inverse @ b
    assert inverse.last.iterations <= 1.3 * count


def test_R6_preconditioner_of_a_rectangular_operator():
    M, b = normal(9, 5, seed=17), normal(9, seed=19)
    P = torch.linalg.pinv(M) + 0.02 * normal(5, 9, seed=18)
    inverse = LSMRInverseLinearOperator(Matrix(M), preconditioner=Matrix(P), tol=1e-12)
    torch.testing.assert_close(inverse @ b, torch.linalg.lstsq(M, b[:, None]).solution[:, 0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_R6_preconditioners_that_cannot_be_right(kind):
    A, M = of(symmetric(8, 10.0))
    with pytest.raises(ValueError, match=r"preconditioner.*symmetric=False"):
        kind(A, preconditioner=Matrix(normal(8, 8)))
    with pytest.raises(ValueError, match=r"preconditioner M is not positive definite"):
        kind(A, preconditioner=of(-M)[0]) @ normal(8, seed=20)


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator, NeumannInverseLinearOperator])
def test_R6_an_operator_that_returns_nan_is_named(kind):
    M = torch.eye(4, dtype=F64)
    M[0, 0] = float("nan")
    with pytest.raises(ValueError, match="product with the operator has NaN"):
        kind(Matrix(M, symmetric=True)) @ normal(4, seed=21)


def test_R6_bad_input():
    A, _ = of(symmetric(8, 10.0, indefinite=True))
    b = normal(8, seed=13)
    with pytest.raises(ValueError, match=r"negative curvature.*MINRES"):
        CGInverseLinearOperator(A) @ b
    for kind in SYMMETRIC:
        with pytest.raises(ValueError, match=r"symmetric.*LSMR"):
            kind(Matrix(normal(4, 4)))
    with pytest.raises(TypeError, match="float32"):
        CGInverseLinearOperator(A.to(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="tol"):
        CGInverseLinearOperator(A, tol=0.0)
    with pytest.raises(ValueError, match="preconditioner"):
        MINRESInverseLinearOperator(A, preconditioner=Matrix(normal(3, 3)))
    with pytest.raises(ValueError, match="NaN"):
        MINRESInverseLinearOperator(A) @ torch.full((8,), float("nan"), dtype=F64)
    for name in ("CG", "MINRES", "LSMR", "Neumann"):
        with pytest.raises(NotImplementedError, match=f"{name}InverseLinearOperator"):
            Matrix(normal(4, 4)).inverse(0.1)
    hard, _ = of(symmetric(60, 1e6))
    inverse = CGInverseLinearOperator(hard, maxiter=5)
    with pytest.warns(RuntimeWarning, match="did not reach"):
        inverse @ normal(60, seed=14)
    assert not inverse.last.converged.any()


@pytest.mark.parametrize(("kind", "condition"), [*((k, 1e4) for k in SYMMETRIC), (LSMRInverseLinearOperator, 1e3)])
def test_R6_float32_reaches_its_default_tolerance(kind, condition):
    A, M = of(symmetric(40, condition))
    A, b = A.to(dtype=torch.float32), normal(40, seed=15).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = kind(A) @ b
    assert x.dtype == torch.float32
    assert (b.double() - M @ x.double()).norm() / b.double().norm() < 1.5e-4


@pytest.mark.parametrize("exponent", [-1000, -500, 500, 1000])
@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_the_size_of_a_right_hand_side_does_not_matter(kind, exponent):
    A, _ = of(symmetric(12, 1e2))
    b, scale = normal(12, seed=16), 2.0**exponent
    assert torch.equal(kind(A) @ (b * scale), (kind(A) @ b) * scale)


@pytest.mark.parametrize("exponent", [-200, 140])
@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_the_size_of_an_operator_does_not_matter(kind, exponent):
    A, M = of(symmetric(12, 1e2) * 10.0**exponent)
    b = normal(12, seed=16)
    torch.testing.assert_close(M @ (kind(A) @ b), b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_the_derivative_of_a_solution_is_a_solve(kind):
    A, M = of(symmetric(9, 1e2))
    b = normal(9, seed=17).requires_grad_()
    (kind(A, tol=1e-12) @ b).square().sum().backward()
    inverse = torch.linalg.inv(M)
    torch.testing.assert_close(b.grad, 2 * inverse @ inverse @ b.detach(), rtol=1e-8, atol=1e-8)


class Counted(Matrix):
    """Counts the columns that it multiplies."""

    columns = 0

    def _apply(self, V):
        self.columns += len(V[0])
        return super()._apply(V)


@pytest.mark.parametrize("kind", [*SYMMETRIC, LSMRInverseLinearOperator])
def test_R6_columns_that_are_done_are_not_multiplied(kind):
    M = symmetric(40, 1e4)
    M = (M + M.T) / 2
    easy = torch.linalg.eigh(M).eigenvectors[:, -1:]  # one product is enough
    counts = []
    for B in (easy, normal(40, 1, seed=18), torch.cat([easy, normal(40, 1, seed=18)], 1)):
        A = Counted(M, symmetric=True)
        kind(A) @ B
        counts.append(A.columns)
    assert counts[2] < 1.5 * counts[1]  # not twice; rounding may cost an iteration


def test_R6_adjoints_of_preconditioned_inverses():
    A = Matrix(torch.eye(8, dtype=F64) * 3 + 0.3 * normal(8, 8, seed=19))
    P = Matrix(torch.eye(8, dtype=F64) / 3 + 0.02 * normal(8, 8, seed=20))
    N = NeumannInverseLinearOperator(A, num_terms=5, preconditioner=P)
    torch.testing.assert_close(N.T.to_dense(), N.to_dense().T, rtol=1e-12, atol=1e-12)
    tall, right = Matrix(normal(9, 5, seed=21)), Matrix(torch.eye(5, dtype=F64) + 0.2 * normal(5, 5, seed=22))
    wide = LSMRInverseLinearOperator(tall, tol=1e-12, preconditioner=_maps(right, 5, 9))
    torch.testing.assert_close(wide.T.to_dense(), wide.to_dense().T, rtol=1e-7, atol=1e-7)


def _maps(right: Matrix, n: int, m: int) -> Matrix:
    """Return an operator from R^m onto R^n, as preconditioners of rectangular operators are."""
    return Matrix(right.to_dense() @ normal(n, m, seed=23))
