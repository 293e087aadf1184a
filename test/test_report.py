"""The curvature report: its numbers are those of the operators, its page opens in a browser, its errors say what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn

pytest.importorskip("matplotlib")

from curvops import GGNLinearOperator, HessianLinearOperator, KFACLinearOperator, _quality
from curvops.kfac.ekfac import EKFACLinearOperator
from curvops.report import load, main, measure

PROBLEM = """
import torch
from torch import nn

def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    data = [(torch.randn(6, 4).double(), torch.randint(3, (6,))) for _ in range(2)]
    return model, nn.CrossEntropyLoss(), None, data

def short():
    return nn.Linear(2, 2), 3

def swapped():
    model, loss, params, data = problem()
    return loss, model, params, data

def wrong():
    model, loss, params, data = problem()
    return model, loss, model.parameters(), [(X, y.double()) for X, y in data]

answer = 42
"""
HF = """
import sys
try:
    import torchvision
except (ImportError, RuntimeError):  # built for another torch, as it may be beside the second witnesses of the tests
    sys.modules["torchvision"] = None
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

def problem():
    torch.manual_seed(0)
    sizes = dict(vocab_size=19, n_positions=8, n_embd=8, n_layer=4, n_head=2, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    tokens = torch.randint(19, (6, 8))
    data = [({"input_ids": t[:, :-1]}, t[:, 1:]) for t in tokens.split(4)]
    return model, nn.CrossEntropyLoss(), None, data, {"class_dim": -1}
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(6, 4).double(), torch.randint(3, (6,))) for _ in range(2)]
    return model, nn.CrossEntropyLoss(), dict(model.named_parameters()), data


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("report")
    (folder / "mine.py").write_text(PROBLEM)
    out, numbers = folder / "deep" / "report.html", folder / "report.json"
    arguments = [f"{folder / 'mine.py'}:problem", "--out", str(out), "--json", str(numbers), "--top", "3"]
    assert main(arguments) == 0
    return out, json.loads(numbers.read_text())


def test_R9_numbers_are_those_of_the_operators(monkeypatch):
    args = problem()
    numbers, figures = measure(*args, top=3, probes=20)
    K, E = (
        kind(*args, fisher_type="type-2", unsupported="diagonal") for kind in (KFACLinearOperator, EKFACLinearOperator)
    )
    G, H = GGNLinearOperator(*args), HessianLinearOperator(*args)
    for name, op in (("GGN", G), ("Hessian", H)):
        values = torch.linalg.eigvalsh(op.to_dense())
        want = values[values.abs().argsort(descending=True)[:3]]
        got = torch.tensor([e["value"] for e in numbers["eigenvalues"][name]], dtype=torch.float64)
        torch.testing.assert_close(got.sort().values, want.sort().values, rtol=1e-6, atol=1e-9)
        trace = numbers["trace"][name]
        assert abs(trace["value"] - float(op.trace())) <= 5 * trace["stderr"] + 1e-9
        density = numbers["density"][name]
        grid, height = torch.tensor(density["grid"]), torch.tensor(density["density"])
        assert float(torch.trapezoid(height, grid)) == pytest.approx(1, rel=0.05)
    blocks = G.block_diagonal()
    at = [slice(0, 25), slice(25, None)]
    monkeypatch.setattr(_quality, "EXACT", 0)
    few = measure(*args, top=1, probes=40)[0]["layers"]
    for i, (row, part, block) in enumerate(zip(numbers["layers"], K.parts, at, strict=True)):
        exact = blocks.to_dense()[block, block]
        assert row["KFAC trace"] == pytest.approx(float(part.operator.trace()), rel=1e-12)
        assert row["KFAC top eigenvalue"] == pytest.approx(float(part.operator.eigenvalues().max()), rel=1e-12)
        for title, op in (("KFAC", K), ("EKFAC", E)):
            near = op.to_dense()[block, block]
            distance = float((near - exact).norm() / exact.norm())
            cosine = float((near * exact).sum() / near.norm() / exact.norm())
            assert row[f"{title} distance"] == pytest.approx(distance, abs=1e-9)
            assert row[f"{title} cosine"] == pytest.approx(cosine, abs=1e-9)
            assert row[f"{title} distance error"] == row[f"{title} cosine error"] == 0
            for what, value in (("distance", distance), ("cosine", cosine)):
                name = f"{title} {what}"
                assert abs(few[i][name] - value) <= 4 * few[i][f"{name} error"] + 1e-9
                assert few[i][f"{name} error"] < 0.3
        assert row["GGN trace"] == pytest.approx(float(exact.trace()), rel=1e-9)
    assert numbers["suggested_damping"] == pytest.approx(0.1 * float(G.trace()) / K.shape[0])
    spectrum = numbers["factor_spectra"]["0.weight"]["output"]
    want = torch.linalg.eigvalsh(K.factors["0.weight"].output).flatten().flip(0)
    torch.testing.assert_close(torch.tensor(spectrum, dtype=torch.float64), want, rtol=1e-9, atol=1e-14)
    assert set(figures) >= {"Spectral density", "Trace of each block of the GGN", "Kronecker factors"}


