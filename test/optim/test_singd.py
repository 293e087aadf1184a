"""SINGD against the published update, written in loops; its limits and invariances."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from optim.cases import F64, NETS, Oracle, batches, difference, loss_of, mlp
from torch import nn

from curvops.optim import SINGD
from curvops.structured import STRUCTURES, BlockDiagonalMatrixTemplate, DenseMatrix


def train(model, kind, steps, reduction="mean", schedule=None, closure=False, **options):
    loss, optimizer = loss_of(kind, reduction), SINGD(model, **options)
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for X, y in batches(kind, steps):

        def run(X=X, y=y):
            optimizer.zero_grad()
            value = loss(model(X), y)
            value.backward()
            return value

        if closure:
            assert optimizer.step(run) > 0
        else:
            run()
            optimizer.step()
        if scheduler:
            scheduler.step()
    return optimizer


def check(kind, steps=50, reduction="mean", schedule=None, closure=False, **options):
    """Train with both; parameters and factors agree."""
    average = options.setdefault("loss_average", "batch" if reduction == "mean" else None)
    settings = {
        "lr": 1e-2,
        "momentum": 0.9,
        "damping": 1e-2,
        "alpha1": 0.5,
        "weight_decay": 0.01,
        "T": 1,
        "lr_cov": 0.05,
    }
    settings |= options
    ours, theirs = NETS[kind](), NETS[kind]()
    optimizer = train(ours, kind, steps, reduction, schedule, closure, **settings)
    renamed = {"normalize": settings.pop("normalize_lr_cov", False), "approx": settings.pop("kfac_approx", "expand")}
    settings.pop("loss_average")
    oracle, loss = Oracle(**settings, **renamed, average=average), loss_of(kind, reduction)
    for t, (X, y) in enumerate(batches(kind, steps)):
        oracle.lr = settings["lr"] * (schedule(t) if schedule else 1.0)
        oracle.step(theirs, X, y, loss)
    assert difference(ours, theirs) < 1e-12
    with torch.no_grad():
        assert difference(ours, NETS[kind]()) > 1e-3  # it moved
    for block, layer in zip(sorted(optimizer._engine.method.factors, key=lambda b: b.label), oracle.state, strict=True):
        f = optimizer._engine.method.factors[block]
        for name in ("K", "C"):
            want = torch.stack([g[name] for g in oracle.state[layer]["f"]])
            torch.testing.assert_close(getattr(f, name).to_dense_blocks(), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kfac_like", [False, True], ids=["INGD", "IKFAC"])
def test_R1_the_published_update(kfac_like, momentum, normalize, T, reduction):
    check("mlp", reduction=reduction, T=T, normalize_lr_cov=normalize, momentum=momentum, kfac_like=kfac_like)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("kfac_like", [False, True], ids=["INGD", "IKFAC"])
@pytest.mark.parametrize(
    ("kind", "average"), [("cnn", "batch"), ("tokens", "batch+sequence"), ("tokens", "batch"), ("tokens", None)]
)
def test_R1_shared_weights(kind, average, kfac_like, approx):
    reduction = "sum" if average is None else "mean"
    check(kind, 20, reduction, loss_average=average, kfac_like=kfac_like, kfac_approx=approx, lr=1e-3, lr_cov=0.02)


def test_R1_schedules_and_closures():
    check("mlp", schedule=lambda t: 0.9**t, lr_cov=lambda t: 0.05 / (1 + t), closure=True)


@pytest.mark.parametrize("alpha1", [0.0, 0.9])
def test_R1_riemannian_momentum(alpha1):
    check("mlp", alpha1=alpha1, weight_decay=0.0)


def test_R1_singd_as_second_witness():
    """Where it is right: a mean loss, dense factors."""
    from singd.optim.optimizer import SINGD as Theirs

    options = {"lr": 1e-2, "damping": 1e-2, "T": 2, "lr_cov": 0.05, "weight_decay": 0.01}
    ours, theirs, loss = mlp(), mlp(), loss_of("mlp", "mean")
    train(ours, "mlp", 40, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = Theirs(theirs, **options)
        for X, y in batches("mlp", 40):
            optimizer.zero_grad()
            loss(theirs(X), y).backward()
            optimizer.step()
    assert difference(ours, theirs) < 1e-13


def one_layer(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(5, 3, bias=False).double()


def factors_of(optimizer):
    (f,) = optimizer._engine.method.factors.values()
    return f.K.to_dense_blocks()[0], f.C.to_dense_blocks()[0]


def ikfac_error(beta, steps):
    """The distance of ``K K'`` after some steps of IKFAC on one batch from the inverse of KFAC's running average."""
    model, damping = one_layer(), 0.1
    optimizer = SINGD(model, lr=0.0, momentum=0.0, damping=damping, T=1, kfac_like=True, alpha1=0.0, lr_cov=beta)
    X, y = next(batches("mlp", 1))
    S = torch.eye(5, dtype=F64) * (1 - damping)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of("mlp", "mean")(model(X), y).backward()
        optimizer.step()
        S = (1 - beta) * S + beta * X.T @ X / len(X)
    K, _ = factors_of(optimizer)
    return (K @ K.T - torch.linalg.inv(S + damping * torch.eye(5, dtype=F64))).norm().item()


def test_R2_one_step_of_ikfac_is_kfac_to_second_order():
    errors = [ikfac_error(beta, 1) for beta in (0.02, 0.01, 0.005)]
    for large, small in itertools.pairwise(errors):
        assert 3.7 < large / small < 4.3


def test_R2_over_a_fixed_horizon_to_first_order():
    errors = [ikfac_error(1 / steps, steps) for steps in (100, 200, 400)]
    for large, small in itertools.pairwise(errors):
        assert 1.8 < large / small < 2.2


class Block40DiagonalMatrix(BlockDiagonalMatrixTemplate):
    BLOCK_DIM = 40


@pytest.mark.parametrize("structure", [Block40DiagonalMatrix, "block30diagonal"])
def test_R2_one_block_reproduces_dense_over_200_steps(structure):
    nets = mlp(), mlp()
    for net, one in zip(nets, (structure, "dense"), strict=True):
        train(net, "mlp", 200, structures=(one, one), lr=1e-2, damping=1e-2, T=1, lr_cov=0.05)
    assert difference(*nets) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_R2_every_structure_trains(structure, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 3)).to(dtype)
    X, y = torch.randn(60, 8).to(dtype), torch.randint(3, (60,))
    X += 2.0 * nn.functional.one_hot(y, 8).to(dtype)
    optimizer = SINGD(model, structures=(structure, structure), lr=2e-2, damping=1e-1, T=2, lr_cov=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    f = next(iter(optimizer._engine.method.factors.values()))
    assert f.K.torch_dtype == f.C.torch_dtype == dtype


@pytest.mark.parametrize("kfac_like", [False, True], ids=["INGD", "IKFAC"])
def test_R2_ingd_does_not_see_how_a_scale_is_split_between_the_factors(kfac_like):
    """Inputs times c and output gradients over c are the same problem; IKFAC's factors see the difference."""
    found = []
    for c in (1.0, 3.0):
        model, loss = one_layer(), loss_of("mlp", "mean")
        optimizer = SINGD(model, lr=1e-2, damping=1e-2, T=1, kfac_like=kfac_like, alpha1=0.0, lr_cov=0.02)
        for X, y in batches("mlp", 10):
            optimizer.zero_grad()
            loss(model(c * X) / c, y).backward()
            optimizer.step()
        found.append((*factors_of(optimizer), model.weight.detach()))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12) != kfac_like


