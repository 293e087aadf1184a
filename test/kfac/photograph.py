"""A photograph of everything that is the user's: tests compare two of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack


def state(*models: nn.Module) -> dict[str, Any]:
    """Photograph what belongs to the user."""
    picture: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [a.tolist() if isinstance(a, np.ndarray) else a for a in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "modes": [id(m) for m in _get_current_function_mode_stack()],
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "dtype": torch.get_default_dtype(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "torch functions": (id(F.has_torch_function), id(F.linear), id(torch.nn.functional.dropout)),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    for i, (name, module) in enumerate(pair for m in models for pair in m.named_modules(remove_duplicate=False)):
        shelf = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        picture[f"{i} {name} dict"] = {k: dict(v) if isinstance(v, dict) else repr(v) for k, v in shelf.items()}
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                hooks = dict(t._backward_hooks or {}), dict(t._post_accumulate_grad_hooks or {})
                picture[f"{i} {name}.{key}"] = (id(t), t.tolist(), t.requires_grad, t.data_ptr(), t._version, hooks)
                grad = t.grad if t.is_leaf else None
                picture[f"{i} {name}.{key}.grad"] = grad if grad is None else (id(grad), grad.tolist())
    return picture