class Page(HTMLParser):
    """Collects tags, and insists that what is opened is closed in order."""

    VOID = frozenset({"meta", "link", "img", "br", "!doctype"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_R9_the_page_is_valid_and_self_contained(written):
    out, numbers = written
    page = Page()
    page.feed(out.read_text(encoding="utf-8"))
    page.close()
    assert not page.open
    images = [a for tag, a in page.tags if tag == "img"]
    assert len(images) >= 4
    assert all(a["alt"] and a["src"].startswith("data:image/png;base64,") for a in images)
    assert not [a for _, a in page.tags if re.match("https?:", a.get("src", a.get("href", "")))]
    layers = [a for tag, a in page.tags if tag == "table"]
    assert [t["id"] for t in layers] == ["layers", "eigenvalues", "traces"]
    assert len(numbers["layers"]) == numbers["blocks"] > 2  # the norm's parameters have blocks, too


# The page checks itself: pictures are decoded, a click sorts, and what goes wrong becomes the title.
PROBE = """<script>
window.onerror = m => { document.title = "error: " + m; };
window.onload = () => {
  const images = [...document.images].every(i => i.complete && i.naturalWidth > 100);
  const column = () => [...document.querySelectorAll("#layers tbody tr")].map(r => Number(r.cells[4].dataset.value));
  const button = document.querySelectorAll("#layers th button")[4];
  button.click(); const up = column(); button.click(); const down = column();
  document.title = JSON.stringify({images, up, down});
};</script></head>"""


def assert_opens(out: Path, numbers: dict, folder: Path) -> None:
    """Open the page in a headless browser: no console error, pictures are there, the table sorts."""
    copy = folder / "probe.html"
    copy.write_text(out.read_text(encoding="utf-8").replace("</head>", PROBE), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None
    found = json.loads(title[1])
    traces = sorted(row["KFAC trace"] for row in numbers["layers"])
    assert found == {"images": True, "up": traces, "down": traces[::-1]}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_R9_the_page_opens_in_a_headless_browser_and_its_table_sorts(written, tmp_path):
    assert_opens(*written, tmp_path)


def test_R9_a_transformer_of_hugging_face(tmp_path):
    file, out, numbers = tmp_path / "gpt.py", tmp_path / "gpt.html", tmp_path / "gpt.json"
    file.write_text(HF)
    assert main([f"{file}:problem", "--out", str(out), "--json", str(numbers), "--top", "2", "--probes", "4"]) == 0
    found = json.loads(numbers.read_text())
    model, loss, params, data, options = load(f"{file}:problem")()
    K = KFACLinearOperator(model, loss, params, data, fisher_type="type-2", unsupported="diagonal", **options)
    assert {n for row in found["layers"] for n in row["names"]} == {n for n, _ in model.named_parameters()}
    assert len(found["layers"]) == len(K.parts) == found["blocks"]
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    for row in found["layers"]:
        assert row["treatment"].startswith(K.treatments[row["names"][0]].kind)
        if row["treatment"].startswith("kronecker"):
            part = next(p for p in K.parts if p.label == row["block"])
            assert row["KFAC trace"] == pytest.approx(float(part.operator.trace()), rel=1e-4)
    G = GGNLinearOperator(model, loss, params, data, **options)
    with G.cached():
        top = sorted(eigsh(G, 2, return_eigenvectors=False), reverse=True)
    assert [e["value"] for e in found["eigenvalues"]["GGN"]] == pytest.approx(top, rel=1e-4)
    page = Page()
    page.feed(out.read_text(encoding="utf-8"))
    assert not page.open
    if CHROMIUM is not None:
        assert_opens(out, found, tmp_path)


def test_bad_input_says_what_was_expected(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(PROBLEM)
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name")
    for target, words in {
        "mine": "expected path/to/file.py:function",
        f"{tmp_path / 'no.py'}:problem": "found no file",
        f"{broken}:problem": "cannot be imported: ModuleNotFoundError",
        f"{file}:nothing": "has no 'nothing', expected a function; found the functions .'problem', 'short', 'swapped'",
        f"{file}:answer": "its 'answer' is a int, expected a function",
        f"{file}:swapped": "returned the loss CrossEntropyLoss as model, expected a tuple",
        f"{file}:wrong": "Error: .*CrossEntropyLoss needs class indices.*--traceback shows where",
        f"{file}:short": r"returned a tuple of length 2, expected a tuple \(model, loss, params, data\)",
    }.items():
        assert main([target, "--out", str(tmp_path / "r.html")]) == 1
        assert re.search(words, capsys.readouterr().err), words
    assert not (tmp_path / "r.html").exists()
    with pytest.raises((TypeError, ValueError), match="needs class indices"):
        main([f"{file}:wrong", "--traceback", "--out", str(tmp_path / "r.html")])
    for option in ("--probes", "--ncv"):
        with pytest.raises(SystemExit):
            main([f"{file}:problem", option, "1"])
        assert "found '1', expected an integer of at least 2" in capsys.readouterr().err
