"""Mixed precision: real gradient scalers, clipping, skipped steps, half precision."""

from __future__ import annotations

import pytest
import torch
from optim.cases import F64, batches, difference, loss_of, mlp
from torch import nn

from curvops.optim import KFAC, SINGD, KFACPreconditioner

MAKE = {
    "INGD": lambda net, **o: SINGD(net, lr=1e-2, damping=1e-2, **{"T": 1, "lr_cov": 0.05, **o}),
    "IKFAC": lambda net, **o: SINGD(
        net, lr=1e-2, damping=1e-2, kfac_like=True, alpha1=0.0, **{"T": 1, "lr_cov": 0.05, **o}
    ),
    "KFAC": lambda net, **o: KFAC(
        net, lr=1e-2, damping=1e-2, inv_update_steps=2, **{"factor_update_steps": o.pop("T", 1), **o}
    ),
    "EKFAC": lambda net, **o: KFAC(
        net, lr=1e-2, damping=1e-2, compute_method="ekfac", **{"factor_update_steps": o.pop("T", 1), **o}
    ),
}
every_method = pytest.mark.parametrize("method", MAKE)


def scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**7, "growth_interval": 3, **options})


def snapshot(optimizer, net):
    """Parameters, momenta and factors; decompositions of factors are made on schedule, whatever the batch."""
    state = optimizer.state_dict()
    found = []

    def walk(x):
        if isinstance(x, torch.Tensor):
            found.append(x.clone())
        elif isinstance(x, dict):
            [walk(v) for k, v in x.items() if k != "solutions"]
        elif isinstance(x, list | tuple):
            [walk(v) for v in x]

    walk({k: v for k, v in state.items() if k not in ("steps", "param_groups")})
    return [p.detach().clone() for p in net.parameters()] + found


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_method
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled and clipped"])
def test_R7_powers_of_two_change_nothing(method, unscale):
    """Scales grow on the way; with ``unscale_`` gradients are clipped, too."""
    nets, loss = (mlp(), mlp()), loss_of("mlp", "mean")
    amp = scaler()
    plain, scaled = MAKE[method](nets[0]), MAKE[method](nets[1], grad_scaler=amp if unscale else None)
    for X, y in batches("mlp", 10, (30,)):
        plain.zero_grad()
        loss(nets[0](X), y).backward()
        if unscale:
            nn.utils.clip_grad_norm_(nets[0].parameters(), 0.1)
        plain.step()
        scaled.zero_grad()
        amp.scale(loss(nets[1](X), y)).backward()
        if unscale:
            amp.unscale_(scaled)
            nn.utils.clip_grad_norm_(nets[1].parameters(), 0.1)
        amp.step(scaled)
        amp.update()
    assert amp.get_scale() == 2.0**10
    assert difference(*nets) < 1e-15
    assert difference(nets[0], mlp()) > 1e-3


def test_R7_the_preconditioner_between_unscale_and_step():
    nets, loss, amp = (mlp(), mlp()), loss_of("mlp", "mean"), scaler()
    sgds = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    plain = KFACPreconditioner(nets[0], damping=0.01)
    scaled = KFACPreconditioner(nets[1], damping=0.01, grad_scaler=amp)
    by_function = amp.get_scale
    for t, (X, y) in enumerate(batches("mlp", 8)):
        sgds[0].zero_grad()
        loss(nets[0](X), y).backward()
        plain.step()
        sgds[0].step()
        sgds[1].zero_grad()
        amp.scale(loss(nets[1](X), y)).backward()
        amp.unscale_(sgds[1])
        if t == 4:
            scaled._engine._scale_of = by_function  # a function that returns the scale is as good
        scaled.step()
        amp.step(sgds[1])
        amp.update()
    assert difference(*nets) < 1e-15


@every_method
def test_R7_unscaled_gradients_without_the_scaler_are_refused(method):
    net, amp = mlp(), scaler()
    optimizer, (X, y) = MAKE[method](net), next(batches("mlp", 1))
    amp.scale(loss_of("mlp", "mean")(net(X), y)).backward()
    amp.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        amp.step(optimizer)


