"""Convolutions: the canonical form gives autograd's weight gradients, and its sums are those of the patches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvops.kfac.rules import Operation, rule_for
from curvops.kfac.rules.conv import ConvForm

CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@dataclass(frozen=True)
class Case:
    """A call of ``conv1d/2d/3d``."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int

    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any convolution that torch takes, with unequal settings on each axis."""
    n, groups, N = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    kernel, stride, dilation = per_axis(1, 4 if n < 3 else 3), per_axis(1, 3), per_axis(1, 3)
    padding = draw(st.sampled_from([per_axis(0, 3), "same", "valid"]))
    stride = (1,) * n if padding == "same" else stride
    sizes = []
    for j in range(n):
        sides = dilation[j] * (kernel[j] - 1) if padding == "same" else 0 if padding == "valid" else 2 * padding[j]
        least = max(1, dilation[j] * (kernel[j] - 1) + 1 - sides)
        sizes.append(draw(st.integers(least, max(least, 9 if n < 3 else 5))))
    channels, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    x, weight = (N, groups * channels, *sizes), (groups * outputs, channels, *kernel)
    return Case(x, weight, stride, padding, dilation, groups)


def observe(call: Callable[[], Tensor], *tracked: Tensor) -> tuple[Tensor, Operation]:
    """Return the result of a call and the operation that consumed a tracked tensor, seen as the recorder sees it."""
    found: list[Operation] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if rule := rule_for(func):
                found.append(rule(*args, tracked=lambda t: any(t is p for p in tracked), **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch, on copies for even kernels with padding="same"
        y = call()
    (operation,) = found
    return y, operation


def one_hot_patches(x: Tensor, case: Case) -> Tensor:
    """``[G, N, O, in/G * K]`` by torch's convolution with one-hot kernels."""
    d, (_, channels, *kernel) = prod(case.weight[1:]), case.weight
    weight = torch.eye(d, dtype=x.dtype).view(d, channels, *kernel).repeat(case.groups, *[1] * (1 + len(kernel)))
    X = CONVOLUTIONS[len(kernel)](x, weight, **case.options())
    return X.flatten(2).unflatten(1, (case.groups, d)).permute(1, 0, 3, 2)


def assert_equal(found: Tensor, expected: Tensor, scale: Tensor, tol: float = 1e-12) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tol * scale


