"""What sits on a model while an optimizer observes it: hooks that hold the observer weakly, and die with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from curvops._traceless import compiler_switch, forget_compiled, skipped_by_compiler

_set_compiler = compiler_switch()


class Hook:
    """What sits on the model: calls a method of an observer, if it is still there."""

    def __init__(self, observer: Any | None, method: str, *given: Any) -> None:
        self.observer = _gone if observer is None else weakref.ref(observer)
        self.method, self.given = method, given

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook(None, self.method)

    def __reduce__(self) -> Any:
        return Hook, (None, self.method)

    @skipped_by_compiler
    def __call__(self, *args: Any) -> None:
        observer = self.observer()
        if observer is None:
            return
        if self.method == "accumulated":
            observer._accumulated(*self.given)
            return
        # An observed pass runs as it is, also in the midst of a compiled model; nothing of ours is compiled, ever.
        compiler = _set_compiler(None)
        try:
            if self.method == "enter":
                compiler = observer._enter(compiler)
            else:
                compiler = observer._exit(args[-1], args[-1] is None, compiler)
        finally:
            _set_compiler(compiler)


def _gone() -> None:
    return None


def attach(observer: Any, model: nn.Module) -> list[Any]:
    """Hook an observer to the calls of a model; return the handles, to which others may be added."""
    root = getattr(model, "_orig_mod", model)
    for hook in root._forward_pre_hooks.values():
        if isinstance(hook, Hook) and hook.observer() is not None:
            raise ValueError(
                "The model is observed by another optimizer already: close() that one first, or make one optimizer with "
                "parameter groups."
            )
    forget_compiled()
    handles: list[Any] = [
        root.register_forward_pre_hook(Hook(observer, "enter")),
        root.register_forward_hook(Hook(observer, "exit"), always_call=True),
    ]
    weakref.finalize(observer, _remove, handles)
    return handles


def attach_to_gradients(observer: Any, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Hook an observer to the gradients of those parameters that have some; return a handle for each."""
    trained = {n: p for n, p in params.items() if p.requires_grad}
    return {n: p.register_post_accumulate_grad_hook(_accumulated_hook(observer, n)) for n, p in trained.items()}


def _accumulated_hook(observer: Any, name: str) -> Callable[[Tensor], None]:
    hook = Hook(observer, "accumulated", name)
    return lambda _: hook()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
