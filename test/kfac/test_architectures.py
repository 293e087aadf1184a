"""R6: architectures drawn at random agree with the dense GGN where theory says that KFAC is exact."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kfac.oracle import block_diagonal, dense_ggn, joint_groups, relative_error
from torch import Tensor, nn

from curvops import KFACLinearOperator

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MODES = ("zeros", "reflect", "replicate", "circular")


def assert_exact(model: nn.Module, loss: nn.Module, data: list, **options) -> None:
    params = dict(model.named_parameters())
    K = KFACLinearOperator(model, loss, params, data, fisher_type="type-2", **options)
    want = block_diagonal(dense_ggn(model, loss, params, data), params, joint_groups(params))
    assert relative_error(K.to_dense(), want) < 1e-10


@st.composite
def convolutions(draw) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a convolution and the shape of an image, over the whole grid of parameters."""
    n, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n))  # noqa: E731
    kernel, dilation, mode = per_axis(1, 3), per_axis(1, 2), draw(st.sampled_from(MODES))
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), st.just("int")))
    stride = (1,) * n if padding == "same" else per_axis(1, 3)
    padding = per_axis(0, 2) if padding == "int" else padding
    size = per_axis(1, 4 if n > 1 else 7)
    spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        widths = [(s // 2, s - s // 2) for s in spans]
    else:
        widths = [(p, p) for p in (padding if padding != "valid" else (0,) * n)]
    for pads, span, pixels in zip(widths, spans, size, strict=True):
        assume(pixels + sum(pads) > span)  # there is a window
        assume(mode != "reflect" or max(pads) < pixels)
        assume(mode != "circular" or max(pads) <= pixels)
    module = CONVS[n](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return module.double(), (module.in_channels, *size)


def images(module: nn.Module, shape: tuple[int, ...], target) -> list:
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, *shape, generator=g, dtype=torch.float64) for n in (2, 1)]
    return [(x, torch.randn(target(module(x)).shape, generator=g, dtype=torch.float64)) for x in batches]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=120)
@given(convolutions(), st.sampled_from(["mean", "sum"]))
def test_R6_any_convolution_with_a_loss_per_pixel_is_exact_in_expand(drawn, reduction):
    module, shape = drawn
    assert_exact(module, nn.MSELoss(reduction=reduction), images(module, shape, lambda y: y))


class Pooled(nn.Sequential):
    """A network followed by the mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).mean(2)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=120)
@given(convolutions())
def test_R6_any_convolution_before_a_global_average_is_exact_in_reduce(drawn):
    module, shape = drawn
    model = Pooled(module)
    assert_exact(model, nn.MSELoss(), images(model, shape, lambda y: y), kfac_approx="reduce")


class Residual(nn.Module):
    """``x + f(x)`` where the widths allow it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return x + y if x.shape == y.shape else y


@st.composite
def networks(draw, activations: tuple) -> nn.Sequential:
    """Return layers of random widths, with or without bias, residual or not, with or without activations."""
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        linear = nn.Linear(a, b, bias=draw(st.booleans()))
        layers += [Residual(linear) if draw(st.booleans()) else linear, *(f() for f in activations)]
    return nn.Sequential(*layers).double()


def data_for(model: nn.Sequential, lead: tuple[tuple[int, ...], ...]) -> list:
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    g = torch.Generator().manual_seed(0)
    X = [torch.randn(*shape, width, generator=g, dtype=torch.float64) for shape in lead]
    return [(x, torch.randn(model(x).shape, generator=g, dtype=torch.float64)) for x in X]


@settings(max_examples=60)
@given(networks(()), st.sampled_from([(), (3,), (2, 2)]), st.sampled_from(["mean", "sum"]))
def test_R6_linear_and_residual_nets_are_exact_on_any_number_of_axes(model, axes, reduction):
    data = data_for(model, ((3, *axes), (2, *axes)))
    assert_exact(model, nn.MSELoss(reduction=reduction), data)


@settings(max_examples=60)
@given(networks((nn.Tanh,)), st.sampled_from([nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss()]))
def test_R6_nonlinear_and_residual_nets_are_exact_on_one_datum(model, loss):
    ((x, y),) = data_for(model, ((1,),))
    y = y.argmax(1) if isinstance(loss, nn.CrossEntropyLoss) else y.sigmoid()
    assert_exact(model, loss, [(x, y)])
