"""What became, or would become, of every parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from curvops.kfac.estimate import Estimate
from curvops.kfac.recorder import Recorder
from curvops.kfac.rules._base import assumed_operation
from curvops.kfac.sites import conflicts, find_sites
from curvops.risk import EmpiricalRisk, Model, Params, named_params, random_state_kept


@dataclass(frozen=True)
class Treatment:
    """How one parameter is treated.

    Attributes:
        name, shape: The parameter.
        kind: ``"kronecker"``, ``"exact"``, ``"diagonal"``, ``"zero"`` or ``"unsupported"``.
        detail: Operations, factor sizes, what shares the block, what is approximate.
        assumed: Concluded from module types, without a forward pass.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    detail: str
    assumed: bool = False


class Explanation(dict[str, Treatment]):
    """Treatments by parameter name; prints as a table."""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "treatment", "")]
        for t in self.values():
            shape = "x".join(map(str, t.shape)) or "scalar"
            rows.append((t.name, shape, t.kind + (" (assumed)" if t.assumed else ""), t.detail))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def explain(
    model: Model, params: Params = None, data: Iterable[tuple[Any, Any]] | None = None, **options: Any
) -> Explanation:
    """Say how KFAC treats every parameter, before anything is computed.

    Args:
        model, params: See :class:`curvops.risk.EmpiricalRisk`.
        data: With data, one forward pass on the first batch is observed. Without, module types tell, and treatments are
            marked as assumed.
        **options: ``separate_weight_and_bias``, ``unsupported`` of :class:`curvops.KFACLinearOperator`;
            ``allow_train_mode``, ``batch_size_fn`` of :class:`curvops.risk.EmpiricalRisk`.
    """
    separate = options.pop("separate_weight_and_bias", False)
    policy = options.pop("unsupported", "raise")
    if policy not in ("raise", "exact", "diagonal", "zero"):
        raise ValueError(f"unsupported: found {policy!r}, expected one of 'raise', 'exact', 'diagonal', 'zero'.")
    if data is None:
        return _assumed(model, params, policy)
    risk = EmpiricalRisk(model, nn.MSELoss(), params, data, **options)
    with random_state_kept(risk.device):
        X, _ = next(risk.batches())
    replaced = risk.replaced
    with risk.leaves() as leaves:
        recorder = Recorder(leaves, replaced, allow_train_mode=risk.allow_train_mode)
        with recorder:
            raw = risk.predict(leaves, X)
        reached = recorder.check(risk.loss.prepare(raw))
        refused = {u.name: u for u in (*recorder.unsupported, *conflicts(recorder.uses))}
        details: dict[str, str] = {}
        for site in find_sites([u for u in recorder.uses if not set(u.names) & set(refused)], separate):
            functions = [u.function for u, _ in site.members]
            text = site_detail(site.placement.shape, functions, site.placement.names, site.weight is not None)
            details |= dict.fromkeys(site.placement.names, text)
    result = Explanation()
    for name, shape in zip(risk.names, risk.shapes, strict=True):
        if name in refused:
            kind = "unsupported" if policy == "raise" else policy
            result[name] = Treatment(name, shape, kind, f"{refused[name].function}: {refused[name].reason}")
        elif name in details and name in reached:
            result[name] = Treatment(name, shape, "kronecker", details[name])
        else:
            result[name] = Treatment(name, shape, "zero", "never reached by a prediction")
    return result


def treatments(estimate: Estimate) -> Explanation:
    """Say what became of every parameter of an estimate."""
    details: dict[str, str] = {}
    for sums in estimate.blocks:
        text = site_detail(sums.placement.shape, sums.uses, sums.placement.names, sums.A is not None)
        for name in sums.placement.names:
            details[name] = f"{details[name]}; {text}" if name in details else text
    for label, (_, *turned) in estimate.labelled().items():
        if turned:
            details[label] += " (both orientations: the nearest single Kronecker product)"
    result = Explanation()
    for name, shape in estimate.shapes.items():
        note = estimate.notes.get(name)
        if name in details:
            result[name] = Treatment(name, shape, "kronecker", details[name])
        elif name in estimate.dense:
            result[name] = Treatment(name, shape, estimate.options["unsupported"], note or "")
        else:
            result[name] = Treatment(name, shape, "zero", note or "")
    return result


def site_detail(shape: tuple[int, int, int], functions: Iterable[str], names: tuple[str, ...], weighs: bool) -> str:
    """Describe a block."""
    G, o, i = shape
    calls = ", ".join(f"{f} x{k}" if k > 1 else f for f, k in Counter(functions).items())
    parts = [calls, f"A {i}x{i}, B {o}x{o}" if weighs else f"bias alone, B {o}x{o}"]
    if G > 1:
        parts.append(f"{G} groups")
    if len(names) > 1:
        parts.append("joint: " + " + ".join(names))
    return ", ".join(parts)


def _assumed(model: Model, params: Params, policy: str) -> Explanation:
    if not isinstance(model, nn.Module):
        raise ValueError("explain: a callable model has no module types to go by; pass data, too.")
    owners = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    own = dict(model.named_parameters(remove_duplicate=False))
    result = Explanation()
    for name, p in named_params(model, params).items():
        module = owners[id(own[name])]
        operation = assumed_operation(module)
        if operation is None:
            kind, detail = (
                "unsupported" if policy == "raise" else policy,
                f"no rule is known for {type(module).__name__}",
            )
        else:
            kind, detail = "kronecker", operation
        result[name] = Treatment(name, tuple(p.shape), kind, detail, assumed=True)
    return result
