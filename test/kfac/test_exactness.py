"""R1: where theory says that KFAC is exact, it is; against dense matrices, in float64."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from kfac.nets import (
    LOSSES,
    Keywords,
    Then,
    Tied,
    UNet,
    Whole,
    every_loss,
    every_mse,
    joint_or_separate,
    kfac,
    mlp,
    setting,
)
from kfac.oracle import (
    batches,
    block_diagonal,
    dense_ef,
    dense_ggn,
    joint_groups,
    relative_error,
    shifted,
    term_factors,
)
from torch import Tensor, nn

from curvops import KFACLinearOperator

TOL = 1e-11


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def ggn_blocks(model, loss, params, data, separate: bool) -> Tensor:
    groups = [[n] for n in params] if separate else joint_groups(params)
    return block_diagonal(dense_ggn(model, loss, params, data), params, groups)


def records(kind: type) -> list:
    return [kind({"x": torch.randn(n, 5), "scale": 1 + torch.rand(n, 1)}) for n in (2, 3)]


LINEAR = {
    "6-3-1": lambda: (mlp(6, 3, 1), torch.randn(2, 6), torch.randn(3, 6)),
    "5-4-3": lambda: (mlp(5, 4, 3), torch.randn(2, 5), torch.randn(3, 5)),
    "keywords": lambda: (Keywords(), *records(dict)),
    "mapping": lambda: (Whole(), *records(UserDict)),
}


@pytest.mark.parametrize("drop", ["nothing", "weight", "bias", "1.weight", "0.bias"])
@pytest.mark.parametrize("net", LINEAR)
@joint_or_separate
@every_mse
def test_R1_type2_is_the_ggn_of_linear_nets(loss: nn.Module, separate: bool, net: str, drop: str) -> None:
    model, *inputs = LINEAR[net]()
    data, values = batches(model, loss, *inputs), shifted(model)
    names = [n for n in values if drop not in n]
    params = {names[i]: values[names[i]] for i in torch.randperm(len(names))}
    K = kfac(model, loss, params, data, separate_weight_and_bias=separate)
    assert K.domain_names == tuple(params)
    assert relative_error(K.to_dense(), ggn_blocks(model, loss, params, data, separate)) < TOL


@every_mse
def test_R1_params_as_a_list_or_none_are_the_modules_own(loss: nn.Module) -> None:
    model = mlp(5, 4, 3)
    data, own = batches(model, loss, torch.randn(2, 5)), dict(model.named_parameters())
    G = ggn_blocks(model, loss, own, data, False)
    for params in (None, list(own.values()), own):
        assert relative_error(kfac(model, loss, params, data).to_dense(), G) < TOL
    backwards = dict(reversed(own.items()))
    K = kfac(model, loss, list(backwards.values()), data)
    assert relative_error(K.to_dense(), ggn_blocks(model, loss, backwards, data, False)) < TOL


SHARED = {
    "positions": ("expand", lambda: mlp(5, 4, 3), (4, 8, 5)),
    "mean over positions": ("reduce", lambda: Then(mlp(5, 4, 3), lambda y: y.mean((1, 2))), (4, 8, 5)),
    "mean between layers": (
        "reduce",
        lambda: nn.Sequential(Then(mlp(5, 4, 3), lambda y: y.mean((1, 2))), nn.Linear(3, 2)),
        (4, 8, 5),
    ),
    "pixels": ("expand", lambda: nn.Conv2d(3, 2, 4, padding=2), (3, 6, 5)),
    "pixels, channels last": (
        "expand",
        lambda: Then(nn.Conv2d(3, 2, 4, padding=2), lambda y: y.movedim(1, -1)),
        (3, 6, 5),
    ),
    "pooled pixels": ("reduce", lambda: Then(nn.Conv2d(3, 2, 4, padding=2), lambda y: y.mean((2, 3))), (3, 6, 5)),
}


@pytest.mark.parametrize("case", SHARED)
@joint_or_separate
@every_mse
def test_R1_expand_and_reduce_are_exact_where_theory_says(loss: nn.Module, separate: bool, case: str) -> None:
    approx, make, shape = SHARED[case]
    model = make()
    data, params = batches(model, loss, torch.randn(2, *shape), torch.randn(3, *shape)), shifted(model)
    K = kfac(model, loss, params, data, kfac_approx=approx, separate_weight_and_bias=separate)
    G = ggn_blocks(model, loss, params, data, separate)
    assert relative_error(K.to_dense(), G) < TOL
    other = {"expand": "reduce", "reduce": "expand"}[approx]
    wrong = kfac(model, loss, params, data, kfac_approx=other, separate_weight_and_bias=separate)
    assert relative_error(wrong.to_dense(), G) > 0.1


@pytest.mark.parametrize("act", [nn.Identity, nn.Tanh])
@joint_or_separate
@every_loss
def test_R1_one_datum(loss: nn.Module, separate: bool, act: type) -> None:
    model = mlp(5, 4, 3, act=act)
    data, params = batches(model, loss, torch.randn(1, 5)), shifted(model)
    groups = [[n] for n in params] if separate else joint_groups(params)
    for fisher, reference in (("type-2", dense_ggn), ("empirical", dense_ef)):
        K = kfac(model, loss, params, data, fisher_type=fisher, separate_weight_and_bias=separate)
        assert relative_error(K.to_dense(), block_diagonal(reference(model, loss, params, data), params, groups)) < TOL


@pytest.mark.parametrize(
    ("loss", "net", "approx", "fisher"),
    [
        ("mse", "mlp", "expand", "mc"),
        ("bce", "mlp", "expand", "mc"),
        ("ce", "mlp", "expand", "mc"),
        ("ce", "tokens", "reduce", "mc"),
        ("bce", "tokens", "expand", "signs"),
        ("mse", "cnn", "expand", "mc"),
        ("ce", "cnn", "reduce", "mc"),
    ],
)
def test_R1_draws_converge(loss: str, net: str, approx: str, fisher: str) -> None:
    model, X = setting(net, 24)
    model = Then(model, lambda y: y.movedim(-1, 1))
    data = batches(model, LOSSES[loss](), X)
    want = kfac(model, LOSSES[loss](), None, data, kfac_approx=approx).to_dense()
    options = {"kfac_approx": approx, "fisher_type": fisher, "mc_samples": 3000}
    got = kfac(model, LOSSES[loss](), None, data, **options).to_dense()
    torch.testing.assert_close(got / want.abs().max(), want / want.abs().max(), rtol=1e-1, atol=1.5e-2)


@pytest.mark.parametrize("modules", [1, 2], ids=["one layer twice", "two layers, one weight"])
@pytest.mark.parametrize("sizes", [(1,), (2, 3)], ids=["one datum", "more data"])
@joint_or_separate
@every_mse
def test_R1_tied_weights(loss: nn.Module, separate: bool, sizes: tuple, modules: int) -> None:
    for approx, merge in (
        ("expand", lambda parts: torch.cat(parts, 1)),
        ("reduce", lambda parts: (parts[0] + parts[1]) / 2),
    ):
        model = Tied(merge, modules)
        data, params = batches(model, loss, *(torch.randn(n, 6) for n in sizes)), shifted(model)
        K = kfac(model, loss, params, data, kfac_approx=approx, separate_weight_and_bias=separate)
        assert relative_error(K.to_dense(), ggn_blocks(model, loss, params, data, separate)) < TOL


def assembled(K: KFACLinearOperator, block) -> Tensor:
    """Put ``block(B, A)`` of every layer to its place in the space of the parameters."""
    names, offset = {}, 0
    for name, shape in zip(K.domain_names, K.domain, strict=True):
        n = torch.Size(shape).numel()
        names[name], offset = torch.arange(offset, offset + n).reshape(shape[0], -1), offset + n
    M = torch.zeros(offset, offset)
    for f in set(K.factors.values()):
        index = torch.cat([names[n] for n in f.names], 1).flatten()
        M[index[:, None], index] = block(f.output, f.input)
    return M


def damped(B: Tensor, A: Tensor | None, damping: float, how: str) -> Tensor:
    """Return the inverse of a block with formulas on dense matrices."""

    def shift(M: Tensor, c: float) -> Tensor:
        return M + c * torch.eye(len(M))

    if A is None or how == "exact":
        return torch.linalg.inv(shift(B if A is None else torch.kron(B, A), damping))
    pi = 1.0 if how == "factors" else sqrt(float(A.trace() / len(A)) / float(B.trace() / len(B)))
    root = damping if how == "factors" else sqrt(damping)
    return torch.kron(torch.linalg.inv(shift(B, root / pi)), torch.linalg.inv(shift(A, root * pi)))


@pytest.mark.parametrize("how", ["exact", "heuristic", "factors"])
@pytest.mark.parametrize("net", ["mlp", "cnn"])
@joint_or_separate
@every_loss
def test_R1_inverses(loss: nn.Module, separate: bool, net: str, how: str) -> None:
    model, *inputs = setting(net, 2, 3)
    data = batches(model, loss, *inputs)
    K = kfac(model, loss, None, data, separate_weight_and_bias=separate)
    M = assembled(K, lambda B, A: B if A is None else torch.kron(B, A))
    assert relative_error(K.to_dense(), M) < TOL
    for damping in (1e-2, 0.3, 5.0):
        want = assembled(K, partial(damped, damping=damping, how=how))
        assert relative_error(K.inverse(damping, how=how).to_dense(), want) < TOL
    if how == "exact":
        assert relative_error(K.inverse(1e-2).to_dense(), torch.linalg.inv(M + 1e-2 * torch.eye(len(M)))) < TOL


@joint_or_separate
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(reduction="sum")], ids=["mse", "bce"])
def test_R1_trace_determinant_and_norm(loss: nn.Module, separate: bool) -> None:
    model = mlp(3, 4, 3, act=nn.Tanh)
    K = kfac(model, loss, None, batches(model, loss, torch.randn(40, 3)), separate_weight_and_bias=separate)
    for op in (K, K.shift(1e-3), K.inverse(1e-2), K.inverse(1e-2, how="heuristic"), K.inverse(1e-2, how="factors")):
        M = op.to_dense()
        pairs = [
            (op.trace(), M.trace()),
            (op.frobenius_norm(), M.norm()),
            (op.det(), M.det()),
            (op.logdet(), M.logdet()),
        ]
        assert all(want != 0 and torch.isfinite(want) for _, want in pairs)
        assert max(relative_error(*pair) for pair in pairs) < 1e-9


@every_loss
def test_R1_factors_inside_a_unet(loss: nn.Module) -> None:
    model, seen = UNet(), {}
    model.inner.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out))
    data = batches(model, loss, torch.randn(2, 2, 6, 4))
    factors = kfac(model, loss, None, data).factors["inner.weight"]
    out = model(data[0][0])
    patches = F.unfold(seen["x"], 3, padding=1).mT.reshape(-1, 27).detach()
    terms = torch.arange(out.numel()).reshape(out.shape).movedim(1, -1).reshape(-1, 3)
    rows = torch.cat([patches, torch.ones(len(patches), 1)], 1)
    A, B = term_factors(loss, out, data[0][1], rows, seen["y"], lambda g: g.movedim(1, -1).reshape(-1, 4), list(terms))
    assert relative_error(factors.input, A) < TOL
    assert relative_error(factors.output, B) < TOL


@pytest.mark.parametrize(
    ("shape", "approx", "f", "positions"),
    [
        ((4,), "expand", nn.Identity(), 1),
        ((4,), "reduce", nn.Identity(), 1),
        ((6, 4), "expand", nn.Identity(), 6),
        ((6, 4), "reduce", lambda y: y.mean(1), 1),
    ],
    ids=["rows", "rows, reduce", "positions", "mean over positions"],
)
@joint_or_separate
@every_mse
def test_R1_forward_only_and_the_ggn_of_one_layer(loss, separate: bool, shape, approx: str, f, positions: int) -> None:
    model = Then(nn.Linear(4, 3), f)
    data, params = batches(model, loss, torch.randn(2, *shape), torch.randn(3, *shape)), shifted(model)
    K = kfac(
        model, loss, params, data, fisher_type="forward-only", kfac_approx=approx, separate_weight_and_bias=separate
    )
    factor = 2 * 5 * positions if loss.reduction == "sum" else 2 / 3
    assert relative_error(factor * K.to_dense(), ggn_blocks(model, loss, params, data, separate)) < TOL
