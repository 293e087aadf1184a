"""Passes, layouts and indices: the combinatorics behind output vectors that many units share."""

from __future__ import annotations

from math import comb

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from curvops.kfac.schedule import Layout, antichain, find_layout, is_owned, vector_indices

sizes = st.integers(1, 6)


def activity(owner: Tensor, takes: Tensor) -> Tensor:
    """Return which rows ``[P, R]`` receive a gradient if row ``r`` is reached by unit ``owner[r]`` alone."""
    return takes[:, owner]


@given(st.integers(1, 300))
def test_R3_no_unit_takes_all_passes_of_another(units: int) -> None:
    takes = antichain(units)
    active = takes.float()
    contained = active.T @ (1 - active) == 0  # u's passes are all among v's
    assert torch.equal(contained, torch.eye(units, dtype=torch.bool))
    # Sperner's theorem: with one pass less there are not so many sets.
    P = len(takes)
    assert P == 1 or max(comb(P - 1, k) for k in range(P)) < units


@pytest.mark.parametrize(("units", "passes"), [(1, 1), (2, 2), (3, 3), (10, 5), (70, 8), (100_000, 20)])
def test_R3_probing_costs_few_passes(units: int, passes: int) -> None:
    assert antichain(units).shape == (passes, units)


@given(sizes, sizes, sizes)
def test_R3_layouts_are_found(outer: int, units: int, inner: int) -> None:
    takes = antichain(units)
    owner = torch.arange(units).repeat_interleave(inner).repeat(outer)
    layout = find_layout(activity(owner, takes), takes)
    found = torch.arange(units).repeat_interleave(layout.inner).repeat(layout.outer)
    assert torch.equal(found, owner)  # (2, 3) and (6, 1) are the same of one unit
    assert layout.rows(units) == len(owner)
    if units > 1 and outer == 1:
        assert layout == Layout(1, inner)


@given(sizes, st.integers(2, 6), sizes, st.data())
def test_R3_silent_rows_do_not_mislead(outer: int, units: int, inner: int, data: st.DataObject) -> None:
    takes = antichain(units)
    owner = torch.arange(units).repeat_interleave(inner).repeat(outer)
    silent = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(owner), max_size=len(owner))))
    layout = find_layout(activity(owner, takes) & ~silent, takes)
    found = torch.arange(units).repeat_interleave(layout.inner).repeat(layout.outer)
    assert torch.equal(found[~silent], owner[~silent])


@given(st.permutations(list(range(4)) * 3))
def test_R3_rows_in_no_order_have_no_layout_but_an_owner(owner: list[int]) -> None:
    regular = [[u for _ in range(o) for u in range(4) for _ in range(3 // o)] for o in (1, 3)]
    assume(list(owner) not in regular)
    takes = antichain(4)
    active = activity(torch.tensor(owner), takes)
    assert find_layout(active, takes) is None
    assert is_owned(active, takes)


@given(st.integers(2, 8), st.integers(1, 4), st.data())
def test_R3_a_row_that_two_units_reach_is_shared(units: int, per_unit: int, data: st.DataObject) -> None:
    takes = antichain(units)
    owner = torch.arange(units).repeat_interleave(per_unit)
    row = data.draw(st.integers(0, len(owner) - 1))
    intruder = data.draw(st.integers(0, units - 1).filter(lambda u: u != owner[row]))
    active = activity(owner, takes)
    active[:, row] |= takes[:, intruder]
    assert find_layout(active, takes) is None
    assert not is_owned(active, takes)


def test_R3_wrong_numbers_of_rows_have_no_layout() -> None:
    takes = antichain(3)
    assert find_layout(torch.zeros(len(takes), 7, dtype=torch.bool), takes) is None


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


@given(sizes, sizes, st.integers(1, 4), st.booleans(), st.booleans())
def test_R3_indices_take_every_vector_of_every_term_once(N: int, T: int, V: int, datum: bool, term: bool) -> None:
    indices = list(vector_indices(N, T, V, each_datum=datum, each_term=term))
    assert torch.equal(coverage(indices, N, T, V), torch.ones(N, T, V))
    assert len(indices) == (N if datum else 1) * (T if term else 1) * V
    for index in indices:
        taken = index >= 0
        assert taken.any(1).sum() == (1 if datum else N)
        assert (taken.sum(1)[taken.any(1)] == (1 if term else T)).all()
