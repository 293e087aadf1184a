"""Hyperparameters that may depend on the step, and a scheduler for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from curvops.optim.damping import LevenbergMarquardt

#: What a number must be at least (or more than), and whether it must be an integer.
_RANGES: dict[str, tuple[float, bool, bool]] = {
    "damping": (0.0, True, False),
    "factor_decay": (0.0, False, False),
    "kl_clip": (0.0, True, False),
    "lr": (0.0, False, False),
    "factor_update_steps": (1, False, True),
    "inv_update_steps": (1, False, True),
}


class Hyperparameters:
    """Numbers, or functions of the step, by name; every number is checked when it is used.

    Args:
        values: Numbers, 0-dim tensors, or functions of the step; ``kl_clip`` may be ``None``, ``damping`` may be
            :class:`LevenbergMarquardt`.

    Attributes:
        values: What they are now.
        first: What they were in the beginning, also after a state was loaded.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {n: v if _lives(v) else checked(n, v) for n, v in values.items()}
        self.first = dict(self.values)

    def at(self, name: str, step: int) -> Any:
        """Return a hyperparameter as it is in a step."""
        value = self.values[name]
        if isinstance(value, LevenbergMarquardt):
            return value.damping
        return checked(name, value(step)) if callable(value) else value

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, and the state of :class:`LevenbergMarquardt`; functions cannot be saved."""
        state: dict[str, Any] = {"hyperparameters": {n: v for n, v in self.values.items() if not _lives(v)}}
        if isinstance(self.values["damping"], LevenbergMarquardt):
            state["levenberg_marquardt"] = self.values["damping"].state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`; what is a function here stays one."""
        for name, value in state.get("hyperparameters", {}).items():
            if name in self.values and not _lives(self.values[name]):
                self.values[name] = value.clone() if isinstance(value, Tensor) else checked(name, value)
        if isinstance(self.values["damping"], LevenbergMarquardt) and "levenberg_marquardt" in state:
            self.values["damping"].load_state_dict(state["levenberg_marquardt"])


def _lives(value: Any) -> bool:
    """Whether a hyperparameter is more than a number."""
    return callable(value) or isinstance(value, LevenbergMarquardt)


def checked(name: str, value: Any) -> Any:
    """Return a hyperparameter as a number of Python's (which can be saved), a tensor or ``None``, or raise."""
    if isinstance(value, Tensor) or (name == "kl_clip" and value is None):
        return value
    least, above, integer = _RANGES[name]
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, Integral if integer else Real):
        raise TypeError(f"{name}: found {value!r}, expected {kind}.")
    if not (float(value) > least if above else float(value) >= least):
        raise ValueError(f"{name}: found {value!r}, expected {kind} {'>' if above else '>='} {least:g}.")
    if name == "factor_decay" and float(value) > 1:
        raise ValueError(f"factor_decay: found {value!r}, expected at most 1.")
    return int(value) if isinstance(value, Integral) else float(value)


class LambdaParamScheduler:
    """Sets hyperparameters of a :class:`KFACPreconditioner` or :class:`KFAC` to their first values times functions of the step.

    First values are those that they were constructed with, whatever was loaded since. As torch's ``LambdaLR``, and unlike
    ``kfac-pytorch``, where factors of all calls multiply up. Update intervals are rounded and are 1 at least.

    Args:
        preconditioner: Whose hyperparameters are set; those that are functions already cannot be.
        factor_update_steps_lambda, inv_update_steps_lambda, damping_lambda, factor_decay_lambda, kl_clip_lambda, lr_lambda:
            Functions of the step.

    Raises:
        ValueError: If a hyperparameter is a function already.
    """

    def __init__(self, preconditioner: Any, **lambdas: Callable[[int], float] | None) -> None:
        known = {f"{name}_lambda": name for name in _RANGES}
        if set(lambdas) - set(known):
            found = sorted(set(lambdas) - set(known))
            raise TypeError(f"LambdaParamScheduler: found {found}, expected some of {sorted(known)}.")
        self._preconditioner = preconditioner
        self._lambdas = {known[k]: f for k, f in lambdas.items() if f is not None}
        first = preconditioner.hyperparameters.first
        for name in self._lambdas:
            if name not in first:
                raise ValueError(f"{name}: found no such hyperparameter here, expected one of {sorted(first)}.")
            if _lives(first[name]) or first[name] is None:
                raise ValueError(f"{name}: found {first[name]!r}, expected a number that a scheduler can multiply.")
        self._first = {name: first[name] for name in self._lambdas}

    def step(self, step: int | None = None) -> None:
        """Set the hyperparameters for a step, by default the next one of the preconditioner."""
        step = self._preconditioner.steps if step is None else step
        for name, f in self._lambdas.items():
            value = self._first[name] * f(step)
            value = max(1, round(value)) if _RANGES[name][2] else value
            self._preconditioner.hyperparameters.values[name] = checked(name, value)


def exp_decay_factor_averaging(min_value: float = 0.95) -> Callable[[int], float]:
    """Return the decay ``min(1 - 1/k, min_value)`` of step ``k`` (Martens and Grosse 2015, section 5).

    Args:
        min_value: The most that the decay becomes, above 0.
    """
    if not min_value > 0:
        raise ValueError(f"min_value: found {min_value!r}, expected a number > 0.")

    def decay(step: int) -> float:
        if step < 0:
            raise ValueError(f"step: found {step}, expected an integer >= 0.")
        return min(1.0 - 1.0 / max(step, 1), min_value)

    return decay
