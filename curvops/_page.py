"""One self-contained HTML page: tables that sort, pictures inside, nothing to fetch."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from html import escape
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1,h2{line-height:1.2}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child,.text{text-align:left}
th button{all:unset;cursor:pointer;font-weight:600}th button:focus-visible{outline:2px solid #0072b2}
th[aria-sort=ascending] button::after{content:" \\25b2"}th[aria-sort=descending] button::after{content:" \\25bc"}
.wide{overflow-x:auto}figure{margin:1.5rem 0}img{max-width:100%;height:auto}
"""
_PRODUCTS = {"forward": "forward mode", "backward": "reverse over reverse", "compiled": "compiled code"}
_SCRIPT = """
document.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === "ascending";
  const key = row => { const v = row.cells[column].dataset.value; const n = Number(v); return Number.isNaN(n) ? v : n; };
  const rows = [...body.rows].sort((a, b) => { const x = key(a), y = key(b); return x < y ? -1 : x > y ? 1 : 0; });
  if (down) rows.reverse();
  head.parentNode.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}));
"""


_CAPTIONS = {
    "Spectral density": "By Lanczos, smoothed with a Gaussian kernel (which also reaches below zero); two standard errors to "
    "each side. The axes differ.",
    "Trace of each block of the GGN": "Where the curvature is: exact traces, and their shares of the whole.",
    "Spectrum of each block of KFAC": "Sorted eigenvalues; what is zero up to rounding is left out.",
    "Kronecker factors": "Second moments of layer inputs, and of the gradients of layer outputs.",
}


_LAYERS = """A block holds a weight and, in the last column of its shape, its bias. GGN trace: exact. Distance: Frobenius norm
of the difference from the Gauss-Newton block, relative to its own; cosine: of the angle between the two matrices; both from
products with random vectors (with all unit vectors in small models), ± their standard error. Blocks without a rule are exact
diagonals."""


def render(numbers: dict[str, Any], figures: dict[str, Any], title: str = "") -> str:
    """Return the page for what :func:`curvops.report.measure` returns."""
    found = numbers["eigenvalues"]
    eigenvalues = [
        {"rank": i + 1, **{k: v for n in found if i < len(found[n]) for k, v in _eigenvalue(n, found[n][i]).items()}}
        for i in range(max(map(len, found.values())))
    ]
    traces = [{"operator": n, "trace": t["value"], "standard error": t["stderr"]} for n, t in numbers["trace"].items()]
    about = {**numbers["about"], **{f"{n} products": _PRODUCTS[way] for n, way in numbers["products"].items()}}
    name = escape(title)
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Curvature report: {name}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<style>{_STYLE}</style></head><body><h1>Curvature report</h1><p>{name}</p>",
            "<p>" + "; ".join(f"{escape(k)}: {escape(str(v))}" for k, v in about.items()) + ".</p>",
            f"<p>{numbers['parameters']} parameters in {numbers['blocks']} blocks. Suggested damping: ",
            f'<strong id="damping">{numbers["suggested_damping"]:.3g}</strong>, a tenth of the mean eigenvalue of the GGN ',
            "(Grosse et al. 2023).</p>",
            f"<h2>Layers</h2><p>{_LAYERS}</p>",
            _table("layers", [_layer(row) for row in numbers["layers"]]),
            "<h2>Largest eigenvalues in magnitude</h2><p>An eigenvalue lies within the error of each number.</p>",
            _table("eigenvalues", eigenvalues),
            "<h2>Traces</h2>",
            _table("traces", traces),
            *(f"<h2>{escape(t)}</h2><p>{_CAPTIONS.get(t, '')}</p>{_figure(f, t)}" for t, f in figures.items()),
            f"<script>{_SCRIPT}</script></body></html>",
        ]
    )


def _eigenvalue(name: str, found: dict[str, float]) -> dict[str, Any]:
    return {name: found["value"], f"{name} error at most": found["error"]}


def _layer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a layer: numbers beside their errors, the treatment last and without names."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("names", "treatment") or key.endswith(" error"):
            continue
        error = row.get(f"{key} error")
        cells[key] = Measured(value, error) if error else value
    return {**cells, "treatment": _short(row["treatment"])}


@dataclass(frozen=True)
class Measured:
    """A number and its standard error."""

    value: float
    error: float


def _short(treatment: str) -> str:
    """Leave out the names of the parameters that a block joins: the JSON has them."""
    return treatment.partition(", joint")[0]


def _table(name: str, rows: list[dict[str, Any]]) -> str:
    columns = list(rows[0]) if rows else []
    head = "".join(f'<th scope="col"><button type="button">{escape(c)}</button></th>' for c in columns)
    body = "".join("<tr>" + "".join(_cell(row[c]) for c in columns) + "</tr>" for row in rows)
    return f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, Measured):
        return f'<td data-value="{value.value!r}">{value.value:.3g} ± {value.error:.1g}</td>'
    if isinstance(value, float):
        return f'<td data-value="{value!r}">{value:.4g}</td>'
    if isinstance(value, int):
        return f'<td data-value="{value}">{value}</td>'
    text = " × ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f'<td class="text" data-value="{escape(text, quote=True)}">{escape(text)}</td>'


def _figure(figure: Any, title: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<figure><img alt="{escape(title, quote=True)}" src="data:image/png;base64,{data}"></figure>'
