"""The input factor of convolutions: curvops against unfold and product, and against the forward pass.

    python bench/conv_gram.py [--threads 2] [--seconds 2]

Times are medians over rounds that run all contestants in turn; ratios are medians of ratios within a round. Memory is
the peak of the call beyond its inputs, in units of the input.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.nn.functional as F
from _common import alternate, markdown, memory, ratio
from torch import Tensor

from curvops.kfac.rules.conv import ConvForm

# N, C, H = W, kernel, stride, padding, groups
SIZES = [
    *((64, 16, 32, 3, 1, 1, 1), (64, 32, 32, 3, 1, 1, 1), (64, 64, 16, 3, 1, 1, 1), (64, 64, 32, 3, 1, 1, 1)),
    *((32, 128, 16, 3, 1, 1, 1), (32, 256, 8, 3, 1, 1, 1), (16, 64, 56, 3, 1, 1, 1), (32, 512, 4, 3, 1, 1, 1)),
    *((16, 64, 32, 3, 1, 0, 1), (64, 3, 32, 3, 1, 1, 1), (64, 64, 32, 3, 2, 1, 1), (8, 3, 224, 7, 2, 3, 1)),
    *((64, 64, 32, 3, 1, 1, 64), (16, 96, 56, 7, 1, 3, 96), (64, 64, 32, 1, 1, 0, 1), (16, 3, 224, 16, 16, 0, 1)),
]
HEAD = ["N, C, H = W", "kernel", "forward", "unfold + product", "curvops", "gain", "in forwards", "memory", "of unfold"]


def unfold_gram(x: Tensor, form: ConvForm) -> Tensor:
    """What other libraries do: all patches at once, then their product."""
    X = F.unfold(x, form.kernel, form.dilation, form.padding[0][0], form.stride).unflatten(1, (form.groups, -1))
    X = X.permute(1, 0, 3, 2).flatten(1, 2)
    return X.mT @ X


def row(size: tuple[int, ...], seconds: float) -> list[str]:
    """Measure one convolution with as many outputs as inputs (32 for three channels)."""
    N, C, H, k, s, p, G = size
    form = ConvForm((k, k), (s, s), ((p, p), (p, p)), (1, 1), G)
    x, weight = torch.randn(N, C, H, H), torch.randn(max(C, 32) if G == 1 else C, C // G, k, k)
    runs = {
        "forward": lambda: F.conv2d(x, weight, None, s, p, 1, G),
        "unfold": lambda: unfold_gram(x, form),
        "curvops": lambda: form.input_gram(x),
    }
    torch.testing.assert_close(runs["curvops"](), runs["unfold"](), rtol=1e-4, atol=1e-6 * x.numel() ** 0.5 * H)
    times = alternate(runs, seconds)
    peaks = [memory(runs[name])[0] / (x.numel() * x.element_size()) for name in ("curvops", "unfold")]
    kernel = f"{k}x{k}" + f", stride {s}" * (s > 1) + f", padding {p}" * (p > 0) + f", {G} groups" * (G > 1)
    gain, forwards = ratio(times, "unfold", "curvops"), ratio(times, "curvops", "forward")
    milliseconds = (f"{1e3 * median(times[name]):.1f}" for name in runs)
    sides = (f"{gain:.1f}x", f"{forwards:.1f}", *(f"{peak:.1f}" for peak in peaks))
    return [f"{N}, {C}, {H}", kernel, *milliseconds, *sides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.threads} CPU threads, torch {torch.__version__.split('+')[0]}, float32; times in milliseconds.\n")
    print(markdown(HEAD, [row(size, args.seconds) for size in SIZES]))


if __name__ == "__main__":
    main()
