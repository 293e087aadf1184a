"""An orthonormal basis of random products that grows, of its numerical rank: also for operators that are zero."""

from __future__ import annotations

import torch
from torch import Tensor

#: Directions this much smaller than the largest product are rounding, in units of machine epsilon.
_NOISE = 4.0
#: A product lies in the span of the others unless its leverage is one; see `Basis.omitted`.
_LEVERAGE = 1e-6
#: Unit vectors whose difference is smaller than this are parallel.
_PARALLEL = 1e-7


class Basis:
    """Orthonormal rows ``Q [r, N]`` with ``Y = R'Q`` for all rows ``Y`` it has seen; ``R`` is ``[r, m]``, in float64."""

    def __init__(self, like: Tensor):
        self.Q = like.new_zeros(0, like.shape[1])
        self.R = like.new_zeros(0, 0, dtype=torch.float64)
        self._largest = like.new_zeros(())

    def extend(self, Y: Tensor) -> Tensor:
        """Take in rows ``Y [k, N]``; return the rows that ``Q`` grew by."""
        k, n = Y.shape
        self._largest = torch.maximum(self._largest, Y.norm(dim=1).max())
        C = Y @ self.Q.T
        rest = Y - C @ self.Q
        again = rest @ self.Q.T  # once is not enough where most of Y is in the span
        C, rest = C + again, rest - again @ self.Q
        Qt, R = torch.linalg.qr(rest.T)
        U, S, _ = torch.linalg.svd(R)
        room = n - len(self.Q)
        rank = min(int((_NOISE * torch.finfo(Y.dtype).eps * k**0.5 * self._largest < S).sum()), room)
        new = (Qt @ U[:, : len(S)][:, :rank]).T
        new = new - (new @ self.Q.T) @ self.Q  # small directions carry large relative errors: clean them at full length
        new = torch.linalg.qr(new.T).Q.T
        m = self.R.shape[1]
        top = torch.cat([self.R, C.T.double()], 1)
        bottom = torch.cat([self.R.new_zeros(rank, m), (new @ rest.T).double()], 1)
        self.Q, self.R = torch.cat([self.Q, new]), torch.cat([top, bottom])
        return new

    def omitted(self) -> Tensor:
        """Return ``S [r, m]``: without product i, the span is ``Q`` without the direction ``S[:, i]``.

        The direction is zero where product i lies in the span of the others, so that leaving it out changes nothing. It
        is the i-th column of ``R^-T`` at unit length (Epperly, Tropp, Webber 2024, section 2.2); for an ``R`` that is wide,
        since the operator has low rank, the pseudo-inverse takes its place.
        """
        if self.R.numel() == 0:
            return self.R
        U, s, Vh = torch.linalg.svd(self.R, full_matrices=False)
        W = (U / s.clamp(min=torch.finfo(s.dtype).tiny)) @ Vh  # the transpose of the pseudo-inverse
        leverage = Vh.square().sum(0)
        return torch.where(leverage > 1 - _LEVERAGE, W / W.norm(dim=0), 0.0)


def beyond(S: Tensor, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of the unit columns ``S`` beyond those of ``T`` at unit length, ``S'T``, and one over that length.

    All zero where nothing is left, so that pairs of columns ``T`` and the answer span what ``T`` and ``S`` do.
    """
    overlap = (S * T).sum(0)
    rest = S - T * overlap
    length = rest.norm(dim=0)
    scale = torch.where(length > _PARALLEL, 1.0 / length, 0.0)
    return rest * scale, overlap, scale
