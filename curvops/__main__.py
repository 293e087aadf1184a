"""The main job, on real images: ``python -m curvops`` trains a small network and looks at its curvature.

Needs scikit-learn (for its bundled digits) and matplotlib: ``pip install 'curvops[demo]'``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from curvops import report, viz
from curvops._digits import TRAIN, digits, network, train
from curvops.kfac.operator import KFACLinearOperator


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "report":
        return report.main(argv[1:])
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except ModuleNotFoundError as error:
        print(f"curvops: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m curvops",
        description="Train a small network on handwritten digits and show its curvature (KFAC) layer by layer.",
        epilog="`python -m curvops report --help`: a page about the curvature of a model of your own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("curvops-demo"), help="folder for the plots")
    parser.add_argument("--epochs", type=report.natural, default=10, help="passes over the training images")
    parser.add_argument("--damping", type=_positive, default=1e-3, help="how much identity is added to the curvature")
    parser.add_argument("--top", type=report.natural, default=5, help="how many eigenvalues to show")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the batches")
    parser.set_defaults(run=demo)
    return parser


def _positive(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a positive number")
    return value


def demo(args: argparse.Namespace) -> None:
    """Train, build the operator, show what it knows."""
    for module in ("sklearn", "matplotlib"):
        viz.require(module)
    with _section("Data and model"):
        images, labels = digits()
        model = network(args.seed)
        size = sum(p.numel() for p in model.parameters())
        print(f"{len(images)} images of 8 x 8 pixels in 10 classes; convolutional network with {size} parameters")
    with _section("Training"):
        data = DataLoader(TensorDataset(images[:TRAIN], labels[:TRAIN]), 250)
        train(model, images[:TRAIN], labels[:TRAIN], args.epochs, args.seed)
        print(
            f"accuracy on {len(images) - TRAIN} held-out images: {_accuracy(model, images[TRAIN:], labels[TRAIN:]):.1%}"
        )
    with _section("KFAC of the cross-entropy loss, exact at the output (type-2)"):
        parameters = dict(model.named_parameters())
        K = KFACLinearOperator(
            model, nn.CrossEntropyLoss(), parameters, data, fisher_type="type-2", progressbar=True
        )  # fmt: skip
        print(f"a {K.shape[0]} x {K.shape[1]} scipy LinearOperator in {len(K.parts)} blocks, one per layer\n")
        _print_blocks(K, args.damping)
    with _section(f"Largest {args.top} eigenvalues"):
        _print_eigenvalues(K, args.top)
    with _section(f"Whole matrix, and damped: K + {args.damping:g} I"):
        damped = K.shift(args.damping)
        print(f"trace           {float(K.trace()):12.5g}\nFrobenius norm  {float(K.frobenius_norm()):12.5g}")
        print(f"trace, damped   {float(damped.trace()):12.5g}\nlogdet, damped  {float(damped.logdet()):12.5g}")
    with _section(f"Solving (K + {args.damping:g} I) x = gradient with the inverse"):
        b = _gradient(model, images[:TRAIN], labels[:TRAIN])
        x = K.inverse(args.damping) @ b
        residual = damped @ x - b
        print(f"|gradient| = {float(b.norm()):.3g}   |x| = {float(x.norm()):.3g}")
        print(f"relative residual |(K + {args.damping:g} I) x - b| / |b| = {float(residual.norm() / b.norm()):.1e}")
    with _section("Plots"):
        for draw in (viz.plot_factors, viz.plot_spectra, viz.plot_layer_bars):
            path = args.out / f"{draw.__name__.removeprefix('plot_')}.png"
            draw(K, path)
            print(f"wrote {path}")


@contextmanager
def _section(title: str) -> Iterator[None]:
    """Print a title, then what is inside, then the time that it took."""
    print(f"\n{title}\n{'-' * len(title)}")
    start = perf_counter()
    yield
    print(f"({perf_counter() - start:.2f} s)", flush=True)


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def _gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    loss = cross_entropy(model(images), labels)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def _print_blocks(K: KFACLinearOperator, damping: float) -> None:
    """One row per block, with the condition number of the damped block."""
    header = ("block", "shape", "trace", "top eigenvalue", "condition", "treatment")
    rows = []
    for part in K.parts:
        values = part.operator.eigenvalues()
        low, high = float(values.min()), float(values.max())
        groups, *matrix = part.placement.shape
        shape = " x ".join(map(str, matrix if groups == 1 else (groups, *matrix)))
        numbers = (float(part.operator.trace()), high, (high + damping) / (low + damping))
        rows.append((part.label, shape, *(f"{n:.3e}" for n in numbers), K.treatments[part.placement.names[0]].detail))
    _print_table("lrrrrl", header, rows)
    print(f"\nshape: outputs x inputs (and bias); condition: of the block + {damping:g} I")


def _print_eigenvalues(K: KFACLinearOperator, top: int) -> None:
    """Compare scipy's Lanczos iteration on the object with the closed form."""
    lanczos = eigsh(K, k=top, return_eigenvectors=False)[::-1]
    exact = K.eigenvalues().flatten().sort(descending=True).values[:top].tolist()
    rows = [
        (str(i + 1), f"{a:.6g}", f"{b:.6g}", f"{abs(a - b) / b:.0e}")
        for i, (a, b) in enumerate(zip(lanczos, exact, strict=True))
    ]
    _print_table("rrrr", ("", "scipy eigsh(K)", "K.eigenvalues()", "difference"), rows)


def _print_table(align: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns to the left (``l``) or to the right (``r``)."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = (c.rjust(w) if a == "r" else c.ljust(w) for a, c, w in zip(align, row, widths, strict=True))
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
