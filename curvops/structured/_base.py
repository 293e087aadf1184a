"""What symmetric operators with a known eigendecomposition have in common: every closed form of the spectrum."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from curvops import _linalg
from curvops._algebra import Identity, Scaled
from curvops._forms import Names, Shapes, join, split
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype

HOW = ("exact", "heuristic", "factors")
#: ``(Q_B [G, o, o] or None, Q_A [G, i, i] or None, values [G, o, i])``; None stands for the identity.
Decomposition = tuple[Tensor | None, Tensor | None, Tensor]


def sandwich(B: Tensor | None, X: Tensor, A: Tensor | None) -> Tensor:
    """Return ``B X A'`` for ``X [K, G, o, i]``, ``B [G, p, o]`` and ``A [G, q, i]``; None is the identity."""
    kind = X.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # autocast is for models: factors keep their precision
            return sandwich(B, X, A)
    if len(X) == 1:
        if len(X[0]) == 1:  # two matrix products and nothing else
            Y = X[0, 0] if B is None else B[0] @ X[0, 0]
            return (Y if A is None else Y @ A[0].mT)[None, None]
        Y = X[0] if B is None else B @ X[0]
        return (Y if A is None else Y @ A.mT)[None]
    return _right(X if B is None else _left(B, X), A)


def _left(B: Tensor, X: Tensor) -> Tensor:
    K, G, o, i = X.shape
    if G == 1:  # an expanded matrix in a batched product is not copied
        return (B.expand(K, *B.shape[1:]) @ X[:, 0])[:, None]
    wide_X = X.permute(1, 2, 0, 3).reshape(G, o, K * i)
    return (B @ wide_X).reshape(G, len(B[0]), K, i).permute(2, 0, 1, 3)


def _right(X: Tensor, A: Tensor | None) -> Tensor:
    if A is None:
        return X
    K, G, o, i = X.shape
    tall = X.transpose(0, 1).reshape(G, K * o, i)
    return (tall @ A.mT).reshape(G, K, o, A.shape[1]).transpose(0, 1)


def check_damping(damping: Any, label: str = "") -> float | Tensor:
    """Return a damping as a number or 0-dim tensor; refuse negative ones."""
    if isinstance(damping, Tensor) and damping.numel() == 1:
        damping = damping.reshape(())
    elif isinstance(damping, Real):
        damping = float(damping)
    else:
        found = f"a tensor of shape {tuple(damping.shape)}" if isinstance(damping, Tensor) else repr(damping)
        raise TypeError(f"Got damping={found} for {_linalg.named(label)}, expected one number (per block).")
    if not damping >= 0:
        raise ValueError(f"Got damping={float(damping)} for {_linalg.named(label)}, expected a number >= 0.")
    return damping


def check_how(how: str) -> str:
    """Return ``how``, or raise listing the ways to damp."""
    if how not in HOW:
        raise ValueError(f"Got how={how!r}, expected one of {HOW}.")
    return how


