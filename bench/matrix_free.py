"""The price of products with matrix-free operators, in gradients of the same model and batch, beside curvlinops.

All in one process and in turn; determinism checks are off. Run ``make bench``, or ``python bench/matrix_free.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from statistics import median
from typing import Any

import curvlinops
import torch
from _common import ROOT, UNIT, alternate, cnn, gradient, markdown, mlp, ratio, write_section
from torch import nn

import curvops

PEER = f"curvlinops {version('curvlinops-for-pytorch')}"
MODELS = {"MLP 784-512-256-10, batch 256": mlp, "CNN, 3x3 convolutions, 64x3x32x32": cnn}
NAMES = {"GGN": "GGNLinearOperator", "Hessian": "HessianLinearOperator", "empirical Fisher": "EFLinearOperator"}


def product(op: Any, columns: int) -> Callable[[], Any]:
    """A product with ``columns`` vectors in the form that both libraries take."""
    D = op.shape[1]
    V = torch.randn(D) if columns == 1 else torch.randn(D, columns)
    return lambda: op @ V


def rows(seconds: float, columns: int) -> list[list[str]]:
    """One row per model and operator."""
    loss, table = nn.CrossEntropyLoss(), []
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, X, y = make()
        params, data = dict(model.named_parameters()), [(X, y)]
        for label, name in NAMES.items():
            with ExitStack() as stack:
                kept, ours = (getattr(curvops, name)(model, loss, params, data) for _ in range(2))
                stack.enter_context(kept.cached())
                theirs = getattr(curvlinops, name)(
                    model, loss, list(params.values()), data, check_deterministic=False, num_data=len(X)
                )
                runs = {
                    UNIT: gradient(model, loss, X, y),
                    "ours": product(ours, columns),
                    "cached": product(kept, columns),
                    "theirs": product(theirs, columns),
                }
                times = alternate(runs, seconds)
            cells = (f"{ratio(times, n) / columns:.2f}" for n in ("ours", "cached", "theirs"))
            table.append([title, label, str(columns), f"{1e3 * median(times[UNIT]):.1f} ms", *cells])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each row of the table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/bench.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head = ["model", "operator", "columns", "one gradient", "curvops", "curvops, cached", PEER]
    table = markdown(head, rows(args.seconds, 1) + rows(args.seconds, 8))
    text = (
        f"`make bench` on {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, float32. Products "
        "with vectors, per column, in gradients of the same model and batch; medians of ratios over rounds that run all "
        f"contestants in turn.\n\n{table}"
    )
    print(text)
    if args.write:
        write_section(ROOT / "docs" / "bench.md", "bench:matrix_free", text)


if __name__ == "__main__":
    main()
