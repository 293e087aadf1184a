"""Kinds of Fisher: type-2 is brute force, random ones converge to it, empirical ones loop over data or loss terms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kfac.nets import FISHERS
from kfac.oracle import relative_error, term_factors
from losses.loss_cases import CASES, PARAMS, Case, classes, rand, unit
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import jacrev

from curvops import KFACLinearOperator

# torch announces a change of "mean"; losses without curvature warn, which test_silent_errors.py checks
pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*has no second derivative:UserWarning"),
]
RANDOM = ["mc", "signs"]

# Every loss with every option that changes its Hessian or what is drawn.
OPTIONS = [name for name in CASES if name.startswith(("ce", "bce ", "gauss", "callable", "subclass", "soft margin"))]
OPTIONS = [n for n in OPTIONS if "(4,)" not in n and "(1,)" not in n and "(2,)" not in n and "(3, 2, 1" not in n]
OPTIONS += [f"{name} {shape}" for name in ("mse", "smooth", "huber", "poisson") for shape in ("(3,)", "(2, 3)")]
OPTIONS += ["poisson rates", "mse ()", "ce (2,) smoothing=0.0 weight=False", "ce (4,) smoothing=0.3 weight=True"]


def table_model(p: dict[str, Tensor], X: tuple[Tensor, Tensor]) -> Tensor:
    """Predict close to given outputs (so that rates stay positive); the loss terms of a datum share its only row."""
    x, base = X
    h = F.linear(x, p["hidden.weight"], p["hidden.bias"]).tanh()
    return base * (1 - 0.2 * F.linear(h, p["last.weight"], p["last.bias"]).sigmoid().reshape(base.shape))


def table_params(case: Case) -> dict[str, Tensor]:
    d = case.output[0].numel()
    shapes = {"hidden.weight": (3, 5), "hidden.bias": (3,), "last.weight": (d, 3), "last.bias": (d,)}
    return {n: rand(*s, seed=20 + i) for i, (n, s) in enumerate(shapes.items())}


def table_data(case: Case) -> list[tuple[Any, Any]]:
    """Return the case's uneven batches as data of :func:`table_model`."""
    inputs = rand(len(case.output), 5, seed=30).split([len(x) for x, _ in case.batches()])
    return [((x, base), y) for x, (base, y) in zip(inputs, case.batches(), strict=True)]


