"""The inverse-free preconditioner ``K K' ⊗ C C'`` of SINGD: structured factors, updated without inverse or decomposition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops._algebra import Identity
from curvops._operator import LinearOperator
from curvops._scalars import accumulation_dtype
from curvops.kfac.sites import Site
from curvops.optim.blocks import Block, Blocks
from curvops.optim.engine import Moment
from curvops.optim.passes import Counts, loss_scale
from curvops.optim.projected import Frame, Projected
from curvops.structured import DirectSum, Kronecker, Part, Placement, Slot, StructuredMatrix, structure

Pair = tuple[StructuredMatrix, StructuredMatrix]


@dataclass(eq=False)
class Factors:
    """The state of one block.

    Attributes:
        K, C: The factors ``[G, d_in, d_in]`` and ``[G, d_out, d_out]`` in the structures and dtypes of the group.
        m: Their momenta; ``None`` without Riemannian momentum.
        updated: Whether an update has been adopted.
    """

    K: StructuredMatrix
    C: StructuredMatrix
    m: Pair | None = None


def inverse_free_update(
    K: StructuredMatrix,
    C: StructuredMatrix,
    m: Pair | None,
    H: Pair,
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
        H: ``Π(K' A K)`` and ``Π(C' B C)``.
        damping: Added to both factors of the curvature.
        alpha1: Riemannian momentum.
        lr_cov: Step size.
        kfac_like: IKFAC: the factors do not weigh each other.
        normalize: Divide the step size by the largest entry of the momentum.
    """
    grams = K.self_gram(), C.self_gram()
    weights = (1.0, 1.0), (1.0, 1.0)
    if not kfac_like:
        weights = (H[1].mean_trace(), grams[1].mean_trace()), (H[0].mean_trace(), grams[0].mean_trace())
    s = 0.5 * (1.0 - alpha1) if normalize else 0.5
    new_m, new = [], []
    for i, M in enumerate((K, C)):
        of_H, of_gram = weights[i]
        direction = H[i].scale(of_H).add(grams[i].scale(of_gram), alpha=damping).shift(-1.0).scale(s)
        if m is not None:
            direction = direction.add(m[i], alpha=alpha1)
        step: Any = lr_cov
        if normalize:
            step = lr_cov / direction.max_abs().clamp(min=1.0)
        new.append(M.add(M.compose(direction), alpha=-step))
        new_m.append(direction)
    return new[0], new[1], (new_m[0], new_m[1]) if alpha1 != 0 else None


