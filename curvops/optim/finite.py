"""Skip steps whose numbers are not finite, on the device: nothing waits for the answer, and the warning comes a step later."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor


class Finite:
    """Remembers which of the last step's numbers were finite, without waiting for them.

    Attributes:
        owed: Whether the last step that should have updated the curvature was skipped, as far as is known.
    """

    def __init__(self) -> None:
        self._labels: list[str] = []
        self._flags: Tensor | None = None
        self._expected = False
        self._updating = False
        self._ready: torch.cuda.Event | None = None

    def check(self, numbers: Mapping[str, Tensor], *, updating: bool, found_inf: Tensor | None) -> Tensor:
        """Return whether all numbers are finite, as a 0-dim tensor on their device.

        Args:
            numbers: 0-dim tensors by what they are called in a warning.
            updating: Whether the curvature is updated in it.
            found_inf: What a gradient scaler found, which needs no warning.
        """
        flags = torch.stack([n.float() for n in numbers.values()]).isfinite()
        ok = flags.all()
        if found_inf is not None:
            ok = ok & (found_inf.reshape(()).to(ok.device) == 0)
        together = torch.cat([ok[None], flags])
        self._labels, self._updating = list(numbers), updating
        self._expected = found_inf is not None
        self._flags = together.to("cpu", non_blocking=True)
        if together.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()
        return ok

    @property
    def owed(self) -> bool:
        """Whether the last update of the curvature was skipped."""
        return self._updating and self._flags is not None and not self._read()[0]

    def report(self) -> None:
        """Warn of a step that was skipped, by the names of what was not finite."""
        if self._flags is None or self._expected:
            return
        flags = self._read()
        bad = [label for label, fine in zip(self._labels, flags[1:], strict=True) if not fine]
        if bad:
            more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
            warnings.warn(
                "The last step was skipped, parameters and curvature are as before it: NaN or infinite numbers in "
                f"{', '.join(bad[:4])}{more}.",
                RuntimeWarning,
                stacklevel=_levels_up(),
            )
            self._labels, self._flags = [], self._flags[:1]

    def _read(self) -> Sequence[bool]:
        if self._ready is not None:
            self._ready.synchronize()  # of an earlier step: it has long been there
        return self._flags.numpy().tolist()


def _levels_up() -> int:
    """Return the ``stacklevel`` of whoever called the optimizer."""
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


def telltale(t: Tensor) -> Tensor:
    """Return a number that is finite if all entries are, in the quickest way (sums: 5x quicker than the largest entry).

    The sum of finite numbers overflows only where gradients are of no use any more.
    """
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.sum(dtype=torch.float32) if t.dtype in (torch.float16, torch.bfloat16) else t.sum()