def merged(data: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return all data as one batch."""
    join = lambda parts: tuple(map(join, zip(*parts, strict=True))) if isinstance(parts[0], tuple) else torch.cat(parts)  # noqa: E731
    return tuple(map(join, zip(*data, strict=True)))


def table_kfac(case: Case, data: list | None = None, reduction: str = "mean", **kwargs: Any) -> KFACLinearOperator:
    data = table_data(case) if data is None else data
    loss, options = case.make(reduction), dict(case.options)
    return KFACLinearOperator(table_model, loss, table_params(case), data, **options, **kwargs)


def bias_blocks(case: Case, reduction: str) -> dict[str, Tensor]:
    """Return ``sum_n J_n' H_n J_n`` of the layers' outputs: the GGN of the biases, as a layer has one row per datum."""
    params, loss, (X, _) = table_params(case), case.make(reduction), merged(table_data(case))
    out = table_model(params, X)
    targets = [case.target]
    if case.second is not None:  # a Hessian quadratic in y: its expectation is the average over mean +- sd
        mean, variance = out.unbind(-1)
        targets = [mean - variance.sqrt(), mean + variance.sqrt()]
    H = sum(hessian(lambda o, y=y: case.value(loss, o, y), out) for y in targets) / len(targets)
    H = H.reshape(out.numel(), -1)
    blocks = {}
    for layer in ("hidden", "last"):
        J = jacrev(lambda b, n=f"{layer}.bias": table_model({**params, n: b}, X))(params[f"{layer}.bias"])
        J = J.reshape(out.numel(), -1)
        blocks[f"{layer}.weight"] = J.T @ H @ J
    return blocks


@pytest.mark.parametrize(("name", "reduction"), PARAMS)
def test_R4_type_2_is_brute_force_for_every_loss(name: str, reduction: str) -> None:
    case = CASES[name]
    K = table_kfac(case, reduction=reduction, fisher_type="type-2")
    x = merged(table_data(case))[0][0]
    p = table_params(case)
    h = F.linear(x, p["hidden.weight"], p["hidden.bias"]).tanh()
    for (layer, B), rows in zip(bias_blocks(case, reduction).items(), (x, h), strict=True):
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        assert relative_error(K.factors[layer].output, B) < 1e-9
        assert relative_error(K.factors[layer].input, rows.T @ rows / len(rows)) < 1e-12


def z_scores(draws: Tensor, expected: Tensor, count: int) -> Tensor:
    """Compare the mean of independent ``draws [R, ...]`` with what is expected, in standard errors.

    A sample may miss the variance of rare events; its standard error is not trusted below a tenth of a typical one.
    """
    error = draws.std(0) / len(draws) ** 0.5
    d = expected.diagonal()
    floor = 0.1 * torch.outer(d, d).sqrt() / count**0.5
    return (draws.mean(0) - expected).abs() / (torch.maximum(error, floor) + 1e-13 * d.max())


def tiled(batch: tuple[Any, Any], copies: int) -> list[tuple[Any, Any]]:
    """Return the data many times over: every copy of a datum has its own draws."""
    return [merged([batch] * copies)]


@pytest.mark.parametrize("fisher_type", RANDOM)
@pytest.mark.parametrize("name", OPTIONS)
def test_R4_random_kinds_converge_to_type_2_for_every_loss(name: str, fisher_type: str) -> None:
    case, seeds, samples, copies = CASES[name], 20, 2, 120
    reduction = case.reductions[0]
    data = tiled(merged(table_data(case)), copies)
    exact = table_kfac(case, data, reduction, fisher_type="type-2").factors
    draw = lambda s: table_kfac(case, data, reduction, fisher_type=fisher_type, mc_samples=samples, seed=s)  # noqa: E731
    runs = [draw(s).factors for s in range(seeds)]
    for layer in ("hidden.weight", "last.weight"):
        B, draws = exact[layer].output, torch.stack([f[layer].output for f in runs])
        assert z_scores(draws, B, seeds * samples * copies).max() < 5
        trace = draws.diagonal(dim1=1, dim2=2).sum(1) / B.trace()
        error = trace.std() / seeds**0.5
        assert error < 0.08  # enough draws to tell a wrong scale
        assert abs(trace.mean() - 1) < 5 * error + 1e-12
        assert relative_error(runs[0][layer].input, exact[layer].input) < 1e-12


def mixed(axis: int) -> tuple[dict[str, Tensor], Callable]:
    """Return a net on ``[N, T, D]`` that mixes tokens (axis 1) or data (axis 0); it also tells its layers' outputs."""
    shapes = {"first.weight": (4, 3), "first.bias": (4,), "second.weight": (5, 4), "second.bias": (5,)}
    p = {n: rand(*s, seed=40 + i) for i, (n, s) in enumerate(shapes.items())}

    def forward(p: dict[str, Tensor], X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = F.linear(X, p["first.weight"], p["first.bias"])
        mix = rand(X.shape[axis], X.shape[axis], seed=50)
        h = torch.einsum("ts,nsd->ntd" if axis == 1 else "ts,snd->tnd", mix, first).tanh()
        return F.linear(h, p["second.weight"], p["second.bias"]), first, h

    return p, forward


WEIGHT = unit(5, seed=60) + 0.2
Y = classes(5, 5, 3, seed=61).masked_fill(unit(5, 3, seed=62) < 0.3, -100)
X = rand(5, 3, 3, seed=63)


def sequence_kfac(axis: int, batches: list[int], copies: int = 1, **kwargs: Any) -> KFACLinearOperator:
    p, forward = mixed(axis)
    loss = nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)
    data = list(zip(X.split(batches), Y.split(batches), strict=True)) if copies == 1 else tiled((X, Y), copies)
    return KFACLinearOperator(lambda p, X: forward(p, X)[0], loss, p, data, class_dim=-1, **kwargs)


@pytest.mark.parametrize(("axis", "approx"), [(1, "expand"), (1, "reduce"), (0, "expand")])
@pytest.mark.parametrize("fisher_type", ["empirical", "empirical-per-term"])
def test_R4_empirical_kinds_are_loops_over_data_or_over_loss_terms(fisher_type: str, axis: int, approx: str) -> None:
    p, forward = mixed(axis)
    p = {n: t.requires_grad_() for n, t in p.items()}
    out, first, _ = forward(p, X)
    terms = F.cross_entropy(out.movedim(-1, 1), Y, WEIGHT, label_smoothing=0.1, reduction="none")  # [N, T]
    units = terms.sum(1) if fisher_type == "empirical" else terms.flatten()
    K = sequence_kfac(axis, [3, 2] if axis else [5], fisher_type=fisher_type, kfac_approx=approx)
    for name, z in (("first.weight", first), ("second.weight", out)):
        B = 0
        for value in units:
            g = torch.autograd.grad(value, z, retain_graph=True)[0].flatten(0, 1)
            g = g.sum(0, keepdim=True) if approx == "reduce" else g
            B = B + g.T @ g
        assert relative_error(K.factors[name].output, B / WEIGHT[Y[Y >= 0]].sum()) < 1e-12
    other = sequence_kfac(axis, [5], fisher_type="empirical", kfac_approx=approx).factors["first.weight"].output
    same = relative_error(K.factors["first.weight"].output, other) < 1e-3
    assert same == (fisher_type == "empirical" or axis == 0)  # tokens of a datum meet on axis 1 only


@pytest.mark.parametrize("axis", [0, 1])
def test_R4_type_2_has_no_cross_terms_and_random_kinds_converge_to_it(axis: int) -> None:
    p, forward = mixed(axis)
    p = {n: t.requires_grad_() for n, t in p.items()}
    out, first, h = forward(p, X)
    loss = lambda o, y: F.cross_entropy(o.movedim(-1, 1), y, WEIGHT, label_smoothing=0.1)  # noqa: E731
    K = sequence_kfac(axis, [3, 2] if axis else [5], fisher_type="type-2").factors
    # Copies of the data would meet where data are mixed: there, samples make up for them.
    seeds, samples, copies = 20, 2 if axis else 30, 100 if axis else 1
    draw = lambda kind, s: sequence_kfac(axis, [5], copies, fisher_type=kind, mc_samples=samples, seed=s)  # noqa: E731
    runs = {kind: [draw(kind, s).factors for s in range(seeds)] for kind in RANDOM}
    for name, x, z in (("first.weight", X, first), ("second.weight", h, out)):
        rows = torch.cat([x.detach().flatten(0, 1), torch.ones(15, 1, dtype=torch.float64)], 1)
        A, B = term_factors(loss, out, Y, rows, z, lambda g: g.flatten(0, 1), torch.arange(75).reshape(15, 5))
        assert relative_error(K[name].input, A) < 1e-12
        assert relative_error(K[name].output, B) < 1e-9
        for factors in runs.values():
            z = z_scores(torch.stack([f[name].output for f in factors]), B, seeds * samples * copies)
            assert z.max() < 5


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("fisher_type", RANDOM)
def test_R4_draws_do_not_depend_on_the_batches(fisher_type: str, approx: str) -> None:
    options = {"fisher_type": fisher_type, "kfac_approx": approx, "mc_samples": 2}
    want = sequence_kfac(1, [5], **options).to_dense()
    for batches in ([3, 2], [1, 3, 1], [1] * 5):
        assert relative_error(sequence_kfac(1, batches, **options).to_dense(), want) < 1e-12
    assert relative_error(sequence_kfac(1, [5], seed=1, **options).to_dense(), want) > 1e-2


@pytest.mark.parametrize("fisher_type", RANDOM)
@pytest.mark.parametrize("name", OPTIONS)
def test_R4_draws_do_not_depend_on_the_batches_for_every_loss(name: str, fisher_type: str) -> None:
    case = CASES[name]
    options = {"reduction": case.reductions[0], "fisher_type": fisher_type}
    whole = table_kfac(case, [merged(table_data(case))], **options)
    assert relative_error(table_kfac(case, **options).to_dense(), whole.to_dense()) < 1e-12


def test_R4_draws_touch_no_generator_and_leave_it_no_say() -> None:
    draw = lambda: table_kfac(CASES["bce both"], fisher_type="mc").to_dense()  # noqa: E731
    state = torch.get_rng_state()
    first = draw()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1234)
    assert torch.equal(draw(), first)