class InverseFree:
    """What the engine asks for: see :class:`curvops.optim.engine.Preconditioner`.

    Args:
        blocks: The blocks of the shell.
        start: Returns the first ``(K, C)`` of a block as dense symmetric matrices, or ``None`` for the identity.
    """

    separate: bool = False

    def __init__(
        self, blocks: Blocks, groups: list[dict[str, Any]], start: Callable[[Block], tuple[Tensor, Tensor] | None]
    ) -> None:
        self._blocks, self._groups, self._start = blocks, groups, start
        self.factors: dict[Block, Factors] = {}
        self._prepared: dict[Block, Factors] = {}

    @property
    def by_datum(self) -> bool:
        """Whether any group reduces over positions first."""
        return any(group["kfac_approx"] == "reduce" for group in self._groups)

    def due(self, group: Mapping[str, Any], step: int) -> bool:
        """Whether a group is updated in a step."""
        return step % group["T"] == 0

    def statistic(self) -> Projected:
        """Return an empty statistic."""
        return Projected(self._frame)

    def register(self, statistic: Projected) -> None:
        """Nothing is left to do: what was asked for has a block."""

    def _frame(self, site: Site) -> Frame | None:
        block = self._blocks.add(site.placement)
        if block is None or not self._blocks.due(block):
            return None
        found = self._of(block)
        return Frame(found.K._wide(), found.C._wide(), block.group["kfac_approx"], block)

    def _of(self, block: Block) -> Factors:
        if block not in self.factors:
            self.factors[block] = self._first(block)
        return self.factors[block]

    def _first(self, block: Block) -> Factors:
        G, o, i = block.placement.shape
        p = block.parameter
        dtypes = [d or p.dtype for d in block.group["preconditioner_dtype"]]
        classes = [structure(s) for s in block.group["structures"]]
        dense = self._start(block)
        made = []
        for side, (n, cls, dtype) in enumerate(zip((i, o), classes, dtypes, strict=True)):
            if dense is None:
                made.append(cls.eye(n, batch=(G,), dtype=dtype, device=p.device))
            else:
                made.append(cls.from_dense(dense[side])._retyped(dtype))
        return Factors(made[0], made[1])

    # ---- the update ----------------------------------------------------------------------------
    def update(self, statistic: Projected, counts: Counts, moment: Moment) -> dict[str, Tensor]:
        """Prepare new factors of the blocks that were observed."""
        numbers = {}
        for key, moments in statistic.sums.items():
            block = statistic.block_of(key)
            group = block.group
            if moments.B is None or not moments.B.fed:
                continue
            scale = loss_scale(group["loss_average"], counts, moment.scale)
            H = moments.A.value().scale(1.0 / moments.rows), moments.B.value().scale(scale)
            numbers[f"the statistics of {block.label!r}"] = H[0].mean_trace().sum() * H[1].mean_trace().sum()
            old = self.factors[block]
            lr_cov = group["lr_cov"](moment.step) if callable(group["lr_cov"]) else group["lr_cov"]
            K, C, m = inverse_free_update(
                old.K._wide(),
                old.C._wide(),
                None if old.m is None else (old.m[0]._wide(), old.m[1]._wide()),
                H,
                damping=group["damping"],
                alpha1=0.0 if group["kfac_like"] else group["alpha1"],
                lr_cov=lr_cov,
                kfac_like=group["kfac_like"],
                normalize=group["normalize_lr_cov"],
            )
            like = old.K.torch_dtype, old.C.torch_dtype
            held = None if m is None else (m[0]._retyped(like[0]), m[1]._retyped(like[1]))
            self._prepared[block] = Factors(K._retyped(like[0]), C._retyped(like[1]), held)
        return numbers

    def settle(self, ok: Tensor) -> None:
        """Adopt the prepared factors where ``ok``."""
        for block, new in self._prepared.items():
            old = self.factors[block]
            m = new.m
            if m is not None:
                before = old.m or (m[0]._zeros(), m[1]._zeros())
                m = _where(ok, m[0], before[0]), _where(ok, m[1], before[1])
            self.factors[block] = Factors(_where(ok, new.K, old.K), _where(ok, new.C, old.C), m)
        self._prepared = {}

    def apply(self, arrays: dict[Block, Tensor], step: int) -> dict[Block, Tensor]:
        """Multiply by ``C C' · K K'``; blocks that have no factors yet stay as they are."""
        result = {}
        for block, X in arrays.items():
            found = self.factors.get(block)
            result[block] = X if found is None else precondition(found.K, found.C, X)
        return result

    # ---- as operators --------------------------------------------------------------------------
    def preconditioner(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return ``K K' ⊗ C C'`` on all parameters."""
        return self._direct_sum(params, lambda f, b: _Product(f.K, f.C, b.placement.shape, b.parameter.dtype, b.label))

    def operator(self, params: Mapping[str, Tensor]) -> LinearOperator:
        """Return the curvature that the factors stand for: inverses of ``K K'`` and ``C C'`` without what damping added."""
        return self._direct_sum(params, _undamped)

    def _direct_sum(
        self, params: Mapping[str, Tensor], make: Callable[[Factors, Block], LinearOperator]
    ) -> LinearOperator:
        parts = [Part(b.placement, make(f, b)) for b, f in self.factors.items() if b in set(self._blocks)]
        taken = {n for part in parts for n in part.placement.names}
        for name, p in params.items():
            if name not in taken:
                place = Placement((Slot(name, tuple(p.shape), 0, 1),), (1, p.numel(), 1))
                parts.append(Part(place, Identity((place.shape,), dtype=p.dtype, device=p.device)))
        return DirectSum(tuple(tuple(p.shape) for p in params.values()), tuple(params), parts)

    # ---- saving --------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        blocks = []
        for block, f in self.factors.items():
            held = {"K": f.K, "C": f.C} | ({} if f.m is None else {"m_K": f.m[0], "m_C": f.m[1]})
            blocks.append(
                {
                    "placement": block.placement.state_dict(),
                    **{name: dict(M.named_tensors()) for name, M in held.items()},
                }
            )
        return {"blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.factors, self._prepared = {}, {}
        for saved in state["blocks"]:
            block = self._blocks.restore(Placement.from_state_dict(saved["placement"]))
            now = self._first(block)
            K, C = _loaded(now.K, saved["K"]), _loaded(now.C, saved["C"])
            m = (_loaded(now.K, saved["m_K"]), _loaded(now.C, saved["m_C"])) if "m_K" in saved else None
            self.factors[block] = Factors(K, C, m)


def precondition(K: StructuredMatrix, C: StructuredMatrix, X: Tensor) -> Tensor:
    """Return ``C C' X K K'`` for ``X [G, d_out, d_in]``, in the dtype of ``X``."""
    wide_K, wide_C = K._wide(), C._wide()
    Y = wide_K.times(wide_K.adjoint_times(X.mT.to(wide_K.torch_dtype)))
    Y = Y.mT.to(wide_C.torch_dtype)
    return wide_C.times(wide_C.adjoint_times(Y)).to(X.dtype)


def _where(ok: Tensor, new: StructuredMatrix, old: StructuredMatrix) -> StructuredMatrix:
    return new.with_tensors({n: torch.where(ok, t, old.named_tensors()[n]) for n, t in new.named_tensors().items()})


def _loaded(like: StructuredMatrix, tensors: Mapping[str, Tensor]) -> StructuredMatrix:
    wanted = {n: (t.device, t.dtype) for n, t in like.named_tensors().items()}
    if set(tensors) != set(wanted):
        raise ValueError(
            f"state_dict: found tensors {sorted(tensors)}, expected {sorted(wanted)} of a {type(like).__name__}: the state "
            "belongs to another structure."
        )
    for n, t in like.named_tensors().items():
        if tuple(tensors[n].shape) != tuple(t.shape):
            raise ValueError(f"state_dict: found {n} {tuple(tensors[n].shape)}, expected {tuple(t.shape)}.")
    return like.with_tensors({n: t.to(*wanted[n], copy=True) for n, t in tensors.items()})


class _Product(LinearOperator):
    """``K K' ⊗ C C'`` on arrays ``[G, d_out, d_in]``."""

    def __init__(self, K: StructuredMatrix, C: StructuredMatrix, shape: Any, dtype: torch.dtype, label: str) -> None:
        super().__init__((shape,), (shape,), dtype=dtype, device=K.device, symmetric=True)
        self.K, self.C, self.label = K, C, label

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [torch.stack([precondition(self.K, self.C, v) for v in V[0]]) if len(V[0]) else V[0].clone()]


def _undamped(f: Factors, block: Block) -> LinearOperator:
    """Return ``A ⊗ B`` with ``A = (K K')^-1 - λ κ I``, where ``κ`` is 1 in IKFAC and the mean trace of ``C' C`` else."""
    group, p = block.group, block.parameter
    found = []
    for M, other in ((f.C, f.K), (f.K, f.C)):
        dense = M._wide().to_dense_blocks()
        inverse = torch.linalg.inv(dense @ dense.mT)
        kappa = 1.0 if group["kfac_like"] else other._wide().self_gram().mean_trace()[:, None, None]
        eye = torch.eye(M.dim, dtype=dense.dtype, device=dense.device)
        values, Q = torch.linalg.eigh(inverse - group["damping"] * kappa * eye)
        found.append((Q * values.clamp(min=0).unsqueeze(-2)) @ Q.mT)
    held = accumulation_dtype(p.dtype)
    return Kronecker(found[0].to(held), found[1].to(held), label=block.label, dtype=p.dtype)
