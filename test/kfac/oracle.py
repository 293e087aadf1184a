"""Brute force: dense curvature of the whole-set risk, and Kronecker factors by loops over loss terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def concatenated(data):
    """Return all data as one batch; mappings keep their type."""
    xs, ys = zip(*data, strict=True)
    if not isinstance(xs[0], Mapping):
        return torch.cat(xs), torch.cat(ys)
    return type(xs[0])({k: torch.cat([x[k] for x in xs]) for k in xs[0]}), torch.cat(ys)


def batches(model, loss, *inputs):
    """Return ``[(X, y), ...]`` with random targets of the kind that the loss wants for the model's predictions."""
    return [(X, targets(loss, predictor(model)(dict(model.named_parameters()), X).detach())) for X in inputs]


def targets(loss, out: Tensor) -> Tensor:
    """Draw class indices (classes on axis 1), zeros and ones, or numbers."""
    if isinstance(loss, nn.CrossEntropyLoss):
        return torch.randint(out.shape[1], out.shape[:1] + out.shape[2:])
    return torch.rand_like(out).round() if isinstance(loss, nn.BCEWithLogitsLoss) else torch.randn_like(out)


def shifted(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters that differ from the module's own: by up to 0.01, upwards."""
    return {n: p.detach() + 0.01 * torch.rand_like(p) for n, p in model.named_parameters()}


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
    # Reverse over reverse: forward mode loads decompositions that warn.
    H = jacrev(jacrev(lambda o: loss(o.reshape(out.shape), y)))(out.detach().flatten())
    return H.reshape(n, n).detach()


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


def dense_ef(model, loss, params: dict[str, Tensor], data) -> Tensor:
    """Return ``sum_n g_n g_n'`` over gradients of data, divided once by what the loss divides its sum by."""
    total = type(loss)(reduction="sum")
    F: Tensor | float = 0.0
    for X, y in data:
        for n in range(len(y)):
            leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
            value = total(predictor(model)(leaves, X[n : n + 1]), y[n : n + 1])
            g = torch.cat([t.flatten() for t in torch.autograd.grad(value, list(leaves.values()))])
            F = F + torch.outer(g, g)
    if loss.reduction == "sum":
        return F
    X, y = concatenated(data)
    out = predictor(model)(params, X)
    return (F * loss(out, y) / total(out, y)).detach()


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


def tapped(model, modules: Sequence[nn.Module], X) -> tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
    """Return the prediction, and module, input and output of every call of the given modules."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [m.register_forward_hook(lambda m, args, out: calls.append((m, args[0], out))) for m in modules]
    try:
        return model(X), calls
    finally:
        for hook in hooks:
            hook.remove()


def loss_terms(loss, out: Tensor) -> Tensor:
    """Return for every loss term, datum by datum, the flat indices ``[N * T, C]`` of its entries."""
    index = torch.arange(out.numel()).reshape(out.shape if out.ndim > 1 else (-1, 1))
    axis = 1 if isinstance(loss, nn.CrossEntropyLoss) else -1
    return index.movedim(axis, -1).reshape(-1, index.shape[axis])


def output_vectors(loss, out: Tensor, y: Tensor, fisher: str) -> list[Tensor]:
    """Return vectors shaped like ``out``, each of one loss term or datum, whose squares sum to the Fisher."""
    total = copy.copy(loss)
    total.reduction = "sum"
    flat, terms = torch.zeros(out.numel(), dtype=out.dtype), loss_terms(loss, out)
    if fisher == "type-2":
        H = output_hessian(total, out, y)
        pieces = []
        for index in terms:
            values, columns = torch.linalg.eigh(H[index][:, index])
            pieces += [(index, column) for column in (columns * values.clamp(min=0).sqrt()).T]
    else:
        leaf = out.detach().clone().requires_grad_()
        gradient = torch.autograd.grad(total(leaf, y), leaf)[0].flatten()
        units = terms if fisher == "empirical-per-term" else terms.reshape(len(out), -1)
        pieces = [(index, gradient[index]) for index in units]
    return [flat.index_copy(0, index, values).reshape(out.shape) for index, values in pieces]


def kfac_factors(
    model,
    loss,
    data,
    modules: Sequence[nn.Module],
    *,
    fisher: str = "type-2",
    approx: str = "expand",
    split: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return input and output factor of linear modules that share a weight: one backward pass per loss term and column.

    Args:
        model: A module.
        loss: A loss module with ``reduction="mean"`` or ``"sum"``.
        data: Batches.
        modules: The modules that hold the weight.
        fisher: ``"type-2"``, ``"empirical"`` or ``"empirical-per-term"``.
        approx: ``"expand"`` or ``"reduce"``.
        split: Maps a module's input and the number of data to ``[N, S, d]``, or ``[1, R, d]`` where the data share
            rows; batch-first if missing. Only ``"reduce"`` asks.
    """
    split = split or (lambda t, n: t.reshape(n, -1, t.shape[-1]))
    with_bias = any(m.bias is not None for m in modules)
    A, B, count, normalizer = 0.0, 0.0, 0, 0.0
    for X, y in data:
        out, calls = tapped(model, modules, X)
        normalizer += 1.0 if loss.reduction == "sum" else _normalizer(loss, out.detach(), y)
        rows = []
        for m, x, _ in calls:
            ones = x.new_full((*x.shape[:-1], 1 if with_bias else 0), 0.0 if m.bias is None else 1.0)
            rows.append(split(torch.cat([x.detach(), ones], -1), len(out)))
        if approx == "expand":
            A = A + sum(r.flatten(0, 1).T @ r.flatten(0, 1) for r in rows)
            count += sum(r.shape[0] * r.shape[1] for r in rows)
        else:
            mean = sum(r.sum(1) for r in rows) / sum(r.shape[1] for r in rows)
            A = A + mean.T @ mean * len(out) / len(mean)
            count += len(out)
        for v in output_vectors(loss, out, y, fisher):
            grads = torch.autograd.grad(out, [o for _, _, o in calls], v, retain_graph=True, allow_unused=True)
            grads = [g.reshape(-1, g.shape[-1]) for g in grads if g is not None]
            if approx == "reduce":
                grads = [sum((g.sum(0, keepdim=True) for g in grads[1:]), grads[0].sum(0, keepdim=True))]
            B = B + sum(g.T @ g for g in grads)
    return A / count, B / (1.0 if loss.reduction == "sum" else normalizer)


def _normalizer(loss, out: Tensor, y: Tensor) -> float:
    """Return what torch divides this batch's mean by."""
    total = copy.copy(loss)
    total.reduction = "sum"
    return float(total(out, y) / loss(out, y))
