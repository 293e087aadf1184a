"""The price of optimizer steps, in steps of SGD with momentum on the same model and batch.

SINGD beside singd, KFACPreconditioner beside KFAC as one writes it first (hooks and unfold); all in one process and in turn.
Run ``make bench``, or ``python bench/optim.py`` where singd is installed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from _common import ROOT, alternate, markdown, ratio, write_section
from _optimizers import PlainKFAC, Problem, cnn, kronecker_params, transformer
from singd.optim.optimizer import SINGD as TheirSINGD

from curvops.optim import SINGD, KFACPreconditioner

MODELS: dict[str, tuple[Callable[[int], Problem], str]] = {
    "CNN": (cnn, "batch"),
    "transformer": (transformer, "batch+sequence"),
}
UNIT = "SGD"
ROWS = [("dense", 1), ("dense", 10), ("diagonal", 1), ("triltoeplitz", 1)]
KFACS = [("eigen", 1, 10), ("inverse", 1, 10), ("eigen", 10, 100)]


def steps(kind: str, batch: int, make: Callable[..., Any], several: int = 1) -> Callable[[], None]:
    """Train a fresh model for some steps."""
    torch.manual_seed(0)
    problem, average = MODELS[kind]
    model, loss = problem(batch)
    step, zero = make(model, kronecker_params(model), average)

    def run() -> None:
        for _ in range(several):
            zero()
            loss(model).backward()
            step()

    return run


def sgd(model: Any, params: Any, average: str) -> tuple:
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    return optimizer.step, optimizer.zero_grad


def singd(cls: Any, structure: str, T: int) -> Callable[..., tuple]:
    def make(model: Any, params: Any, average: str) -> tuple:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # singd says that Toeplitz structures are slow
            optimizer = cls(model, params, lr=1e-3, T=T, structures=(structure, structure), loss_average=average)
        return optimizer.step, optimizer.zero_grad

    return make


def kfac(method: str, factors: int, inverses: int) -> Callable[..., tuple]:
    def make(model: Any, params: Any, average: str) -> tuple:
        optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
        preconditioner = KFACPreconditioner(
            model,
            factor_update_steps=factors,
            inv_update_steps=inverses,
            compute_method=method,
            loss_average=average,
            lr=1e-3,
        )
        return lambda: (preconditioner.step(), optimizer.step()), optimizer.zero_grad

    return make


def plain(model: Any, params: Any, average: str) -> tuple:
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    preconditioner = PlainKFAC(model, 1e-3, 0.95, 1e-3, 1e-3, 10)
    return lambda: (preconditioner.step(), optimizer.step()), optimizer.zero_grad


def singd_rows(kinds: list[str], batches: list[int], seconds: float) -> list[list[str]]:
    table = []
    for kind in kinds:
        for batch in batches:
            for structure, T in ROWS:
                runs = {UNIT: steps(kind, batch, sgd, T), "ours": steps(kind, batch, singd(SINGD, structure, T), T)}
                if structure != "triltoeplitz" or batch == min(batches):  # theirs takes a minute
                    runs["theirs"] = steps(kind, batch, singd(TheirSINGD, structure, T), T)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    times = alternate(runs, seconds, least=3)
                cells = [f"{ratio(times, n, UNIT):.2f}" if n in runs else "" for n in ("ours", "theirs")]
                unit = f"{1e3 * median(times[UNIT]) / T:.1f} ms"
                table.append([f"{kind}, batch {batch}", structure, str(T), unit, *cells])
                print(table[-1], flush=True)
    return table


def kfac_rows(kinds: list[str], batches: list[int], seconds: float) -> list[list[str]]:
    table = []
    for kind in kinds:
        for batch in batches:
            for method, factors, inverses in KFACS:
                many = inverses if inverses <= 10 else 20
                runs = {
                    UNIT: steps(kind, batch, sgd, many),
                    "ours": steps(kind, batch, kfac(method, factors, inverses), many),
                }
                if (method, factors) == ("eigen", 1):
                    runs["plain"] = steps(kind, batch, plain, many)
                times = alternate(runs, seconds, least=3)
                cells = [f"{ratio(times, n, UNIT):.2f}" if n in runs else "" for n in ("ours", "plain")]
                unit = f"{1e3 * median(times[UNIT]) / many:.1f} ms"
                table.append([f"{kind}, batch {batch}", method, f"{factors} / {inverses}", unit, *cells])
                print(table[-1], flush=True)
    return table


def report(kinds: list[str], batches: list[int], seconds: float) -> str:
    head = ["model", "structure", "T", "one step of SGD", "curvops", f"singd {version('singd')}"]
    first = markdown(head, singd_rows(kinds, batches, seconds))
    head = ["model", "method", "factors / inverses every", "one step of SGD", "curvops", "hooks and unfold"]
    second = markdown(head, kfac_rows(kinds, batches, seconds))
    return (
        f"`make bench` on {torch.get_num_threads()} CPU thread, torch {torch.__version__.split('+')[0]}, float32.\n\n"
        "A training step of SINGD, in steps of SGD with momentum; medians of ratios over rounds that run all in turn.\n\n"
        f"{first}\n\n"
        "The same for KFAC: `KFACPreconditioner` and SGD, beside a straight implementation with module hooks and `unfold`.\n\n"
        f"{second}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each row of the tables")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/bench.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = report(args.models, args.batches, args.seconds)
    print(text)
    if args.write:
        write_section(ROOT / "docs" / "bench.md", "bench:optim", text)


if __name__ == "__main__":
    main()
