"""Nyström approximations: close to the best of their rank, never larger than the operator, and closed in form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_cases import F64, Matrix, direct_sum, normal
from scipy.sparse.linalg import cg
from torch import Tensor

from curvops.estimators import nystrom
from curvops.structured import LowRank
from curvops.testing import check_closed_forms, check_operator


def symmetric(values: Tensor, seed: int = 0) -> Matrix:
    """Return an operator with these eigenvalues."""
    basis = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    M = (basis * values) @ basis.T
    return Matrix((M + M.T) / 2, symmetric=True)


DECAYING = symmetric(0.6 ** torch.arange(60, dtype=F64))


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_nystrom_is_close_and_not_larger(rank: int) -> None:
    approximation = nystrom(DECAYING, rank)
    assert isinstance(approximation, LowRank)
    assert approximation.rank == rank
    rest = torch.linalg.eigvalsh(DECAYING.M - approximation.to_dense())
    assert rest[0] >= -1e-12
    assert 0.6**rank * (1 - 1e-9) <= rest[-1] <= 1.5 * 0.6**rank + 1e-12  # the best one leaves 0.6^rank
    assert nystrom(DECAYING, rank, oversampling=0).rank == rank
    torch.testing.assert_close(nystrom(DECAYING, rank).to_dense(), approximation.to_dense(), rtol=0, atol=0)
    assert not torch.equal(nystrom(DECAYING, rank, seed=1).to_dense(), approximation.to_dense())


def test_nystrom_takes_as_many_products_as_it_says() -> None:
    DECAYING.calls = 0
    columns = []
    apply = DECAYING._apply
    DECAYING._apply = lambda V: columns.append(len(V[0])) or apply(V)
    try:
        nystrom(DECAYING, 7, oversampling=3)
    finally:
        del DECAYING._apply
    assert sum(columns) == 10


def test_nystrom_is_exact_for_low_rank_and_full_size() -> None:
    Z = normal(40, 4)
    for M, rank, found in ((Z @ Z.T, 6, 4), (torch.zeros(9, 9, dtype=F64), 3, 0), (torch.eye(5, dtype=F64), 50, 5)):
        approximation = nystrom(Matrix(M, symmetric=True), rank)
        torch.testing.assert_close(approximation.to_dense(), M, rtol=1e-10, atol=1e-10)
        assert approximation.values[approximation.values > 1e-10].numel() == found
        torch.testing.assert_close(approximation.trace(), M.trace(), rtol=1e-10, atol=1e-10)
    op = Matrix((Z @ Z.T).float(), symmetric=True)
    torch.testing.assert_close(nystrom(op, 6).to_dense(), op.M, rtol=1e-4, atol=1e-4)
    half = nystrom(op.to(dtype=torch.bfloat16), 6)
    assert half.torch_dtype == torch.bfloat16
    torch.testing.assert_close(half.to_dense().float(), op.M, rtol=0.1, atol=0.3)


def test_nystrom_keeps_the_blocks_and_all_closed_forms() -> None:
    op, _ = direct_sum()
    approximation = nystrom(op, 6)
    assert approximation.domain_names == op.domain_names
    assert approximation.domain == op.domain
    check_operator(approximation)
    check_closed_forms(approximation, approximation.to_dense(), singular=True)
    dense = approximation.to_dense()
    eye = torch.eye(65, dtype=F64)
    torch.testing.assert_close(approximation.shift(0.2).logdet(), torch.logdet(dense + 0.2 * eye), rtol=1e-10, atol=0)


def test_nystrom_preconditions() -> None:
    op = symmetric(torch.cat([torch.logspace(6, 1, 20, dtype=F64), torch.linspace(0.1, 1, 80, dtype=F64)]))
    b = normal(100).numpy()
    damped = op.shift(0.1)
    steps = []
    for M in (None, nystrom(op, 25).inverse(0.1)):
        count: list[int] = []
        x, info = cg(damped, b, rtol=1e-8, maxiter=2000, M=M, callback=lambda _, count=count: count.append(1))
        assert info == 0
        np.testing.assert_allclose(damped @ x, b, rtol=0, atol=1e-6)
        steps.append(len(count))
    assert steps[1] < steps[0] / 3


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="nystrom needs a positive semidefinite operator, found negative curvature"):
        nystrom(symmetric(torch.linspace(-1, 1, 20, dtype=F64)), 8)
    with pytest.raises(ValueError, match="symmetric operator"):
        nystrom(Matrix(normal(5, 5)), 2)
    with pytest.raises(ValueError, match="rank=0"):
        nystrom(DECAYING, 0)
    with pytest.raises(ValueError, match="oversampling=-1"):
        nystrom(DECAYING, 3, oversampling=-1)
