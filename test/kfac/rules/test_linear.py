"""Products with a weight, however they are written: the canonical form gives autograd's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvops.kfac.rules import Operation, rule_for
from curvops.kfac.rules.linear import LinearForm

IN, OUT, M = 4, 3, 5


def observe(call: Callable[[], Tensor], *tracked: Tensor) -> tuple[Tensor, Operation]:
    """Return the result of a call and its operation, seen as the recorder sees it."""
    found: list[Operation] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if rule := rule_for(func):
                found.append(rule(*args, tracked=lambda t: any(t is p for p in tracked), **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Mode():
        y = call()
    (operation,) = found
    return y, operation


# name: (shape of x, shape of the weight, shape of the bias, call)
CALLS: dict[str, tuple[tuple, tuple, tuple | None, Callable[..., Tensor]]] = {
    "linear": ((M, IN), (OUT, IN), (OUT,), lambda x, W, b: F.linear(x, W, b)),
    "linear, keywords": ((M, IN), (OUT, IN), (OUT,), lambda x, W, b: F.linear(weight=W, bias=b, input=x)),
    "linear, no bias": ((M, IN), (OUT, IN), None, lambda x, W, b: F.linear(x, W)),
    "linear, one row": ((IN,), (OUT, IN), (OUT,), lambda x, W, b: F.linear(x, W, b)),
    "linear, sequences": ((2, M, 6, IN), (OUT, IN), (OUT,), lambda x, W, b: F.linear(x, W, b)),
    "linear, vector": ((2, M, IN), (IN,), None, lambda x, W, b: F.linear(x, W)),
    "x @ W": ((M, IN), (IN, OUT), None, lambda x, W, b: x @ W),
    "x @ W, sequences": ((2, M, IN), (IN, OUT), None, lambda x, W, b: x @ W),
    "x @ W, one row": ((IN,), (IN, OUT), None, lambda x, W, b: x @ W),
    "x @ w": ((2, M, IN), (IN,), None, lambda x, W, b: x @ W),
    "x . w": ((IN,), (IN,), None, lambda x, W, b: x @ W),
    "W @ x": ((IN, M), (OUT, IN), None, lambda x, W, b: W @ x),
    "W @ x, batch": ((2, IN, M), (OUT, IN), None, lambda x, W, b: W @ x),
    "W @ x, one column": ((IN,), (OUT, IN), None, lambda x, W, b: W @ x),
    "w @ x": ((2, IN, M), (IN,), None, lambda x, W, b: W @ x),
    "torch.matmul": ((M, IN), (IN, OUT), None, lambda x, W, b: torch.matmul(x, W)),
    "torch.matmul, keywords": ((M, IN), (IN, OUT), None, lambda x, W, b: torch.matmul(other=W, input=x)),
    "torch.linalg.matmul": ((M, IN), (IN, OUT), None, lambda x, W, b: torch.linalg.matmul(x, W)),
    "torch.mm": ((M, IN), (IN, OUT), None, lambda x, W, b: torch.mm(x, mat2=W)),
    "torch.mm, left": ((IN, M), (OUT, IN), None, lambda x, W, b: torch.mm(W, x)),
    "torch.mv": ((IN,), (OUT, IN), None, lambda x, W, b: torch.mv(W, vec=x)),
    "torch.mv, vector": ((M, IN), (IN,), None, lambda x, W, b: torch.mv(x, W)),
    "Tensor.matmul": ((M, IN), (IN, OUT), None, lambda x, W, b: x.matmul(other=W)),
    "Tensor.mm": ((IN, M), (OUT, IN), None, lambda x, W, b: W.mm(x)),
    "Tensor.mv": ((IN,), (OUT, IN), None, lambda x, W, b: W.mv(x)),
    "__rmatmul__": ((M, IN), (IN, OUT), None, lambda x, W, b: W.__rmatmul__(x)),
    "torch.addmm": ((M, IN), (IN, OUT), (OUT,), lambda x, W, b: torch.addmm(b, x, W)),
    "torch.addmm, row": ((M, IN), (IN, OUT), (1, OUT), lambda x, W, b: torch.addmm(b, x, W)),
    "torch.addmm, keywords": ((M, IN), (IN, OUT), (OUT,), lambda x, W, b: torch.addmm(mat2=W, mat1=x, input=b)),
    "torch.addmm, left": ((IN, M), (OUT, IN), (OUT, 1), lambda x, W, b: torch.addmm(b, W, x)),
    "Tensor.addmm": ((M, IN), (IN, OUT), (OUT,), lambda x, W, b: b.addmm(x, W)),
    "torch.addmv": ((IN,), (OUT, IN), (OUT,), lambda x, W, b: torch.addmv(b, W, x)),
    "torch.addmv, vector": ((M, IN), (IN,), (1,), lambda x, W, b: torch.addmv(b, x, W)),
}


@pytest.mark.parametrize(("x_shape", "W_shape", "b_shape", "call"), CALLS.values(), ids=CALLS)
def test_R1_every_way_to_write_a_product(
    x_shape: tuple, W_shape: tuple, b_shape: tuple | None, call: Callable[..., Tensor]
) -> None:
    x, W = torch.randn(x_shape, dtype=torch.float64), torch.randn(W_shape, dtype=torch.float64).requires_grad_()
    b = None if b_shape is None else torch.randn(b_shape, dtype=torch.float64).requires_grad_()
    y, op = observe(lambda: call(x, W, b), W, *([] if b is None else [b]))
    g, form = torch.randn_like(y), op.form
    assert op.x is x
    assert op.weight is W
    assert op.bias is b

    X, Y = form.inputs(x), form.cotangents(g)
    rows = x.numel() // IN
    assert X.shape == (1, rows, 1, IN)
    assert Y.shape == (1, rows, 1, 1 if W.ndim == 1 else OUT)
    assert form.extent(x) == (rows, 1)
    gradient = torch.einsum("gmso,gmsi->goi", Y, X)
    assert form.weight_shape(tuple(W.shape)) == gradient.shape
    stored = gradient.mT if form.transposed else gradient
    torch.testing.assert_close(stored.reshape(W.shape), torch.autograd.grad(y, W, g, retain_graph=True)[0])
    if b is not None:
        torch.testing.assert_close(form.output_sum(g).sum(1).reshape(b.shape), torch.autograd.grad(y, b, g)[0])

    X, Y = X[:, :, 0], Y[:, :, 0]
    torch.testing.assert_close(form.input_gram(x), X.mT @ X)
    torch.testing.assert_close(form.output_gram(g), Y.mT @ Y)
    torch.testing.assert_close(form.input_sum(x), X)
    torch.testing.assert_close(form.output_sum(g), Y)


@pytest.mark.parametrize("width", [3, 255, 256, 301])  # the triangle is multiplied in blocks from 256 on
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_R10_moments_of_wide_layers(width: int, dtype: torch.dtype) -> None:
    x, form = torch.randn(2, 7, width).to(dtype), LinearForm()
    X = x.double().flatten(0, 1)
    A = form.input_gram(x)
    assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(A[0].double(), X.T @ X, rtol=1e-5, atol=1e-5)
    # Blocks are mirrored; one product is as symmetric as the BLAS of the machine makes it.
    assert torch.equal(A, A.mT) if width >= 256 else (A - A.mT).abs().max() <= 1e-6 * A.abs().max()
    assert torch.equal(form.output_gram(x), A)
    sums = torch.ones_like(A)
    form.add_input_gram_(sums, x)
    torch.testing.assert_close(sums.triu(), (A + 1).triu(), rtol=1e-5, atol=1e-5)


def test_R1_the_orientation_of_a_square_weight_is_told_apart() -> None:
    W = nn.Parameter(torch.randn(IN, IN))  # square: shapes cannot tell x @ W from W @ x
    x = torch.randn(IN, IN)
    assert observe(lambda: x @ W, W)[1].form == LinearForm(transposed=True)
    assert observe(lambda: W @ x, W)[1].form == LinearForm(left=True)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "both": (lambda x, W, b: W @ W, "both factors of the product are parameters"),
    "batched": (lambda x, W, b: torch.matmul(x, W.expand(2, IN, IN)), r"batch of matrices, of shape \(2, 4, 4\)"),
    "bmm": (lambda x, W, b: torch.bmm(x.expand(2, IN, IN), b), r"batch of matrices, of shape \(2, 4, 4\)"),
    "alpha": (lambda x, W, b: torch.addmm(x, x, W, alpha=2), "alpha=2"),
    "beta": (lambda x, W, b: torch.addmm(b[0, 0], x, x, beta=0.5), "beta=0.5"),
    "full": (lambda x, W, b: torch.addmm(W, x, x), r"a parameter of shape \(4, 4\) is added"),
    "linear, one for all": (
        lambda x, W, b: F.linear(x, W, W[0, 0]),
        r"parameter of shape \(\) is added; .* shape \(4,\)",
    ),
    "linear, full": (lambda x, W, b: F.linear(x, W, W), r"parameter of shape \(4, 4\) is added; .* shape \(4,\)"),
    "one per row": (lambda x, W, b: torch.addmm(W[:, :1], x, W), r"shape \(4, 1\) is added; .* shape \(4,\)"),
    "one per column": (lambda x, W, b: torch.addmm(W[0], W, x), r"shape \(4,\) is added; .* shape \(4, 1\)"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_R1_what_is_not_a_linear_map_is_refused_with_the_reason(call: Callable[..., Tensor], message: str) -> None:
    x, W = torch.randn(IN, IN), nn.Parameter(torch.randn(IN, IN))
    b = nn.Parameter(torch.randn(2, IN, IN))

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if rule := rule_for(func):
                rule(*args, tracked=lambda t: t.requires_grad, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(NotImplementedError, match=message):
        call(x, W, b)


def test_R1_a_constant_may_be_added_and_scaled() -> None:
    x, W, c = torch.randn(M, IN), nn.Parameter(torch.randn(IN, OUT)), torch.randn(M, OUT)
    operation = observe(lambda: torch.addmm(c, x, W, beta=2), W)[1]
    assert operation.weight is W
    assert operation.bias is None


def test_R1_only_the_bias_is_trained() -> None:
    x, W, b = torch.randn(M, IN), torch.randn(IN, OUT), nn.Parameter(torch.randn(OUT))
    y, op = observe(lambda: torch.addmm(b, x, W), b)
    g = torch.randn_like(y)
    assert op.bias is b
    torch.testing.assert_close(op.form.output_sum(g).sum((0, 1)), torch.autograd.grad(y, b, g)[0])