def test_R4_more_samples_are_further_draws_of_one_stream() -> None:
    """One draw more changes the average by its own share only."""
    case = CASES["mse (2, 3)"]
    B = [table_kfac(case, fisher_type="mc", mc_samples=m).factors["last.weight"].output for m in (1, 2, 3)]
    second = 2 * B[1] - B[0]
    third = 3 * B[2] - 2 * B[1]
    assert torch.linalg.eigvalsh(second).min() > -1e-12
    assert torch.linalg.eigvalsh(third).min() > -1e-12
    assert relative_error(second, B[0]) > 0.1


def test_R4_forward_only_is_the_empirical_kind_with_an_identity() -> None:
    case = CASES["ce (3, 2) smoothing=0.3 weight=True"]
    forward, empirical = (table_kfac(case, fisher_type=kind) for kind in ("forward-only", "empirical"))
    for name, factors in forward.factors.items():
        assert torch.equal(factors.output, torch.eye(len(factors.output), dtype=torch.float64))
        assert torch.equal(factors.input, empirical.factors[name].input)


def test_R4_losses_without_curvature_have_zero_factors() -> None:
    for name in ("l1 (2, 3)", "nll (3, 2) weight=True"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for kind in ("type-2", *RANDOM):
                assert not table_kfac(CASES[name], fisher_type=kind).to_dense().any()
            assert table_kfac(CASES[name], fisher_type="empirical").to_dense().any()


@pytest.mark.parametrize("fisher_type", FISHERS)
@pytest.mark.parametrize("seed", [2**70 + 1, -5, np.int64(3)])
def test_R4_any_integer_is_a_seed(fisher_type: str, seed: int) -> None:
    model, data = nn.Linear(3, 2), [(torch.randn(4, 3), torch.randn(4, 2))]
    options = {"fisher_type": fisher_type, "mc_samples": np.int64(2)}
    K, L = (KFACLinearOperator(model, nn.MSELoss(), None, data, seed=s, **options) for s in (seed, int(seed)))
    assert torch.equal(K.to_dense(), L.to_dense())
