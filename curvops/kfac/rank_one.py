"""The largest singular pair of a linear map between matrices, from products with it and its adjoint."""

from __future__ import annotations

import torch
from torch import Tensor

_LONGEST = 16  #: matrices of each kind that are held; then it begins again with the best there is


class Bidiagonalization:
    """Golub-Kahan with full orthogonalization, for ``G`` maps ``R`` from ``[i, i]`` to ``[o, o]`` side by side.

    It asks for ``R v`` and ``R' u`` in turn. If ``R`` and ``R'`` keep matrices positive semidefinite, and the start is so, the
    singular pair that it converges to is, too.

    Args:
        start: ``[G, i, i]``, positive semidefinite.
    """

    def __init__(self, start: Tensor) -> None:
        self._V: list[Tensor] = [_unit(start)]
        self._U: list[Tensor] = []
        self._T: Tensor = start.new_zeros(len(start), 0, 0)  # U' R V
        self.residual = float("inf")  #: of ``R' u = s v``, relative to the largest singular value ``s``
        self.right, self.value = self._V[0], start.new_zeros(len(start))
        self.left: Tensor = None

    @property
    def inner(self) -> Tensor:
        """The ``v`` to multiply next."""
        return self._V[-1]

    @property
    def outer(self) -> Tensor:
        """The ``u`` to multiply next."""
        return self._U[-1]

    def take_left(self, y: Tensor) -> None:
        """Take in ``y = R inner``."""
        coefficients = [_dot(u, y) for u in self._U]
        u, size = _orthogonal(y, self._U)
        n = len(self._V)
        T = y.new_zeros(len(y), n, n)
        T[:, : n - 1, : n - 1] = self._T
        for k, c in enumerate([*coefficients, size]):
            T[:, k, n - 1] = c
        self._T = T
        self._U.append(u)

    def take_right(self, y: Tensor) -> None:
        """Take in ``y = R' outer``; find the best pair so far."""
        v, size = _orthogonal(y, self._V)
        scale = _nonzero(self._T.abs().amax((1, 2)))
        P, S, Qh = torch.linalg.svd(self._T / scale[:, None, None])
        p, q = P[:, :, 0], Qh[:, 0]
        self.value = S[:, 0] * scale
        self.left = sum(c[:, None, None] * u for c, u in zip(p.unbind(1), self._U, strict=True))
        self.right = sum(c[:, None, None] * w for c, w in zip(q.unbind(1), self._V, strict=True))
        negative = self.right.diagonal(dim1=1, dim2=2).sum(1) < 0
        sign = (1 - 2 * negative.to(self.right.dtype))[:, None, None]
        self.left, self.right = sign * self.left, sign * self.right
        defects = size * p[:, -1].abs()
        self.residual = float(torch.where(defects > 0, defects / self.value, 0.0).max())
        if len(self._V) < _LONGEST:
            self._V.append(v)
        else:
            self._V, self._U, self._T = [_unit(self.right)], [], self._T[:, :0, :0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2))


def _unit(a: Tensor) -> Tensor:
    return _direction(a)[0]


def _direction(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit matrices and norms, of any scale: squares of very small or large entries leave the dtype."""
    scale = _nonzero(a.abs().amax((1, 2)))
    a = a / scale[:, None, None]
    size = torch.linalg.matrix_norm(a)
    return a / _nonzero(size)[:, None, None], size * scale


def _nonzero(size: Tensor) -> Tensor:
    return torch.where(size > 0, size, 1.0)


def _orthogonal(y: Tensor, to: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the direction and the size of what is orthogonal to unit matrices."""
    for _ in range(2):
        for u in to:
            y = y - _dot(u, y)[:, None, None] * u
    y, size = _direction(y)
    for u in to:  # what is left of rounding noise need not be orthogonal
        y = y - _dot(u, y)[:, None, None] * u
    return _unit(y), size
