"""Second moments of windows against the windows themselves, which a convolution with one-hot kernels yields."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvops._gram import mirror_
from curvops.kfac.rules import autocorrelation, windows
from curvops.kfac.rules.autocorrelation import add_autocorrelation_, add_window_gram_
from curvops.kfac.rules.windows import Axis


def one_hot_moment(x: Tensor, axes: list[Axis]) -> Tensor:
    """Second moment of ``x [N, G, C, *I]`` by torch's convolution."""
    G, C = x.shape[1:3]
    K = [a.kernel for a in axes]
    d = C * prod(K)
    weight = torch.eye(d, dtype=x.dtype).view(d, C, *K).repeat(G, *[1] * (1 + len(K)))
    x = F.pad(x.flatten(1, 2), [w for a in reversed(axes) for w in (a.left, a.right)])
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[len(K) - 1]
    X = conv(x, weight, None, [a.stride for a in axes], 0, [a.dilation for a in axes], G)
    X = X.unflatten(1, (G, d)).flatten(3)
    return torch.einsum("ngcl,ngdl->gcd", X, X)


def assert_moment(A: Tensor, x: Tensor, axes: list[Axis], times: int = 1) -> None:
    expected = times * one_hot_moment(x, axes)
    assert (mirror_(A) - expected).abs().max() <= 1e-12 * times * x.square().sum()


@st.composite
def convolutions(draw: st.DrawFn, strided: bool = True) -> tuple[tuple[int, ...], list[Axis]]:
    """Shape ``[N, G, C, *I]`` and axes that the autocorrelation covers; unequal on each axis, and on both sides."""
    axes, sizes = [], []
    n = draw(st.integers(1, 3))
    for j in range(n):
        kernel, stride, dilation = (draw(st.integers(1, top)) for top in (4, 3 if strided else 1, 3))
        if j >= n - 2 and stride > 1:
            dilation = 1
        axis = Axis(kernel, stride, dilation, draw(st.integers(0, 4)), draw(st.integers(0, 4)))
        least = max(1, axis.span - axis.left - axis.right)
        axes.append(axis)
        sizes.append(draw(st.integers(least, max(least, 9 if n < 3 else 5))))
    return (*(draw(st.integers(1, 3)) for _ in range(3)), *sizes), axes


@given(convolutions())
@settings(max_examples=150)
def test_R6_autocorrelation_is_the_second_moment_of_the_windows(case: tuple[tuple[int, ...], list[Axis]]) -> None:
    shape, axes = case
    x = torch.randn(shape, dtype=torch.float64)
    d = shape[2] * prod(a.kernel for a in axes)
    big = torch.zeros(shape[1], d + 1, d + 1, dtype=torch.float64)  # sums may be a part of a larger matrix
    for _ in range(2):
        add_autocorrelation_(big[:, :d, :d], x, axes)
    assert_moment(big[:, :d, :d], x, axes, times=2)
    assert not big[:, d].any()
    assert not big[:, :, d].any()


SETTINGS = {
    "same": [Axis(3, 1, 1, 1, 1), Axis(3, 1, 1, 1, 1)],
    "valid": [Axis(3), Axis(4)],
    "even": [Axis(2, 1, 1, 0, 1), Axis(4, 1, 1, 1, 2)],
    "dilated": [Axis(3, 1, 2, 2, 2), Axis(3, 1, 3, 1, 2)],
    "strided": [Axis(4, 2, 1, 2, 2), Axis(3, 2, 1, 0, 1)],
    "long": [Axis(7, 1, 1, 3, 3)],
}


