"""What of KFAC does not change while training, and which layers it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvops.kfac.options import KFACType, choice
from curvops.optim.check import check_loss_average
from curvops.optim.decompositions import ComputeMethod

Number = float | Callable[[int], float]


@dataclass(frozen=True)
class Options:
    """What does not change while training.

    Attributes:
        compute_method: See :class:`ComputeMethod`.
        prediv: Keep ``1 / (eigenvalues + λ)`` of the last inverse update in place of the eigenvalues.
        kfac_approx, loss_average, factor_dtype, inv_dtype: See :class:`curvops.optim.KFACPreconditioner`.
    """

    compute_method: ComputeMethod
    prediv: bool
    kfac_approx: str
    loss_average: Any
    factor_dtype: torch.dtype | None
    inv_dtype: torch.dtype | None


def checked_options(
    compute_method: Any, prediv: bool, kfac_approx: str, loss_average: Any, factor_dtype: Any, inv_dtype: Any
) -> Options:
    """Return options, or raise."""
    name = getattr(compute_method, "name", compute_method)
    method = ComputeMethod(choice("compute_method", str(name).lower(), ComputeMethod))
    for what, dtype in (("factor_dtype", factor_dtype), ("inv_dtype", inv_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{what}: found {dtype!r}, expected a floating point dtype or None.")
    return Options(
        method,
        bool(prediv),
        choice("kfac_approx", kfac_approx, KFACType),
        check_loss_average(loss_average),
        factor_dtype,
        inv_dtype,
    )


def skipped(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, str]:
    """Return the parameters of layers whose name or class a pattern is found in, and why they are skipped.

    A layer is a module with parameters of its own; those inside it go with it. A module or parameter with several names is
    skipped by any of them.
    """
    if isinstance(patterns, str):
        raise TypeError(f"skip_layers: found the string {patterns!r}, expected a list of regular expressions.")
    found: dict[str, str] = {}
    first = {id(p): n for n, p in model.named_parameters()}
    for pattern in patterns or ():
        search = re.compile(pattern, re.IGNORECASE).search
        for name, module in model.named_modules(remove_duplicate=False):
            own = next(iter(module.parameters(recurse=False)), None)
            if own is not None and (search(name) or search(type(module).__name__)):
                for p in module.parameters():
                    found.setdefault(first[id(p)], f"skip_layers={pattern!r}")
    return found
