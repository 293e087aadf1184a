"""Which tensors to differentiate: parameters by name, whatever the user hands over."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Params = Mapping[str, Tensor] | Sequence[Tensor] | None
Model = nn.Module | Callable[[dict[str, Tensor], Any], Any]


def named_params(model: Model, params: Params) -> dict[str, Tensor]:
    """Return the parameters as an ordered dictionary from name to tensor."""
    result: dict[str, Tensor]
    if not isinstance(model, nn.Module):
        if not callable(model) or isinstance(model, type):
            raise TypeError(f"model: found {model!r}, expected a module or a callable (params, x) -> prediction.")
        if not isinstance(params, Mapping):
            raise TypeError(
                f"params: found {type(params).__name__}; a callable model needs a dictionary name -> tensor."
            )
        result = dict(params)
    elif params is None:
        result = {n: p for n, p in model.named_parameters() if p.requires_grad}
    elif isinstance(params, Mapping):
        result = dict(params)
        _check_names(model, result)
    else:
        result = _names_of(model, params)
    if not result:
        raise ValueError(
            "params: found none (with params=None, none requires a gradient); expected at least one parameter."
        )
    for name, p in result.items():
        if not isinstance(p, Tensor):
            raise TypeError(f"params[{name!r}]: found {type(p).__name__}, expected a tensor.")
    return result


def _names_of(model: nn.Module, params: Any) -> dict[str, Tensor]:
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params: found {type(params).__name__}, expected a dictionary, a list of parameters, or None.")
    names = {id(p): n for n, p in model.named_parameters()}
    result: dict[str, Tensor] = {}
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"params[{i}]: found {p!r:.60}, expected a parameter of the model; for other values or an order of "
                "your own pass a dictionary, for example dict(model.named_parameters())."
            )
        if id(p) not in names:
            raise ValueError(
                f"params[{i}]: found a tensor that is no parameter of the model; to use other values, pass a dictionary "
                "from parameter name to tensor."
            )
        if names[id(p)] in result:
            raise ValueError(f"params[{i}]: found {names[id(p)]!r} a second time; expected each parameter once.")
        result[names[id(p)]] = p
    return result


def _check_names(model: nn.Module, params: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, p in params.items():
        if name not in own:
            close = difflib.get_close_matches(str(name), own, n=3, cutoff=0.3)
            raise ValueError(
                f"params: the model has no parameter {name!r}" + (f"; close names: {close}." if close else ".")
            )
        if isinstance(p, Tensor) and p.shape != own[name].shape:
            raise ValueError(f"params[{name!r}]: found shape {tuple(p.shape)}, expected {tuple(own[name].shape)}.")
        other = first.setdefault(id(own[name]), name)
        if other != name:
            raise ValueError(
                f"params: {other!r} and {name!r} are one tied parameter of the model; pass it under one name."
            )


def common_kind(params: dict[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of the parameters, or raise where they have several."""
    for attribute in ("dtype", "device"):
        kinds: dict[Any, str] = {}
        for name, p in params.items():
            kinds.setdefault(getattr(p, attribute), name)
        if len(kinds) > 1:
            listed = ", ".join(f"{name!r} has {kind}" for kind, name in kinds.items())
            error = TypeError if attribute == "dtype" else ValueError
            raise error(
                f"params: found several {attribute}s ({listed}), expected one; select or convert the parameters."
            )
    p = next(iter(params.values()))
    if p.device.type == "meta":
        raise ValueError("params: found the meta device, which holds no values; load or initialise the parameters.")
    if not p.is_floating_point():
        raise TypeError(f"params: found dtype {p.dtype}, expected a real floating point dtype.")
    return p.dtype, p.device
