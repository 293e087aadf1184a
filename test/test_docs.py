"""Every python code block of README.md and docs/*.md runs, in order, in one namespace per file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_blocks(text: str, name: str) -> dict[str, Any]:
    """Execute the blocks; line numbers of a traceback are those of the page."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for match in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(code, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes stays out of the repository
    run_blocks(page.read_text(encoding="utf-8"), str(page))


def test_the_readme_has_a_short_example() -> None:
    """A newcomer copies ten lines."""
    first = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None
    lines = [line for line in first[1].splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 12
    assert "eigsh" in first[1]


def test_blocks_share_a_namespace_and_failures_name_the_line() -> None:
    page = "text\n```python\na = 1\n```\n```text\nnot code\n```\n```python\nb = a + 1\n```\n"
    assert run_blocks(page, "page.md")["b"] == 2
    with pytest.raises(ZeroDivisionError) as info:
        run_blocks("one\ntwo\n```python\n1 / 0\n```\n", "page.md")
    assert info.traceback[-1].lineno == 3  # counted from 0
