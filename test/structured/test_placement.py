"""Where parameters sit: an isometry, entry by entry."""

from __future__ import annotations

import re

import pytest
import torch
from operator_cases import F64, normal, positions_of

from curvops.structured import Placement, Slot

WEIGHT, BIAS = Slot("weight", (4, 3, 2), 0, 6), Slot("bias", (4,), 6, 1)


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_gather_and_scatter_entry_by_entry(G: int, K: int, transposed: bool) -> None:
    o = 4 // G
    slots = [Slot("bias", (4,), 6, 1), Slot("weight", (3, 2, 4), 0, 6, transposed)]
    placement = Placement(slots, (G, o, 7))
    assert placement.names == ("weight", "bias")
    blocks = {"weight": normal(K, 3, 2, 4), "bias": normal(K, 4)}
    X = placement.gather(blocks)
    flat = torch.cat([blocks["weight"].flatten(1), blocks["bias"]], dim=1)
    where = {"weight": torch.arange(24), "bias": torch.arange(24, 28)}
    at = positions_of([("weight", 0, 6, *[True] * transposed), ("bias", 6, 1)], where, (G, o, 7))
    assert torch.equal(X.reshape(K, 28), flat[:, at])
    for name, y in placement.scatter(X):
        assert torch.equal(y, blocks[name])


def test_a_single_slot_is_not_copied() -> None:
    W = normal(3, 4, 5)
    for slot, shape in ((Slot("W", (4, 5), 0, 5), (1, 4, 5)), (Slot("W", (4, 5), 0, 4, True), (1, 5, 4))):
        placement = Placement([slot], shape)
        X = placement.gather({"W": W})
        assert X.data_ptr() == W.data_ptr()
        [(name, y)] = placement.scatter(X)
        assert (name, y.data_ptr()) == ("W", W.data_ptr())
        assert torch.equal(y, W)


def test_scatter_returns_views_of_weight_and_bias() -> None:
    Y = normal(1, 2, 2, 7)
    for _, y in Placement([WEIGHT, BIAS], (2, 2, 7)).scatter(Y):
        assert y.untyped_storage().data_ptr() == Y.untyped_storage().data_ptr()


def test_parts_of_a_parameter() -> None:
    W = normal(2, 6, 2)
    index = torch.arange(12).reshape(6, 2)[[4, 1, 3]]
    placement = Placement([Slot("W", (6, 2), 0, 2, index=index)], (1, 3, 2))
    X = placement.gather({"W": W})
    assert torch.equal(X[:, 0], W[:, [4, 1, 3]])
    [(_, y)] = placement.scatter(X)
    assert torch.equal(y[:, [4, 1, 3]], W[:, [4, 1, 3]])
    assert torch.equal(y[:, [0, 2, 5]], torch.zeros(2, 3, 2, dtype=F64))
    moved = placement.to("meta")
    assert moved.slots[0].index.device.type == "meta"


def test_state_dict_of_a_placement() -> None:
    placement = Placement([Slot("W", (6, 2), 0, 2, index=torch.arange(6)), Slot("b", (3,), 2, 1)], (1, 3, 3))
    clone = Placement.from_state_dict(placement.state_dict())
    X = {"W": normal(1, 6, 2), "b": normal(1, 3)}
    assert torch.equal(clone.gather(X), placement.gather(X))


@pytest.mark.parametrize(
    ("slots", "shape", "text"),
    [
        ([BIAS], (1, 4, 7), "Slot 'bias' starts at column 6, expected 0"),
        ([WEIGHT], (1, 4, 7), "Slots ('weight',) fill 6 columns, expected 7"),
        ([WEIGHT, BIAS], (1, 3, 7), "Slot 'weight' has 24 entries, expected 1 x 3 x 6 of the array (1, 3, 7)"),
        ([WEIGHT, Slot("bias", (4,), 5, 1)], (1, 4, 7), "Slot 'bias' starts at column 5, expected 6"),
    ],
)
def test_slots_must_tile(slots: list, shape: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Placement(slots, shape)


def test_an_index_fixes_the_order() -> None:
    with pytest.raises(ValueError, match="leave `transposed` False"):
        Slot("W", (2, 3), 0, 3, transposed=True, index=torch.arange(6))
