"""Every import inside curvops points down or sideways: floor(importer) >= floor(imported).

The floors are those of docs/design.md. A module that is not listed takes the floor of its package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "curvops"

FLOORS: list[set[str]] = [
    {"_operator", "_algebra", "_forms", "_communicator", "_random", "_linalg", "_keywords", "_gram", "_scalars", "structured"},
    {
        "_params",
        "_traceless",
        "_tape",
        "_linearize",
        "_compiled",
        "risk",
        "losses",
        "inverse",
        "estimators",
        "kfac.rules",
    },
    {f"kfac.{room}" for room in "_autograd recorder sites tied vectors schedule sharing".split()}
    | {f"kfac.{room}" for room in "uses statistics rotation collect gradients joined reducers rank_one".split()},
    {
        "kfac",
        "_matrix_free",
        "hessian",
        "ggn",
        "fisher",
        "jacobian",
        "diagonal_ggn",
        "activations",
        "interaction_basis",
    },
    {"optim", "distributed", "report", "_page", "_quality", "_digits", "testing", "_check_structure", "viz", "__main__"},
]
#: Neighbours on one floor that do not know each other.
STRANGERS = [{"optim", "distributed"}]


def floor(module: str) -> int:
    """Return the floor of the longest listed prefix of ``module``; the package itself is the roof."""
    parts = module.split(".")
    for cut in range(len(parts), 0, -1):
        for i, names in enumerate(FLOORS):
            if ".".join(parts[:cut]) in names:
                return i
    if module == "":
        return len(FLOORS)
    raise AssertionError(f"curvops.{module} has no floor: add it to FLOORS here and to docs/design.md.")


def module_name(path: Path, root: Path) -> str:
    """Name a file of the package, relative to the package: ``""`` is its ``__init__``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolve(module: str, root: Path) -> str:
    """Cut names that are no modules (classes, functions) off a dotted name."""
    parts = module.split(".") if module else []
    while parts:
        path = root.joinpath(*parts)
        if path.is_dir() or path.with_suffix(".py").is_file():
            break
        parts.pop()
    return ".".join(parts)


def imported(path: Path, root: Path) -> Iterator[str]:
    """Yield what a file imports from its package, anywhere in the file (also inside functions)."""
    package = path.relative_to(root.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == root.name:
                yield resolve(".".join(name.split(".")[1:]), root)


def violations(root: Path) -> list[str]:
    """Say every import of a package that points up, or to a neighbour that should stay a stranger."""
    found = []
    for path in sorted(root.rglob("*.py")):
        importer = module_name(path, root)
        for target in sorted(set(imported(path, root)) - {importer}):
            here, there = floor(importer), floor(target)
            if there > here:
                found.append(f"{importer} (floor {here}) imports {target or root.name} (floor {there})")
            rooms = {importer.split(".")[0], target.split(".")[0]}
            if len(rooms) == 2 and rooms in STRANGERS:
                found.append(f"{importer} imports {target}: they do not know each other")
    return found


def test_imports_point_down() -> None:
    assert violations(ROOT) == []


def test_every_file_has_a_floor() -> None:
    names = [module_name(path, ROOT) for path in ROOT.rglob("*.py")]
    assert len(names) > 1
    for name in names:
        floor(name)


TOY = dict.fromkeys(
    ["__init__.py", "losses.py", "kfac/__init__.py", "kfac/recorder.py", "kfac/rules/__init__.py", "distributed.py"], ""
)


def plant(root: Path, file: str, code: str) -> Path:
    """Write a toy package with one file that holds ``code``."""
    for name, text in {**TOY, file: code}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "code",
    [
        "from curvops.losses import mse",
        "import curvops.losses",
        "import numpy, curvops.losses as L",
        "from curvops import losses",
        "from . import losses",
        "def f():\n    from .losses import mse",
        "if 1:\n    import curvops.losses",
    ],
)
def test_all_forms_of_imports_are_seen(tmp_path: Path, code: str) -> None:
    root = plant(tmp_path / "curvops", "_operator.py", code)
    assert violations(root) == ["_operator (floor 0) imports losses (floor 1)"]


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("_operator.py", "from curvops import KFAC", "_operator (floor 0) imports curvops (floor 5)"),
        ("structured/dense.py", "from ..losses import f", "structured.dense (floor 0) imports losses (floor 1)"),
        ("kfac/rules/conv.py", "from ..recorder import r", "kfac.rules.conv (floor 1) imports kfac.recorder (floor 2)"),
        ("kfac/rules/conv.py", "from .. import recorder", "kfac.rules.conv (floor 1) imports kfac.recorder (floor 2)"),
        ("kfac/collect.py", "import curvops.kfac", "kfac.collect (floor 2) imports kfac (floor 3)"),
        ("optim.py", "from .distributed import x", "optim imports distributed: they do not know each other"),
    ],
)
def test_violations_are_found(tmp_path: Path, file: str, code: str, expected: str) -> None:
    assert violations(plant(tmp_path / "curvops", file, code)) == [expected]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("kfac/collect.py", "from curvops.kfac.recorder import r\nfrom .rules import q\nimport curvops.losses"),
        ("losses.py", "import torch\nfrom scipy import losses\nfrom curvops_like import kfac"),
        ("__init__.py", "from curvops.losses import mse as mse\nfrom .kfac import recorder"),
    ],
)
def test_imports_down_are_allowed(tmp_path: Path, file: str, code: str) -> None:
    assert violations(plant(tmp_path / "curvops", file, code)) == []


def test_a_module_without_a_floor_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"curvops\.attic has no floor"):
        floor("attic")
