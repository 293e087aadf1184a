"""The curvature report: what a person wants to see of a model's curvature, on one page or as JSON.

Needs matplotlib, and scikit-learn for the default problem: ``pip install 'curvops[demo]'``.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvops import _digits, viz
from curvops._page import render
from curvops._random import signs
from curvops.estimators import LanczosSpectrum, top_eigenpairs, xtrace
from curvops.ggn import GGNLinearOperator
from curvops.hessian import HessianLinearOperator
from curvops.kfac.ekfac import EKFACLinearOperator
from curvops.kfac.factors import factors_of
from curvops.kfac.operator import KFACLinearOperator

Problem = tuple[Any, Any, Any, Any, dict[str, Any]]
_EXPECTED = (
    "expected a tuple (model, loss, params, data), as KFACLinearOperator takes them, or (..., options) with a dictionary of "
    "keywords such as {'class_dim': -1}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m curvops report``; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m curvops report", description="Write a page about the curvature of a model."
    )
    parser.add_argument(
        "target",
        nargs="?",
        help="path/to/file.py:function that returns (model, loss, params, data), or these and a dictionary of keywords for the "
        "operators; default: digits",
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--json", type=Path, help="the numbers, as JSON")
    parser.add_argument("--top", type=natural, default=5, help="how many eigenvalues")
    parser.add_argument("--probes", type=natural, default=20, help="random vectors for each estimate")
    args = parser.parse_args(argv)
    try:
        found = _digits.problem() if args.target is None else load(args.target)()
        *problem, options = checked(found, args.target)
        numbers, figures = measure(*problem, top=args.top, probes=args.probes, **options)
        page = render(numbers, figures)
    except (ReportError, ModuleNotFoundError) as error:
        print(f"curvops: {error}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page, encoding="utf-8")
    print(f"wrote {args.out}")
    if args.json is not None:
        args.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        print(f"wrote {args.json}")
    return 0


def natural(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a positive integer")
    return int(text)


class ReportError(ValueError):
    """What the user asked for cannot be reported on."""


def load(target: str) -> Callable[[], Any]:
    """Return the function that a ``path/to/file.py:function`` names."""
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise ReportError(f"found {target!r}, expected path/to/file.py:function, for example mymodel.py:problem")
    if not Path(path).is_file():
        raise ReportError(f"found no file {path!r}; expected path/to/file.py:function")
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)  # what a script beside its modules expects
    try:
        namespace = runpy.run_path(path)
    except Exception as error:
        raise ReportError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(namespace.get(name)):
        names = sorted(n for n, v in namespace.items() if callable(v) and not n.startswith("_"))
        raise ReportError(f"{path} has no function {name!r}, only {names}; {_EXPECTED} from one")
    return namespace[name]


def checked(found: Any, target: str | None) -> Problem:
    """Return what a problem function gave, if it is a problem."""
    size = len(found) if isinstance(found, tuple | list) else 0
    if size not in (4, 5):
        length = f" of length {size}" if isinstance(found, tuple | list) else ""
        raise ReportError(f"{target} returned a {type(found).__name__}{length}, {_EXPECTED}")
    if not isinstance(found[0], nn.Module) and not callable(found[0]):
        raise ReportError(f"{target} returned a {type(found[0]).__name__} as model, {_EXPECTED}")
    options = found[4] if size == 5 else {}
    if not isinstance(options, Mapping):
        raise ReportError(f"{target} returned a {type(options).__name__} as options, {_EXPECTED}")
    return found[0], found[1], found[2], found[3], dict(options)


def measure(
    model: Any,
    loss: Any,
    params: Any,
    data: Any,
    *,
    top: int = 5,
    probes: int = 20,
    ncv: int = 40,
    seed: int = 0,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the curvature of a risk.

    Args:
        model, loss, params, data: See :class:`~curvops.EmpiricalRisk`.
        top: How many eigenvalues.
        probes: Random vectors for each estimate.
        ncv: Lanczos vectors for each spectral density.
        seed: Seed of all random vectors.
        **options: For all operators: keywords of :class:`~curvops.EmpiricalRisk`.

    Returns:
        Plain numbers, ready for JSON, and the figures by title.
    """
    with tqdm(total=5, desc="report", unit="step") as bar:
        step = partial(_step, bar)
        step("KFAC")
        factored = {"fisher_type": "type-2", "unsupported": "diagonal", **options}
        K = KFACLinearOperator(model, loss, params, data, **factored)
        numbers: dict[str, Any] = {"parameters": K.shape[0], "blocks": len(K.parts), "layers": _layers(K)}
        step("EKFAC")
        E = EKFACLinearOperator(model, loss, params, data, **factored)
        H, G = (kind(model, loss, params, data, **options) for kind in (HessianLinearOperator, GGNLinearOperator))
        operators = {"Hessian": H, "GGN": G}
        with G.cached(), H.cached():
            step("quality of KFAC and EKFAC")
            _quality(numbers["layers"], G, {"KFAC": K, "EKFAC": E}, probes, seed)
            for row in numbers["layers"]:
                treatment = K.treatments[row["names"][0]]
                row["treatment"] = f"{treatment.kind}: {treatment.detail}"
            step("eigenvalues")
            numbers["eigenvalues"] = {name: _eigenvalues(op, top, seed) for name, op in operators.items()}
            step("traces and densities")
            spectra = {name: LanczosSpectrum(op, ncv, num_repeats=3, seed=seed) for name, op in operators.items()}
            traces = {n: xtrace(op, min(probes, op.shape[0]), seed=seed) for n, op in operators.items()}
        bar.update()
    densities = {name: spectrum.density() for name, spectrum in spectra.items()}
    numbers["trace"] = {n: {"value": float(e.value), "stderr": float(e.stderr)} for n, e in traces.items()}
    numbers["density"] = {
        n: {"grid": d.grid.tolist(), "density": d.density.tolist(), "stderr": d.stderr.tolist()}
        for n, d in densities.items()
    }
    numbers["products"] = {name: op.linearization for name, op in operators.items()}
    numbers["factor_spectra"] = _factor_spectra(K)
    # A tenth of the mean eigenvalue, as Grosse et al. (2023) damp for influence functions.
    numbers["suggested_damping"] = 0.1 * float(K.trace()) / K.shape[0]
    return numbers, _figures(K, densities)


