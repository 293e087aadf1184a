"""Start an optimizer from a curvature that is known."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvops import _linalg
from curvops._scalars import accumulation_dtype
from curvops.kfac.blocks import factor_pair, labelled
from curvops.kfac.estimate import Estimate, block_key
from curvops.kfac.operator import KFACLinearOperator
from curvops.optim.blocks import Block


def roots_of(curvature: KFACLinearOperator, block: Block) -> tuple[Tensor, Tensor] | None:
    """Return ``(A + λI)^-1/2`` and ``(B + λI)^-1/2`` of a block, ``λ`` its group's damping; ``None`` if it is not in there."""
    found = factors_of(curvature, block, block.group["kfac_approx"])
    if found is None:
        return None
    A, B, _ = found
    ones = torch.ones(len(B), 1, 1, dtype=B.dtype, device=B.device)
    damping = block.group["damping"]
    return _inverse_root(ones if A is None else A, damping, block.label), _inverse_root(B, damping, block.label)


def factors_of(
    curvature: KFACLinearOperator | None, block: Block, approx: str
) -> tuple[Tensor | None, Tensor, tuple[str, ...]] | None:
    """Return the factors ``(A, B)`` of a block, and its operations; ``None`` if it is not in there."""
    if curvature is None:
        return None
    estimate = checked_curvature(curvature, approx)
    for label, members in labelled(estimate).items():
        if block_key(members[0].placement) == block.key:
            if members[0].placement.shape != block.placement.shape:
                raise ValueError(
                    f"curvature: found a block {members[0].placement.shape} of {label!r}, expected "
                    f"{block.placement.shape}: it belongs to another model."
                )
            B, A = factor_pair(estimate, label, *members)
            place = block.parameter.device, accumulation_dtype(block.parameter.dtype)
            return None if A is None else A.to(*place), B.to(*place), members[0].uses
    return None


def checked_curvature(
    curvature: KFACLinearOperator, approx: str, params: Mapping[str, Tensor] | None = None
) -> Estimate:
    """Return the estimate of an operator that may be the start of factors, or raise.

    Args:
        curvature: The operator.
        approx: ``"expand"`` or ``"reduce"``, whatever the optimizer does.
        params: The parameters of the optimizer: one of them at least must be in there, and none with another shape.
    """
    if type(curvature) is not KFACLinearOperator:
        raise TypeError(f"curvature: found {type(curvature).__name__}, expected a KFACLinearOperator.")
    estimate = curvature._estimate
    if estimate.options["kfac_approx"] != approx:
        raise ValueError(
            f"curvature: found kfac_approx={str(estimate.options['kfac_approx'])!r}, expected {str(approx)!r} as here."
        )
    if params is not None:
        found = {n: shape for n, shape in estimate.shapes.items() if n in params}
        if not found:
            raise ValueError(
                f"curvature: found the parameters {sorted(estimate.shapes)}, expected some of {sorted(params)}: it belongs to "
                "another model."
            )
        for name, shape in found.items():
            if tuple(shape) != tuple(params[name].shape):
                raise ValueError(
                    f"curvature: found {name!r} with shape {tuple(shape)}, expected {tuple(params[name].shape)}: it belongs "
                    "to another model."
                )
    return estimate


def _inverse_root(F: Tensor, damping: float, label: str) -> Tensor:
    values, Q = _linalg.eigh_psd(F, label)
    return (Q * _linalg.reciprocal(values + damping, label).sqrt().unsqueeze(-2)) @ Q.mT
