"""The curvature report: what a person wants to see of a model's curvature, on one page or as JSON.

Needs matplotlib, and scikit-learn for the default problem: ``pip install 'curvops[demo]'``.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from curvops import _digits, viz
from curvops._page import render
from curvops._quality import add_quality
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
    args = _parser().parse_args(argv)
    try:
        found = _digits.problem() if args.target is None else load(args.target)()
        model, loss, params, data, options = checked(found, args.target)
        if args.allow_train_mode:
            options["allow_train_mode"] = True
        options |= {"top": args.top, "probes": args.probes, "ncv": args.ncv, "seed": args.seed}
        numbers, figures = measure(model, loss, params, data, **options)
        page = render(numbers, figures, args.title or args.target or "the digits of scikit-learn")
    except Exception as error:
        if args.traceback:
            raise
        kind = "" if isinstance(error, ReportError | ModuleNotFoundError) else f"{type(error).__name__}: "
        hint = "" if isinstance(error, ReportError) else " (--traceback shows where)"
        print(f"curvops: {kind}{error}{hint}", file=sys.stderr)
        return 1
    _write(args.out, page)
    if args.json is not None:
        _write(args.json, json.dumps(numbers, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--title", help="what the page calls the model; default: the target")
    parser.add_argument("--top", type=natural, default=5, help="how many eigenvalues")
    parser.add_argument("--probes", type=several, default=20, help="random vectors for each estimate, at least 2")
    parser.add_argument("--ncv", type=several, default=40, help="Lanczos vectors for the spectral densities")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random vectors")
    parser.add_argument("--allow-train-mode", action="store_true", help="accept dropout and batch statistics")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def natural(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a positive integer")
    return int(text)


def several(text: str) -> int:
    """Parse an integer above one: of one number there is no standard error."""
    if natural(text) < 2:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer of at least 2")
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
        names = sorted(n for n, v in namespace.items() if isfunction(v) and v.__module__ == namespace["__name__"])
        what = f"its {name!r} is a {type(namespace[name]).__name__}" if name in namespace else f"has no {name!r}"
        raise ReportError(f"{path}: {what}, expected a function; found the functions {names}. {_EXPECTED} from one")
    return namespace[name]


def checked(found: Any, target: str | None) -> Problem:
    """Return what a problem function gave, if it is a problem."""
    size = len(found) if isinstance(found, tuple | list) else 0
    if size not in (4, 5):
        length = f" of length {size}" if isinstance(found, tuple | list) else ""
        raise ReportError(f"{target} returned a {type(found).__name__}{length}, {_EXPECTED}")
    if not isinstance(found[0], nn.Module) and not callable(found[0]):
        raise ReportError(f"{target} returned a {type(found[0]).__name__} as model, {_EXPECTED}")
    if isinstance(found[0], nn.modules.loss._Loss) and isinstance(found[1], nn.Module):
        raise ReportError(f"{target} returned the loss {type(found[0]).__name__} as model, {_EXPECTED}")
    options = found[4] if size == 5 else {}
    if not isinstance(options, Mapping):
        raise ReportError(f"{target} returned a {type(options).__name__} as options, {_EXPECTED}")
    params = list(found[2]) if isinstance(found[2], Iterator) else found[2]  # they are read more than once
    return found[0], found[1], params, found[3], dict(options)


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
    factored = {"fisher_type": "type-2", "unsupported": "diagonal", **options}
    with tqdm(total=5, desc="report", unit="step") as bar:
        step = partial(_step, bar)
        step("KFAC")
        K = KFACLinearOperator(model, loss, params, data, **factored)
        step("EKFAC")
        E = EKFACLinearOperator(model, loss, params, data, **factored)
        H, G = (kind(model, loss, params, data, **options) for kind in (HessianLinearOperator, GGNLinearOperator))
        operators = {"Hessian": H, "GGN": G}
        numbers: dict[str, Any] = {"parameters": K.shape[0], "blocks": len(K.parts), "layers": _layers(K, E)}
        with G.cached(), H.cached():
            step("quality of KFAC and EKFAC")
            add_quality(numbers["layers"], G, {"KFAC": K, "EKFAC": E}, probes, seed)
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
    numbers["suggested_damping"] = 0.1 * float(E.trace()) / E.shape[0]
    numbers["about"] = {
        "model": type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "a function"),
        "loss": type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "a function"),
        "data": int(K.num_data),
        "dtype": str(K.torch_dtype).removeprefix("torch."),
        "device": str(K.device),
        "probes": probes,
        "Lanczos vectors": ncv,
        "seed": seed,
        "torch": torch.__version__,
    }
    return numbers, _figures(K, E, densities)


def _step(bar: tqdm, what: str) -> None:
    if bar.postfix:  # the one before is done
        bar.update()
    bar.set_postfix_str(what)


def _figures(K: KFACLinearOperator, E: EKFACLinearOperator, densities: dict[str, Any]) -> dict[str, Any]:
    figures = {
        "Spectral density": viz.plot_density(densities),
        "Trace of each block of the GGN": viz.plot_layer_bars(E),
        "Spectrum of each block of KFAC": viz.plot_spectra(K),
    }
    if any(factors_of(part).input is not None for part in K.parts):
        figures["Kronecker factors"] = viz.plot_factors(K)
    return figures


def _layers(K: KFACLinearOperator, E: EKFACLinearOperator) -> list[dict[str, Any]]:
    exact = {part.label: float(part.operator.trace()) for part in E.parts}
    rows = []
    for part in K.parts:
        shape = part.placement.shape
        rows.append(
            {
                "block": part.label,
                "names": list(dict.fromkeys(part.placement.names)),
                "shape": [n for n in shape[:1] if n > 1] + list(shape[1:]),
                "parameters": part.operator.shape[0],
                # In its eigenbasis EKFAC has the diagonal of the GGN, and a basis changes no trace.
                "GGN trace": exact[part.label],
                "KFAC trace": float(part.operator.trace()),
                "KFAC top eigenvalue": float(part.operator.eigenvalues().max()),
            }
        )
    return rows


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