def _step(bar: tqdm, what: str) -> None:
    if bar.postfix:  # the one before is done
        bar.update()
    bar.set_postfix_str(what)


def _figures(K: KFACLinearOperator, densities: dict[str, Any]) -> dict[str, Any]:
    figures = {
        "Spectral density": viz.plot_density(densities),
        "Where the curvature is": viz.plot_layer_bars(K),
        "Spectrum of each block": viz.plot_spectra(K),
    }
    if any(factors_of(part).input is not None for part in K.parts):
        figures["Kronecker factors"] = viz.plot_factors(K)
    return figures


def _layers(K: KFACLinearOperator) -> list[dict[str, Any]]:
    rows = []
    for part in K.parts:
        values = part.operator.eigenvalues()
        rows.append(
            {
                "block": part.label,
                "names": list(dict.fromkeys(part.placement.names)),
                "shape": [n for n in part.placement.shape[:1] if n > 1] + list(part.placement.shape[1:]),
                "parameters": part.operator.shape[0],
                "KFAC trace": float(part.operator.trace()),
                "top eigenvalue": float(values.max()),
            }
        )
    return rows


def _quality(rows: list[dict[str, Any]], G: Any, approximations: dict[str, Any], probes: int, seed: int) -> None:
    """Add to every block how near the approximations are to the GGN's block: distance and cosine by Hutchinson's sums."""
    merged = _disjoint([row["names"] for row in rows])
    names, shapes = list(G.domain_names), dict(zip(G.domain_names, G.domain, strict=True))
    index = torch.arange(probes, device=G.device).unsqueeze(1)
    z = signs(seed, index, torch.arange(G.shape[1], device=G.device)).to(G.torch_dtype).T.contiguous()
    Z = dict(zip(names, _split(z, shapes), strict=True))
    exact = G.block_diagonal(merged) @ Z
    for row in rows:
        row["GGN trace"] = sum(float((Z[n] * exact[n]).sum(dtype=torch.float64)) for n in row["names"]) / probes
    for title, op in approximations.items():
        near = op @ Z
        for row in rows:
            g, k = (torch.cat([y[n].reshape(-1, probes) for n in row["names"]]).double() for y in (exact, near))
            size = float((g**2).sum()) ** 0.5
            row[f"{title} distance"] = float(((g - k) ** 2).sum()) ** 0.5 / size if size else 0.0
            other = float((k**2).sum()) ** 0.5
            row[f"{title} cosine"] = float((g * k).sum()) / (size * other) if size and other else 1.0


def _disjoint(blocks: list[list[str]]) -> list[list[str]]:
    """Merge blocks that hold pieces of one parameter."""
    merged: list[list[str]] = []
    for block in blocks:
        touching = [m for m in merged if set(m) & set(block)]
        names = dict.fromkeys(n for m in (*touching, block) for n in m)
        merged = [m for m in merged if m not in touching] + [list(names)]
    return merged


def _split(z: Tensor, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(s).numel() for s in shapes.values()]
    return [p.reshape(*s, -1) for p, s in zip(z.split(sizes), shapes.values(), strict=True)]


def _eigenvalues(op: Any, top: int, seed: int) -> list[dict[str, float]]:
    """Largest eigenvalues; a residual bounds the distance to an eigenvalue."""
    pairs = top_eigenpairs(op, min(top, op.shape[0]), which="LM", seed=seed)
    return [{"value": float(v), "error": float(r)} for v, r in zip(pairs.values, pairs.residuals, strict=True)]


def _factor_spectra(K: KFACLinearOperator) -> dict[str, dict[str, list[float]]]:
    spectra: dict[str, dict[str, list[float]]] = {}
    for part in K.parts:
        factors = factors_of(part)
        for role in ("input", "output"):
            M = getattr(factors, role)
            if M is not None:
                values = torch.linalg.eigvalsh(M.double()).flatten().sort(descending=True).values
                spectra.setdefault(part.label, {})[role] = values.tolist()
    return spectra