def test_R2_a_sum_is_a_mean_with_other_damping_and_start():
    """Sum loss, damping λB and C0 = I / sqrt(B): the trajectory of the mean loss, with the same lr."""
    B, damping, steps = 8, 1e-2, 40
    nets = mlp(), mlp()
    for net, reduction in zip(nets, ("mean", "sum"), strict=True):
        mean = reduction == "mean"
        optimizer = SINGD(
            net,
            lr=1e-2,
            damping=damping if mean else damping * B,
            T=1,
            lr_cov=0.05,
            loss_average="batch" if mean else None,
        )
        if not mean:
            method, first = optimizer._engine.method, optimizer._engine.method._first

            def scaled(block, first=first):
                f = first(block)
                f.C = f.C.scale(B**-0.5)
                return f

            method._first = scaled
        loss = loss_of("mlp", reduction)
        for X, y in batches("mlp", steps, (B,)):
            optimizer.zero_grad()
            loss(net(X), y).backward()
            optimizer.step()
    assert difference(*nets) < 1e-12


def test_structures_may_be_classes_and_are_listed_when_unknown():
    SINGD(mlp(), structures=(DenseMatrix, "diagonal")).close()
    with pytest.raises(ValueError, match=r"diagonal.*triltoeplitz"):
        SINGD(mlp(), structures=("dence", "dense"))
