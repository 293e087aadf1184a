"""From what the user hands over to an :class:`OutputLoss`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from curvops.losses import elementwise, gaussian, linear  # noqa: F401  (they register their losses)
from curvops.losses._base import OutputLoss
from curvops.losses._module import MODULES, TWINS
from curvops.losses.callables import CallableLoss
from curvops.losses.categorical import ClassLoss

_REDUCTIONS = ("mean", "sum")


def output_loss(loss: Any, *, reduction: str | None = None, class_dim: int | None = None) -> OutputLoss:
    """Return what curvature needs to know about a loss.

    Args:
        loss: A loss module of torch, its functional twin (also as a ``functools.partial`` with keywords), or any
            callable ``(output, target) -> scalar``.
        reduction: For callables: ``"mean"`` (default; a batch of ``b`` data weighs ``b / N``) or ``"sum"``.
        class_dim: The axis of the classes, where it is not torch's (1): ``CrossEntropyLoss`` and ``NLLLoss`` only.

    Returns:
        The loss as a function of the output.

    Raises:
        ValueError: For options that are not supported, or a ``reduction`` that contradicts the loss.
        TypeError: If ``loss`` is not a loss.
    """
    if reduction not in (None, *_REDUCTIONS):
        raise ValueError(f"Found reduction={reduction!r}, expected 'mean' or 'sum'.")
    if isinstance(loss, OutputLoss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(
            f"Found {loss!r} as loss, expected an instance of a loss module or a callable (output, target)."
        )
    loss = _as_module(_unwrapped(loss), reduction)
    known = None if _is_changed(loss) else _known(type(loss))
    if class_dim is not None and not (isinstance(known, type) and issubclass(known, ClassLoss)):
        raise ValueError(f"class_dim={class_dim} means nothing to {_name(loss)}, only to CrossEntropyLoss and NLLLoss.")
    if known is None:
        return CallableLoss(loss, _agree(loss, reduction))
    result = known(loss) if class_dim is None else known(loss, class_dim)
    if reduction not in (None, result.reduction):
        _contradiction(loss, result.reduction, reduction)
    return result


def _unwrapped(loss: Any) -> Any:
    """Return the module in what ``torch.compile`` returns, and in ``module.forward``; refuse scripted ones."""
    loss = getattr(loss, "_orig_mod", loss)
    owner = getattr(loss, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(loss, "__func__", None) is type(owner).forward:
        loss = owner
    name = getattr(loss, "original_name", None)
    if isinstance(loss, torch.jit.ScriptModule) and name in {k.__name__ for k in MODULES}:
        raise ValueError(f"Found a scripted {name}, whose options are out of sight: pass the {name} itself.")
    return loss


def _is_changed(loss: Any) -> bool:
    """Whether hooks or an attribute change what a loss module computes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return "forward" in vars(loss) or any(getattr(loss, h, None) for h in hooks)


def _known(cls: Any) -> Any:
    """Return the registered loss whose ``forward`` this class runs: a subclass with its own is another loss."""
    return next((MODULES[k] for k in cls.__mro__ if k in MODULES and _runs(cls, k)), None)


def _runs(cls: Any, base: Any) -> bool:
    return cls.forward is base.forward and cls.__call__ is base.__call__


def _as_module(loss: Any, reduction: str | None) -> Any:
    """Turn a functional loss with its keywords into the module; leave everything else."""
    bound = loss if isinstance(loss, functools.partial) else functools.partial(loss)
    module = TWINS.get(bound.func)
    if module is None:
        return loss
    options = {**({} if reduction is None else {"reduction": reduction}), **bound.keywords}
    unknown = {k for k in options if not _accepts(module, k)}
    if unknown or bound.args:
        found = f"keywords {sorted(unknown)}" if unknown else "positional arguments"
        raise ValueError(
            f"{_name(bound.func)} with {found} is not supported: bind options of {module.__name__} by keyword, or "
            "write the loss as a function (output, target) -> scalar of your own."
        )
    return module(**options)


def _accepts(module: type[nn.Module], option: str) -> bool:
    # size_average and reduce are torch's deprecated spellings of reduction, and would hide a contradiction with it.
    code = module.__init__.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return option in names and option not in ("size_average", "reduce")


def _agree(loss: Any, reduction: str | None) -> str:
    """Return the reduction of a callable: its own, the one asked for, or "mean"."""
    own = getattr(loss, "reduction", None)
    if own is None:
        return reduction or "mean"
    if own not in _REDUCTIONS:
        raise ValueError(
            f"{_name(loss)} has reduction={own!r}, expected 'mean' or 'sum': use a loss that returns one of them."
        )
    if reduction not in (None, own):
        _contradiction(loss, own, reduction)
    return own


def _contradiction(loss: Any, own: str, asked: str) -> None:
    raise ValueError(f"{_name(loss)} has reduction={own!r} but reduction={asked!r} was asked for: leave one out.")


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
