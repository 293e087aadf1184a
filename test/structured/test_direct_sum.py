"""R10: closed forms of direct sums go part by part, and the parts cover every entry once."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from operator_cases import F64, NAMES, SHAPES, direct_sum, normal, psd

from curvops import Identity
from curvops.structured import Diagonal, DirectSum, Kronecker, Part, Placement, Slot, from_state_dict
from curvops.testing import check_closed_forms, check_operator

LABELS = ("linear", "conv", "embedding", "first", "second")
INDEX = {"weight": slice(27 + 12, 27 + 24), "bias": slice(0, 3)}


def one_part(operator, *slots: Slot) -> Part:
    return Part(Placement(slots, operator.domain[0]), operator)


def with_dead_layer() -> tuple[DirectSum, torch.Tensor]:
    B, A = psd(3, rank=1), psd(4)
    parts = [
        one_part(Kronecker(B, A, label="fc"), Slot("fc.weight", (3, 4), 0, 4)),
        one_part(Diagonal(torch.zeros(1, 1, 2, dtype=F64), label="dead"), Slot("dead", (2,), 0, 2)),
    ]
    dense = torch.block_diag(torch.zeros(2, 2, dtype=F64), torch.kron(B[0], A[0]))
    return DirectSum(((2,), (3, 4)), ("dead", "fc.weight"), parts), dense


def test_R10_closed_forms() -> None:
    op, dense = direct_sum()
    check_closed_forms(op, dense, rtol=1e-9)
    check_operator(op.inverse(0.3), torch.linalg.inv(dense + 0.3 * torch.eye(65, dtype=F64)), rtol=1e-10)


def test_R10_uncovered_entries_count_as_zero_eigenvalues() -> None:
    op, dense = with_dead_layer()
    check_closed_forms(op, dense, singular=True)
    assert (op.eigenvalues() == 0).sum() == 2 + 8
    torch.testing.assert_close(op.inverse(0.5).to_dense()[:2, :2], 2 * torch.eye(2, dtype=F64))
    for ask, text in ((lambda: op.inverse(), "'fc': it is singular"), (lambda: op.power(-1), "'fc' to the power -1")):
        with pytest.raises(ValueError, match=text):
            ask()
    with pytest.raises(ValueError, match="'dead': it is singular"):
        op.inverse({"fc": 0.1, "dead": 0.0})


@pytest.mark.parametrize("how", ["exact", "factors", "heuristic"])
def test_R10_damping_per_part(how: str) -> None:
    op, _ = direct_sum()
    numbers = {"linear": 0.1, "conv": 0.2, "embedding": 0.3, "first": 0.4, "second": 0.5}
    expected = DirectSum(
        SHAPES, NAMES, [Part(p.placement, p.operator.inverse(numbers[p.label], how)) for p in op.parts]
    )
    by_name = {"weight": 0.1, "conv": 0.2, "embedding": 0.3, "first": 0.4, "second": 0.5}
    both_names = {**by_name, "bias": 0.1}
    tensors = {k: torch.tensor(v, dtype=F64) for k, v in numbers.items()}
    for damping in (numbers, by_name, both_names, tensors, numbers.__getitem__):
        found = op.inverse(damping, how=how)
        assert isinstance(found, DirectSum)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-12)
    assert (op.inverse(0.1, how).to_dense() - expected.to_dense()).norm() > 1e-2
    torch.testing.assert_close(found.logdet(), expected.to_dense().logdet(), rtol=1e-9, atol=1e-9)


def test_R10_a_parameter_in_two_parts_names_both() -> None:
    op, _ = direct_sum()
    others = {"linear": 0.1, "conv": 0.1, "embedding": 0.1}
    expected = op.inverse({**others, "first": 0.7, "second": 0.7})
    assert torch.equal(op.inverse({**others, "split": 0.7}).to_dense(), expected.to_dense())
    expected = op.inverse({**others, "first": 0.2, "second": 0.7})  # a label wins over a name
    assert torch.equal(op.inverse({**others, "split": 0.7, "first": 0.2}).to_dense(), expected.to_dense())


def test_R10_errors_of_damping() -> None:
    op, _ = direct_sum()
    some = dict.fromkeys(LABELS, 0.1)
    with pytest.raises(ValueError, match=re.escape("unknown keys ['lienar'], and none for the parts ['linear']")):
        op.inverse({**{k: v for k, v in some.items() if k != "linear"}, "lienar": 0.1})
    with pytest.raises(ValueError, match=re.escape("none for the parts ['conv', 'first']")):
        op.inverse({"linear": 0.1, "embedding": 0.1, "second": 0.1})
    with pytest.raises(ValueError, match=r"different dampings .* for the part 'linear'"):
        op.inverse({**{k: 0.1 for k in LABELS if k != "linear"}, "weight": 0.1, "bias": 0.2})
    with pytest.raises(ValueError, match=r"damping=-1\.0 for the block of 'conv'"):
        op.inverse({**some, "conv": -1})
    with pytest.raises(ValueError, match=r"damping=-0.1 for .*expected a number >= 0"):
        op.inverse(lambda label: -0.1)
    with pytest.raises(ValueError, match="Got how='cholesky'"):
        op.inverse(0.1, how="cholesky")


def test_R10_diagonal_is_in_the_order_of_parameters() -> None:
    op, dense = direct_sum()
    torch.testing.assert_close(op.diagonal(), dense.diagonal(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        op.inverse(0.1).diagonal(), op.inverse(0.1).to_dense().diagonal(), rtol=1e-12, atol=1e-12
    )


def test_R10_samples_have_their_parameters_in_order() -> None:
    op, dense = with_dead_layer()
    samples = op.sample(50, torch.Generator().manual_seed(0))
    assert samples.shape == (50, 14)
    assert (samples[:, :2] == 0).all()
    assert torch.linalg.matrix_rank(samples) == torch.linalg.matrix_rank(dense)
    state = torch.get_rng_state()
    assert not torch.equal(op.sample(2), op.sample(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_R10_parts_are_mapped_at_their_places() -> None:
    op, dense = direct_sum()
    doubled = op.map_parts(lambda p: 2 * p.operator if p.label == "linear" else p.operator)
    difference = doubled.to_dense() - dense
    rows = torch.zeros(65, dtype=torch.bool)
    for at in INDEX.values():
        rows[at] = True
    torch.testing.assert_close(difference, torch.where(rows, dense, 0.0), rtol=1e-12, atol=1e-12)


def test_R10_block_by_name() -> None:
    op, dense = direct_sum()
    block = op.block("weight")
    assert (block.domain_names, block.domain) == (("bias", "weight"), ((3,), (3, 4)))
    assert op.block("bias").domain_names == op.block(0).domain_names == block.domain_names
    at = torch.cat([torch.arange(3), torch.arange(39, 51)])
    torch.testing.assert_close(block.to_dense(), dense[at][:, at], rtol=1e-12, atol=1e-12)
    check_closed_forms(op.block("split"), dense[27:39, 27:39])
    with pytest.raises(ValueError, match="Got the parameter 'head', expected one of"):
        op.block("head")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_R10_other_dtypes(dtype: torch.dtype) -> None:
    op, dense = direct_sum()
    narrow = op.to(dtype=dtype)
    assert narrow.torch_dtype == dtype
    assert all(p.operator.held_dtype == torch.float32 for p in narrow.parts)
    check_closed_forms(narrow, dense)


def test_R10_state_dict_and_copies() -> None:
    op, _ = direct_sum()
    for A in (op, op.inverse(0.1), op.shift(0.1).to(dtype=torch.bfloat16)):
        buffer = io.BytesIO()
        torch.save(A.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        for clone in (from_state_dict(state), DirectSum.from_state_dict(state), copy.deepcopy(A)):
            assert (clone.domain, clone.domain_names, clone.torch_dtype) == (SHAPES, NAMES, A.torch_dtype)
            assert [p.label for p in clone.parts] == list(LABELS)
            assert torch.equal(clone.to_dense(), A.to_dense())
            assert torch.equal(clone.eigenvalues(), A.eigenvalues())


def test_R10_factors_are_never_modified() -> None:
    op, _ = direct_sum()
    factors = [t for p in op.parts for t in vars(p.operator).values() if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in factors]
    assert len(factors) == 8
    for how in ("exact", "factors", "heuristic"):
        op.inverse(0.1, how).sqrt().sample(2)
    (2 * op).shift(1.0).logdet(), op.power(2), op.trace(), op @ normal(65), op.frobenius_norm(), op.diagonal()
    assert all(torch.equal(a, b) for a, b in zip(factors, before, strict=True))


def test_R10_parts_cover_every_entry_once() -> None:
    index = torch.arange(6)
    whole, half = Slot("W", (2, 3), 0, 3), Slot("W", (2, 3), 0, 3, index=index[:3])
    six, three = Diagonal(torch.ones(1, 2, 3, dtype=F64)), Diagonal(torch.ones(1, 1, 3, dtype=F64))
    rest = one_part(three, Slot("W", (2, 3), 0, 3, index=index[3:]))

    def make(*parts: Part, shape: tuple[int, ...] = (2, 3)) -> DirectSum:
        return DirectSum((shape,), ("W",), parts)

    assert make(one_part(three, half), rest).trace() == 6
    for parts, text in (
        ([one_part(three, half)], "cover 3 of 6 entries of 'W', 3 in total; expected every entry exactly once"),
        ([one_part(three, half), one_part(six, whole)], "cover 6 of 6 entries of 'W', 9 in total"),
        ([one_part(six, whole), one_part(six, whole)], "12 in total"),
        ([one_part(three, half)] * 2, "cover 3 of 6 entries of 'W', 6 in total"),
        ([one_part(six, Slot("V", (2, 3), 0, 3))], "Got a part with the parameter 'V', expected one of ('W',)"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            make(*parts)
    with pytest.raises(ValueError, match=re.escape("Got shape (2, 3) for 'W' in a part, expected (3, 2)")):
        make(one_part(six, whole), shape=(3, 2))
    with pytest.raises(ValueError, match=re.escape("expected one on the single block (1, 2, 3)")):
        Part(Placement([whole], (1, 2, 3)), Diagonal(torch.ones(6, dtype=F64)))
    with pytest.raises(TypeError, match=r"Got <3x3 Diagonal, torch.float32 on cpu> for 'W', expected torch.float64"):
        make(one_part(three, half), one_part(three.to(dtype=torch.float32), half))


def test_R10_labels_default_to_names() -> None:
    slots = [Slot("fc.weight", (2, 3), 0, 3), Slot("fc.bias", (2,), 3, 1)]
    op = DirectSum(((2, 3), (2,)), ("fc.weight", "fc.bias"), [one_part(Kronecker(psd(2), psd(4)), *slots)])
    assert op.parts[0].label == "fc.weight, fc.bias"
    found = []
    op.inverse(lambda label: found.append(label) or 0.1)
    assert found == ["fc.weight, fc.bias"]


def test_R10_a_multiple_of_the_identity_may_come_first() -> None:
    op, dense = direct_sum()
    identity = Identity(op)
    for shifted, c in ((0.3 * identity + op, 0.3), (identity + op, 1.0)):
        check_closed_forms(shifted, dense + c * torch.eye(len(dense), dtype=F64))
    assert torch.equal((identity + 0.3 * identity).diagonal(), torch.full((len(dense),), 1.3, dtype=F64))
    with pytest.raises(TypeError, match="Cannot add operators"):
        0.3 * Identity(op, dtype=torch.float32) + op
