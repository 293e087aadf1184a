"""Windows against indexing in plain Python, torch's own output sizes, and einconv's index patterns."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from einconv import index_pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvops._gram import mirror_
from curvops.kfac.rules import windows
from curvops.kfac.rules.windows import Axis, add_channel_gram_, add_patch_gram_, patches, window_sums


@st.composite
def axis_and_size(draw: st.DrawFn) -> tuple[Axis, int]:
    """An axis of any setting and an image size with at least one window."""
    kernel, stride, dilation = (draw(st.integers(1, top)) for top in (4, 3, 3))
    axis = Axis(kernel, stride, dilation, draw(st.integers(0, 4)), draw(st.integers(0, 4)))
    least = max(1, axis.span - axis.left - axis.right)
    return axis, draw(st.integers(least, max(least, 9)))


def naive_patches(x: Tensor, axes: list[Axis]) -> Tensor:
    """``[N, C, *K, *O]``, one pixel at a time."""
    K, O = ([f(a, s) for a, s in zip(axes, x.shape[2:], strict=True)] for f in (lambda a, _: a.kernel, Axis.windows))
    P = x.new_zeros(*x.shape[:2], *K, *O)
    for entry, window in product(product(*map(range, K)), product(*map(range, O))):
        pixel = [a.stride * o + a.dilation * i - a.left for a, o, i in zip(axes, window, entry, strict=True)]
        if all(0 <= p < size for p, size in zip(pixel, x.shape[2:], strict=True)):
            P[(..., *entry, *window)] = x[(..., *pixel)]
    return P


@given(st.lists(axis_and_size(), min_size=1, max_size=2))
@settings(max_examples=60)
def test_R6_patches_and_their_sums_equal_plain_indexing(cases: list[tuple[Axis, int]]) -> None:
    axes, sizes = [a for a, _ in cases], [s for _, s in cases]
    x = torch.randn(2, 3, *sizes, dtype=torch.float64)
    expected = naive_patches(x, axes)
    assert torch.equal(patches(x, axes), expected)
    sums = window_sums(x, axes)
    torch.testing.assert_close(sums, expected.flatten(-len(axes)).sum(-1), rtol=1e-12, atol=1e-12)


@given(axis_and_size())
@settings(max_examples=60)
def test_R6_an_axis_agrees_with_torch_and_einconv(case: tuple[Axis, int]) -> None:
    axis, size = case
    x = torch.nn.functional.pad(torch.zeros(1, 1, size), (axis.left, axis.right))
    y = torch.conv1d(x, torch.zeros(1, 1, axis.kernel), stride=axis.stride, dilation=axis.dilation)
    assert axis.windows(size) == y.shape[-1]
    if axis.left == axis.right:
        pattern = index_pattern(size, axis.kernel, axis.stride, axis.left, axis.dilation)
        assert torch.equal(axis.hits(size, torch.zeros(())), pattern.sum(1).float())


@pytest.mark.parametrize(
    ("groups", "channels", "length"), [(1, 3, 7), (3, 2, 5), (2, 5, 3), (1, 260, 270), (2, 256, 257)]
)
@pytest.mark.parametrize("cached", [windows._CACHED, 8])  # the second: one image at a time
def test_R6_channel_gram(groups: int, channels: int, length: int, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_CACHED", cached)
    x = torch.randn(3, groups, channels, length, dtype=torch.float64)
    A = torch.zeros(groups, channels, channels, dtype=torch.float64)
    for _ in range(2):  # it adds
        add_channel_gram_(A, x)
    torch.testing.assert_close(mirror_(A), 2 * torch.einsum("ngcl,ngdl->gcd", x, x), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("cached", [windows._CACHED, 400, 1])  # all at once, some images, some rows of one image
def test_R6_patch_gram_in_portions(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_CACHED", cached)
    axes = [Axis(3, 2, 1, 1, 2), Axis(2, 1, 3, 0, 1)]
    x = torch.randn(5, 2, 3, 7, 6, dtype=torch.float64)
    d = 3 * prod(a.kernel for a in axes)
    A = torch.zeros(2, d, d, dtype=torch.float64)
    add_patch_gram_(A, x, axes)
    P = naive_patches(x.flatten(1, 2), axes).view(5, 2, d, -1)
    torch.testing.assert_close(mirror_(A), torch.einsum("ngcl,ngdl->gcd", P, P), rtol=1e-12, atol=1e-12)


def test_R6_sums_over_windows_of_a_long_signal_need_no_table_of_windows() -> None:
    axis = Axis(10, 5, 1, 3, 3)
    x = torch.randn(1, 1, 100_000, dtype=torch.float64)  # 20 000 windows: as a table of booleans 20 GB
    expected = patches(x, [axis]).sum(-1)
    torch.testing.assert_close(window_sums(x, [axis]), expected, rtol=1e-10, atol=1e-10)
