"""The price of KFAC's factors and products, in gradients of the same model and batch, beside curvlinops.

Factors are forced, determinism checks are off, weight and bias are one block, all in one process and in turn.
Run ``make bench``, or ``python bench/kfac.py`` where curvlinops-for-pytorch is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any

import curvlinops
import torch
from _common import ROOT, UNIT, alternate, cnn, gradient, markdown, memory, mlp, ratio, write_section
from torch import Tensor, nn

import curvops

PEER = f"curvlinops {version('curvlinops-for-pytorch')}"
MODELS = {"MLP 784-512-256-10, batch 256": mlp, "CNN, 3x3 convolutions, 64x3x32x32": cnn}
FISHER_TYPES = ("mc", "type-2")


def ours(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, kind: str) -> Callable[[], Any]:
    params = dict(model.named_parameters())
    return lambda: curvops.KFACLinearOperator(model, loss, params, [(X, y)], fisher_type=kind)


def theirs(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, kind: str) -> Callable[[], Any]:
    options = {"check_deterministic": False, "separate_weight_and_bias": False}
    counts = {"num_data": len(X), "num_per_example_loss_terms": 1}  # spares it a pass over the data

    def build() -> Any:
        K = curvlinops.KFACLinearOperator(
            model, loss, list(model.parameters()), [(X, y)], fisher_type=kind, **options, **counts
        )
        K.compute_kronecker_factors()
        return K

    return build


def factor_rows(seconds: float) -> list[list[str]]:
    """One row per model and Fisher type: time and memory of building the factors."""
    loss, rows = nn.CrossEntropyLoss(), []
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, X, y = make()
        unit = gradient(model, loss, X, y)
        unit_peak, _ = memory(unit)
        for kind in FISHER_TYPES:
            builders = {"ours": ours(model, loss, X, y, kind), "theirs": theirs(model, loss, X, y, kind)}
            times = alternate({UNIT: unit, **builders}, seconds)
            row = [title, kind, f"{1e3 * median(times[UNIT]):.1f} ms"]
            row += [f"{ratio(times, name):.2f}" for name in builders]
            for build in builders.values():
                peak, kept = memory(build)
                row.append(f"{peak / unit_peak:.2f} ({(peak - kept) / unit_peak:.2f})")
            rows.append(row)
    return rows


def product_rows(seconds: float) -> list[list[str]]:
    """One row per model: a product with the operator in units of its two matrix products per block."""
    loss, rows = nn.CrossEntropyLoss(), []
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, X, y = make()
        K = curvops.KFACLinearOperator(model, loss, dict(model.named_parameters()), [(X, y)])
        blocks = [torch.randn_like(p) for p in model.parameters()]
        flat = torch.cat([b.flatten() for b in blocks])
        factors = [(f.output, f.input) for f in dict.fromkeys(K.factors.values())]
        matrices = [torch.randn(len(B), len(A)) for B, A in factors]
        runs = {
            "two products": lambda f=factors, m=matrices: [B @ V @ A for (B, A), V in zip(f, m, strict=True)],
            "blocks": lambda K=K, v=blocks: K @ v,
            "flat": lambda K=K, v=flat: K @ v,
        }
        times = alternate(runs, seconds, least=50)
        base = f"{1e3 * median(times['two products']):.2f} ms"
        rows.append([title, base, *(f"{ratio(times, n, 'two products'):.2f}" for n in ("blocks", "flat"))])
    return rows


def report(seconds: float) -> str:
    head = ["model", "Fisher type", "one gradient", "curvops", PEER, "memory: curvops", f"memory: {PEER}"]
    factors = markdown(head, factor_rows(seconds))
    head = ["model", "two matrix products per block", "`K @ list of blocks`", "`K @ flat tensor`"]
    products = markdown(head, product_rows(seconds / 4))
    return (
        f"`make bench` on {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, float32.\n\n"
        "Building the factors, in gradients (forward and backward pass) of the same model and batch; medians of ratios "
        "over rounds that run all contestants in turn. Memory: peak in units of the gradient's peak; in brackets "
        f"without the factors themselves.\n\n{factors}\n\n"
        f"A product with the operator, in units of its two matrix products per block.\n\n{products}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each row of the table")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md and docs/bench.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = report(args.seconds)
    print(text)
    if args.write:
        write_section(ROOT / "README.md", "bench", text)
        write_section(ROOT / "docs" / "bench.md", "bench:kfac", text)


if __name__ == "__main__":
    main()
