"""The page for people from curvlinops names all that is public there, and leaves no cell of its tables empty."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import curvops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports is deprecated
    import curvlinops

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "curvlinops.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not re.match(r"^\|[ |-]+\|$", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_no_cell_is_empty_on_our_side():
    for row in rows():
        if not row[0].startswith("**") and row[0]:
            assert all(row), row
            assert row[-1].lower() not in ("no", "-", "not yet"), row


def test_every_public_name_of_curvlinops_is_there():
    for name, thing in vars(curvlinops).items():
        if not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)):
            assert f"`{name}" in PAGE, name
            same = any(f"`{name}" in row[0] and row[1].startswith("the same name") for row in rows())
            assert not same or hasattr(curvops, name), name


def test_every_name_that_the_page_offers_exists():
    ours = " ".join(row[-1] for row in rows())
    kinds = r"[A-Z]\w+Operator|hutch\w+|lanczos\w+|trace_of_function|top_eigenpairs|xnystrace|nystrom|explain"
    for name in re.findall(f"`({kinds})`", ours):
        assert hasattr(curvops, name), name
