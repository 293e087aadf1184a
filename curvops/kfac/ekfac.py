"""EKFAC: the eigenvectors of KFAC with the eigenvalues that fit best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from curvops import _linalg
from curvops._params import Model, Params
from curvops.kfac.blocks import factor_pair, labelled
from curvops.kfac.estimate import Estimate, block_key
from curvops.kfac.estimated import EstimatedOperator
from curvops.kfac.operator import kronecker_factors
from curvops.kfac.reading import BUDGET, Reading, checked_budget
from curvops.kfac.reducers import Basis, Squares
from curvops.kfac.statistics import Sums
from curvops.structured._base import sandwich


class EKFACLinearOperator(EstimatedOperator):
    """Eigenvalue-corrected KFAC: ``(Q_B ⊗ Q_A) diag(values) (Q_B ⊗ Q_A)'`` for every layer.

    ``Q_B`` and ``Q_A`` are the eigenvectors of KFAC's factors. Of all matrices with these eigenvectors it is the one
    nearest in Frobenius norm to the layer's block of the curvature: ``values = sum_k (Q_B' G_k Q_A)^2`` over the gradients
    ``G_k`` of single output vectors. So it is never further from that block than KFAC. Weight sharing, groups, outputs of
    any shape and weights that are used several times (in both orientations, too) all enter ``G_k``, with their cross terms.

    Source: George et al. (2018), Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis.

    Args:
        model, loss, params, data: See :class:`curvops.risk.EmpiricalRisk`.
        memory_budget: Bytes of layer inputs and gradients that may be kept; what exceeds them is computed again in a second
            pass over the data, which must then be the same data in the same order.
        **options: Those of :class:`curvops.KFACLinearOperator`.

    Attributes:
        factors: KFAC's factors of every block; ``.operator`` has ``QB``, ``QA`` and ``values``.
        treatments: What became of every parameter.

    Raises:
        ValueError: As for KFAC, and for data that differ in a second pass.
        NotImplementedError: As for KFAC.
    """

    kind = "EKFAC"

    def __init__(
        self,
        model: Model,
        loss: Callable[..., Any],
        params: Params,
        data: Iterable[tuple[Any, Any]],
        *,
        memory_budget: float = BUDGET,
        **options: Any,
    ) -> None:
        self._budget = checked_budget(memory_budget)
        super().__init__(model, loss, params, data, **options)

    def merge(self, other: Any) -> Any:
        """Refuse: eigenvalues belong to eigenvectors, and those of all data are known from all data only."""
        raise NotImplementedError(
            "EKFAC operators of different data have different eigenvectors, so they have no exact sum. Merge KFAC operators, "
            "or build one EKFAC operator from all data."
        )

    def _observe(self, options: dict[str, Any], data: Iterable[tuple[Any, Any]] | None, offset: int) -> Estimate:
        if options["fisher_type"] == "forward-only":
            return _uncorrected(kronecker_factors(self._risk, options, data, offset))
        reading = Reading(self._risk, options, data, offset, self._budget)
        return _corrected(reading.estimate, reading)

    def _averaged(self, data: Iterable[tuple[Any, Any]], decay: float) -> Estimate:
        """Average the factors; correct the eigenvalues in their eigenvectors, those of the old matrix and of new gradients."""
        old = self._estimate
        if old.options["fisher_type"] == "forward-only":
            return _uncorrected(old.averaged(self._observe(old.options, data, old.seen), decay))
        reading = Reading(self._risk, old.options, data, old.seen, self._budget)
        return _corrected(old.averaged(reading.estimate, decay), reading, old, decay)


def _corrected(estimate: Estimate, reading: Reading, old: Estimate | None = None, decay: float = 0.0) -> Estimate:
    """Give every block its eigenvectors, and the eigenvalues of what was read (and of an old estimate)."""
    keys = {block_key(s.placement): key for key, s in reading.sums.items()}
    groups, bases = labelled(estimate), eigenvectors(estimate)
    by_key: dict[Hashable, Basis] = {}
    for label, members in groups.items():
        for j, sums in enumerate(members):  # behind the first: the same weight, turned
            by_key[keys.get(block_key(sums.placement))] = bases[label][::-1] if j else bases[label]
    squares = reading.reduce(lambda: Squares(by_key)).sums
    before = {} if old is None else {block_key(b.placement): b for b in old.blocks if b.values is not None}
    weight = (1 - decay) * reading.estimate.scale
    for label, members in groups.items():
        basis, first = bases[label], members[0]
        values = basis[0].new_zeros(first.placement.shape)
        for j, sums in enumerate(members):
            found = squares.get(keys.get(block_key(sums.placement)))
            if found is not None:
                values += weight * (found.mT if j else found)
        if block_key(first.placement) in before:
            values += decay * _seen_from(basis, before[block_key(first.placement)])
        first.basis, first.values = basis, _without_noise(values)
    return estimate


def _without_noise(values: Tensor) -> Tensor:
    """Set to zero what rounding leaves of gradients that are orthogonal to an eigenvector."""
    noise = max(4.0, max(values.shape) ** 0.5) * torch.finfo(values.dtype).eps
    return torch.where(values > noise**2 * values.sum((1, 2), keepdim=True), values, 0.0)


def _seen_from(basis: Basis, block: Sums) -> Tensor:
    """Return the diagonal, in a basis, of a block with other eigenvectors."""
    B, A = (None if new is None else (new.mT @ old).square() for new, old in zip(basis, block.basis, strict=True))
    return sandwich(B, block.values.unsqueeze(0), A).squeeze(0)


def _uncorrected(estimate: Estimate) -> Estimate:
    """Give every block the eigenvalues of its Kronecker product: without gradients there is nothing to correct."""
    for label, members in labelled(estimate).items():
        B, A = factor_pair(estimate, label, *members)
        b, QB = _linalg.eigh_psd(B, label)
        a, QA = (torch.ones_like(b[:, :1]), None) if A is None else _linalg.eigh_psd(A, label)
        members[0].basis, members[0].values = (QB, QA), b.unsqueeze(-1) * a.unsqueeze(-2)
    return estimate


def eigenvectors(estimate: Estimate) -> dict[str, Basis]:
    """Return the eigenvectors of the factors of every block, by label; factors of one size are decomposed together."""
    pairs = {label: factor_pair(estimate, label, *members) for label, members in labelled(estimate).items()}
    places: dict[int, list[tuple[str, int]]] = {}
    for label, pair in pairs.items():
        for side, F in enumerate(pair):
            if F is not None:
                places.setdefault(F.shape[-1], []).append((label, side))
    found: dict[tuple[str, int], Tensor] = {}
    for equal in places.values():
        factors = [pairs[label][side] for label, side in equal]
        names = ", ".join(dict.fromkeys(label for label, _ in equal))
        _, Q = _linalg.eigh_psd(torch.cat(factors), names)
        found.update(zip(equal, Q.split([len(F) for F in factors]), strict=True))
    return {label: (found[label, 0], found.get((label, 1))) for label in pairs}