@every_method
def test_R7_an_infinite_scale_skips_and_loses_no_update(method):
    """With T = 5 the update of step 0 is made in step 1, on its batch."""
    nets, loss = (mlp(), mlp()), loss_of("mlp", "mean")
    amp = scaler(init_scale=2.0**7)
    skipping, plain = MAKE[method](nets[0], T=5), MAKE[method](nets[1], T=5)
    data = list(batches("mlp", 5, (30,)))
    before = None
    for t, (X, y) in enumerate(data):
        skipping.zero_grad()
        amp.scale(loss(nets[0](X), y)).backward()
        if t == 0:
            nets[0][0].weight.grad[0, 0] = float("inf")
            before = [p.detach().clone() for p in nets[0].parameters()]
        amp.step(skipping)
        amp.update()
        if t == 0:
            assert same(before, [p.detach() for p in nets[0].parameters()])
            assert amp.get_scale() == 2.0**6
    for X, y in data[1:]:
        plain.zero_grad()
        loss(nets[1](X), y).backward()
        plain.step()
    assert difference(*nets) < 1e-15


@every_method
@pytest.mark.parametrize("where", ["gradient", "statistics"])
def test_R7_a_batch_that_is_not_finite_leaves_everything_as_it_was(method, where):
    net, loss = mlp(), loss_of("mlp", "mean")
    optimizer = MAKE[method](net)
    data = list(batches("mlp", 4, (30,)))
    for X, y in data[:2]:
        optimizer.zero_grad()
        loss(net(X), y).backward()
        optimizer.step()
    before = snapshot(optimizer, net)
    optimizer.zero_grad()
    loss(net(data[2][0]), data[2][1]).backward()
    if where == "gradient":
        net[0].weight.grad[1, 2] = float("nan")
    else:
        for p in net.parameters():
            p.grad.zero_()
        optimizer.zero_grad()
        X = data[2][0].clone()
        X[0, 0] = 1e200  # gradients are finite, squares of inputs are not
        loss(net(X), data[2][1]).backward()
        net[0].weight.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    after = snapshot(optimizer, net)
    assert same(before, after)
    optimizer.zero_grad()
    loss(net(data[3][0]), data[3][1]).backward()
    message = "gradient of '0.weight'" if where == "gradient" else "statistics of '0.weight'"
    with pytest.warns(RuntimeWarning, match=message):
        optimizer.step()
    assert not same(before, snapshot(optimizer, net))
    optimizer.zero_grad()
    loss(net(data[3][0]), data[3][1]).backward()
    optimizer.step()  # and no further warning


def test_R7_a_preconditioner_leaves_gradients_that_are_not_finite():
    net, loss = mlp(), loss_of("mlp", "mean")
    preconditioner, (X, y) = KFACPreconditioner(net), next(batches("mlp", 1))
    loss(net(X), y).backward()
    net[0].bias.grad[0] = float("inf")
    before = [p.grad.clone() for p in net.parameters()]
    preconditioner.step()
    assert same(before, [p.grad for p in net.parameters()])
    net.zero_grad()
    loss(net(X), y).backward()
    g = torch.cat([p.grad.flatten() for p in net.parameters()])
    with pytest.warns(RuntimeWarning, match="gradient of '0.bias'"):
        preconditioner.step()
    assert torch.isfinite(preconditioner.operator @ g).all()


@pytest.mark.parametrize("fallback", ["adamw", "sgd", torch.optim.Adam, torch.optim.RMSprop], ids=str)
def test_R7_the_fallback_skips_too(fallback):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    optimizer, loss = SINGD(net, T=1, fallback=fallback), loss_of("mlp", "mean")
    for t, (X, y) in enumerate(batches("mlp", 4)):
        optimizer.zero_grad()
        loss(net(X), y).backward()
        if t == 2:
            net[0].weight.grad[0, 0] = float("nan")
        before = snapshot(optimizer, net)
        with pytest.warns(RuntimeWarning) if t == 3 else _nothing():
            optimizer.step()
        kept = same(before[: len(list(net.parameters()))], [p.detach() for p in net.parameters()])
        assert kept == (t == 2)


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


