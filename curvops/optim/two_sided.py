"""The preconditioner ``K K' ⊗ C C'`` of a block: structured factors, updated without inverse or decomposition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops.structured import DenseMatrix, StructuredMatrix
from curvops.structured._batched import mm, outer
from curvops.structured.pulled import Pulled
from curvops.structured.together import joined, parted

Pair = tuple[StructuredMatrix, StructuredMatrix]


@dataclass(eq=False)
class Factors:
    """The state of one block.

    Attributes:
        K, C: The factors ``[G, d_in, d_in]`` and ``[G, d_out, d_out]`` in the structures and dtypes of the group.
        m: Their momenta; ``None`` without Riemannian momentum.
        steps: Steps that the factors serve.
    """

    K: StructuredMatrix
    C: StructuredMatrix
    m: Pair | None = None
    steps: int = 1
    _squares: tuple[Tensor | None, Tensor | None] | None = None

    def times(self, X: Tensor) -> Tensor:
        """Return ``C C' X K K'`` for ``X [G, d_out, d_in]``, in the dtype of ``X``."""
        if self._squares is None:
            self._squares = self._square(self.K, X.shape[-2]), self._square(self.C, X.shape[-1])
        Y = _squared(self.K, self._squares[0], X.mT)
        return _squared(self.C, self._squares[1], Y.mT).to(X.dtype)

    def _square(self, M: StructuredMatrix, columns: int) -> Tensor | None:
        """Return ``M M'`` of a dense matrix if it saves more products than it costs."""
        half = 0.62 if M.dim >= 256 else 1.0  # of the product is multiplied
        return outer(M._wide().M) if isinstance(M, DenseMatrix) and columns * self.steps > half * M.dim else None

    def move(self, like: Tensor, dtypes: Sequence[torch.dtype]) -> Factors:
        """Return the factors on a device, in dtypes for ``K`` and ``C``."""
        K, C = self.K._convert(like.device, dtypes[0]), self.C._convert(like.device, dtypes[1])
        m = self.m and (self.m[0]._convert(like.device, dtypes[0]), self.m[1]._convert(like.device, dtypes[1]))
        return Factors(K, C, m, self.steps)

    def retyped(self, dtypes: Sequence[torch.dtype]) -> Factors:
        """Return the factors in other dtypes of single or half precision."""
        K, C = self.K._retyped(dtypes[0]), self.C._retyped(dtypes[1])
        return Factors(K, C, self.m and (self.m[0]._retyped(dtypes[0]), self.m[1]._retyped(dtypes[1])), self.steps)

    def where_(self, ok: Tensor, old: Factors) -> Factors:
        """Return these factors where ``ok``, else old ones, in place of these."""
        for new, before in ((self.K, old.K), (self.C, old.C)):
            _where_(ok, new, before)
        for j, new in enumerate(self.m or ()):
            _where_(ok, new, None if old.m is None else old.m[j])
        return self


def _squared(M: StructuredMatrix, square: Tensor | None, X: Tensor) -> Tensor:
    M = M._wide()
    X = X.to(M.torch_dtype)
    return M.times(M.adjoint_times(X)) if square is None else mm(square, X)


def _where_(ok: Tensor, new: StructuredMatrix, old: StructuredMatrix | None) -> None:
    before = {} if old is None else old.named_tensors()
    for name, t in new.named_tensors().items():
        if name in before:
            torch.where(ok, t, before[name], out=t)
        else:
            t.masked_fill_(~ok, 0.0)


def inverse_free_update(
    K: StructuredMatrix,
    C: StructuredMatrix,
    m: Pair | None,
    H: tuple[Pulled, Pulled],
    scale: tuple[float | Tensor, float | Tensor],
    *,
    damping: float,
    alpha1: float,
    lr_cov: float,
    kfac_like: bool,
    normalize: bool,
) -> tuple[StructuredMatrix, StructuredMatrix, Pair | None]:
    """Return new factors and momenta (Lin et al. 2024, Structured Inverse-Free Natural Gradient Descent, eq. (8) and Fig. 3).

    Args:
        K, C: The factors.
        m: Their momenta; ``None`` is zero.
        H: ``Π(K' A K)`` and ``Π(C' B C)``, up to
        scale: what multiplies each of them.
        damping: Added to both factors of the curvature.
        alpha1: Riemannian momentum.
        lr_cov: Step size.
        kfac_like: IKFAC: the factors do not weigh each other.
        normalize: Divide the step size by the largest entry of the momentum.
    """
    weights = [(1.0, 1.0), (1.0, 1.0)]
    if not kfac_like:  # each factor weighs the other one by its mean traces
        weights = [(H[j].mean_trace() * scale[j], H[j].gram_mean_trace()) for j in (1, 0)]
    s = 0.5 * (1.0 - alpha1) if normalize else 0.5
    new_m, new = [], []
    for i, M in enumerate((K, C)):
        of_H, of_gram = weights[i]
        terms = [] if m is None else [(alpha1, m[i])]
        direction = H[i].mixed(of_H * scale[i] * s, of_gram * (damping * s), terms, shift=-s)
        step: Any = lr_cov
        if normalize:
            step = lr_cov / direction.max_abs().clamp(min=1.0)
        new.append(M.minus_product(direction, step))
        new_m.append(direction)
    return new[0], new[1], (new_m[0], new_m[1]) if alpha1 != 0 else None


def joined_factors(factors: Sequence[Factors]) -> Factors:
    """Join the factors of blocks of one shape along ``G``."""
    if len(factors) == 1:
        return factors[0]
    K, C = joined([f.K for f in factors]), joined([f.C for f in factors])
    m = None
    if factors[0].m is not None:
        m = joined([f.m[0] for f in factors]), joined([f.m[1] for f in factors])
    return Factors(K, C, m, factors[0].steps)


def parted_factors(together: Factors, like: Sequence[Factors]) -> list[Factors]:
    """Undo :func:`joined_factors`."""
    if len(like) == 1:
        return [together]
    sizes = [f.K.batch[0] for f in like]
    sides = [parted(M, sizes) for M in (together.K, together.C, *(together.m or ()))]
    return [Factors(K, C, tuple(m) if m else None, together.steps) for K, C, *m in zip(*sides, strict=True)]
