"""A single process needs no branch."""

from __future__ import annotations

import pytest
import torch

from curvops._communicator import Communicator, Serial


def test_serial_leaves_tensors_as_they_are() -> None:
    comm = Serial()
    tensors = [torch.arange(3.0), torch.ones(2, 2)]
    before = [t.clone() for t in tensors]
    assert (comm.rank, comm.size) == (0, 1)
    comm.all_reduce_(tensors)
    comm.broadcast_(tensors, src=0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    with pytest.raises(ValueError, match="expected 0: there is only one process"):
        comm.broadcast_(tensors, src=1)


def test_serial_is_a_communicator() -> None:
    assert isinstance(Serial(), Communicator)
    assert not isinstance(object(), Communicator)
