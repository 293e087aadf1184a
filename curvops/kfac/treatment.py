"""What became, or would become, of every parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from curvops._params import Model, Params, named_params
from curvops._traceless import random_state_kept
from curvops.jacobian import JacobianLinearOperator
from curvops.kfac.estimate import Estimate
from curvops.kfac.options import Policy, choice
from curvops.kfac.recorder import Recorder
from curvops.kfac.rules._base import assumed_operation
from curvops.kfac.sites import conflicts, find_sites
from curvops.kfac.tied import is_turned
from curvops.risk import EmpiricalRisk
from curvops.structured.placement import Placement


@dataclass(frozen=True)
class Treatment:
    """How one parameter is treated.

    Attributes:
        name, shape: The parameter.
        kind: ``"kronecker"``, ``"eigen"``, ``"exact"``, ``"diagonal"``, ``"unit-wise"``, ``"zero"`` or ``"unsupported"``.
        detail: Operations, factor sizes, what shares the block, what is approximate.
        assumed: Concluded from module types, without a forward pass.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    detail: str
    assumed: bool = False


class Explanation(dict[str, Treatment]):
    """Treatments by parameter name; prints as a table.

    Attributes:
        products: How matrix-free operators (Hessian, GGN, Jacobian, ...) multiply by the model's Jacobian; empty if unknown.
    """

    products: str = ""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "treatment", "")]
        for t in self.values():
            shape = "x".join(map(str, t.shape)) or "scalar"
            rows.append((t.name, shape, t.kind + (" (assumed)" if t.assumed else ""), t.detail))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"Matrix-free products: {self.products}"] if self.products else lines)


def explain(
    model: Model,
    params: Params = None,
    data: Iterable[tuple[Any, Any]] | None = None,
    *,
    separate_weight_and_bias: bool = False,
    unsupported: str = "raise",
    batch_size_fn: Callable[[Any], int] | None = None,
    allow_train_mode: bool = False,
) -> Explanation:
    """Say how KFAC treats every parameter and how matrix-free operators multiply, before anything is computed.

    Args:
        model, params: See :class:`curvops.risk.EmpiricalRisk`.
        data: With data, forward passes on the first batch are observed. Without, module types tell, and treatments are marked
            as assumed.
        separate_weight_and_bias, unsupported: See :class:`curvops.KFACLinearOperator`; with ``unsupported="raise"`` nothing
            is raised, and what no rule covers is of kind ``"unsupported"``.
        batch_size_fn, allow_train_mode: See :class:`curvops.risk.EmpiricalRisk`.

    Returns:
        Treatments by parameter name; prints as a table.

    Raises:
        ValueError: For bad arguments, and for a callable model without data.
        NotImplementedError: For uses of a parameter that cannot be seen.
    """
    policy = choice("unsupported", unsupported, Policy)
    kind = "unsupported" if policy == Policy.RAISE else policy
    if data is None:
        return _assumed(model, params, kind)
    risk = EmpiricalRisk(
        model, nn.MSELoss(), params, data, batch_size_fn=batch_size_fn, allow_train_mode=allow_train_mode
    )
    with random_state_kept(risk.device):  # loaders draw
        batch = next(risk.batches())
    recorder, reached = _observed(risk, batch[0])
    refused = {u.name: u for u in (*recorder.unsupported, *conflicts(recorder.uses))}
    sites = find_sites([u for u in recorder.uses if not set(u.names) & set(refused)], separate_weight_and_bias)
    details = _details(
        [(s.placement, tuple(use.function for use, _ in s.members), s.weight is not None) for s in sites]
    )
    result = Explanation()
    for name, shape in zip(risk.names, risk.shapes, strict=True):
        if name in refused:
            result[name] = Treatment(name, shape, kind, f"{refused[name].function}: {refused[name].reason}")
        elif name in details and name in reached:
            result[name] = Treatment(name, shape, "kronecker", details[name])
        else:
            result[name] = Treatment(name, shape, "zero", "never reached by a prediction")
    result.products = _products(
        JacobianLinearOperator(model, params, [batch], batch_size_fn=batch_size_fn, allow_train_mode=allow_train_mode)
    )
    return result


def _products(jacobian: JacobianLinearOperator) -> str:
    """Say how a product with the Jacobian went."""
    jacobian @ torch.zeros(jacobian.shape[1], dtype=jacobian.torch_dtype, device=jacobian.device)
    if jacobian.linearization == "forward":
        return "forward mode"
    return f"double backward, since torch says: {jacobian.refusal.splitlines()[0]}"


def _observed(risk: EmpiricalRisk, X: Any) -> tuple[Recorder, frozenset[str]]:
    """Record one forward pass; return what was seen, and the parameters that the prediction depends on."""
    replaced = risk.replaced
    with random_state_kept(risk.device), risk.leaves() as leaves:
        recorder = Recorder(leaves, replaced, allow_train_mode=risk.allow_train_mode)
        with recorder:
            raw = risk.predict(leaves, X)
        return recorder, recorder.check(risk.loss.prepare(raw))


def treatments(estimate: Estimate) -> Explanation:
    """Say what became of every parameter of an estimate."""
    factored = estimate.structure in ("kronecker", "eigen")
    details = _details([(b.placement, b.uses, b.A is not None if factored else None) for b in estimate.blocks])
    result = Explanation()
    for name, shape in estimate.shapes.items():
        note = estimate.notes.get(name, "")
        if name in details:
            result[name] = Treatment(name, shape, estimate.structure, details[name])
        elif name in estimate.dense:
            result[name] = Treatment(name, shape, estimate.options["unsupported"], note)
        else:
            result[name] = Treatment(name, shape, "zero", note)
    return result


def _details(blocks: Sequence[tuple[Placement, tuple[str, ...], bool | None]]) -> dict[str, str]:
    """Describe blocks, by parameter: where they sit, the operations, and whether they have a weight (``None``: no factors)."""
    details: dict[str, str] = {}
    for placement, functions, weighs in blocks:
        text = _block_detail(placement, functions, weighs)
        for name in placement.names:
            details[name] = f"{details[name]}; {text}" if name in details else text
    for (a, _, weighs_a), (b, _, weighs_b) in combinations(blocks, 2):
        if weighs_a and weighs_b and is_turned(a, b):
            details[a.names[0]] += " (both orientations: the nearest single Kronecker product)"
    return details


def _block_detail(placement: Placement, functions: tuple[str, ...], weighs: bool | None) -> str:
    G, o, i = placement.shape
    calls = ", ".join(f"{f} x{k}" if k > 1 else f for f, k in Counter(functions).items())
    parts = [calls]
    if weighs is not None:
        parts.append(f"A {i}x{i}, B {o}x{o}" if weighs else f"bias alone, B {o}x{o}")
    if G > 1:
        parts.append(f"{G} groups")
    if len(placement.names) > 1:
        parts.append("joint: " + " + ".join(placement.names))
    return ", ".join(parts)


def _assumed(model: Model, params: Params, otherwise: str) -> Explanation:
    """Go by module types; modules without a rule are of kind ``otherwise``."""
    if not isinstance(model, nn.Module):
        raise ValueError("explain: a callable model has no module types to go by; pass data, too.")
    owners = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    own = dict(model.named_parameters(remove_duplicate=False))
    result = Explanation()
    for name, p in named_params(model, params).items():
        module = owners[id(own[name])]
        operation = assumed_operation(module)
        if operation is None:
            kind, detail = otherwise, f"no rule is known for {type(module).__name__}"
        else:
            kind, detail = "kronecker", operation
        result[name] = Treatment(name, tuple(p.shape), kind, detail, assumed=True)
    return result