@given(cases())
@settings(max_examples=120)
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_R6_canonical_form_of_any_convolution(case: Case) -> None:
    x, W = torch.randn(case.x, dtype=torch.float64), torch.randn(case.weight, dtype=torch.float64).requires_grad_()
    y, op = observe(lambda: CONVOLUTIONS[W.ndim - 2](x, W, **case.options()), W)
    g, G = torch.randn_like(y), case.groups
    X, Y, form = one_hot_patches(x, case), g.flatten(2).unflatten(1, (G, W.shape[0] // G)).permute(1, 0, 3, 2), op.form

    assert op.x is x
    assert op.weight is W
    assert torch.equal(form.inputs(x), X)
    assert torch.equal(form.cotangents(g), Y)
    assert form.extent(x) == X.shape[1:3]
    (expected,) = torch.autograd.grad(y, W, g)
    gradient = torch.einsum("gnso,gnsi->goi", form.cotangents(g), form.inputs(x))
    assert form.weight_shape(tuple(W.shape)) == gradient.shape
    assert_equal(gradient.reshape(W.shape), expected, x.norm() * g.norm())

    assert_equal(form.input_gram(x), torch.einsum("gnsi,gnsj->gij", X, X), x.square().sum())
    assert_equal(form.input_sum(x), X.sum(2), x.abs().sum())
    assert_equal(form.output_gram(g), torch.einsum("gnsi,gnsj->gij", Y, Y), g.square().sum())
    assert_equal(form.output_sum(g), Y.sum(2), g.abs().sum())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("kernel", "stride", "dilation", "padding"), [(3, 1, 1, 1), (4, 2, 1, 2), (2, 1, 3, 0)])
def test_R6_moment_equals_unfold_at_realistic_sizes(
    groups: int, kernel: int, stride: int, dilation: int, padding: int
) -> None:
    form = ConvForm((kernel,) * 2, (stride,) * 2, ((padding, padding),) * 2, (dilation,) * 2, groups)
    x = torch.randn(5, 16, 19, 22, dtype=torch.float64)
    X = F.unfold(x, kernel, dilation, padding, stride).unflatten(1, (groups, -1))
    assert_equal(form.input_gram(x), torch.einsum("ngil,ngjl->gij", X, X), x.square().sum())


FORMS = {
    "defaults": lambda x, W, b: torch.conv2d(x, W),
    "positional": lambda x, W, b: F.conv2d(x, W, b, (2, 1), (1, 0), (1, 2), 2),
    "keywords": lambda x, W, b: torch.conv2d(weight=W, input=x, groups=2, padding=[1], bias=b, stride=(2,), dilation=2),
    "lists": lambda x, W, b: torch.conv2d(x, W, b, stride=[1, 2], padding=[0, 1]),
    "numbers": lambda x, W, b: torch.conv2d(x, W, None, 2, 1),
    "strings": lambda x, W, b: torch.conv2d(x, W, b, padding="same", dilation=(1, 2)),
    "valid": lambda x, W, b: torch.conv2d(x, W, b, (2, 2), "valid"),
}


@pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("batched", [True, False])
def test_R6_every_form_of_the_call(call: Callable[..., Tensor], batched: bool) -> None:
    groups = 2 if call in (FORMS["positional"], FORMS["keywords"]) else 1
    x = torch.randn(*((3,) if batched else ()), 4, 7, 9, dtype=torch.float64)
    W = torch.randn(6, 4 // groups, 3, 2, dtype=torch.float64).requires_grad_()
    b = torch.randn(6, dtype=torch.float64).requires_grad_()
    y, op = observe(lambda: call(x, W, b), W, b)
    g = torch.randn_like(y)
    assert op.weight is W
    assert op.bias is (b if torch.autograd.grad(y, b, g, retain_graph=True, allow_unused=True)[0] is not None else None)
    (expected,) = torch.autograd.grad(y, W, g)
    gradient = torch.einsum("gnso,gnsi->goi", op.form.cotangents(g), op.form.inputs(x))
    assert_equal(gradient.reshape(W.shape), expected, x.norm() * g.norm())
    M, S = op.form.extent(x)
    assert (3 if batched else 1, y.shape[-1] * y.shape[-2]) == (M, S)
    assert op.form.output_sum(g).shape == (groups, M, 6 // groups)
    X = op.form.inputs(x).flatten(1, 2)
    assert_equal(op.form.input_gram(x), X.mT @ X, x.square().sum())


@pytest.mark.parametrize("module", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_R6_padding_modes_of_modules(module: type[nn.Module], padding: int | str, mode: str) -> None:
    layer = module(2, 3, 4, padding=padding, padding_mode=mode, dtype=torch.float64)
    x = torch.randn(2, 2, *[6] * (layer.weight.ndim - 2), dtype=torch.float64)
    y, op = observe(lambda: layer(x), layer.weight, layer.bias)
    g = torch.randn_like(y)
    expected, bias = torch.autograd.grad(y, (layer.weight, layer.bias), g)
    gradient = torch.einsum("gnso,gnsi->goi", op.form.cotangents(g), op.form.inputs(op.x))
    assert_equal(gradient.reshape(expected.shape), expected, op.x.norm() * g.norm())
    assert op.bias is layer.bias
    assert_equal(op.form.output_sum(g).sum(1).flatten(), bias, g.abs().sum())


@pytest.mark.parametrize("size", [(6, 8, 17, 18), (3, 40, 5, 6)])  # autocorrelation, patches
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_R10_half_precision_is_summed_in_float32(size: tuple[int, ...], dtype: torch.dtype) -> None:
    form = ConvForm((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2)
    x = torch.randn(size).to(dtype)
    exact = x.double()
    for name in ("input_gram", "input_sum", "output_gram", "output_sum"):
        found, expected = getattr(form, name)(x), getattr(form, name)(exact)
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= 1e-6 * expected.norm(), name


def test_R10_float32_is_as_accurate_as_a_product_of_patches() -> None:
    form = ConvForm((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    x = torch.rand(16, 8, 32, 33) + 1  # positive: sums far from zero
    exact, X = form.input_gram(x.double()), form.inputs(x).flatten(1, 2)
    assert (form.input_gram(x) - exact).norm() <= 3 * (X.mT @ X - exact).norm() + 1e-7 * exact.norm()


def test_R6_sums_are_added_to_what_is_there() -> None:
    form = ConvForm((3, 2), (1, 2), ((1, 1), (0, 1)), (2, 1), 2)
    x, g = torch.randn(3, 4, 9, 8, dtype=torch.float64), torch.randn(3, 6, 7, 4, dtype=torch.float64)
    A, B = torch.randn(2, 12, 12, dtype=torch.float64), torch.randn(2, 3, 3, dtype=torch.float64)
    sums = (A + form.input_gram(x)).triu(), (B + form.output_gram(g)).triu()
    form.add_input_gram_(A, x)
    form.add_output_gram_(B, g)
    torch.testing.assert_close((A.triu(), B.triu()), sums, rtol=1e-12, atol=1e-12)


def test_R6_forms_are_values() -> None:
    make = lambda: torch.conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3), padding=1)  # noqa: E731
    first, second = (observe(make)[1].form for _ in range(2))
    assert first == second == ConvForm((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    assert hash(first) == hash(second)
