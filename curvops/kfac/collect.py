"""One pass over the data: observe, prove, reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from curvops._traceless import random_state_kept
from curvops.kfac.recorder import Recorder
from curvops.kfac.schedule import vector_indices
from curvops.kfac.sharing import Sharing
from curvops.kfac.sites import conflicts, find_sites
from curvops.kfac.statistics import DenseBlocks, Statistic
from curvops.kfac.uses import Unsupported, Use, unsupported_message, without
from curvops.kfac.vectors import Batch, Fisher, Vectors
from curvops.losses import OutputView
from curvops.risk import EmpiricalRisk

S = TypeVar("S", bound=Statistic)


@dataclass
class Counts:
    """What a pass over the data counted.

    Attributes:
        normalizer: What a mean loss divides by.
        num_data: Number of data.
        output_rows: Entries of the predictions' first axis.
        loss_terms: Number of loss terms.
        reached: Parameters that a prediction depends on.
        unsupported: Operations that no rule covers, by parameter.
    """

    normalizer: float = 0.0
    num_data: int = 0
    output_rows: int = 0
    loss_terms: int = 0
    reached: set[str] = field(default_factory=set)
    unsupported: dict[str, Unsupported] = field(default_factory=dict)


class Collector(Generic[S]):
    """A pass over the data of a risk that feeds a statistic.

    Args:
        risk: Model, loss, parameters and data.
        fisher: Which vectors to back-propagate.
        make: Makes an empty statistic.
        by_datum: Whether the statistic needs to know which rows belong to which datum.
        separate: Whether a bias is a block of its own.
        policy: What to do with parameters that no rule covers: ``"raise"``, ``"exact"``, ``"diagonal"`` or ``"zero"``.
        offset: Index of the first datum, for the random draws.
        regular: Whether rows must be in a regular order where the statistic needs to know them by datum.

    Attributes:
        statistic: The statistic of all data.
        dense: Blocks of the parameters that no rule covers.
        counts: What was counted.
        sharing: What shared output vectors.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        fisher: Fisher,
        make: Callable[[], S],
        *,
        by_datum: bool,
        separate: bool,
        policy: str,
        offset: int = 0,
        regular: bool = True,
    ) -> None:
        self._risk, self._make, self._separate, self._policy = risk, make, separate, policy
        self._offset, self._replaced = offset, risk.replaced
        self.fisher, self.sharing = fisher, Sharing(fisher, by_datum, regular)
        self.statistic, self.dense, self.counts = make(), DenseBlocks(policy), Counts()

    def run(self, data: Iterable[tuple[Any, Any]] | None = None) -> Collector[S]:
        """Go through the data once."""
        with random_state_kept(self._risk.device):
            for i, (X, y) in enumerate(self._risk.batches(data)):
                with self._risk.leaves() as leaves:
                    self._batch(i, X, y, leaves)
        self._risk.check_counts(self.counts.num_data, self.counts.loss_terms)
        return self

    def _batch(self, i: int, X: Any, y: Any, leaves: dict[str, Tensor]) -> None:
        recorder = Recorder(leaves, self._replaced, allow_train_mode=self._risk.allow_train_mode)
        with recorder:
            raw = self._risk.predict(leaves, X)
        # The user's autocast is for the model; everything from here on is in full precision.
        with torch.autocast(self._risk.device.type, enabled=False):
            output = self._risk.loss.prepare(raw)
            _check_output(output, i)
            self.counts.reached |= recorder.check(output)
            uses = self._supported(recorder)
            view = self._risk.loss.view(output.detach(), y)
            num_data = self._num_data(X, output)
            vectors = Vectors(self.fisher, view, self._offset + self.counts.output_rows)
            batch = Batch(uses, output, vectors, num_data, view.N * view.T // num_data)
            self._dense_blocks(batch, leaves)
            self.statistic.merge(self.sharing.feed(batch, find_sites(uses, self._separate), self._make))
        self._count(view, num_data, output)

    def _supported(self, recorder: Recorder) -> list[Use]:
        """Return the uses without the parameters that no rule covers."""
        for found in (*recorder.unsupported, *conflicts(recorder.uses)):
            if self._policy == "raise":
                raise NotImplementedError(unsupported_message(found))
            self.counts.unsupported.setdefault(found.name, found)
        return without(recorder.uses, self.counts.unsupported)

    def _dense_blocks(self, batch: Batch, leaves: dict[str, Tensor]) -> None:
        names = [n for n in self.counts.unsupported if self._policy != "zero"]
        if not names or not batch.output.requires_grad:
            return
        by_term = self.fisher.unit == "term"
        for index in vector_indices(
            batch.num_data, batch.terms, batch.vectors.count, each_datum=True, each_term=by_term
        ):
            vector = batch.vectors.at(index)
            tensors = [leaves[n] for n in names]
            grads = torch.autograd.grad(batch.output, tensors, vector, retain_graph=True, allow_unused=True)
            self.dense.add(zip(names, grads, strict=True))

    # ---- counting --------------------------------------------------------------------------
    def _num_data(self, X: Any, output: Tensor) -> int:
        found = self._risk.batch_size(X, output.shape)
        if found is not None:
            return found
        if (self.sharing.by_datum and self.sharing.regular) or self.fisher.kind == "empirical":
            raise ValueError(
                f"The prediction has {output.shape[0]} entries on its first axis, which is not the number of data that X "
                "suggests; pass batch_size_fn, a function from X to its number of data."
            )
        return int(output.shape[0])

    def _count(self, view: OutputView, num_data: int, output: Tensor) -> None:
        self.counts.normalizer += float(view.normalizer)
        self.counts.loss_terms += view.N * view.T
        self.counts.num_data += num_data
        self.counts.output_rows += output.shape[0]


def _check_output(output: Tensor, batch: int) -> None:
    if output.ndim == 0:
        raise ValueError(f"Batch {batch}: the prediction is a scalar; expected an axis of data first.")
    if output.numel() == 0:
        raise ValueError(
            f"Batch {batch}: the prediction is empty (shape {tuple(output.shape)}); leave empty batches out."
        )
    if not torch.isfinite(output).all():
        raise ValueError(
            f"Batch {batch}: the prediction has NaN or infinite entries, though the data have none; check the params."
        )
