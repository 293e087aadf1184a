"""R3: the matrices of singd 0.0.5 are a second witness, where they are right (not D1: transposed blocks; not float64: D17)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operator_cases import normal

from curvops.structured import structure

#: Module and class there, and the name here.
PAIRS = [
    ("dense", "DenseMatrix", "dense"),
    ("diagonal", "DiagonalMatrix", "diagonal"),
    ("blockdiagonal", "Block30DiagonalMatrix", "block30diagonal"),
    ("hierarchical", "Hierarchical15_15Matrix", "hierarchical15_15"),
    ("triltoeplitz", "TrilToeplitzMatrix", "triltoeplitz"),
    ("triutoeplitz", "TriuToeplitzMatrix", "triutoeplitz"),
    ("triltopleftdiag", "TrilTopLeftDiagonalMatrix", "triltopleftdiag"),
    ("trilbottomrightdiag", "TrilBottomRightDiagonalMatrix", "trilbottomrightdiag"),
    ("triutopleftdiag", "TriuTopLeftDiagonalMatrix", "triutopleftdiag"),
    ("triubottomrightdiag", "TriuBottomRightDiagonalMatrix", "triubottomrightdiag"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """It warns that most of its classes fall back to dense matrices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(theirs.abs().max().item(), 1e-3))


@pytest.mark.parametrize("dim", [1, 2, 16, 31, 40])
@pytest.mark.parametrize(("module", "theirs", "name"), PAIRS, ids=[p[2] for p in PAIRS])
def test_R3_as_in_singd(module: str, theirs: str, name: str, dim: int) -> None:
    cls = getattr(importlib.import_module(f"singd.structures.{module}"), theirs)
    S, T = (normal(dim, dim, seed=k, dtype=torch.float32) for k in range(2))
    S, T, X = S + S.T, T @ T.T, normal(dim, 7, dtype=torch.float32)
    pairs: list[tuple[Any, Any]] = [(structure(name).from_dense(Y), cls.from_dense(Y)) for Y in (S, T)]
    (A, A_), (B, B_) = pairs
    for ours, there in pairs:
        close(ours.to_dense(), there.to_dense())
    M, M_ = A.compose(B), A_ @ B_
    close(M.to_dense(), M_.to_dense())
    close(M.add(A, -0.3).to_dense(), (M_ + A_ * -0.3).to_dense())
    close(M.shift(0.5).to_dense(), M_.diag_add_(0.5).to_dense())
    M = M.shift(0.5)
    close(M.times(X), M_ @ X)
    close(M.mean_trace(), M_.average_trace())
    close(structure(name).gram(X).to_dense(), cls.from_mat_inner(X).to_dense())
    if name != "block30diagonal":
        close(M.adjoint_times(X), M_.rmatmat(X))
        close(M.self_gram().to_dense(), M_.from_inner().to_dense())
        close(M.gram_through(X).to_dense(), M_.from_inner(X=X).to_dense())
