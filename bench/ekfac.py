"""The price of EKFAC and of the exact GGN diagonal, in gradients of the same model and batch, beside curvlinops
and BackPACK (curvlinops 3.0.1 has no diagonal).

Eigenvalues are forced, determinism checks are off, weight and bias are one block, all in one process and in turn.
Run ``make bench``, or ``python bench/ekfac.py`` where both are installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from statistics import median
from time import perf_counter
from typing import Any

import backpack
import curvlinops
import torch
from _common import ROOT, UNIT, alternate, cnn, gradient, markdown, memory, mlp, ratio, write_section
from backpack import extensions
from torch import Tensor, nn

import curvops

PEERS = {
    "EKFAC": f"curvlinops {version('curvlinops-for-pytorch')}",
    "diagonal": f"BackPACK {version('backpack-for-pytorch')}",
}
MODELS = {"MLP 784-512-256-10, batch 256": mlp, "CNN, 3x3 convolutions, 64x3x32x32": cnn}


def our_ekfac(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, kind: str) -> Callable[[], Any]:
    params = dict(model.named_parameters())
    return lambda: curvops.EKFACLinearOperator(model, loss, params, [(X, y)], fisher_type=kind)


def their_ekfac(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, kind: str) -> Callable[[], Any]:
    options = {"check_deterministic": False, "separate_weight_and_bias": False, "fisher_type": kind}
    counts = {"num_data": len(X), "num_per_example_loss_terms": 1}  # spares it a pass over the data

    def build() -> Any:
        K = curvlinops.EKFACLinearOperator(model, loss, list(model.parameters()), [(X, y)], **options, **counts)
        K.compute_kronecker_factors()
        K.compute_eigenvalue_correction()
        return K

    return build


def our_diagonal(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, kind: str) -> Callable[[], Any]:
    params = dict(model.named_parameters())
    return lambda: curvops.GGNDiagonalLinearOperator(model, loss, params, [(X, y)], fisher_type=kind)


def their_diagonal(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, kind: str) -> Callable[[], Any]:
    extension = extensions.DiagGGNExact() if kind == "type-2" else extensions.DiagGGNMC(mc_samples=1)
    twin, risk = backpack.extend(deepcopy(model)), backpack.extend(deepcopy(loss))

    def build() -> Any:
        with backpack.backpack(extension):
            risk(twin(X), y).backward()
        found = [getattr(p, extension.savefield) for p in twin.parameters()]
        twin.zero_grad()
        for p in twin.parameters():
            delattr(p, extension.savefield)
        return found

    return build


def once(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def rows(what: str, ours: Callable, theirs: Callable, kinds: tuple[str, ...], seconds: float) -> list[list[str]]:
    """One row per model and Fisher type: time and peak memory beside the peer."""
    loss, table = nn.CrossEntropyLoss(), []
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, X, y = make()
        unit = gradient(model, loss, X, y)
        unit_peak, _ = memory(unit)
        for kind in kinds:
            runs = {"ours": ours(model, loss, X, y, kind), "theirs": theirs(model, loss, X, y, kind)}
            slow = once(runs["theirs"]) > seconds / 3  # one look is enough
            quick = {name: run for name, run in runs.items() if not (slow and name == "theirs")}
            times = alternate({UNIT: unit, **quick}, seconds)
            row = [title, f"{what}, {kind}", f"{1e3 * median(times[UNIT]):.1f} ms", f"{ratio(times, 'ours'):.2f}"]
            theirs_ratio = once(runs["theirs"]) / median(times[UNIT]) if slow else ratio(times, "theirs")
            row += [PEERS[what], f"{theirs_ratio:.2f}"]
            row += [f"{memory(run)[0] / unit_peak:.2f}" for run in runs.values()]
            table.append(row)
    return table


def report(seconds: float) -> str:
    head = ["model", "operator", "one gradient", "curvops", "peer", "its time", "memory: curvops", "its memory"]
    table = rows("EKFAC", our_ekfac, their_ekfac, ("mc", "type-2"), seconds)
    table += rows("diagonal", our_diagonal, their_diagonal, ("type-2", "mc"), seconds)
    return (
        f"`make bench` on {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, float32.\n\n"
        "Building the operators, in gradients (forward and backward pass) of the same model and batch; medians of ratios "
        "over rounds that run all contestants in turn. Memory: peak in units of the gradient's peak.\n\n"
        f"{markdown(head, table)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each row of the table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/bench.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = report(args.seconds)
    print(text)
    if args.write:
        write_section(ROOT / "docs" / "bench.md", "bench:ekfac", text)


if __name__ == "__main__":
    main()