@pytest.mark.parametrize("axes", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(  # blocks of 8, 4 and 1 positions; a product for each offset
    ("groups", "channels"), [(1, 1), (1, 2), (1, 7), (1, 9), (1, 129), (3, 1), (3, 2), (3, 9)]
)
def test_R6_autocorrelation_at_every_number_of_channels(axes: list[Axis], groups: int, channels: int) -> None:
    x = torch.randn(3, groups, channels, *(9, 7)[: len(axes)], dtype=torch.float64)
    if channels > 100 and axes is SETTINGS["strided"]:
        x = x[:, :, :33]  # 132 channels after the strides have become channels
        channels = 33
    d = channels * prod(a.kernel for a in axes)
    A = torch.zeros(groups, d, d, dtype=torch.float64)
    add_autocorrelation_(A, x, axes)
    assert_moment(A, x, axes)


@pytest.mark.parametrize("column", [Axis(3, 1, 3, 4, 3), Axis(3, 3, 1, 4, 0)], ids=["dilation", "stride"])
def test_R6_windows_that_read_padding_only(column: Axis) -> None:
    axes = [Axis(2, 1, 2, 1, 2), column]
    x = torch.randn(2, 1, 2, 4, 1, dtype=torch.float64)
    A = torch.zeros(1, 12, 12, dtype=torch.float64)
    add_autocorrelation_(A, x, axes)
    assert_moment(A, x, axes)


CHOICES = {
    "1x1": ((3, 2, 4, 5, 6), [Axis(), Axis()], "channel"),
    "1x1, stride 2, padded": ((3, 2, 4, 5, 6), [Axis(1, 2, 1, 1, 3), Axis(1, 3, 2, 2, 0)], "channel"),
    "1x1 that reads padding only": ((3, 1, 2, 1, 1), [Axis(1, 9, 1, 4, 0), Axis()], "channel"),
    "1x3": ((4, 1, 16, 32, 33), [Axis(), Axis(3, 1, 1, 1, 1)], "autocorrelation"),
    "3x1, stride 2": ((4, 1, 32, 32, 66), [Axis(3, 1, 1, 1, 1), Axis(1, 2)], "autocorrelation"),
    "3x3, stride 2, many channels": ((2, 1, 64, 8, 8), [Axis(3, 2, 1, 1, 1)] * 2, "patches"),
    "tiny": ((2, 1, 2, 5, 4), [Axis(3, 1, 1, 1, 1)] * 2, "patches"),
    "stem": ((4, 1, 3, 130, 131), [Axis(7, 2, 1, 3, 3)] * 2, "autocorrelation"),
    "stride and dilation": ((2, 1, 3, 64, 63), [Axis(7, 2, 2, 3, 3)] * 2, "patches"),
    "no image": ((0, 1, 3, 9, 9), [Axis(3)] * 2, None),
}


@pytest.mark.parametrize(("shape", "axes", "way"), CHOICES.values(), ids=CHOICES)
def test_R6_the_cheapest_way_is_taken_and_exact(
    shape: tuple[int, ...], axes: list[Axis], way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name, function in (("channel", "add_channel_gram_"), ("patches", "add_patch_gram_")):
        original = getattr(windows, function)
        monkeypatch.setattr(
            autocorrelation, function, lambda *args, name=name, f=original: (taken.append(name), f(*args))[1]
        )
    x = torch.randn(shape, dtype=torch.float64)
    d = shape[2] * prod(a.kernel for a in axes)
    A = torch.zeros(shape[1], d, d, dtype=torch.float64)
    add_window_gram_(A, x, axes)
    assert_moment(A, x, axes)
    if way is not None:
        assert (taken or ["autocorrelation"]) == [way]


def test_R6_large_batches_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocorrelation, "_LIMIT", 40_000)
    sizes = []
    init = autocorrelation._Lines.__init__
    monkeypatch.setattr(
        autocorrelation._Lines, "__init__", lambda self, *args: (init(self, *args), sizes.append(self.flat.numel()))[0]
    )
    x, axes = torch.randn(5, 1, 16, 31, 30, dtype=torch.float64), SETTINGS["same"]
    A = torch.zeros(1, 144, 144, dtype=torch.float64)
    add_window_gram_(A, x, axes)
    assert_moment(A, x, axes)
    assert len(sizes) == 3
    assert max(sizes) < 40_000


def test_R6_no_gradient_graph_and_no_change_of_the_input() -> None:
    x = torch.randn(4, 1, 16, 31, 30).requires_grad_()
    before = x.detach().clone()
    A = torch.zeros(1, 144, 144)
    with torch.no_grad():
        add_window_gram_(A, x, SETTINGS["same"])
    assert torch.equal(x.detach(), before)
    assert not A.requires_grad
