"""Watch the user's own passes: layer inputs of a forward pass, output gradients of the backward pass that fills ``.grad``.

Gradients are *staged* where they arrive, at the autograd nodes of the layers' outputs, and *committed* when the gradient of
the parameter is accumulated: ``torch.autograd.grad``, evaluations and forward passes without a backward pass leave nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvops._traceless import eager
from curvops.kfac.recorder import Escaped, Recorder
from curvops.kfac.schedule import Layout
from curvops.kfac.sharing import Sharing, find_layouts
from curvops.kfac.sites import conflicts, find_sites
from curvops.kfac.statistics import Statistic
from curvops.kfac.uses import Use, without
from curvops.kfac.vectors import Batch, Vectors
from curvops.losses import output_loss
from curvops.optim.hooks import attach, attach_to_gradients
from curvops.optim.passes import Counts, ForwardPass, Hints, count


class Observer:
    """Observe a model's passes while they are wanted.

    Args:
        model: Its calls are watched; models that are not called themselves are watched in :meth:`observing`.
        params: The parameters, by name.
        wanted: Whether the coming forward pass shall be observed.
        make: Makes an empty statistic.
        by_datum: Whether the statistic needs to know which rows belong to which datum.
        separate: Every bias is a block of its own.

    Attributes:
        statistic: Of what was observed since :meth:`reset`.
        counts: Of the forward passes that were observed; each counts once.
        uncovered: Parameters used in a way that no rule covers, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        *,
        wanted: Callable[[], bool],
        make: Callable[[], Statistic],
        by_datum: bool = False,
        separate: bool = False,
    ) -> None:
        self._wanted, self._make, self._by_datum, self._separate = wanted, make, by_datum, separate
        self._layouts: dict[tuple, Layout | None] = {}
        self._params = dict(params)
        self._live: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._open: list[_Window | None] = []
        self._hints = Hints()
        self._drawn = 0
        self.uncovered: dict[str, str] = {}
        self.reset()
        self._handles = attach(self, model)
        self._watched: set[str] = set()
        self._watch_gradients()

    def reset(self) -> None:
        """Forget everything: what was committed, and what is still on its way."""
        self.forget_committed()
        for seen in list(self._live):
            seen.forget()
        self._live.clear()

    def forget_committed(self) -> None:
        """Forget what was committed: the gradients that it belongs to are gone."""
        self.statistic, self.counts = self._make(), Counts()

    def include(self, params: Mapping[str, Tensor]) -> None:
        """Watch further parameters from now on."""
        self._params.update(params)

    def _watch_gradients(self) -> None:
        """Watch the gradients of parameters, also of those that were frozen until now."""
        missing = {n: p for n, p in self._params.items() if n not in self._watched and p.requires_grad}
        if missing:
            handles = attach_to_gradients(self, missing)
            self._handles += handles.values()
            self._watched |= handles.keys()

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reset()

    @property
    def closed(self) -> bool:
        """Whether the hooks are gone."""
        return not self._handles

    @contextmanager
    def observing(self, hints: Hints) -> Iterator[None]:
        """Watch everything inside, with the user's hints; calls of the model in it are part of the same pass."""
        before, self._hints = self._hints, hints
        self._enter()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._exit(None, failed)
            self._hints = before

    # ---- what hooks call --------------------------------------------------------------------
    def _enter(self, compiler: Any = None) -> Any:
        """Open a window, if it is time; return the compiler that goes on."""
        self._open.append(None)  # whatever happens below, the exit finds its entry
        if not any(self._open) and torch.is_grad_enabled() and self._wanted():
            self._watch_gradients()
            trained = {n for n, p in self._params.items() if p.requires_grad}
            window = _Window(ForwardPass(self._separate, trained), self._params, self._look_inside)
            window.stack.enter_context(eager())  # a compiled model would run past the recorder
            window.stack.enter_context(window.recorder)
            window.compiler, compiler = compiler, None
            self._open[-1] = window
        return compiler

    def _exit(self, output: Any, failed: bool, compiler: Any = None) -> Any:
        """Close the window that was opened; return the compiler that goes on."""
        window = self._open.pop()
        if window is not None:
            compiler = window.compiler
        else:
            # A call of the whole model inside `observing` completes the pass: its backward pass may follow inside, too.
            if not self._open or self._open[-1] is None or failed:
                return compiler
            window, self._open[-1] = self._open[-1], None
        window.stack.close()
        if failed:
            window.seen.forget()
            return compiler
        if window.late:
            window.seen.forget()
            raise RuntimeError(
                "A backward pass ran inside `observe()` before the forward pass was complete. The model is not called as a "
                "whole there, so leave the block before the backward pass."
            )
        with torch.autocast(_device(self._params).type, enabled=False):
            self._settle(window, _tensors(output))
        return compiler

    def _settle(self, window: _Window, outputs: list[Tensor]) -> None:
        recorder, seen = window.recorder, window.seen
        attached = [t for t in outputs if t.requires_grad]
        if attached:
            self._prove(recorder, attached[0] if len(attached) == 1 else _joined(attached))
        for found in (*recorder.unsupported, *conflicts(recorder.uses)):
            self.uncovered.setdefault(found.name, f"{found.function}: {found.reason}")
        uses = without(recorder.uses, self.uncovered)
        output = next((t for t in outputs if t.ndim), None)
        seen.counts = count(output, self._hints)
        if self._by_datum and output is not None:
            seen.layouts = self._laid_out(uses, output)
        if self._hints.fisher is not None:
            self._draw(uses, output, seen.counts)
            seen.forget()
            return
        seen.keep(uses)
        self._live.add(seen)

    def _look_inside(self, seen: ForwardPass, node: Any) -> None:
        """Watch what a reentrant checkpoint computes once more, in the middle of the backward pass."""
        observer, inside = weakref.ref(self), ExitStack()

        def begin(*_: Any) -> None:
            if (own := observer()) is not None and seen in own._live:
                inside.enter_context(Recorder(own._params, allow_train_mode=True, on_use=seen.note))

        node.register_prehook(begin)
        node.register_hook(lambda *_: inside.close())

    def _laid_out(self, uses: list[Use], output: Tensor) -> dict[Use, Layout | None]:
        """Find out where the data are in the rows of the uses; what was found once holds for batches of other sizes."""
        N = len(output)
        keys = [(i, use.function, use.names, use.form.extent(use.x)[0] / N) for i, use in enumerate(uses)]
        if any(key not in self._layouts for key in keys):
            self._layouts |= dict(zip(keys, find_layouts(uses, output), strict=True))
        found = {}
        for key, use in zip(keys, uses, strict=True):
            layout, rows = self._layouts[key], use.form.extent(use.x)[0]
            if layout is None and rows % N == 0:  # the model couples its data (batch statistics): data come first
                layout = Layout(1, rows // N)
            found[use] = layout
        return found

    def _draw(self, uses: list[Use], output: Tensor | None, counts: Counts) -> None:
        """Feed the statistic with vectors of the loss, in place of those of the user's backward pass."""
        hints = self._hints
        if output is None or not output.requires_grad:
            raise ValueError(f"fisher_type={hints.fisher.kind!r} needs a prediction with a graph; found none.")
        loss = output_loss(hints.loss)
        view = loss.view(loss.prepare(output).detach(), hints.y)
        vectors = Vectors(hints.fisher, view, self._drawn)
        self._drawn += view.N
        batch = Batch(uses, loss.prepare(output), vectors, view.N, view.T, lent=True)
        sharing = Sharing(hints.fisher, self._by_datum)
        self.statistic.merge(sharing.feed(batch, find_sites(uses, self._separate), self._make))
        normalizer = float(view.normalizer) if loss.reduction == "mean" else 0.0
        counts.normalizer = normalizer
        self._add(counts)

    def _add(self, new: Counts) -> None:
        old = self.counts
        if old.passes and (old.normalizer is None) != (new.normalizer is None):
            raise ValueError("Forward passes of one step have different kinds of Fisher; expected one kind for all.")
        normalizer = None if new.normalizer is None else (old.normalizer or 0.0) + new.normalizer
        self.counts = Counts(
            old.data + new.data,
            old.positions + new.positions,
            old.given + new.given,
            old.passes + new.passes,
            old.told + new.told,
            normalizer,
        )

    def _prove(self, recorder: Recorder, output: Tensor) -> None:
        """Insist that no use of a parameter was missed; a parameter for which that fails is uncovered."""
        frozen = {n for n, p in self._params.items() if not p.requires_grad}  # until further notice
        while True:
            try:
                recorder.check(output, {*self.uncovered, *frozen})
            except Escaped as escaped:
                self.uncovered[escaped.name] = str(escaped)
            else:
                return

    @torch.no_grad()
    def _accumulated(self, name: str) -> None:
        for window in filter(None, self._open):
            window.late |= window.seen.waits_for(name)
        if not self._live or name in self.uncovered:
            return
        with torch.autocast(_device(self._params).type, enabled=False):
            for seen in list(self._live):
                if seen.commit(name, self.statistic) and not seen.counted:
                    seen.counted = True
                    self._add(seen.counts)


@dataclass(eq=False)
class _Window:
    """The time between the beginning and the end of a forward pass."""

    seen: ForwardPass
    params: Mapping[str, Tensor]
    look_inside: Callable[[ForwardPass, Any], None]
    late: bool = False
    compiler: Any = None
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.recorder = Recorder(
            self.params,
            allow_train_mode=True,
            on_use=self.seen.note,
            on_checkpoint=partial(self.look_inside, self.seen),
        )


def _device(params: Mapping[str, Tensor]) -> torch.device:
    return next(iter(params.values())).device


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an answer, the logits first."""
    output = [output.logits, output] if isinstance(getattr(output, "logits", None), Tensor) else output
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def _joined(outputs: list[Tensor]) -> Tensor:
    """Return a node that leads to all outputs."""
    return torch.stack([t.flatten()[:1].sum().double() for t in outputs]).sum()
