"""Unknown keywords are refused in the name of the class that was called."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import curvops
from curvops._keywords import accepted

MODEL, LOSS = nn.Linear(3, 2), nn.MSELoss()
DATA = [(torch.randn(4, 3), torch.randn(4, 2))]
OPERATORS = {n: c for n, c in vars(curvops).items() if inspect.isclass(c) and n.endswith("LinearOperator")}
WITH_LOSS = [
    c
    for n, c in OPERATORS.items()
    if {"model", "loss", "params", "data"} <= accepted(c) and not n.startswith("Activation")
]


@pytest.mark.parametrize("kind", WITH_LOSS)
def test_operators_of_a_risk(kind) -> None:
    assert len(WITH_LOSS) >= 10
    with pytest.raises(
        TypeError, match=rf"{kind.__name__}: found unknown arguments \['fisher'\], expected some of .*'num_data'"
    ):
        kind(MODEL, LOSS, None, DATA, fisher="mc")
    assert kind(MODEL, LOSS, None, DATA, num_data=4).shape == (8, 8)


@pytest.mark.parametrize(
    "kind", [curvops.JacobianLinearOperator, curvops.NTKLinearOperator, curvops.TransposedJacobianLinearOperator]
)
def test_jacobians_take_no_loss(kind) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}: found unknown arguments \['loss'\]"):
        kind(MODEL, None, DATA, loss=LOSS)


def test_solvers() -> None:
    A = curvops.GGNLinearOperator(MODEL, LOSS, None, DATA)
    for kind in (
        curvops.CGInverseLinearOperator,
        curvops.LSMRInverseLinearOperator,
        curvops.NeumannInverseLinearOperator,
    ):
        with pytest.raises(TypeError, match=rf"{kind.__name__}: found unknown arguments \['atol'\]"):
            kind(A, atol=1e-3)
