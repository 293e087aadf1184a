"""Brute force: dense curvature of the whole-set risk, and Kronecker factors by loops over loss terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev


def concatenated(data):
    """Return all data as one batch."""
    xs, ys = zip(*data, strict=True)
    join = lambda parts: {k: torch.cat([p[k] for p in parts]) for k in parts[0]} if isinstance(parts[0], dict) else torch.cat(parts)
    return join(xs), join(ys)


def predictor(model) -> Callable:
    """Return ``f(params, X)`` for a module or a callable."""
    if not isinstance(model, nn.Module):
        return model

    def call(p, X):
        return functional_call(model, p, (), X) if isinstance(X, dict) else functional_call(model, p, (X,))

    return call


def output_hessian(loss, out: Tensor, y) -> Tensor:
    """Return the Hessian of the whole-set loss at the output, ``[out.numel(), out.numel()]``."""
    n = out.numel()
    return hessian(lambda o: loss(o.reshape(out.shape), y))(out.detach().flatten()).reshape(n, n)


def dense_ggn(model, loss, params: dict[str, Tensor], data) -> Tensor:
    """Return the GGN of the whole-set risk on the flattened parameters."""
    X, y = concatenated(data)
    f = predictor(model)
    params = {n: p.detach() for n, p in params.items()}
    out = f(params, X)
    H = output_hessian(loss, out, y)
    J = jacrev(lambda p: f(p, X))(params)
    J = torch.cat([J[n].reshape(out.numel(), -1) for n in params], 1).detach()
    return J.T @ H @ J


def block_diagonal(M: Tensor, params: dict[str, Tensor], groups: Sequence[Sequence[str]]) -> Tensor:
    """Keep the blocks of parameters that stand together in ``groups``."""
    owner = {n: i for i, g in enumerate(groups) for n in g}
    ids = torch.cat([torch.full((prod(p.shape),), owner[n]) for n, p in params.items()])
    return M * (ids[:, None] == ids[None, :])


def joint_groups(params: dict[str, Tensor]) -> list[list[str]]:
    """Group weight and bias of every module."""
    groups: dict[str, list[str]] = {}
    for n in params:
        groups.setdefault(n.rpartition(".")[0], []).append(n)
    return list(groups.values())


def term_factors(
    loss, out: Tensor, y, x_rows: Tensor, layer_out: Tensor, rows: Callable[[Tensor], Tensor], terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return KFAC-expand factors of one use by a loop over loss terms and the columns of their Hessians' roots.

    Args:
        loss: Whole-set loss.
        out: Prediction for the whole set, attached to the graph.
        y: Targets.
        x_rows: Layer inputs ``[R, d_in]`` (append the ones yourself).
        layer_out: Output of the layer, part of the graph.
        rows: Maps a gradient of ``layer_out`` to rows ``[R, d_out]``.
        terms: For every loss term the flat indices of its entries in ``out``.
    """
    H = output_hessian(loss, out, y)
    A = x_rows.T @ x_rows / len(x_rows)
    B = 0
    for index in terms:
        values, vectors = torch.linalg.eigh(H[index][:, index])
        for value, vector in zip(values.clamp(min=0), vectors.T, strict=True):
            v = torch.zeros(out.numel(), dtype=out.dtype)
            v[index] = value.sqrt() * vector
            g = rows(torch.autograd.grad(out, layer_out, v.reshape(out.shape), retain_graph=True)[0])
            B = B + g.T @ g
    return A, B


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|`` in the Frobenius norm (absolute if ``want`` is zero)."""
    scale = float(want.norm())
    return float((got - want).norm()) / (scale or 1.0)
