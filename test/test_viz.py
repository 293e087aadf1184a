"""Pictures show what the operator holds: checked on the artists of the figure, not on pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from curvops import viz
from curvops.structured.diagonal import Diagonal
from curvops.structured.direct_sum import DirectSum, Part
from curvops.structured.kronecker import Kronecker
from curvops.structured.placement import Placement, Slot


def psd(*shape: int) -> torch.Tensor:
    X = torch.randn(*shape, shape[-1] + 2, dtype=torch.float64)
    return X @ X.mT


@pytest.fixture
def K() -> DirectSum:
    """A joint block, a grouped one, a bias alone and a parameter without curvature."""
    parts = [
        Part(
            Placement((Slot("a.weight", (3, 4), 0, 4), Slot("a.bias", (3,), 4, 1)), (1, 3, 5)),
            Kronecker(psd(3), psd(5), label="a.weight"),
        ),
        Part(
            Placement((Slot("b.weight", (4, 3, 1), 0, 3),), (2, 2, 3)),
            Kronecker(psd(2, 2), psd(2, 3), label="b.weight"),
        ),
        Part(Placement((Slot("c", (2,), 0, 1),), (1, 2, 1)), Kronecker(psd(2), None, shape=(1, 2, 1), label="c")),
        Part(
            Placement((Slot("d", (2,), 0, 1),), (1, 2, 1)),
            Diagonal(torch.zeros(1, 2, 1, dtype=torch.float64), label="d"),
        ),
    ]
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (4, 3, 1), "c": (2,), "d": (2,)}
    return DirectSum(tuple(shapes.values()), tuple(shapes), parts)


def test_factors_are_drawn_with_their_values(K: DirectSum) -> None:
    figure = viz.plot_factors(K)
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    a, b = K.parts[0].operator, K.parts[1].operator
    for M in (a.A[0], a.B[0], b.A[0], b.B[0]):
        assert any(image.shape == M.shape and np.allclose(image, M) for image in images)


def test_spectra_are_sorted_and_leave_zeros_out(K: DirectSum) -> None:
    lines = viz.plot_spectra(K).axes[0].lines
    assert [line.get_label() for line in lines] == ["a.weight (15)", "b.weight (12)", "c (2)", "d (2)"]
    for line, part in zip(lines[:3], K.parts[:3], strict=True):
        assert np.allclose(line.get_ydata(), part.operator.eigenvalues().flip(0))
    assert len(lines[3].get_ydata()) == 0


def test_bars_are_traces(K: DirectSum) -> None:
    axes = viz.plot_layer_bars(K).axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert np.allclose(widths, [float(part.operator.trace()) for part in K.parts])
    shares = [float(text.get_text().split()[0]) for text in axes.texts]
    assert sum(shares) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize("plot", [viz.plot_factors, viz.plot_spectra, viz.plot_layer_bars])
def test_files_are_written_also_of_inverses(K: DirectSum, plot: object, tmp_path: Path) -> None:
    for i, op in enumerate((K, K.inverse(0.1, how="factors"))):
        path = tmp_path / "new folder" / f"{i}.png"
        plot(op, path)
        assert path.stat().st_size > 5000


def test_no_factors_is_an_error_that_names_what_was_found(K: DirectSum) -> None:
    with pytest.raises(ValueError, match=r"found blocks \['diagonal', 'eigen'\], expected Kronecker"):
        viz.plot_factors(K.inverse(0.1))
