"""Transposed convolutions: the canonical form gives autograd's weight gradients; blocks where theory says they are exact."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kfac.nets import kfac
from kfac.rules.test_conv import assert_equal, observe
from torch import Tensor, nn

from curvops import GGNDiagonalLinearOperator, GGNLinearOperator, KFACLinearOperator
from curvops.optim import SINGD

CALLS = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Any transposed convolution that torch takes, with unequal settings on each axis."""
    n, groups, N = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    kernel, stride, dilation, sizes = per_axis(1, 4 if n < 3 else 3), per_axis(1, 3), per_axis(1, 3), per_axis(1, 5)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    padding = []
    for k, s, d, e, size in zip(kernel, stride, dilation, extra, sizes, strict=True):
        most = ((size - 1) * s + d * (k - 1) + e) // 2  # at least one output
        padding.append(draw(st.integers(0, min(most, 5))))
    channels, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    options = {
        "stride": stride,
        "padding": tuple(padding),
        "output_padding": extra,
        "groups": groups,
        "dilation": dilation,
    }
    return (N, groups * channels, *sizes), (groups * channels, outputs, *kernel), options


@given(cases())
@settings(max_examples=200)
def test_R1_canonical_form_of_any_transposed_convolution(case: tuple) -> None:
    size, shape, options = case
    x, W = torch.randn(size, dtype=torch.float64), torch.randn(shape, dtype=torch.float64).requires_grad_()
    y, op = observe(lambda: CALLS[W.ndim - 2](x, W, **options), W)
    g, form = torch.randn_like(y), op.form
    X, Y = form.inputs(x), form.cotangents(g)
    assert form.extent(x) == X.shape[1:3] == (size[0], prod(y.shape[2:]))
    (expected,) = torch.autograd.grad(y, W, g)
    gradient = torch.einsum("gnso,gnsi->goi", Y, X)
    assert form.weight_shape(shape) == gradient.shape
    index = form.arrangement(shape)
    assert torch.equal(index.flatten().sort().values, torch.arange(W.numel()))
    assert_equal(gradient, expected.flatten()[index], x.norm() * g.norm())
    # and forward: y[g, n, s] = W[g] x[g, n, s]
    want = y.detach().flatten(2).unflatten(1, (options["groups"], -1)).permute(1, 0, 3, 2)
    assert_equal(X @ W.detach().flatten()[index].mT.unsqueeze(1), want, x.norm() * W.norm())
    assert_equal(form.input_gram(x), torch.einsum("gnsi,gnsj->gij", X, X), x.square().sum())
    assert_equal(form.input_sum(x), X.sum(2), x.abs().sum())
    assert_equal(form.input_squares(x), X.square().sum((1, 2)), x.square().sum())
    assert_equal(form.rows(x, slice(0, 1)), X[:, :1], x.norm())


MODULES = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def layer(n: int, groups: int = 1, bias: bool = True) -> nn.Module:
    options: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1, "groups": groups, "bias": bias}
    return MODULES[n](2, 2, 2 if n == 3 else 3, dilation=2 if n == 1 else 1, **options).double()


def data(n: int, net: nn.Module, N: int = 5) -> tuple[Tensor, Tensor]:
    X = torch.randn(N, 2, *[3] * n, dtype=torch.float64)
    return X, torch.randn_like(net(X))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_R2_a_single_layer_is_its_ggn_for_losses_by_position(n: int, bias: bool, groups: int) -> None:
    """One loss term for every output position: the curvature at the output is the identity, and B ⊗ A is all there is."""
    net, loss = layer(n, groups, bias), nn.MSELoss(reduction="sum")
    X, y = data(n, net)
    params = dict(net.named_parameters())
    G = GGNLinearOperator(net, loss, params, [(X[:2], y[:2]), (X[2:], y[2:])]).to_dense()
    K = KFACLinearOperator(net, loss, params, [(X[:2], y[:2]), (X[2:], y[2:])], fisher_type="type-2").to_dense()
    torch.testing.assert_close(K, G, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("unbatched", [False, True])
def test_R4_the_diagonal_of_the_ggn(unbatched: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = layer(2, 2), nn.Linear(72, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = torch.stack([self.up(one) for one in x]) if unbatched else self.up(x)
            return self.head(h.tanh().flatten(1))

    net, loss, X, y = Net(), nn.CrossEntropyLoss(), torch.randn(4, 2, 3, 3, dtype=torch.float64), torch.randint(3, (4,))
    if not unbatched:
        D = GGNDiagonalLinearOperator(net, loss, None, [(X, y)]).diagonal()
        G = GGNLinearOperator(net, loss, None, [(X, y)]).to_dense().diagonal()
        torch.testing.assert_close(D, G, rtol=1e-10, atol=1e-12)
    else:  # the same factors, whether images come one by one or together
        K = kfac(net, loss, None, [(X, y)])
        together = Net()
        together.load_state_dict(net.state_dict())
        together.forward = lambda x: together.head(together.up(x).tanh().flatten(1))
        torch.testing.assert_close(
            K.to_dense(), kfac(together, loss, None, [(X, y)]).to_dense(), rtol=1e-11, atol=1e-13
        )


def test_R5_everything_else_takes_them_too() -> None:
    """Inverse, state, update, reduce, EKFAC; an optimizer."""
    from curvops import EKFACLinearOperator

    net = nn.Sequential(layer(2), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3).double())
    X, y = torch.randn(7, 2, 3, 3, dtype=torch.float64), torch.randint(3, (7,))
    loss = nn.CrossEntropyLoss()
    for K in (
        kfac(net, loss, None, [(X, y)]),
        kfac(net, loss, None, [(X, y)], kfac_approx="reduce"),
        EKFACLinearOperator(net, loss, None, [(X, y)], fisher_type="type-2"),
    ):
        dense = K.to_dense()
        v = torch.randn(len(dense), dtype=torch.float64)
        torch.testing.assert_close(K @ v, dense @ v, rtol=1e-11, atol=1e-13)
        want = torch.linalg.solve(dense + 0.1 * torch.eye(len(dense), dtype=torch.float64), v)
        torch.testing.assert_close(K.inverse(0.1) @ v, want, rtol=1e-9, atol=1e-11)
        again = type(K).from_state_dict(K.state_dict())
        assert torch.equal(again @ v, K @ v)
        K.update([(X, y)], 0.5)
        torch.testing.assert_close(K.to_dense(), dense, rtol=1e-9, atol=1e-12)
    optimizer = SINGD(net, lr=1e-2, damping=1e-2, T=1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(net(X), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]
    assert {t.split()[0] for t in optimizer.treatments.values()} == {"block"}
