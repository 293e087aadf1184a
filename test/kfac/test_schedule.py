"""Codes, layouts and indices: the combinatorics behind output vectors that many units share."""

from __future__ import annotations

from math import comb

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from curvops.kfac.schedule import (
    Codes,
    Layout,
    find_layout,
    is_owned,
    plain_codes,
    proving_codes,
    single_indices,
    term_indices,
)

sizes = st.integers(1, 6)


def fewest_passes(units: int, vectors: int) -> int:
    """Search for the smallest number of passes with enough distinct sets of a multiple of ``vectors`` of them."""
    passes = vectors
    while max(comb(passes, k) for k in range(vectors, passes + 1, vectors)) < units:
        passes += 1
    return passes


def activity(owner: Tensor, codes: Codes) -> Tensor:
    """Return which rows ``[P, R]`` receive a gradient if row ``r`` is reached by unit ``owner[r]`` alone."""
    return codes.assign[:, owner] >= 0


@given(st.integers(1, 300), st.integers(1, 12))
def test_R3_codes_prove_in_the_fewest_passes(units: int, vectors: int) -> None:
    codes = proving_codes(units, vectors)
    active = (codes.assign >= 0).float()
    # Sets of one size: by the inequality of Lubell, Yamamoto and Meshalkin no antichain is larger.
    assert codes.assign.shape == (fewest_passes(units, vectors), units)
    contained = active.T @ (1 - active) == 0  # u's active passes are all among v's
    assert torch.equal(contained, torch.eye(units, dtype=torch.bool))
    for v in range(vectors):
        uses = (codes.assign == v).sum(0)
        assert torch.allclose(uses * codes.scale**2, torch.ones(units))
    assert int(codes.assign.max()) < vectors


@pytest.mark.parametrize(("units", "vectors", "passes"), [(1, 9, 9), (10, 9, 10), (220, 9, 12), (70, 1, 8), (6, 2, 4)])
def test_R3_proving_costs_few_passes(units: int, vectors: int, passes: int) -> None:
    assert len(proving_codes(units, vectors).assign) == passes


def test_R3_plain_codes_leave_nobody_out() -> None:
    codes = plain_codes(3, 2)
    assert codes.assign.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert codes.scale == 1


@given(sizes, sizes, sizes, st.integers(1, 3))
def test_R3_layouts_are_found(outer: int, units: int, inner: int, vectors: int) -> None:
    codes = proving_codes(units, vectors)
    owner = torch.arange(units).repeat_interleave(inner).repeat(outer)
    layout = find_layout(activity(owner, codes), codes)
    found = torch.arange(units).repeat_interleave(layout.inner).repeat(layout.outer)
    assert torch.equal(found, owner)  # (2, 3) and (6, 1) are the same of one unit
    assert layout.rows(units) == len(owner)
    if units > 1 and outer == 1:
        assert layout == Layout(1, inner)


@given(sizes, st.integers(2, 6), sizes, st.data())
def test_R3_silent_rows_do_not_mislead(outer: int, units: int, inner: int, data: st.DataObject) -> None:
    codes = proving_codes(units, 2)
    owner = torch.arange(units).repeat_interleave(inner).repeat(outer)
    silent = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(owner), max_size=len(owner))))
    layout = find_layout(activity(owner, codes) & ~silent, codes)
    found = torch.arange(units).repeat_interleave(layout.inner).repeat(layout.outer)
    assert torch.equal(found[~silent], owner[~silent])


@given(st.permutations(list(range(4)) * 3), st.integers(1, 3))
def test_R3_rows_in_no_order_have_no_layout_but_an_owner(owner: list[int], vectors: int) -> None:
    regular = [[u for _ in range(o) for u in range(4) for _ in range(3 // o)] for o in (1, 3)]
    assume(list(owner) not in regular)
    codes = proving_codes(4, vectors)
    active = activity(torch.tensor(owner), codes)
    assert find_layout(active, codes) is None
    assert is_owned(active, codes)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 3), st.data())
def test_R3_a_row_that_two_units_reach_is_shared(units: int, per_unit: int, vectors: int, data: st.DataObject) -> None:
    codes = proving_codes(units, vectors)
    owner = torch.arange(units).repeat_interleave(per_unit)
    row = data.draw(st.integers(0, len(owner) - 1))
    intruder = data.draw(st.integers(0, units - 1).filter(lambda u: u != owner[row]))
    active = activity(owner, codes)
    active[:, row] |= codes.assign[:, intruder] >= 0
    assert find_layout(active, codes) is None
    assert not is_owned(active, codes)


def test_R3_wrong_numbers_of_rows_have_no_layout() -> None:
    codes = proving_codes(3, 1)
    assert find_layout(torch.zeros(len(codes.assign), 7, dtype=torch.bool), codes) is None


@given(sizes, sizes, sizes, st.integers(1, 3), st.integers(1, 4))
def test_R3_rows_are_summed_by_datum(outer: int, num_data: int, inner: int, groups: int, d: int) -> None:
    layout = Layout(outer, inner)
    rows = torch.randn(groups, layout.rows(num_data), d, dtype=torch.float64)
    want = torch.zeros(groups, num_data, d, dtype=torch.float64)
    for r in range(rows.shape[1]):
        want[:, r // inner % num_data] += rows[:, r]
    assert torch.allclose(layout.group(rows, num_data), want, rtol=1e-12, atol=1e-12)


def coverage(indices: list[Tensor], num_data: int, terms: int, vectors: int) -> Tensor:
    """Count how often every vector of every loss term is taken, ``[N, T, V]``."""
    counts = torch.zeros(num_data, terms, vectors)
    for index in indices:
        for v in range(vectors):
            counts[..., v] += index == v
    return counts


@given(sizes, sizes, st.integers(1, 4), st.booleans())
def test_R3_indices_take_every_vector_of_every_term_once(N: int, T: int, V: int, prove: bool) -> None:
    make = proving_codes if prove else plain_codes
    for level, codes in (("terms", make(N * T, V)), ("data", make(N, T * V))):
        indices = list(term_indices(codes, N, T, V, level, "term"))
        assert torch.allclose(coverage(indices, N, T, V) * codes.scale**2, torch.ones(N, T, V))
        assert all(index.shape == (N, T) for index in indices)
        if level == "data":
            assert all(((index >= 0).sum(1) <= 1).all() for index in indices)  # one term of a datum at a time
    # Units of data: the terms of a datum go together.
    for index in term_indices(make(N, V), N, T, V, "data", "datum"):
        assert (index == index[:, :1]).all()


@given(sizes, sizes, st.integers(1, 4))
def test_R3_single_indices_take_one_unit_at_a_time(N: int, T: int, V: int) -> None:
    indices = list(single_indices(N, T, V, "term"))
    assert torch.equal(coverage(indices, N, T, V), torch.ones(N, T, V))
    assert all((index >= 0).sum() == 1 for index in indices)
    indices = list(single_indices(N, T, V, "datum"))
    assert torch.equal(coverage(indices, N, T, V), torch.ones(N, T, V))
    assert all(((index >= 0).all(1).sum(), (index >= 0).sum()) == (1, T) for index in indices)
