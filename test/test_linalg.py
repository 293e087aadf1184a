"""R10: decompositions that do not fail, whatever the size of the entries; what is wrong is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from operator_cases import F64, normal, psd

from curvops import _linalg

SIZES = [1e-30, 1e-12, 1.0, 1e8]


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_R10_eigh_at_every_size(size: float, dtype: torch.dtype) -> None:
    M = (psd(6, 3) * size).to(dtype)
    before = M.clone()
    values, Q = _linalg.eigh(M)
    assert (values.dtype, Q.dtype) == (dtype, dtype)
    tolerance = {"rtol": 0, "atol": 50 * torch.finfo(dtype).eps}
    torch.testing.assert_close((Q * values.unsqueeze(-2)) @ Q.mT / size, M / size, **tolerance)
    torch.testing.assert_close(Q @ Q.mT, torch.eye(6, dtype=dtype).expand(3, 6, 6), **tolerance)
    assert torch.equal(M, before)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize(("n", "rank"), [(5, 1), (40, 1), (40, 13), (200, 60), (7, 0)])
def test_R10_noise_around_zero_becomes_zero(n: int, rank: int, dtype: torch.dtype) -> None:
    Z = normal(2, n, rank, dtype=dtype)
    values, _ = _linalg.eigh_psd(1e-9 * Z @ Z.mT)
    assert (values[:, : n - rank] == 0).all()
    assert (values[:, n - rank :] > 0).all()


def test_R10_eigenvalues_above_the_noise_are_kept() -> None:
    values = torch.logspace(-13, 2, 16, dtype=F64)
    Q = torch.linalg.qr(normal(16, 16)).Q
    found, _ = _linalg.eigh_psd((Q * values) @ Q.T)
    assert (found > 0).all()
    torch.testing.assert_close(found, values, rtol=0, atol=1e-13)


def test_R10_empty_and_one_entry() -> None:
    values, Q = _linalg.eigh_psd(torch.zeros(2, 0, 0, dtype=F64))
    assert (values.shape, Q.shape) == ((2, 0), (2, 0, 0))
    values, Q = _linalg.eigh_psd(torch.full((1, 1, 1), 1e-30, dtype=F64))
    assert (values.item(), Q.abs().item()) == (1e-30, 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "decompose", [_linalg.eigh, _linalg.eigh_psd, lambda M, label: _linalg.inverse_psd(M, 1.0, label)]
)
def test_R10_non_finite_entries_name_the_label(decompose, bad: float) -> None:
    M = psd(4, 2)
    M[1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"Found 1 non-finite entries in the block of 'layer\.3'"):
        decompose(M, "layer.3")


def test_R10_matrices_that_are_not_what_they_should_be() -> None:
    with pytest.raises(ValueError, match="not symmetric for the block of 'fc'"):
        _linalg.eigh(normal(4, 4), "fc")
    with pytest.raises(ValueError, match="negative eigenvalues for the block of 'fc'"):
        _linalg.eigh_psd(-psd(4), "fc")
    with pytest.raises(ValueError, match=r"Cannot invert the matrix: it is singular in torch\.float64"):
        _linalg.inverse_psd(psd(4, rank=2), 0.0)
    M = psd(4)
    noisy = M + 1e-9 * normal(1, 4, 4)  # rounding of a narrow dtype
    torch.testing.assert_close(_linalg.eigh(noisy)[0], _linalg.eigh(M)[0], rtol=1e-7, atol=1e-7)


class Fails:
    """A decomposition that works in certain places only."""

    def __init__(self, works):
        self.works, self.tried = works, []

    def __call__(self, M):
        self.tried.append(M)
        if not self.works(M):
            raise torch.linalg.LinAlgError("no convergence")
        return ORIGINAL(M)


ORIGINAL = torch.linalg.eigh


@pytest.mark.parametrize(
    ("works", "attempts", "how"),
    [
        (lambda M: M.dtype == F64, 2, "in float64"),
        (lambda M: M.diagonal(dim1=1, dim2=2).min() > 1e-7, 4, "with jitter on the CPU"),
    ],
)
def test_R10_fallbacks_say_what_they_did(monkeypatch, works, attempts: int, how: str) -> None:
    M = psd(5).float()
    M[:, 0] = M[:, :, 0] = 0.0
    fails = Fails(works)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.warns(UserWarning, match=f"Decomposed the block of 'fc' {how}"):
        values, Q = _linalg.eigh(M, "fc")
    assert [t.dtype for t in fails.tried] == [torch.float32, F64, F64, F64][:attempts]
    assert values.dtype == torch.float32
    torch.testing.assert_close((Q * values.unsqueeze(-2)) @ Q.mT, M, rtol=1e-6, atol=1e-6)
    assert values[0, 0].abs() < 1e-7  # the jitter is taken off again


def test_R10_results_that_are_not_finite_are_tried_again(monkeypatch) -> None:
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda M: tuple(t * (1 if M.dtype == F64 else torch.nan) for t in ORIGINAL(M))
    )
    with pytest.warns(UserWarning, match="in float64"):
        values, _ = _linalg.eigh(psd(4).float())
    torch.testing.assert_close(values, ORIGINAL(psd(4))[0].float())


def test_R10_when_nothing_works(monkeypatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", Fails(lambda M: False))
    with pytest.raises(ValueError, match="Cannot decompose the block of 'fc'"):
        _linalg.eigh(psd(4), "fc")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("relative", [1.0, 1e-3, 1e-7])
def test_R10_inverse_of_damped_matrices(size: float, rank: int | None, relative: float) -> None:
    M = size * psd(6, 2, rank=rank)
    before = M.clone()
    damping = torch.tensor([1.0, 3.0], dtype=F64)[:, None, None] * relative * size
    inverse = _linalg.inverse_psd(M, damping)
    identity = torch.eye(6, dtype=F64)
    residual = inverse @ (M + damping * identity) - identity
    assert residual.abs().max() < 1e-13 / relative  # rounding times the condition number
    assert torch.equal(inverse, inverse.mT)
    assert torch.equal(M, before)


def test_R10_inverse_sees_an_exact_null_space() -> None:
    """Far below the rounding of the matrix, Cholesky would return noise."""
    u = torch.nn.functional.normalize(normal(5), dim=0)
    M, damping = 1e8 * torch.outer(u, u)[None], 1e-10
    expected = (torch.eye(5, dtype=F64) - torch.outer(u, u)) / damping
    found = _linalg.inverse_psd(M, damping)[0]
    torch.testing.assert_close(found * damping, expected * damping, rtol=1e-9, atol=1e-9)


def test_R10_no_warning_in_ordinary_life() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _linalg.eigh_psd(psd(30, 4).float())
        _linalg.inverse_psd(psd(30, 4).float(), 1e-3)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_R10_the_smallest_numbers_are_symmetric_enough(dtype: torch.dtype) -> None:
    M = psd(6)[0].to(dtype) * torch.finfo(dtype).smallest_normal * 3e-7
    assert M.any()
    assert torch.isfinite(_linalg.eigh_psd(M, "a")[0]).all()
    torch.testing.assert_close(_linalg.inverse_psd(M, 0.5, "a"), 2 * torch.eye(6, dtype=dtype))