def draw(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normals without touching torch's global generators."""
    if generator is None:
        generator = torch.Generator(like.device)
        generator.seed()  # from the operating system
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


class Structured(LinearOperator):
    """A symmetric operator on an array ``[G, o, i]`` whose eigendecomposition is within reach.

    Subclasses implement :meth:`_multiply`, :meth:`eigendecomposition`, :meth:`_data` and :meth:`_rebuild`. Numbers are
    held in float32 or better; vectors may be narrower, and are computed in the wider dtype.

    Args:
        array: The shape ``(G, o, i)``.
        held: Dtype of the numbers that define the operator.
        dtype: Dtype of the vectors; by default ``held``.
        device: Device.
        domain: Blocks of the vectors, concatenated to the array; by default the array as one block.
        names: Names of the blocks.
        label: What messages call the operator.
    """

    def __init__(
        self,
        array: tuple[int, int, int],
        held: torch.dtype,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        domain: Shapes | None,
        names: Names | None,
        label: str,
    ):
        G, o, i = map(int, array)
        self.array = G, o, i
        self.held_dtype, self.label = held, label
        domain = (self.array,) if domain is None else domain
        super().__init__(domain, domain, dtype=dtype or held, device=device, symmetric=True, domain_names=names)
        if self.shape[0] != math.prod(self.array):
            raise ValueError(
                f"Got blocks {self.domain} for {_linalg.named(label)}, expected {math.prod(self.array)} entries."
            )

    @abstractmethod
    def _multiply(self, X: Tensor) -> Tensor:
        """Map ``[K, G, o, i]`` in the dtype of the operator's numbers."""

    @abstractmethod
    def eigendecomposition(self) -> Decomposition:
        """Return ``(Q_B, Q_A, values)`` with ``op V = Q_B (values * (Q_B' V Q_A)) Q_A'``."""

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """Return what the constructor needs, in plain data."""

    @abstractmethod
    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> Structured:
        """Return the operator elsewhere."""

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        K = len(V[0])
        X = V[0] if len(V) == 1 else join(V)
        Y = self._multiply(X.reshape(K, *self.array).to(self.held_dtype)).to(self.torch_dtype)
        return [Y] if self.domain == (self.array,) else split(Y.reshape(K, self.shape[0]), self.domain)

    def _place(self) -> dict[str, Any]:
        """Return the keyword arguments that say which vectors the operator accepts."""
        return {"dtype": self.torch_dtype, "domain": self.domain, "names": self.domain_names, "label": self.label}

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return self._rebuild(device, accumulation_dtype(dtype), dtype)

    # Algebra that keeps the structure

    def _map(self, f: Callable[[Tensor], Tensor]) -> Structured:
        """Return the operator with ``f`` applied to the eigenvalues."""
        from curvops.structured.eigen import Eigen

        QB, QA, values = self.eigendecomposition()
        return Eigen(QB, QA, f(values), **self._place())

    def shift(self, c: float | Tensor) -> LinearOperator:
        """Return ``op + c I``; closed forms survive."""
        from curvops.structured.shifted import Shifted

        return Shifted(self, self._scalar(c))

    def _plus(self, other: LinearOperator) -> LinearOperator:
        c = multiple_of_identity(other)
        return super()._plus(other) if c is None or other.domain != self.domain else self.shift(c)

    # Closed forms

    def eigenvalues(self) -> Tensor:
        return self.eigendecomposition()[2].flatten().sort().values

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return the sign of the determinant and the logarithm of its size."""
        values = self.eigendecomposition()[2]
        return values.sign().prod(), values.abs().log().sum()

    def logdet(self) -> Tensor:
        return logdet(self)

    def det(self) -> Tensor:
        return det(self)

    def inverse(self, damping: float | Tensor = 0.0, how: str = "exact") -> LinearOperator:
        """Return ``(op + damping I)^-1``; other ``how`` differ for Kronecker products only."""
        check_how(how)
        damping = check_damping(damping, self.label)
        return self._map(lambda v: _linalg.reciprocal(v + damping, self.label))

    def power(self, p: float) -> LinearOperator:
        """Return the symmetric power; negative ones of singular operators are refused."""
        return self._map(lambda v: self._checked_power(v, p))

    def _checked_power(self, values: Tensor, p: float) -> Tensor:
        powers = values**p
        if not torch.isfinite(powers).all():
            raise ValueError(
                f"Cannot raise {_linalg.named(self.label)} to the power {p}: its smallest eigenvalue is "
                f"{values.min().item():.3g}. Use `op.shift(damping)` first."
            )
        return powers

    def frobenius_norm(self) -> Tensor:
        return self.eigendecomposition()[2].norm()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[n, D]`` from N(0, op); without a generator, a fresh one is seeded by the operating system."""
        QB, QA, values = self.eigendecomposition()
        Z = self._checked_power(values, 0.5) * draw((n, *self.array), values, generator)
        return sandwich(QB, Z, QA).reshape(n, self.shape[0]).to(self.torch_dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, readable by ``torch.load(..., weights_only=True)``; see :func:`from_state_dict`."""
        place = {
            "dtype": str(self.torch_dtype).removeprefix("torch."),
            "domain": [list(s) for s in self.domain],
            "names": None if self.domain_names is None else list(self.domain_names),
            "label": self.label,
        }
        return {"kind": type(self).__name__, "data": self._data(), "place": place}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Structured:
        """Undo :meth:`state_dict`."""
        place = dict(state["place"])
        place["dtype"] = getattr(torch, place["dtype"])
        return cls(**state["data"], **place)


def logdet(op: Any) -> Tensor:
    """Return the logarithm of the determinant of an operator with ``slogdet``: ``-inf`` if singular."""
    sign, size = op.slogdet()
    if sign < 0:
        raise ValueError(f"The determinant of {op!r} is negative and has no logarithm; use `slogdet()`.")
    return size


def det(op: Any) -> Tensor:
    """Return the determinant; computed from logarithms, since products of small numbers underflow."""
    sign, size = op.slogdet()
    return sign * size.exp()


def multiple_of_identity(op: LinearOperator) -> float | Tensor | None:
    """Return ``c`` if ``op`` is ``c I``."""
    if isinstance(op, Identity):
        return 1.0
    if isinstance(op, Scaled) and isinstance(op.arg, Identity):
        return op.scalar
    return None
