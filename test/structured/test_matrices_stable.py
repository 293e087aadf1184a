"""R3: dense matrices with a factor beside them keep numbers that float16 cannot hold."""

from __future__ import annotations

import pytest
import torch
from operator_cases import F64, normal

from curvops.structured import DenseMatrix, DenseStableMatrix

F16 = torch.float16
RTOL = 2e-3  # float16 has 11 bits


def held(M: DenseStableMatrix) -> torch.Tensor:
    """Return the value, after a look at the representation."""
    assert (M.M.dtype, M.factor.dtype) == (F16, torch.float32)
    assert 0.499 <= M.M.abs().max() <= 1.0
    return M.to_dense_blocks().double()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=RTOL * expected.abs().max().item())


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e6, 1e12])
def test_R3_stable_matrices_of_any_size(size: float) -> None:
    dense = normal(5, 5) * size
    S = dense + dense.T
    M = DenseStableMatrix.from_dense(S.float()).to(dtype=F16)
    close(held(M), S)
    close(held(M @ M), S @ S)
    close(held(M.self_gram()), S @ S)
    close(held(M + M), 2 * S)
    close(held(M.add(M, -0.25)), 0.75 * S)
    close(held(3.0 * M), 3 * S)
    close(held(M.shift(size)), S + size * torch.eye(5, dtype=F64))
    X = normal(5, 9, seed=1).to(F16)
    through = S @ X.double()
    close(held(M.gram_through(X)), through @ through.T)
    close(M.max_abs(), S.abs().max())
    close(M.frobenius_norms(), S.norm())
    close(M.traces(), S.trace())
    if 1e-4 < size < 1e4:  # vectors have no factor
        close(M.times(X), through)


def test_R3_stable_survives_where_float16_does_not() -> None:
    X = torch.full((3, 1000), 40.0, dtype=F16)
    assert DenseMatrix.gram(X).M.isinf().all()  # 1.6e6
    close(held(DenseStableMatrix.gram(X)), torch.full((3, 3), 1.6e6, dtype=F64))
    X = torch.full((3, 1), 3e-4, dtype=F16)
    close(held(DenseStableMatrix.gram(X)), torch.full((3, 3), X[0, 0].double() ** 2, dtype=F64))
    relative = (DenseMatrix.gram(X).M.double() / X[0, 0].double() ** 2 - 1).abs().max()
    assert relative > 10 * RTOL


def test_R3_stable_zero_and_mixed_batches() -> None:
    zero = DenseStableMatrix.zeros(4, batch=(3,), dtype=F16)
    for M in (zero, zero @ zero, zero.self_gram(), zero + zero, 0.0 * zero, DenseStableMatrix.from_dense(zero.M)):
        assert torch.equal(M.to_dense_blocks(), torch.zeros(3, 4, 4))
    sizes = torch.tensor([1e-7, 0.0, 1e6], dtype=F64)
    S = normal(4, 4) * sizes[:, None, None]
    M = DenseStableMatrix.from_dense(S.float()).to(dtype=F16)
    for k in range(3):
        close(M.to_dense_blocks()[k], S[k])
        close(M.self_gram().to_dense_blocks()[k], S[k].T @ S[k])


def test_R3_stable_normalises_without_rounding() -> None:
    M, N = normal(6, 6, dtype=torch.float32), normal(6, 6, seed=1, dtype=torch.float32)
    stable, dense = (cls(M).compose(cls(N)).shift(0.5) for cls in (DenseStableMatrix, DenseMatrix))
    assert torch.equal(stable.to_dense(), dense.to_dense())


def test_R3_stable_checks_its_factor() -> None:
    with pytest.raises(ValueError, match="factor"):
        DenseStableMatrix(torch.zeros(2, 3, 3), torch.ones(3))
    back = DenseStableMatrix(torch.ones(3, 3, dtype=F16), torch.tensor(1e9)).to(dtype=torch.float32)
    assert torch.equal(back.to_dense(), torch.full((3, 3), 1e9))
