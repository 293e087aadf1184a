"""Operators with a dense twin, shared by the tests of floor 0."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops._forms import join, split
from curvops._operator import LinearOperator
from curvops.structured import Dense, Diagonal, DirectSum, Eigen, Kronecker, Part, Placement, Slot

F64 = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Draw normals without the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def psd(n: int, G: int = 1, *, rank: int | None = None, seed: int = 0) -> Tensor:
    """Draw well-conditioned matrices ``[G, n, n]``, or matrices of low rank."""
    Z = normal(G, n, n + 3 if rank is None else rank, seed=seed)
    return Z @ Z.mT / Z.shape[-1]


class Matrix(LinearOperator):
    """Any real matrix on any blocks, not symmetric unless said; the smallest operator that keeps the contract."""

    def __init__(self, M: Tensor, domain=None, range_=None, **options):
        domain, range_ = domain or ((M.shape[1],),), range_ or ((M.shape[0],),)
        super().__init__(domain, range_, dtype=M.dtype, device=M.device, **options)
        self.M, self.calls = M, 0

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        return split(join(V) @ self.M.T, self.range)

    def _adjoint(self) -> LinearOperator:
        names = {"domain_names": self.range_names, "range_names": self.domain_names}
        return self if self.symmetric else Matrix(self.M.T, self.range, self.domain, **names)


def block_diag_kron(B: Tensor, A: Tensor) -> Tensor:
    """Return the dense matrix of a Kronecker product with groups."""
    return torch.block_diag(*(torch.kron(b, a) for b, a in zip(B, A, strict=True)))


NAMES = ("bias", "conv", "split", "weight", "embedding")
SHAPES = ((3,), (4, 3, 2), (6, 2), (3, 4), (7, 2))


def direct_sum(*, scale: float = 1.0) -> tuple[DirectSum, Tensor]:
    """Return a direct sum with every kind of placement, and its matrix, assembled entry by entry."""
    rows = torch.arange(12).reshape(6, 2)
    operators = [
        (Kronecker(scale * psd(3), psd(5, seed=1), label="linear"), [("weight", 0, 4), ("bias", 4, 1)]),
        (Kronecker(scale * psd(2, 2, seed=2), psd(6, 2, seed=3), label="conv"), [("conv", 0, 6)]),
        (Kronecker(scale * psd(2, seed=4), psd(7, seed=5), label="embedding"), [("embedding", 0, 7, True)]),
        (Diagonal(scale * psd(6, seed=6).diagonal(dim1=1, dim2=2).reshape(1, 3, 2), label="first"), None),
        (Dense(scale * psd(2, 3, seed=7), domain=((3, 1, 2),), label="second"), None),
    ]
    index = [rows[[0, 2, 4]], rows[[1, 5, 3]]]
    parts, dense = [], torch.zeros(65, 65, dtype=F64)
    where = dict(zip(NAMES, torch.arange(65).split([3, 24, 12, 12, 14]), strict=True))
    shapes = dict(zip(NAMES, SHAPES, strict=True))
    for operator, places in operators:
        shape = operator.domain[0]
        if places is None:
            at = index.pop(0)
            slots, positions = [Slot("split", (6, 2), 0, 2, index=at)], where["split"][at.flatten()]
        else:
            slots = [Slot(name, shapes[name], *rest) for name, *rest in places]
            positions = positions_of(places, where, shape)
        parts.append(Part(Placement(slots, shape), operator))
        dense[positions[:, None], positions] = operator.to_dense()
    return DirectSum(SHAPES, NAMES, parts), dense


def positions_of(places: list, where: dict[str, Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Say for every entry of ``[G, o, i]`` which entry of the flat vector sits there, one loop at a time."""
    G, o, _ = shape
    found = torch.empty(shape, dtype=torch.int64)
    for name, start, width, *transposed in places:
        for g in range(G):
            for row in range(o):
                for column in range(width):
                    flat = (g * width + column) * o + row if transposed else (g * o + row) * width + column
                    found[g, row, start + column] = where[name][flat]
    return found.flatten()


def eigen(G: int = 2, o: int = 3, i: int = 5) -> Eigen:
    """Return an operator given by its eigendecomposition."""
    QB, QA = (torch.linalg.qr(normal(G, n, n, seed=n)).Q for n in (o, i))
    return Eigen(QB, QA, normal(G, o, i).square() + 0.1, label="eigen")
