"""R10: closed forms of Kronecker products against their dense matrix, dead layers and zero factors included."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from operator_cases import F64, block_diag_kron, normal, psd

from curvops import _linalg
from curvops.structured import Dense, Eigen, Kronecker, from_state_dict
from curvops.testing import check_closed_forms

HOW = ("exact", "factors", "heuristic")
G, O, I = 2, 3, 5


def factor(kind: str, n: int, seed: int) -> torch.Tensor | None:
    """Return a factor ``[G, n, n]`` of a certain kind."""
    if kind == "none":
        return None
    if kind == "zero":
        return torch.zeros(G, n, n, dtype=F64)
    if kind == "one dead group":
        return psd(n, G, seed=seed) * torch.tensor([1.0, 0.0], dtype=F64)[:, None, None]
    if kind == "dead units":
        M = psd(n, G, seed=seed)
        M[:, 1] = M[:, :, 1] = 0.0
        return M
    rank, size = {
        "full": (None, 1.0),
        "rank one": (1, 1.0),
        "tiny": (None, 1e-30),
        "tiny rank one": (1, 1e-30),
        "huge": (None, 1e8),
    }[kind]
    return size * psd(n, G, rank=rank, seed=seed)


SINGULAR = {"zero", "one dead group", "dead units", "rank one", "tiny rank one"}
KINDS = ["full", "none", *sorted(SINGULAR), "tiny", "huge"]
PAIRS = [(b, a) for b in KINDS for a in KINDS if (b == "full") or (a == "full") or (a == b != "none")]
PAIRS += [("tiny", "huge"), ("rank one", "zero"), ("zero", "none"), ("dead units", "rank one"), ("huge", "rank one")]


def both(b: str, a: str) -> tuple[Kronecker, torch.Tensor, torch.Tensor]:
    """Return the operator, and both factors with identities in the place of None."""
    B, A = factor(b, O, 1), factor(a, I, 2)
    op = Kronecker(B, A, shape=(G, O, I), label="layer")
    eyes = (torch.eye(n, dtype=F64).expand(G, n, n) for n in (O, I))
    return op, *(e if F is None else F for F, e in zip((B, A), eyes, strict=True))


@pytest.mark.parametrize(("b", "a"), PAIRS)
def test_R10_closed_forms(b: str, a: str) -> None:
    op, B, A = both(b, a)
    before = B.clone(), A.clone()
    check_closed_forms(op, block_diag_kron(B, A), singular=bool({b, a} & SINGULAR), rtol=1e-9)
    assert torch.equal(B, before[0])
    assert torch.equal(A, before[1])


@pytest.mark.parametrize("relative", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("b", "a"), PAIRS)
def test_R10_inverses(b: str, a: str, how: str, relative: float) -> None:
    """Judged by what the inverse should undo, which needs no inverse of ill-conditioned references."""
    op, B, A = both(b, a)
    before = B.clone(), A.clone()
    damping = relative * (op.trace().item() / (G * O * I) or 1.0)
    inverse = op.inverse(damping, how=how).to_dense()
    undone = torch.block_diag(*(damped(B[g], A[g], damping, how, b == "none", a == "none") for g in range(G)))
    size = inverse.abs().max() * undone.abs().max()
    assert torch.isfinite(inverse).all()
    assert (inverse @ undone - torch.eye(len(undone), dtype=F64)).abs().max() < 1e-13 * max(size, 100)
    assert torch.equal(B, before[0])
    assert torch.equal(A, before[1])


def damped(B, A, damping: float, how: str, no_b: bool, no_a: bool) -> torch.Tensor:
    """Return the matrix that is inverted, written down from its definition."""
    eye_b, eye_a = torch.eye(O, dtype=F64), torch.eye(I, dtype=F64)
    if how == "exact" or no_b or no_a:
        return torch.kron(B, A) + damping * torch.eye(O * I, dtype=F64)
    if how == "factors":
        return torch.kron(B + damping * eye_b, A + damping * eye_a)
    a, b = A.trace().item() / I, B.trace().item() / O
    pi = 1.0 if 0.0 in (a, b) else (a / b) ** 0.5
    return torch.kron(B + damping**0.5 / pi * eye_b, A + damping**0.5 * pi * eye_a)


@pytest.mark.parametrize("how", HOW)
def test_R10_inverse_without_damping(how: str) -> None:
    op, B, A = both("full", "full")
    dense = torch.linalg.inv(block_diag_kron(B, A))
    torch.testing.assert_close(op.inverse(how=how).to_dense(), dense, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(op.inverse(0.0, how).logdet(), dense.logdet(), rtol=1e-10, atol=1e-10)
    for kind in sorted(SINGULAR):
        for pair in ((kind, "full"), ("full", kind), (kind, "none")):
            with pytest.raises(ValueError, match=r"'layer': it is singular.*Give `damping` > 0"):
                both(*pair)[0].inverse(how=how)


@pytest.mark.parametrize("how", HOW)
def test_R10_the_inverse_has_closed_forms_again(how: str) -> None:
    op, _, _ = both("full", "dead units")
    inverse = op.inverse(0.1, how=how)
    assert isinstance(inverse, Eigen if how == "exact" else Kronecker)
    check_closed_forms(inverse, inverse.to_dense(), rtol=1e-9)


def test_R10_the_exact_inverse_is_not_the_inverse_of_damped_factors() -> None:
    op, _, _ = both("full", "full")
    exact, factors, heuristic = (op.inverse(0.5, how).to_dense() for how in HOW)
    assert min((exact - factors).norm(), (exact - heuristic).norm(), (factors - heuristic).norm()) > 1e-2


def test_R10_errors_of_inverse_and_power() -> None:
    op, _, _ = both("full", "rank one")
    for damping in (-1e-3, float("nan"), torch.tensor(-1.0)):
        with pytest.raises(ValueError, match=r"Got damping=.* for the block of 'layer', expected a number >= 0"):
            op.inverse(damping)
    with pytest.raises(ValueError, match=r"Got how='pi', expected one of"):
        op.inverse(0.1, how="pi")
    with pytest.raises(ValueError, match=r"Cannot raise the block of 'layer' to the power -1.*shift\(damping\)"):
        op.power(-1)


@pytest.mark.parametrize("side", [0, 1])
def test_R10_non_finite_factors_are_named(side: int) -> None:
    factors = [psd(O, G), psd(I, G)]
    factors[side][1, 0, 0] = float("nan")
    op = Kronecker(*factors, label="layer")
    for ask in (op.logdet, op.eigenvalues, lambda: op.sample(2), *(lambda h=h: op.inverse(0.1, h) for h in HOW)):
        with pytest.raises(ValueError, match="non-finite entries in the block of 'layer'"):
            ask()


def test_R10_logdet_does_not_underflow() -> None:
    op = Kronecker(1e-200 * psd(O), 1e-200 * psd(I))
    scaled = Kronecker(psd(O), psd(I))
    torch.testing.assert_close(op.logdet(), scaled.logdet() - 15 * 400 * torch.log(torch.tensor(10.0, dtype=F64)))
    assert op.det() == 0.0


@pytest.mark.parametrize("p", [-2, -0.5, 0, 0.25, 1, 3])
def test_R10_powers_add_up(p: float) -> None:
    op, B, A = both("full", "full")
    values, Q = torch.linalg.eigh(block_diag_kron(B, A))
    torch.testing.assert_close(op.power(p).to_dense(), (Q * values**p) @ Q.T, rtol=1e-9, atol=1e-9)


def test_R10_one_decomposition_serves_everything(monkeypatch) -> None:
    calls = []

    def counted(M, label=""):
        calls.append(M)
        return original(M, label)

    original = _linalg.eigh_psd
    monkeypatch.setattr(_linalg, "eigh_psd", counted)
    op, _, _ = both("full", "full")
    for damping in (0.1, 1.0, 10.0):
        op.inverse(damping).inverse().logdet()
    op.sqrt(), op.sample(1), op.logdet(), op.eigenvalues(), op.shift(1.0).inverse()
    (2 * op).inverse(0.1)
    assert len(calls) == 2  # one of each factor
    assert op.trace() + op.frobenius_norm() + op.diagonal().sum() > 0
    op.shift(1.0) @ normal(30)
    assert len(calls) == 2


def test_R10_products_do_not_decompose(monkeypatch) -> None:
    monkeypatch.setattr(_linalg, "eigh", None)
    op, B, A = both("full", "full")
    x = normal(30)
    dense = block_diag_kron(B, A)
    torch.testing.assert_close(op.shift(0.5) @ x, dense @ x + x / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((2 * op.shift(0.5).T + op) @ x, 3 * dense @ x + x, rtol=1e-12, atol=1e-12)


def test_R10_autocast_leaves_factors_alone() -> None:
    op, _, _ = both("full", "full")
    op = op.to(dtype=torch.float32)
    x = normal(30, dtype=torch.float32)
    expected = op @ x, op.inverse(0.1) @ x, op.inverse(0.1, "factors") @ x, op.logdet(), op.to_dense()
    for clear in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fresh = copy.deepcopy(op) if clear else op
            found = (
                fresh @ x,
                fresh.inverse(0.1) @ x,
                fresh.inverse(0.1, "factors") @ x,
                fresh.logdet(),
                fresh.to_dense(),
            )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("columns", [None, 1, 4])
def test_R10_row_major_convention(groups: int, columns: int | None) -> None:
    B, A = psd(O, groups), psd(I, groups)
    op = Kronecker(B, A)
    W = normal(*(s for s in (groups, O, I, columns) if s is not None))
    expected = torch.einsum("gpo,goi...,gqi->gpq...", B, W, A)
    torch.testing.assert_close((op @ [W])[0], expected, rtol=1e-12, atol=1e-12)
    flat = W.reshape(groups * O * I, *([] if columns is None else [columns]))
    torch.testing.assert_close(op @ flat, expected.reshape(flat.shape), rtol=1e-12, atol=1e-12)


def test_R10_both_factors_none() -> None:
    op = Kronecker(None, None, shape=(2, 3, 4), dtype=F64)
    check_closed_forms(op, torch.eye(24, dtype=F64))
    x = normal(24)
    (op @ x).zero_()
    assert torch.equal(x, normal(24))
    for how in HOW:
        torch.testing.assert_close(op.inverse(1.0, how).to_dense(), torch.eye(24, dtype=F64) / 2)
    with pytest.raises(TypeError, match="needs `shape` and `dtype`"):
        Kronecker(None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_R10_narrow_vectors_wide_factors(dtype: torch.dtype) -> None:
    B, A = psd(O, G), psd(I, G)
    for op in (
        Kronecker(B.float(), A.float(), dtype=dtype),
        Kronecker(B, A).to(dtype=dtype),
        Kronecker(B.to(dtype), A.to(dtype)),
    ):
        assert (op.torch_dtype, op.B.dtype, op.A.dtype) == (dtype, torch.float32, torch.float32)
        assert (op @ torch.ones(30, dtype=dtype)).dtype == dtype
        assert op.inverse(0.1).values.dtype == op.logdet().dtype == op.eigenvalues().dtype == torch.float32
        assert op.inverse(0.1).torch_dtype == op.sample(2).dtype == op.to_dense().dtype == dtype
    op = Kronecker(B, A, dtype=torch.float32)
    assert (op.B.dtype, op.torch_dtype) == (F64, torch.float32)
    check_closed_forms(op, block_diag_kron(B, A))


def test_R10_copies_drop_the_cache_and_keep_the_numbers() -> None:
    op, B, _ = both("full", "rank one")
    op.logdet()
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    copies = [pickle.loads(pickle.dumps(op)), copy.deepcopy(op), torch.load(buffer, weights_only=False)]
    for clone in copies:
        assert clone._spectra is None
        assert op._spectra is not None
        assert torch.equal(clone.B, B)
        assert clone.label == "layer"
        torch.testing.assert_close(clone.inverse(0.1).to_dense(), op.inverse(0.1).to_dense())


@pytest.mark.parametrize("kind", ["none", "full"])
def test_R10_state_dict_is_plain(kind: str) -> None:
    op = Kronecker(factor(kind, O, 1), psd(I, G), shape=(G, O, I), label="layer", dtype=torch.bfloat16)
    for A in (op, op.shift(0.5), op.inverse(0.1), op.inverse(0.1, "factors")):
        buffer = io.BytesIO()
        torch.save(A.state_dict(), buffer)
        buffer.seek(0)
        clone = from_state_dict(torch.load(buffer, weights_only=True))
        assert (type(clone), clone.domain, clone.torch_dtype) == (type(A), A.domain, A.torch_dtype)
        assert (clone.label, clone.held_dtype) == (A.label, A.held_dtype)
        assert torch.equal(clone.to_dense(), A.to_dense())
    with pytest.raises(ValueError, match="expected one of"):
        from_state_dict({"kind": "Toeplitz"})


def test_R10_samples_leave_the_global_generator_alone() -> None:
    op, _, _ = both("full", "full")
    state = torch.get_rng_state()
    first, second = op.sample(2), op.sample(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    seeded = [op.sample(2, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*seeded)


@pytest.mark.parametrize(
    ("B", "A", "options", "text"),
    [
        ((2, 3, 3), (2, 5, 4), {}, r"Got A of shape \(2, 5, 4\) for the block of 'layer', expected \(2, 4, 4\)"),
        ((2, 3, 3), (3, 5, 5), {}, r"Got A of shape \(3, 5, 5\).*expected \(2, 5, 5\)"),
        ((3, 3), (5, 5), {"shape": (1, 4, 5)}, r"Got B of shape \(1, 3, 3\).*expected \(1, 4, 4\)"),
        ((3, 3), (5, 5), {"domain": ((4, 4),)}, r"Got blocks .* expected 15 entries"),
    ],
)
def test_R10_shapes_are_checked(B, A, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Kronecker(normal(*B), normal(*A), label="layer", **options)


def test_R10_dense_agrees_with_a_factor_alone() -> None:
    M = psd(5, 2)
    for how in HOW:
        dense, kronecker = Dense(M).inverse(0.3, how), Kronecker(None, M, shape=(2, 1, 5)).inverse(0.3, how)
        torch.testing.assert_close(dense.to_dense(), kronecker.to_dense(), rtol=1e-12, atol=1e-12)
