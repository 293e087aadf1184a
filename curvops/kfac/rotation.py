"""Type-2 vectors that prove, at the price of one more backward pass, that loss terms may share output vectors.

Each loss term (unit) rotates its ``V`` vectors into ``V + 1`` passes by an isometry ``E_u [V + 1, V]`` of its own. Sums of
squares over the passes are those over the vectors. But what a row receives in the passes is now redundant: if it belongs
to one unit alone, its gradients are orthogonal to the vector ``n_u`` with ``n_u' E_u = 0``, whatever they are; if a second
unit reaches it, they are not. So one scalar for each row and pass tells, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvops.kfac.schedule import Layout, layouts_of
from curvops.kfac.uses import Use

#: Below this fraction a defect is rounding. A coupling that weak would change the factors by as little.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
#: Scalars of a row, over its passes.
_SCALARS = 8


class Rotations:
    """Isometries ``E_u`` of ``units`` loss terms: the first ``V`` columns of Householder reflections.

    Args:
        units, vectors: Numbers of loss terms and of vectors ``V`` of each.
        seed: Seed of the reflections.
    """

    def __init__(self, units: int, vectors: int, seed: int, device: torch.device) -> None:
        self.units, self.vectors = units, vectors
        self.passes = vectors + (units > 1)  # a single unit has nobody to be mistaken for
        self.fed = self.passes  #: passes that a statistic takes in
        w = torch.randn(units, vectors + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._w = (w / w.norm(dim=1, keepdim=True)).to(device) if units > 1 else torch.zeros_like(w, device=device)
        self._twice = -2 * self._w

    def row(self, p: int) -> Tensor:
        """Return how pass ``p`` combines the vectors of every unit: ``[U, V]``."""
        return self._column(p)[:, : self.vectors]

    def null(self) -> Tensor:
        """Return ``n_u`` for every unit: ``[V + 1, U]``."""
        return self._column(self.vectors).T

    def _column(self, p: int) -> Tensor:
        column = self._twice[:, p, None] * self._w
        column[:, p] += 1
        return column


class Combinations(Rotations):
    """The vectors as they are, and in one more pass a random combination of them, for statistics whose passes are dear.

    The last pass only proves: a row that belongs to unit ``u`` alone receives the combination of what it received before,
    with coefficients ``r_u`` of that unit. No two units have nearly the same coefficients.
    """

    def __init__(self, units: int, vectors: int, seed: int, device: torch.device) -> None:
        super().__init__(units, vectors, seed, device)
        self.fed = vectors
        generator = torch.Generator().manual_seed(seed)
        order, jitter = (torch.rand(units, vectors, generator=generator, dtype=torch.float64) for _ in range(2))
        self._r = (0.5 + (order.argsort(0) + jitter / 2) / units).to(device)

    def row(self, p: int) -> Tensor:
        """Return how pass ``p`` combines the vectors of every unit: ``[U, V]``."""
        if p == self.vectors:
            return self._r
        one = torch.zeros_like(self._r)
        one[:, p] = 1
        return one

    def null(self) -> Tensor:
        """Return ``(r_u, -1)`` for every unit: ``[V + 1, U]``."""
        return torch.cat([self._r, -torch.ones_like(self._r[:, :1])], 1).T


class Consistency:
    """Notes a few scalars for each row and pass, and concludes.

    Args:
        uses: The uses of the batch.
        by_position: Tell the positions of a row apart, too.
        seed: Seed of the projections.
        vectors: Vectors of a unit. Scalars of few passes may all be small by chance, and their rounding errors are not: then
            more are noted for each pass.
    """

    def __init__(self, uses: list[Use], by_position: bool, seed: int, vectors: int = _SCALARS) -> None:
        self._uses, self._by_position, self._scalars = uses, by_position, -(-_SCALARS // vectors)
        self._generator = torch.Generator().manual_seed(seed)
        self._directions: dict[Use, Tensor] = {}
        self._passes: dict[Use, list[Tensor | None]] = {u: [] for u in uses}

    def begin(self) -> None:
        """Expect the next backward pass."""
        for passes in self._passes.values():
            passes.append(None)

    def note(self, use: Use, gradient: Tensor) -> None:
        """Take in the gradient of one use."""
        self._passes[use][-1] = self._project(use, use.form.cotangents(gradient))

    def holds(self, rotations: Rotations, assumed: tuple[Layout | None, ...] | None) -> bool:
        """Whether every row belongs to one unit, in a regular order (or in the assumed one)."""
        for i, (use, passes) in enumerate(self._passes.items()):
            rows = self._rows(use, passes)
            possible = layouts_of(rows.shape[1], rotations.units) if assumed is None else [assumed[i]]
            if rotations.units > 1 and not any(lay is not None and _fits(rows, lay, rotations) for lay in possible):
                return False
        return True

    def _rows(self, use: Use, passes: list[Tensor | None]) -> Tensor:
        """Return ``[P, R, scalars]``; rows that a pass did not reach are zero."""
        reached = [p for p in passes if p is not None]
        M, S = use.form.extent(use.x)
        nothing = reached[0] if reached else use.x.detach().new_zeros(M * S if self._by_position else M, 1)
        return torch.stack([torch.zeros_like(nothing) if p is None else p for p in passes])

    def _project(self, use: Use, c: Tensor) -> Tensor:
        G, _, S, o = c.shape
        if self._by_position:
            if use not in self._directions:
                self._directions[use] = self._noise((G, o, self._scalars), c)
            return torch.einsum("gmso,gok->msk", c, self._directions[use]).flatten(0, 1)
        if use not in self._directions:
            self._directions[use] = self._noise((G * S * o, self._scalars), c)
        # Entries in the order of memory, so that the product needs no copy.
        _, *strides = c.transpose(0, 1).stride()
        order = sorted((0, 2, 3), key=lambda axis: -strides[(0, 2, 3).index(axis)])
        return c.permute(1, *order).flatten(1) @ self._directions[use]

    def _noise(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(like.device, like.dtype)


def _fits(rows: Tensor, layout: Layout, rotations: Rotations) -> bool:
    if rows.dtype not in _TOLERANCE:
        return False
    null = rotations.null()
    split = rows.reshape(len(rows), layout.outer, rotations.units, layout.inner, -1).to(null.dtype)
    defect = torch.einsum("paubk,pu->aubk", split, null).flatten(0, 2).abs().amax(1)
    return bool((defect <= _TOLERANCE[rows.dtype] * torch.linalg.vector_norm(rows, dim=(0, 2))).all())
