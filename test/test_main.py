"""The main job end to end: what a person sees, what is on disk, what is said when an extra is missing."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from curvops.__main__ import main

SECTIONS = ["Data and model", "Training", "KFAC of", "Largest 3 eig", "Whole", "Solving", "Plots"]
PICTURES = ["factors.png", "spectra.png", "layer_bars.png"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Run the demo once; return what it printed and where it drew."""
    out = tmp_path_factory.mktemp("demo") / "plots"
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["--out", str(out), "--epochs", "1", "--top", "3", "--damping", "0.01"]) == 0
    return printed.getvalue(), out


def test_sections_come_in_order(demo: tuple[str, Path]) -> None:
    positions = [demo[0].find(f"\n{title}") for title in SECTIONS]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_every_layer_has_a_row(demo: tuple[str, Path]) -> None:
    for name, shape in {"conv1": "8 x 10", "conv2": "16 x 73", "hidden": "32 x 257", "classes": "10 x 33"}.items():
        number = r"\d\.\d+e[+-]\d+"
        row = rf"^{name}\.weight\s+{shape}(\s+{number}){{3}}\s+(conv2d|linear),.*{name}\.weight \+ {name}\.bias"
        assert re.search(row, demo[0], re.MULTILINE), name


def test_eigsh_agrees_with_the_closed_form(demo: tuple[str, Path]) -> None:
    table = demo[0].split("Largest 3 eigenvalues")[1].split("\n\n")[0]
    rows = re.findall(r"^\s*\d\s+(\S+)\s+(\S+)\s+\S+$", table, re.MULTILINE)
    assert len(rows) == 3
    for lanczos, closed in rows:
        assert float(lanczos) == pytest.approx(float(closed), rel=1e-3)  # float32, printed with six digits


def test_the_inverse_solves(demo: tuple[str, Path]) -> None:
    residual = re.search(r"relative residual .* = (\S+)", demo[0])
    assert residual is not None
    assert float(residual[1]) < 1e-3  # float32


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_show_something(demo: tuple[str, Path], name: str) -> None:
    import matplotlib.image

    image = matplotlib.image.imread(demo[1] / name)[..., :3]
    assert min(image.shape[:2]) > 200
    assert (image.min(axis=2) < 0.98).mean() > 0.02  # not blank


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")])
def test_a_missing_extra_is_named(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert main(["--out", str(tmp_path / "plots")]) == 1
    printed = capsys.readouterr()
    assert f"{package} is not installed" in printed.err
    assert "pip install 'curvops[demo]'" in printed.err
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--top", "-1"], ["--damping", "-1"], ["--nonsense"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    assert arguments[0] in capsys.readouterr().err