@every_method
def test_R7_autocast(method):
    """Factors are float32, whatever autocast makes of the layers; training goes where it goes without."""
    torch.manual_seed(0)
    X = torch.randn(120, 8)
    y = torch.randint(3, (120,))
    X += 2.0 * nn.functional.one_hot(y, 8)
    losses = {}
    for autocast in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer, losses[autocast] = MAKE[method](net), []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(net(X), y)
            loss.backward()
            optimizer.step()
            losses[autocast].append(loss.item())
        for _, t in _factors(optimizer):
            assert t.dtype == torch.float32
    assert losses[True][-1] < 0.7 * losses[True][0]
    assert losses[True][-1] == pytest.approx(losses[False][-1], rel=0.1)


def _factors(optimizer):
    method = optimizer._engine.method
    for f in getattr(method, "factors", {}).values():
        yield from f.K.named_tensors().items()
        yield from f.C.named_tensors().items()
    for f in method.averages.of.values() if hasattr(method, "averages") else ():
        yield from (("A", f.A), ("B", f.B))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.float32, None), (None, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_R7_dtypes_of_the_preconditioner(dtype, dtypes):
    """``None`` is the dtype of the parameters; sums are made in float32."""
    net = mlp().to(dtype)
    optimizer = SINGD(net, T=1, preconditioner_dtype=dtypes)
    for X, y in batches("mlp", 3):
        optimizer.zero_grad()
        loss_of("mlp", "mean")(net(X.to(dtype)), y).backward()
        optimizer.step()
    for f in optimizer._engine.method.factors.values():
        assert (f.K.torch_dtype, f.C.torch_dtype) == tuple(d or dtype for d in dtypes)
        assert all(p.dtype == dtype for p in net.parameters())


def test_R7_moments_of_half_precision_gradients_add_up_in_float32():
    """4096 rows of bfloat16 that a sum in bfloat16 would not count beyond 256."""
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    preconditioner = KFACPreconditioner(net, kl_clip=None, loss_average=None)
    X = torch.ones(4096, 1, dtype=torch.bfloat16)
    net(X).sum().backward()
    preconditioner.step()
    found = preconditioner.operator.factors["weight"]
    assert found.output.item() == 4096.0
    assert found.input.item() == 1.0


def test_R7_scales_of_a_dense_stable_structure():
    """In float16 the factors of dense_stable follow those in float64."""
    nets, loss = (mlp(), mlp()), loss_of("mlp", "mean")
    optimizers = [
        SINGD(nets[0], lr=0.0, damping=1e-6, T=1, lr_cov=0.1, structures=("dense", "dense")),
        SINGD(
            nets[1],
            lr=0.0,
            damping=1e-6,
            T=1,
            lr_cov=0.1,
            structures=("dense_stable", "dense_stable"),
            preconditioner_dtype=(torch.float16, torch.float16),
        ),
    ]
    for X, y in batches("mlp", 60):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss(net(X * 1e-3), y).backward()
            optimizer.step()
    for a, b in zip(*(o._engine.method.factors.values() for o in optimizers), strict=True):
        want = a.K.to_dense_blocks()
        assert (b.K.to_dense_blocks().to(F64) - want).norm() < 0.02 * want.norm()


def test_the_warning_of_a_skipped_step_points_to_the_users_line():
    for make in (SINGD, KFACPreconditioner):
        net, loss = mlp(), loss_of("mlp", "mean")
        optimizer, (X, y) = make(net), next(batches("mlp", 1))
        for t in range(2):
            net.zero_grad()
            loss(net(X), y).backward()
            if t == 0:
                net[0].weight.grad[0, 0] = float("nan")
            with pytest.warns(RuntimeWarning) if t else _nothing() as found:
                optimizer.step()
        assert found[0].filename == __file__
