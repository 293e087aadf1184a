"""The examples run as they are and train to the accuracy that they are for."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
ACCURACY = {"01_basic": 0.92, "02_groups": 0.9, "03_every_parameter": 0.85, "04_advanced": 0.9, "05_kfac": 0.92}


@pytest.mark.parametrize("name", ACCURACY)
def test_examples_train_digits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        accuracy = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    out = capsys.readouterr().out
    assert "epoch 1: loss" in out
    assert f"{accuracy:.1%}" in out
    assert accuracy > ACCURACY[name]


def test_every_example_is_tested() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(ACCURACY)
