"""R3: Toeplitz matrices against their definition, in pieces, and of many rows."""

from __future__ import annotations

import pickle

import pytest
import torch
from operator_cases import F64, normal
from structured.structure_cases import name_of

from curvops.structured import (
    StructuredMatrix,
    TrilToeplitzMatrix,
    TriuToeplitzMatrix,
    _convolutions,
    toeplitz,
)


@pytest.mark.parametrize("shape", [(1,), (2,), (257,)], ids=str)
@pytest.mark.parametrize("cls", [TrilToeplitzMatrix, TriuToeplitzMatrix], ids=name_of)
def test_R3_toeplitz_against_the_definition(cls: type[StructuredMatrix], shape: tuple[int]) -> None:
    (d,) = shape
    t = normal(d)
    dense = sum(t[k] * torch.diag(torch.ones(d - k, dtype=F64), -k) for k in range(d))
    dense = dense if cls is TrilToeplitzMatrix else dense.T
    M, X = cls(t), normal(d, 3, seed=1)
    assert torch.equal(M.to_dense(), dense)
    torch.testing.assert_close(M.times(X), dense @ X, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(M.adjoint_times(X), dense.T @ X, rtol=1e-12, atol=1e-12)
    gram = dense.T @ dense
    means = torch.stack([gram.diagonal(k).mean() * (2 if k else 1) for k in range(d)])
    torch.testing.assert_close(getattr(M.self_gram(), cls.TENSORS[0]), means, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("d", [1, 2, 3, 31, 70, 161, 321])
@pytest.mark.parametrize("cls", [TrilToeplitzMatrix, TriuToeplitzMatrix], ids=name_of)
def test_R3_toeplitz_in_pieces(cls: type[StructuredMatrix], d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few columns at a time, from rows or columns in memory; moments from rows, and a strip of their gram at a time."""
    for batch in ((), (2,)):
        t, rows = normal(*batch, d), normal(*batch, 20, d, seed=1)
        M, X = cls(t), rows.mT
        dense = M.to_dense_blocks()
        through = cls.from_dense(dense.mT @ X @ X.mT @ dense)
        for chunk in (1, _convolutions.CHUNK):
            monkeypatch.setattr(_convolutions, "CHUNK", chunk)
            for Y in (X, X.contiguous()):
                ways = [M.gram_through(Y), M.congruence(Y @ Y.mT)]
                for found, expected in (
                    (M.times(Y), dense @ X),
                    (M.adjoint_times(Y), dense.mT @ X),
                    (cls.gram(Y)._t, cls.from_dense(X @ X.mT)._t),
                    *((way._t, through._t) for way in ways),
                ):
                    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * expected.abs().max().item())


@pytest.mark.parametrize("cls", [TrilToeplitzMatrix, TriuToeplitzMatrix], ids=name_of)
def test_R3_large_toeplitz_matrices_want_rows(cls: type[StructuredMatrix]) -> None:
    """Beyond some size the gram of the rows would be the largest matrix of all."""
    assert cls.eye(toeplitz.MAX_GRAM).MOMENT == "gram"
    M = cls.eye(toeplitz.MAX_GRAM + 1, batch=(2,))
    for same in (
        M,
        M.add(M),
        M.with_tensors(M.named_tensors()),
        M.to(dtype=torch.bfloat16),
        pickle.loads(pickle.dumps(M)),
    ):
        assert same.MOMENT == "rows"
    assert cls.MOMENT == "gram"
