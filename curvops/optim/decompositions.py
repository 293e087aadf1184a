"""What is kept of damped Kronecker factors, and how it multiplies gradients; nothing is read back from the device.

Three methods, for ``F = B ⊗ A`` and gradients ``X [G, d_out, d_in]``:

* ``"eigen"``: ``(F + λI)^-1`` by the eigenvectors of both factors;
* ``"inverse"``: ``(B + λI)^-1 X (A + λI)^-1``;
* ``"ekfac"``: as ``"eigen"``, with second moments of gradients in place of products of eigenvalues (George et al. 2018,
  Fast Approximate Natural Gradient Descent in a Kronecker-Factored Eigenbasis).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from curvops import _linalg
from curvops.optim.together import alike, joined, parted
from curvops.structured._base import sandwich

Pair = tuple[Tensor | None, Tensor]


class ComputeMethod(str, Enum):
    """How a :class:`curvops.optim.KFACPreconditioner` inverts."""

    EIGEN = "eigen"
    INVERSE = "inverse"
    EKFAC = "ekfac"


@dataclass(eq=False, frozen=True)
class Solution:
    """What multiplies the gradient of one block.

    Attributes:
        A, B: Eigenvectors, or inverses, of the input and output factor; ``None`` for a block without input factor.
        a, b: Eigenvalues ``[G, n]``.
        values: Eigenvalues ``[G, d_out, d_in]`` of the block.
        reciprocals: ``1 / (values + λ)``, once and for all.
    """

    A: Tensor | None
    B: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    values: Tensor | None = None
    reciprocals: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        return {n: t for n, t in vars(self).items() if t is not None}

    def made_by(self, method: ComputeMethod, prediv: bool) -> bool:
        """Whether a method keeps these tensors; those of another one would go on unnoticed until the next inverse update."""
        kept = {
            ComputeMethod.EIGEN: {"B", "reciprocals"} if prediv else {"B", "b"},
            ComputeMethod.INVERSE: {"B"},
            ComputeMethod.EKFAC: {"B", "b", "values"},
        }
        return self.tensors().keys() - {"A", "a"} == kept[method]

    def map(self, f: Callable[[Tensor], Tensor]) -> Solution:
        """Apply a function to every tensor."""
        return replace(self, **{n: f(t) for n, t in self.tensors().items()})


def eigenvectors(factors: Mapping[str, Pair]) -> dict[str, Solution]:
    """Return eigenvalues and eigenvectors of ``(A, B)`` by label; factors of one size are decomposed together."""
    found = _each(factors, _eigh)
    return {label: Solution(A and A[1], B[1], A and A[0], B[0]) for label, (A, B) in found.items()}


def inverses(factors: Mapping[str, Pair], damping: float | Tensor) -> dict[str, Solution]:
    """Return ``(A + λI)^-1`` and ``(B + λI)^-1`` by label; factors of one size are inverted together."""
    found = _each(factors, lambda F, label: (_damped_inverse(F, damping),))
    return {label: Solution(A and A[0], B[0]) for label, (A, B) in found.items()}


def products(found: Solution) -> Tensor:
    """Return the eigenvalues ``[G, d_out, d_in]`` of the Kronecker product."""
    assert found.b is not None
    return found.b.unsqueeze(-1) * (1.0 if found.a is None else found.a.unsqueeze(-2))


def seen_from(new: Solution, old: Solution) -> Tensor:
    """Return the diagonal, in new eigenvectors, of the block with old eigenvectors and eigenvalues."""
    assert old.values is not None
    B, A = ((n.mT @ o).square() if n is not None else None for n, o in ((new.B, old.B), (new.A, old.A)))
    return sandwich(B, old.values.unsqueeze(0), A).squeeze(0)


def solved(found: list[Solution], X: list[Tensor], damping: float | Tensor) -> list[Tensor]:
    """Multiply gradients of blocks; those of one shape together."""
    result: list[Tensor] = [x for x in X]
    for places in alike(
        range(len(X)), lambda k: (X[k].shape[1:], X[k].dtype, found[k].A is None, len(found[k].tensors()))
    ):
        names = vars(found[places[0]])
        one = Solution(**{n: joined([getattr(found[k], n) for k in places]) for n in names})
        Y = _solved(one, joined([X[k] for k in places]), damping)
        for k, y in zip(places, parted(Y, [X[k] for k in places]), strict=True):
            result[k] = y
    return result


def _solved(found: Solution, X: Tensor, damping: float | Tensor) -> Tensor:
    dtype, X = X.dtype, X.to(found.B.dtype).unsqueeze(0)
    if found.b is None and found.reciprocals is None:
        return sandwich(found.B, X, found.A).squeeze(0).to(dtype)
    V = sandwich(found.B.mT, X, None if found.A is None else found.A.mT)
    if found.reciprocals is not None:
        V = V * found.reciprocals
    else:
        V = V / ((products(found) if found.values is None else found.values) + damping)
    return sandwich(found.B, V, found.A).squeeze(0).to(dtype)


def _each(factors: Mapping[str, Pair], f: Callable[[Tensor, str], tuple[Tensor, ...]]) -> dict[str, list]:
    """Apply a function to all factors, batched by size."""
    found: dict[str, list] = {label: [None, None] for label in factors}
    places = [(label, side) for label, pair in factors.items() for side in (0, 1) if pair[side] is not None]
    for equal in alike(places, lambda p: (factors[p[0]][p[1]].shape[-1], factors[p[0]][p[1]].dtype)):
        own = [factors[label][side] for label, side in equal]
        results = f(joined(own), ", ".join(dict.fromkeys(label for label, _ in equal)))
        for k, (label, side) in enumerate(equal):
            found[label][side] = tuple(parted(t, own)[k] for t in results)
    return found


def _eigh(F: Tensor, label: str) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of positive semidefinite matrices; noise around zero becomes zero."""
    S = (F + F.mT) / 2
    size = _size(S)
    try:
        values, Q = torch.linalg.eigh(S / size)
    except (
        RuntimeError
    ):  # LinAlgError, and what vendors raise: then float64, the CPU, jitter, each of which waits for the device
        return _linalg.eigh_psd(F, label)
    values = values * size.squeeze(-1)
    return torch.where(values > _linalg.noise(F) * values[..., -1:], values, 0.0), Q


def _damped_inverse(F: Tensor, damping: float | Tensor) -> Tensor:
    """Return ``(F + λI)^-1``; ``λ`` is at least what rounding is, so that Cholesky cannot fail."""
    eye = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    size = F.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    least = 4 * torch.finfo(F.dtype).eps * size
    shifted = (F + F.mT) / 2 + least.clamp(min=damping) * eye
    L, _ = torch.linalg.cholesky_ex(shifted)
    inverse = torch.cholesky_inverse(L)
    return (inverse + inverse.mT) / 2


def _size(S: Tensor) -> Tensor:
    size = S.abs().amax((-2, -1), keepdim=True)
    return torch.where(size > 0, size, 1.0)
