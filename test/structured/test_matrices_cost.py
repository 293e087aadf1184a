"""R3: what operations of structured matrices cost: no d x d matrix, no look at numbers, no break of a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operator_cases import normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvops._check_structure import element
from curvops.structured import STRUCTURES, DenseMatrix, DenseStableMatrix, StructuredMatrix, structure

CLASSES = [structure(n) for n in [*STRUCTURES, "block7diagonal", "hierarchical3_2", "rank5"]]
F32 = torch.float32


def name_of(x: object) -> str | None:
    return x.__name__ if isinstance(x, type) else None


class Watch(TorchDispatchMode):
    """Remember the largest tensor that was made, and what asked the device for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.syncs, self.kernels = 0, [], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal"):
            self.syncs.append(name)
        views = not func._schema.is_mutable and func.is_view
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and not views:
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        self.kernels += not views and name not in ("promote_types", "_unsafe_view")
        return out


def operations(A: StructuredMatrix, B: StructuredMatrix, X: Tensor, c: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield every operation that an optimizer calls."""
    cls, dim, options = type(A), A.dim, {"batch": A.batch, "dtype": A.torch_dtype}
    yield "zeros", lambda: cls.zeros(dim, **options)
    yield "eye", lambda: cls.eye(dim, **options)
    yield "gram", lambda: cls.gram(X)
    yield "gram_through", lambda: A.gram_through(X)
    yield "self_gram", lambda: A.self_gram()
    yield "compose", lambda: A.compose(B)
    yield "times", lambda: A.times(X)
    yield "adjoint_times", lambda: A.adjoint_times(X)
    yield "add", lambda: A.add(B, c)
    yield "add a number", lambda: A.add(B, 0.5)
    yield "scale", lambda: A.scale(c)
    yield "*", lambda: 0.5 * A
    yield "shift", lambda: A.shift(c)
    yield "shift by a number", lambda: A.shift(-0.5)
    yield "traces", lambda: A.traces()
    yield "mean_trace", lambda: A.mean_trace()
    yield "frobenius_norms", lambda: A.frobenius_norms()
    yield "max_abs", lambda: A.max_abs()
    yield "diagonals", lambda: A.diagonals()
    yield "A @ vector", lambda: A @ X[..., 0].flatten()
    yield "A.T @ vector", lambda: A.T @ X[..., 0].flatten()
    yield "to another dtype", lambda: A.to(dtype=torch.bfloat16)
    yield "with_tensors", lambda: A.with_tensors(B.named_tensors())
    yield "_map", lambda: A._map(torch.clone)


def drawn(cls: type[StructuredMatrix], dim: int, batch: tuple = (), dtype: torch.dtype = F32, seed: int = 0) -> Any:
    return element(cls, dim, batch, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [c for c in CLASSES if c not in (DenseMatrix, DenseStableMatrix)], ids=name_of)
def test_R3_no_operation_makes_a_square_matrix(cls: type[StructuredMatrix], dtype: torch.dtype) -> None:
    d = 257
    A, B = drawn(cls, d, dtype=dtype), drawn(cls, d, dtype=dtype, seed=1)
    for n in (8, 64):
        for text, ask in operations(A, B, normal(d, n, dtype=dtype), torch.tensor(0.3)):
            with Watch() as watch:
                ask()
            most = max(d * d // 4, 3 * d * n)  # columns with zeros behind them, and their transforms
            assert watch.largest < most < d * d, f"{text} made a tensor of {watch.largest} numbers"
    if cls.congruence is not StructuredMatrix.congruence:  # which is given one, if anything
        S = normal(d, d, dtype=dtype)
        U = S.diagonal() if cls.MOMENT == "squares" else S + S.mT
        with Watch() as watch:
            A.congruence(U)
        assert watch.largest < d * d


def test_R3_the_watch_sees_square_matrices() -> None:
    A = drawn(DenseMatrix, 257)
    with Watch() as watch:
        A.self_gram()
    assert watch.largest == 257**2
    with Watch() as watch:
        A.traces().item()
    assert watch.syncs


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_no_operation_reads_a_number(cls: type[StructuredMatrix], batch: tuple[int, ...]) -> None:
    A, B = drawn(cls, 33, batch), drawn(cls, 33, batch, seed=1)
    for text, ask in operations(A, B, normal(*batch, 33, 8, dtype=F32), torch.full(batch, 0.3)):
        with Watch() as watch:
            ask()
        assert not watch.syncs, f"{text} waits for the device: {watch.syncs}"


@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_operations_need_no_numbers_at_all(cls: type[StructuredMatrix]) -> None:
    """On the meta device there are none: whatever branches on them raises."""
    A, B = (drawn(cls, 33, (2,), seed=k).to("meta") for k in range(2))
    X, c = torch.zeros(2, 33, 8, device="meta"), torch.zeros(2, device="meta")
    for text, ask in operations(A, B, X, c):
        if text not in ("zeros", "eye"):
            ask()
    assert cls.eye(5, device="meta").device.type == "meta"


def step(K: dict, m: dict, X: Tensor, like: StructuredMatrix) -> tuple:
    """An update of SINGD and a natural gradient: every operation that its step needs."""
    K_, m_ = like.with_tensors(K), like.with_tensors(m)
    H, KtK = K_.gram_through(X), K_.self_gram()
    m_ = m_.scale(0.5).add(H, 0.5 * KtK.mean_trace()).add(KtK, 1e-3).shift(-0.5)
    K_ = K_.add(K_.compose(m_), -0.1 / m_.max_abs().clamp(min=1))
    return K_.named_tensors(), m_.named_tensors(), K_.times(K_.adjoint_times(X)), H.traces(), H.frobenius_norms()


@pytest.mark.parametrize("name", "dense dense_stable diagonal block7diagonal triltoeplitz hierarchical3_2".split())
def test_R3_a_step_compiles_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    like = structure(name).eye(9, batch=(2,), dtype=torch.bfloat16)
    K, m, X = like.named_tensors(), (0.1 * like).named_tensors(), normal(2, 9, 5, dtype=torch.bfloat16)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(K, m, X, like), step(K, m, X, like), rtol=0, atol=0)


#: Kernels of one step in float32; singd dispatches 76, 72, 237, 194 and 332 for the first five, with 5 to 21 waits.
KERNELS = {
    "dense": 24,
    "diagonal": 25,
    "block30diagonal": 48,
    "triltoeplitz": 70,
    "hierarchical15_15": 136,
    "rank1": 75,
}


@pytest.mark.parametrize("name", KERNELS)
def test_R3_few_kernels_in_a_step(name: str) -> None:
    like = structure(name).eye(65)
    X = normal(65, 8, dtype=F32)
    K, m = like.named_tensors(), (0.1 * like).named_tensors()
    with Watch() as watch:
        step(K, m, X, like)
    assert watch.kernels <= KERNELS[name]


@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_autocast_leaves_matrices_alone(cls: type[StructuredMatrix]) -> None:
    A, B, X = drawn(cls, 11), drawn(cls, 11, seed=1), normal(11, 40, dtype=F32)
    ask = lambda: [  # noqa: E731
        A.times(X),
        A.adjoint_times(X),
        *(M.to_dense() for M in (A.compose(B), A.self_gram(), A.gram_through(X), type(A).gram(X))),
    ]
    expected = ask()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ask()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("cls", CLASSES, ids=name_of)
def test_R3_gradients_pass(cls: type[StructuredMatrix]) -> None:
    """Matrices are differentiable functions of their tensors, and never write into them."""
    A = drawn(cls, 7, dtype=torch.float64)
    tensors = {n: t.clone().requires_grad_() for n, t in A.named_tensors().items()}
    before = {n: t.detach().clone() for n, t in tensors.items()}
    M, X = A.with_tensors(tensors), normal(7, 3)
    value = M.gram_through(X).add(M.self_gram(), 0.5).compose(M).shift(M.mean_trace()).times(X).square().sum()
    grads = torch.autograd.grad(value, list(tensors.values()), allow_unused=True, materialize_grads=True)
    assert any(g.norm() > 0 for g in grads)
    assert all(torch.equal(t, before[n]) for n, t in tensors.items())
