"""Use a model and leave no trace: parameters and buffers swapped for a while, random states put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvops._params import Model


def _slots(model: nn.Module, kind: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        store = getattr(module, kind)
        for key, t in store.items():
            if t is not None:
                yield store, key, t


@contextmanager
def swapped(model: Model, params: dict[str, Tensor], leaves: dict[str, Tensor]) -> Iterator[None]:
    """Put leaves in the place of a module's parameters, and copies in that of its buffers, for a while."""
    if not isinstance(model, nn.Module):
        yield
        return
    own = dict(model.named_parameters(remove_duplicate=False))
    new = {id(own[name]): leaves[name] for name in params}
    parameters = [slot for slot in _slots(model, "_parameters") if id(slot[2]) in new]
    buffers = list(_slots(model, "_buffers"))
    copies = {id(b): b.clone() for _, _, b in buffers}
    attributes = [(m.__dict__, dict(m.__dict__)) for m in model.modules()]
    try:
        for store, key, t in parameters:
            store[key] = new[id(t)]
        for store, key, t in buffers:
            store[key] = copies[id(t)]
        _refresh_flat_weights(model)
        yield
    finally:
        for store, key, t in (*parameters, *buffers):
            store[key] = t
        for store, before in attributes:
            _restore_tensors(store, before)
        _refresh_flat_weights(model)


def _restore_tensors(store: dict[str, Any], before: dict[str, Any]) -> None:
    """Take back tensors that modules keep as plain attributes (weights made by hooks, caches): they hold our graph."""
    for key, value in list(store.items()):
        if isinstance(value, Tensor) and value is not before.get(key):
            store.pop(key)
    store.update((k, v) for k, v in before.items() if isinstance(v, Tensor))


def _refresh_flat_weights(model: nn.Module) -> None:
    """Recurrent modules keep a second list of their parameters."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.__dict__["_flat_weights"] = [getattr(module, n, None) for n in module._flat_weights_names]


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models eagerly: their operations must be seen, and one pass does not pay for a compilation."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def skipped_by_compiler(f: Any) -> Any:
    """Mark a function that compiled models call as it is; before it calls anything, it must switch the compiler off."""
    import torch._dynamo

    return torch._dynamo.decorators.skip(f)


def compiler_switch() -> Callable[[Any], Any]:
    """Return a function that sets the compiler of this thread (``None``: all runs as it is) and returns the one before.

    It must be called from a skipped function itself: it is a builtin, and any Python function would be compiled.
    """
    import torch._dynamo

    return torch._dynamo.eval_frame.set_eval_frame


def forget_compiled() -> None:
    """Have models compiled anew at their next call: what was compiled before would run past hooks that are new."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@contextmanager
def random_state_kept(device: torch.device | None = None) -> Iterator[None]:
    """Put the global generators of Python, numpy and torch back, whatever data and models draw from them."""
    python, numpy, states = random.getstate(), np.random.get_state(), torch_random_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)


def torch_random_state(device: torch.device | None) -> list[Tensor]:
    """Return the state of torch's global generators: of the CPU, and of a CUDA device."""
    cuda = [torch.cuda.get_rng_state(device)] if device is not None and device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


def plain(t: Tensor) -> Tensor:
    """Return a tensor that can enter a graph, which those made in inference mode cannot."""
    return t.clone() if t.is_inference() else t
