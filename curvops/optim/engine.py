"""A step of any preconditioned method: see the passes, keep the blocks, update the curvature, skip what is not finite."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curvops._operator import LinearOperator
from curvops.kfac.statistics import Statistic
from curvops.kfac.vectors import Fisher
from curvops.optim.blocks import Block, Blocks, gathered, scatter
from curvops.optim.finite import Finite, telltale
from curvops.optim.observer import Observer
from curvops.optim.passes import Counts, Hints

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Occasion:
    """When an update happens, and on what scale its gradients are.

    Attributes:
        step: Number of the step.
        scale: What the observed gradients were multiplied by.
        owed: An update of the curvature was skipped before this one.
    """

    step: int
    scale: Tensor | float
    owed: bool


class Preconditioner(Protocol):
    """What an engine asks of a method. Arrays of blocks are ``[G, d_out, d_in]``."""

    @property
    def by_datum(self) -> bool:
        """Whether rows must be told apart by datum."""

    @property
    def separate(self) -> bool:
        """Whether every bias is a block of its own."""

    def due(self, group: Group, step: int) -> bool:
        """Whether the curvature of a parameter group is observed in a step."""

    def statistic(self) -> Statistic:
        """Return an empty statistic for what is observed."""

    def register(self, statistic: Any) -> None:
        """Make a block of everything that was observed."""

    def update(self, statistic: Any, counts: Counts, occasion: Occasion) -> dict[str, Tensor]:
        """Prepare an update from what was observed; return numbers that must be finite, by what they are called."""

    def settle(self, ok: Tensor) -> None:
        """Adopt the prepared update where ``ok``, else stay as before."""

    def apply(self, arrays: dict[Block, Tensor], step: int) -> dict[Block, Tensor]:
        """Multiply the gradients of blocks."""

    def preconditioner(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return what multiplies gradients."""

    def operator(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return the estimate of the curvature, without damping."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""


class Engine:
    """Observes a model and preconditions its gradients.

    Args:
        model: Its forward and backward passes are observed.
        group_of: The parameter group of every name: hyperparameters.
        params: The parameters by name.
        make: Makes the preconditioner from the blocks.
        grad_scaler: A ``GradScaler``, or a function that returns its scale, where gradients are unscaled before the step.

    Attributes:
        steps: Number of steps made.
        blocks: The blocks that were seen.
    """

    def __init__(
        self,
        model: nn.Module,
        params: dict[str, Tensor],
        group_of: dict[str, dict[str, Any]],
        make: Callable[[Blocks], Preconditioner],
        grad_scaler: Any = None,
    ) -> None:
        self.steps = 0
        self.params = params
        self._model, self._group_of = weakref.ref(model), group_of
        self._groups = list({id(g): g for g in group_of.values()}.values())
        self._scale_of = _scale_source(grad_scaler)
        self._finite = Finite()
        self.blocks = Blocks(group_of, params, self._due, lambda: self.steps)
        self.method: Any = make(self.blocks)
        if not self.method.separate:
            self.blocks.check_layers(model)
        self.observer = Observer(
            model,
            {n: p for n, p in params.items() if n not in self.blocks.refused},
            wanted=lambda: any(map(self._due, self._groups)),
            make=self.method.statistic,
            by_datum=self.method.by_datum,
            separate=self.method.separate,
        )

    def include(self, params: Mapping[str, Tensor], group: dict[str, Any]) -> None:
        """Take in the parameters of a further group."""
        self.params.update(params)
        self._group_of.update(dict.fromkeys(params, group))
        self._groups.append(group)
        if not self.method.separate:
            self.blocks.check_layers(self.model)
        self.observer.include(params)

    def _due(self, group: Group) -> bool:
        return self.method.due(group, self.steps) or self._finite.owed

    @property
    def model(self) -> nn.Module:
        """The model, which is not kept alive."""
        model = self._model()
        if model is None:
            raise RuntimeError("The model of this optimizer is gone.")
        return model

    @contextmanager
    def observing(
        self, loss_terms: int | None, fisher_type: str, loss: Any, target: Any, mc_samples: int, seed: int
    ) -> Iterator[None]:
        """See :meth:`curvops.optim.PreconditionedSGD.observe`."""
        if loss_terms is not None and (
            isinstance(loss_terms, bool) or not isinstance(loss_terms, int) or loss_terms < 1
        ):
            raise ValueError(f"loss_terms: found {loss_terms!r}, expected a positive integer.")
        fisher = None
        if fisher_type != "empirical":
            if loss is None or target is None:
                raise ValueError(f"fisher_type={fisher_type!r} needs loss= and target=; found {loss!r} and {target!r}.")
            fisher = Fisher(str(fisher_type), mc_samples, seed)
        elif loss is not None or target is not None:
            raise ValueError(
                "loss, target: found them with fisher_type='empirical', which takes the user's own gradients."
            )
        with self.observer.observing(Hints(loss_terms, fisher, loss, target)):
            yield

    # ---- the step ------------------------------------------------------------------------------
    def look(self, grads: Mapping[str, Tensor]) -> bool:
        """Begin a step: warn of the last one if it was skipped, register what was observed; say whether to update.

        Raises:
            RuntimeError: If the curvature is due and no forward and backward pass was observed.
        """
        self._finite.report()
        if not grads or not any(map(self._due, self._groups)):
            return False
        if self.observer.closed:
            raise RuntimeError("The optimizer is closed, but its curvature is due in this step.")
        if not self.observer.counts.passes:
            if grads.keys() <= self.reasons().keys():  # none of them has a rule
                return False
            raise RuntimeError(
                "The curvature is due in this step, but no forward and backward pass of the model was observed. Call the "
                "model itself (not one of its parts), or run the forward pass inside `with optimizer.observe():`; in the same "
                "step, and with gradients enabled."
            )
        self.method.register(self.observer.statistic)
        return True

    def reasons(self) -> dict[str, str]:
        """Return why parameters have no block."""
        return {**self.observer.uncovered, **self.blocks.refused}

    def precondition(
        self, grads: dict[str, Tensor], updating: bool, *, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return whether everything is finite, gradients, and preconditioned gradients; zeros where it is not.

        Args:
            grads: Gradients by name; those without a block come back as they were.
            updating: What :meth:`look` said.
            grad_scale: What the gradients are still multiplied by.
            found_inf: What a gradient scaler found.
        """
        numbers = {f"the gradient of {n!r}": telltale(g) for n, g in grads.items()}
        if updating:
            occasion = Occasion(self.steps, self._scale(grad_scale, found_inf), self._finite.owed)
            numbers |= self.method.update(self.observer.statistic, self.observer.counts, occasion)
        ok = self._finite.check(numbers, updating=updating, found_inf=found_inf)
        if updating:
            self.method.settle(ok)
        clean = {n: torch.where(ok, g, 0.0) for n, g in grads.items()}
        if grad_scale is not None:
            clean = {n: (g / grad_scale.to(g.device)).to(g.dtype) for n, g in clean.items()}
        arrays = {b: gathered(b, self._with_zeros(b, clean)) for b in self.blocks if _touches(b, clean)}
        result: dict[str, Tensor] = {}
        for block, array in self.method.apply(arrays, self.steps).items():
            scatter(block, array, result, {n: clean.get(n, self.params[n]) for n in block.placement.names})
        return ok, clean, {n: result.get(n, g) for n, g in clean.items()}

    def advance(self) -> None:
        """End a step."""
        self.steps += 1
        self.observer.reset()

    def _scale(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor | float:
        if self._scale_of is not None:
            return self._scale_of()
        if found_inf is not None and grad_scale is None:
            raise RuntimeError(
                "Gradients were unscaled before the step, so the scale of the observed ones is unknown: pass the scaler to the "
                "optimizer, grad_scaler=scaler."
            )
        return 1.0 if grad_scale is None else grad_scale

    def _with_zeros(self, block: Block, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: grads[n] if n in grads else torch.zeros_like(self.params[n]) for n in block.placement.names}

    # ---- saving --------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"steps": self.steps, "preconditioner": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.method.load_state_dict(state["preconditioner"])
        self.steps = int(state["steps"])
        self._finite = Finite()
        self.observer.reset()


def _touches(block: Block, grads: Mapping[str, Tensor]) -> bool:
    return any(name in grads for name in block.placement.names)


def _scale_source(scaler: Any) -> Callable[[], Tensor | float] | None:
    """Return what tells the scale of the gradients, without waiting for it."""
    if scaler is None or (callable(scaler) and not hasattr(scaler, "get_scale")):
        return scaler
    if not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"grad_scaler: found {type(scaler).__name__}, expected a torch.amp.GradScaler or a function that returns its scale."
        )
    waits_not = getattr(scaler, "_get_scale_async", None)

    def scale() -> Tensor | float:
        found = waits_not() if waits_not is not None else None
        return scaler.get_scale() if found is None else found

    return scale
