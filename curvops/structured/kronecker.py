"""Kronecker products of symmetric positive semidefinite factors, batched over groups."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops import _linalg
from curvops._forms import Names, Shapes
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.structured._base import Decomposition, Structured, check_damping, check_how, sandwich


class Kronecker(Structured):
    """``B[g] ⊗ A[g]`` on the rows-first vector of every ``W[g]``: maps ``W [G, o, i]`` to ``B W A'``.

    Factors are symmetric positive semidefinite and never modified. Their eigendecomposition is computed once, on the
    first question that needs it, and serves every damping.

    Args:
        B: Output factor ``[G, o, o]`` (or ``[o, o]``); None is the identity.
        A: Input factor ``[G, i, i]`` (or ``[i, i]``); None is the identity.
        shape: ``(G, o, i)``; needed where a factor is None.
        label: What messages call the block.
        dtype: Dtype of the vectors; by default that of the factors.
        device: Needed where both factors are None.
        domain: Blocks of the vectors; by default the array as one block.
        names: Names of the blocks.
    """

    def __init__(
        self,
        B: Tensor | None,
        A: Tensor | None,
        *,
        shape: tuple[int, int, int] | None = None,
        label: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        domain: Shapes | None = None,
        names: Names | None = None,
    ):
        given = [F for F in (B, A) if F is not None]
        if not given and (dtype is None or shape is None):
            raise TypeError("A Kronecker product of two identities needs `shape` and `dtype`.")
        dtype = dtype or given[0].dtype
        held = accumulation_dtype(given[0].dtype if given else dtype)
        B, A = (F if F is None else (F if F.ndim == 3 else F.unsqueeze(0)).to(held) for F in (B, A))
        shape = _shape(B, A) if shape is None else shape
        _check_factor(B, "B", shape[0], shape[1], label)
        _check_factor(A, "A", shape[0], shape[2], label)
        device = given[0].device if given else torch.device(device or "cpu")
        super().__init__(shape, held, dtype=dtype, device=device, domain=domain, names=names, label=label)
        self.B, self.A = B, A
        self._spectra: tuple | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_spectra": None}

    def _multiply(self, X: Tensor) -> Tensor:
        if self.B is None and self.A is None:
            return X.clone()  # answers do not share memory with questions
        return sandwich(self.B, X, self.A)

    def _rebuild(self, device: torch.device, held: torch.dtype, dtype: torch.dtype) -> Kronecker:
        B, A = (F if F is None else F.to(device, held) for F in (self.B, self.A))
        return Kronecker(B, A, shape=self.array, device=device, **{**self._place(), "dtype": dtype})

    def _data(self) -> dict:
        return {"B": self.B, "A": self.A, "shape": list(self.array)}

    def _scale(self, s: float | Tensor) -> LinearOperator:
        if self.B is None and self.A is None:
            return self._map(lambda values: values * s)
        if isinstance(s, Tensor) or s < 0:  # the sign is unknown or negative: no longer positive semidefinite
            return super()._scale(s)
        B, A = (self.B * s, self.A) if self.B is not None else (None, self.A * s)
        scaled = Kronecker(B, A, shape=self.array, **self._place())
        if self._spectra is not None:
            (b, QB), (a, QA) = self._spectra
            scaled._spectra = ((b * s, QB), (a, QA)) if self.B is not None else ((b, QB), (a * s, QA))
        return scaled

    # Closed forms

    def _factor_spectra(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Return ``(b [G, o], Q_B), (a [G, i], Q_A)``, computed once."""
        if self._spectra is None:
            self._spectra = tuple(
                (self._ones(n), None) if F is None else _linalg.eigh_psd(F.detach(), self.label)
                for F, n in ((self.B, self.array[1]), (self.A, self.array[2]))
            )
        return self._spectra

    def _ones(self, n: int) -> Tensor:
        return torch.ones(self.array[0], n, dtype=self.held_dtype, device=self.device)

    def eigendecomposition(self) -> Decomposition:
        (b, QB), (a, QA) = self._factor_spectra()
        return QB, QA, b.unsqueeze(-1) * a.unsqueeze(-2)

    def _diagonals(self) -> tuple[Tensor, Tensor]:
        _, o, i = self.array
        b, a = (self._ones(n) if F is None else F.diagonal(dim1=-2, dim2=-1) for F, n in ((self.B, o), (self.A, i)))
        return b, a

    def diagonal(self) -> Tensor:
        b, a = self._diagonals()
        return (b.unsqueeze(-1) * a.unsqueeze(-2)).flatten().to(self.torch_dtype)

    def trace(self) -> Tensor:
        b, a = self._diagonals()
        return (b.sum(-1) * a.sum(-1)).sum()

    def frobenius_norm(self) -> Tensor:
        _, o, i = self.array
        b, a = (
            self._ones(n).norm(dim=-1) if F is None else torch.linalg.matrix_norm(F)
            for F, n in ((self.B, o), (self.A, i))
        )
        return (b * a).norm()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        # The product of two small eigenvalues may underflow, the sum of their logarithms does not.
        (b, _), (a, _) = self._factor_spectra()
        size = self.array[2] * b.log().sum() + self.array[1] * a.log().sum()
        return torch.isfinite(size).to(size.dtype), size

    def inverse(self, damping: float | Tensor = 0.0, how: str = "exact") -> LinearOperator:
        """Invert the damped product.

        Args:
            damping: A number ``λ >= 0``.
            how: ``"exact"`` is ``(B ⊗ A + λI)^-1``. ``"factors"`` is ``(B + λI)^-1 ⊗ (A + λI)^-1``. ``"heuristic"``
                (Martens and Grosse) is ``(B + √λ/π I)^-1 ⊗ (A + √λ π I)^-1`` with ``π² = mean diag(A) / mean diag(B)``,
                and ``π = 1`` where one of the two is zero. With one factor only, all are that factor plus ``λ``.
        """
        damping = check_damping(damping, self.label)
        if check_how(how) == "exact" or (self.B is None and self.A is None):
            return super().inverse(damping)
        split = damping, damping
        if how == "heuristic" and self.B is not None and self.A is not None:
            split = self._split(damping)
        B, A = (
            F if F is None else _linalg.inverse_psd(F, d, self.label)
            for F, d in zip((self.B, self.A), split, strict=True)
        )
        return Kronecker(B, A, shape=self.array, **self._place())

    def _split(self, damping: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the dampings ``[G, 1, 1]`` of ``B`` and ``A`` that keep their product and balance the factors."""
        b, a = (F.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0)[:, None, None] for F in (self.B, self.A))
        pi = torch.where((a > 0) & (b > 0), a.sqrt() / b.sqrt(), 1.0)
        root = damping**0.5
        return root / pi, root * pi


def _shape(B: Tensor | None, A: Tensor | None) -> tuple[int, int, int]:
    if B is None or A is None:
        raise TypeError("A Kronecker product with an identity needs `shape=(G, o, i)`.")
    return len(B), B.shape[-1], A.shape[-1]


def _check_factor(F: Tensor | None, what: str, G: int, n: int, label: str) -> None:
    if F is not None and F.shape != (G, n, n):
        raise ValueError(f"Got {what} of shape {tuple(F.shape)} for {_linalg.named(label)}, expected {(G, n, n)}.")
