"""KFACPreconditioner and KFAC against the operators, and against formulas written in loops."""

from __future__ import annotations

import math

import pytest
import torch
from optim.cases import F64, NETS, batches, difference, loss_of, mlp, observed, rows
from scipy.sparse.linalg import eigsh
from torch import nn

from curvops import EKFACLinearOperator, KFACLinearOperator
from curvops.optim import (
    KFAC,
    SINGD,
    KFACPreconditioner,
    LambdaParamScheduler,
    LevenbergMarquardt,
    exp_decay_factor_averaging,
)

METHODS = ("eigen", "inverse", "ekfac")


class Tied(nn.Module):
    """One weight twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()).tanh())


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular", groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, (2, 3), stride=2, dilation=(1, 2), padding=1, bias=False),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()


def problem(kind):
    torch.manual_seed(3)
    net = {"mlp": mlp, "conv": convolutions, "tied": lambda: Tied().double(), "tokens": mlp}[kind]()
    X, y = next(batches({"conv": "cnn", "tied": "mlp"}.get(kind, kind), 1, (30,)))
    return net, X, y


def flat_gradient(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def flattened(out, y):
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("prediv", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["mlp", "conv", "tied"])
def test_R5_the_gradient_is_that_of_the_operators_inverse(kind, method, prediv, approx):
    net, X, y = problem(kind)
    cls = EKFACLinearOperator if method == "ekfac" else KFACLinearOperator
    K = cls(net, nn.CrossEntropyLoss(), None, [(X, y)], fisher_type="empirical", kfac_approx=approx)
    with KFACPreconditioner(
        net,
        damping=0.03,
        kl_clip=None,
        compute_method=method,
        compute_eigenvalue_outer_product=prediv,
        kfac_approx=approx,
    ) as preconditioner:
        flattened(net(X), y).backward()
        g = flat_gradient(net)
        preconditioner.step()
    want = K.inverse(0.03, how="factors" if method == "inverse" else "exact") @ g
    torch.testing.assert_close(flat_gradient(net), want, rtol=1e-10, atol=1e-12 * float(want.abs().max()))
    v = torch.randn_like(g)
    torch.testing.assert_close(preconditioner.operator @ v, K @ v, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(preconditioner.preconditioner @ g, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("terms", ["batch+sequence", 90])
def test_R5_sequences(terms):
    net, X, y = problem("tokens")
    loss = nn.CrossEntropyLoss()
    K = KFACLinearOperator(net, loss, None, [(X, y)], fisher_type="empirical-per-term", class_dim=-1)
    preconditioner = KFACPreconditioner(net, damping=0.03, kl_clip=None, loss_average=terms)
    flattened(net(X), y).backward()
    g = flat_gradient(net)
    preconditioner.step()
    torch.testing.assert_close(flat_gradient(net), K.inverse(0.03) @ g, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fisher_type", ["type-2", "mc"])
def test_R5_other_fishers_by_observe(fisher_type):
    net, X, y = problem("mlp")
    loss = nn.CrossEntropyLoss()
    K = KFACLinearOperator(net, loss, None, [(X, y)], fisher_type=fisher_type, mc_samples=3, seed=5)
    preconditioner = KFACPreconditioner(net, damping=0.03, kl_clip=None)
    with preconditioner.observe(fisher_type=fisher_type, loss=loss, target=y, mc_samples=3, seed=5):
        out = net(X)
    loss(out, y).backward()
    g = flat_gradient(net)
    preconditioner.step()
    torch.testing.assert_close(flat_gradient(net), K.inverse(0.03) @ g, rtol=1e-10, atol=1e-12)


def test_R5_the_block_of_a_single_convolution_is_its_fisher():
    """One layer, a loss term for every position: B ⊗ A is the Fisher block exactly (here: one channel's rows alike)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 2, 2, bias=False), nn.Flatten(2)).double()
    X, noise = torch.randn(6, 2, 4, 4, dtype=F64), torch.randn(6, 2, 9, dtype=F64)
    loss = nn.MSELoss(reduction="sum")
    K = KFACLinearOperator(net, loss, None, [(X, noise)], fisher_type="type-2")
    preconditioner = KFACPreconditioner(net, damping=0.1, kl_clip=None, loss_average=None)
    with preconditioner.observe(fisher_type="type-2", loss=loss, target=noise):
        out = net(X)
    loss(out, noise).backward()
    preconditioner.step()
    J = torch.func.jacrev(lambda w: torch.func.functional_call(net, {"0.weight": w}, X).flatten())(
        net[0].weight.detach()
    )
    J = J.flatten(1)
    torch.testing.assert_close(preconditioner.operator.to_dense(), 2 * J.T @ J, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(K.to_dense(), 2 * J.T @ J, rtol=1e-11, atol=1e-12)


def oracle_factors(net, X, y, loss):
    """``A`` and ``B`` of every layer of one batch."""
    found = []
    for layer, x, g in observed(net, lambda: loss(net(X), y)):
        a, b = rows(layer, x, g, "expand")
        found.append((a.mT @ a / a.shape[1], len(X) * b.mT @ b))
    return found


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("decay", [0.95, 0.0, exp_decay_factor_averaging(0.8)], ids=["number", "zero", "schedule"])
def test_R5_the_running_average_has_no_identity_in_it(kind, decay):
    net, loss, averages = NETS[kind](), loss_of(kind, "mean"), None
    preconditioner = KFACPreconditioner(
        net, factor_decay=decay, factor_update_steps=2, inv_update_steps=4, kl_clip=None
    )
    for t, (X, y) in enumerate(batches(kind, 9)):
        net.zero_grad()
        loss(net(X), y).backward()
        if t % 2 == 0:
            preconditioner_seen = oracle_factors(NETS[kind](), X, y, loss)
            d = decay(t) if callable(decay) else decay
            pairs = (
                preconditioner_seen
                if averages is None
                else [
                    tuple(d * old + (1 - d) * new for old, new in zip(*both, strict=True))
                    for both in zip(averages, preconditioner_seen, strict=True)
                ]
            )
            averages = pairs
        preconditioner.step()  # the weights stay: nothing moves them
    factors = preconditioner.operator.factors
    layers = [n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for name, (A, B) in zip(layers, averages, strict=True):
        found = factors[f"{name}.weight"]
        torch.testing.assert_close(found.input.reshape(A.shape), A, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found.output.reshape(B.shape), B, rtol=1e-12, atol=1e-13)


def test_R5_the_running_average_is_that_of_the_operator():
    net, loss = mlp(), nn.CrossEntropyLoss()
    preconditioner = KFACPreconditioner(net, factor_decay=0.7, kl_clip=None)
    data = list(batches("mlp", 5))
    K = KFACLinearOperator(net, loss, None, data[:1], fisher_type="empirical")
    for t, (X, y) in enumerate(data):
        net.zero_grad()
        loss(net(X), y).backward()
        preconditioner.step()
        if t:
            K.update([(X, y)], 0.7)
    torch.testing.assert_close(preconditioner.operator.to_dense(), K.to_dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prediv", [True, False])
def test_R5_when_damping_takes_effect(method, prediv):
    """At once for eigenvalues that are kept, with the next inverse update for what holds the damping."""
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(
        net,
        damping=lambda t: 0.1 if t == 0 else 0.5,
        inv_update_steps=2,
        factor_update_steps=3,
        kl_clip=None,
        compute_method=method,
        compute_eigenvalue_outer_product=prediv,
    )
    found = []
    for _ in range(3):
        net.zero_grad()
        flattened(net(X), y).backward()
        g = flat_gradient(net)
        preconditioner.step()
        found.append(flat_gradient(net))
    how = "factors" if method == "inverse" else "exact"
    old, new = (preconditioner.operator.inverse(d, how=how) @ g for d in (0.1, 0.5))
    late = method == "inverse" or (method == "eigen" and prediv)
    for x, want in zip(found, (old, old if late else new, new), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("clip", [1e-6, 1e3, None])
def test_R5_kl_clip(clip):
    net, X, y = problem("mlp")
    lr = 0.3
    preconditioner = KFACPreconditioner(net, damping=0.01, kl_clip=clip, lr=lambda _: lr)
    flattened(net(X), y).backward()
    g = flat_gradient(net)
    preconditioner.step()
    P = preconditioner.preconditioner @ g
    nu = 1.0 if clip is None else min(1.0, math.sqrt(clip / (lr**2 * float(P @ g))))
    assert (nu < 1) == (clip == 1e-6)
    torch.testing.assert_close(flat_gradient(net), nu * P, rtol=1e-12, atol=0)
    if clip is not None:
        assert preconditioner.clip_scale.item() == pytest.approx(nu, rel=1e-12)


def test_R5_kl_clip_of_zero_gradients():
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(net)
    (0.0 * flattened(net(X), y)).backward()
    preconditioner.step()
    assert flat_gradient(net).abs().max() == 0
    assert preconditioner.clip_scale == 1


def test_R5_ekfac_between_and_at_inverse_updates():
    """Second moments average in the eigenvectors; new eigenvectors see the old matrix's diagonal."""
    net, loss = mlp(), loss_of("mlp", "mean")
    decay, every = 0.6, 3
    preconditioner = KFACPreconditioner(
        net, damping=0.01, factor_decay=decay, inv_update_steps=every, kl_clip=None, compute_method="ekfac"
    )
    twin = mlp()  # its passes are not observed, and weights stay
    layer, averages, state = twin[0], None, None
    for t, (X, y) in enumerate(batches("mlp", 8, (30, 25, 33))):
        (_, x, g), _ = observed(twin, lambda X=X, y=y: loss(twin(X), y))
        a, b = rows(layer, x, g, "expand")
        A, B = (a.mT @ a / a.shape[1])[0], (len(X) * b.mT @ b)[0]
        averages = (
            (A, B)
            if averages is None
            else tuple(decay * o + (1 - decay) * n for o, n in zip(averages, (A, B), strict=True))
        )
        if t % every == 0:
            QA, QB = (torch.linalg.eigh(F).eigenvectors for F in averages)
            if state is not None:
                old = torch.einsum("oi,po,qi->pq", state[2], (QB.T @ state[0]) ** 2, (QA.T @ state[1]) ** 2)
        elif state is not None:
            QB, QA, old = state
        D = torch.einsum("no,ni->noi", b[0], a[0])
        squares = len(X) * torch.einsum("noi,op,iq->npq", D, QB, QA).square().sum(0)
        values = squares if state is None else decay * old + (1 - decay) * squares
        state = QB, QA, values
        net.zero_grad()
        loss(net(X), y).backward()
        preconditioner.step()
        (block,) = [b for b in preconditioner._engine.blocks if b.label == "0.weight"]
        found = preconditioner._engine.method.solutions[block]
        got = torch.einsum("po,oi,qi->pq", (QB.T @ found.B[0]) ** 2, found.values[0], (QA.T @ found.A[0]) ** 2)
        torch.testing.assert_close(got, values, rtol=1e-9, atol=1e-12)


def test_R5_schedules():
    calls = []
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(
        net, factor_update_steps=lambda t: calls.append(t) or 2, inv_update_steps=4, damping=0.1, lr=1.0
    )
    scheduler = LambdaParamScheduler(
        preconditioner,
        damping_lambda=lambda t: 0.5 ** (t // 2),
        lr_lambda=lambda t: 1 / (1 + t),
        inv_update_steps_lambda=lambda t: 0.1,
    )
    seen = []
    for _ in range(6):
        net.zero_grad()
        flattened(net(X), y).backward()
        preconditioner.step()
        scheduler.step()
        seen.append((preconditioner.hyperparameters.at("damping", 0), preconditioner.hyperparameters.at("lr", 0)))
    assert seen == [(0.1 * 0.5 ** (t // 2), 1 / (1 + t)) for t in range(1, 7)]  # absolute, it does not compound
    assert preconditioner.hyperparameters.at("inv_update_steps", 0) == 1
    assert calls
    with pytest.raises(ValueError, match="factor_update_steps: found"):
        LambdaParamScheduler(preconditioner, factor_update_steps_lambda=lambda t: 1)
    with pytest.raises(TypeError, match="momentum_lambda"):
        LambdaParamScheduler(preconditioner, momentum_lambda=lambda t: 1)
    decay = exp_decay_factor_averaging(0.95)
    assert [decay(k) for k in (0, 1, 5, 10, 100)] == [0.0, 0.0, 0.8, 0.9, 0.95]


def test_R5_layers_that_are_skipped():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Linear(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
            self.decoder = nn.Linear(4, 3)

        def forward(self, x):
            h = self.embed(x)
            return self.decoder(self.attention(h, h, h, need_weights=False)[0])

    for patterns, skipped in (
        (["multihead"], {"attention"}),
        (["^embed$", "DECODER"], {"embed", "decoder"}),
        (["Linear"], {"embed", "decoder", "attention.out_proj"}),
    ):
        net = Net().double()
        preconditioner = KFACPreconditioner(net, skip_layers=patterns, kl_clip=None, loss_average="batch+sequence")
        X, y = next(batches("tokens", 1))
        flattened(net(X), y).backward()
        before = {n: p.grad.clone() for n, p in net.named_parameters()}
        preconditioner.step()
        for name, p in net.named_parameters():
            inside = any(name.startswith(s + ".") for s in skipped)
            assert torch.equal(p.grad, before[name]) == inside, name
            assert ("skip_layers" in preconditioner.treatments[name]) == inside
        preconditioner.close()
    with pytest.raises(TypeError, match="expected a list"):
        KFACPreconditioner(Net(), skip_layers="Linear")
    with pytest.raises(ValueError, match="no parameter to precondition"):
        KFACPreconditioner(Net(), skip_layers=["."])


def test_R5_memory_is_counted():
    """An MLP 4-5-3 with biases: the numbers of kfac-pytorch's documentation in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    X, y = torch.randn(7, 4), torch.randint(3, (7,))
    preconditioner = KFACPreconditioner(net)
    assert preconditioner.memory_usage()["total"] == 0
    flattened(net(X), y).backward()
    pending = preconditioner.memory_usage()
    assert (pending["a_batch"], pending["g_batch"]) == (244, 136)
    preconditioner.step()
    found = preconditioner.memory_usage()
    assert found == {
        "a_factors": 244, "g_factors": 136, "a_batch": 0, "g_batch": 0, "a_inverses": 244, "g_inverses": 308, "total": 932,
    }  # fmt: skip
    preconditioner.close()
    inverse = KFACPreconditioner(net, compute_method="INVERSE")
    flattened(net(X), y).backward()
    inverse.step()
    assert inverse.memory_usage()["total"] == 760


@pytest.mark.parametrize("method", METHODS)
def test_R5_dtypes(method):
    for dtype, inv_dtype, held in (
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
    ):
        net = mlp().to(dtype)
        preconditioner = KFACPreconditioner(
            net, inv_dtype=inv_dtype, factor_dtype=torch.bfloat16, compute_method=method
        )
        X, y = next(batches("mlp", 1, (30,)))
        flattened(net(X.to(dtype)), y).backward()
        preconditioner.step()
        method_ = preconditioner._engine.method
        assert all(f.B.dtype == f.A.dtype == torch.bfloat16 for f in method_.averages.of.values())
        assert all(t.dtype == held for s in method_.solutions.values() for t in s.tensors().values())
        assert all(p.grad.dtype == dtype for p in net.parameters())


def test_R5_too_few_passes():
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(net, accumulation_steps=2)
    (flattened(net(X), y) / 2).backward()
    with pytest.raises(RuntimeError, match="accumulation_steps: found 1"):
        preconditioner.step()
    (flattened(net(X), y) / 2).backward()
    preconditioner.step()


@pytest.mark.parametrize("method", METHODS)
def test_R5_starting_from_an_operator(method):
    net, X, y = problem("mlp")
    loss = nn.CrossEntropyLoss()
    K = KFACLinearOperator(net, loss, None, [(X, y)], fisher_type="type-2")
    preconditioner = KFACPreconditioner(
        net, curvature=K, damping=0.02, factor_decay=1.0, kl_clip=None, compute_method=method
    )
    flattened(net(X), y).backward()
    g = flat_gradient(net)
    preconditioner.step()  # with this decay its own batch counts nothing
    if method != "ekfac":
        torch.testing.assert_close(preconditioner.operator.to_dense(), K.to_dense(), rtol=1e-12, atol=1e-14)
    want = K.inverse(0.02, how="factors" if method == "inverse" else "exact") @ g
    torch.testing.assert_close(flat_gradient(net), want, rtol=1e-9, atol=1e-11)


def test_R5_singd_starting_from_an_operator():
    net, X, y = problem("mlp")
    K = KFACLinearOperator(net, nn.CrossEntropyLoss(), None, [(X, y)], fisher_type="type-2")
    optimizer = SINGD(net, lr=1.0, momentum=0.0, damping=0.02, curvature=K, lr_cov=0.0, T=1)
    flattened(net(X), y).backward()
    g, before = flat_gradient(net), torch.cat([p.detach().flatten() for p in net.parameters()])
    optimizer.step()
    want = K.inverse(0.02, how="factors") @ g
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(before - after, want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(optimizer.preconditioner @ g, want, rtol=1e-9, atol=1e-11)


def test_R5_curvature_must_fit():
    net, X, y = problem("mlp")
    data, loss = [(X, y)], nn.CrossEntropyLoss()
    for bad, error in (
        (EKFACLinearOperator(net, loss, None, data), "expected a KFACLinearOperator"),
        (KFACLinearOperator(net, loss, None, data, kfac_approx="reduce"), "kfac_approx"),
    ):
        for make in (KFACPreconditioner, SINGD):
            with make(net, curvature=bad) as optimizer:
                loss_ = flattened(net(X), y)
                with pytest.raises((TypeError, ValueError), match=error):
                    _finish(loss_, optimizer)
            net.zero_grad()


def _finish(loss, optimizer):
    loss.backward()
    optimizer.step()


def test_R5_they_are_operators():
    net, X, y = problem("mlp")
    for make in (lambda n: KFAC(n, inv_update_steps=1), lambda n: SINGD(n, T=1), KFACPreconditioner):
        optimizer = make(net)
        net.zero_grad()
        flattened(net(X), y).backward()
        optimizer.step()
        for op in (optimizer.operator, optimizer.preconditioner):
            dense = op.to_dense()
            torch.testing.assert_close(dense, dense.T, rtol=1e-9, atol=1e-12)
            top = eigsh(op, k=2, return_eigenvectors=False)
            assert max(top) == pytest.approx(torch.linalg.eigvalsh(dense).max().item(), rel=1e-9)
        optimizer.close()


def test_R5_the_undamped_operator_of_singd_is_what_its_factors_stand_for():
    """After many small steps of IKFAC on one batch the operator is that batch's KFAC."""
    net, X, y = problem("mlp")
    loss = nn.CrossEntropyLoss()
    K = KFACLinearOperator(net, loss, None, [(X, y)], fisher_type="empirical")
    optimizer = SINGD(net, lr=0.0, momentum=0.0, damping=0.1, T=1, kfac_like=True, alpha1=0.0, lr_cov=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        loss(net(X), y).backward()
        optimizer.step()
    torch.testing.assert_close(optimizer.operator.to_dense(), K.to_dense(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_R5_kfac_is_the_preconditioner_and_sgd(method):
    nets, loss = (mlp(), mlp()), loss_of("mlp", "mean")
    options = {"damping": 0.03, "kl_clip": 1e-3, "inv_update_steps": 3, "factor_decay": 0.8, "compute_method": method}
    ours = KFAC(nets[0], lr=0.1, momentum=0.9, weight_decay=0.01, **options)
    sgd = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    preconditioner = KFACPreconditioner(nets[1], lr=0.1, **options)
    for X, y in batches("mlp", 20, (30, 25)):
        ours.zero_grad()
        loss(nets[0](X), y).backward()
        ours.step()
        sgd.zero_grad()
        loss(nets[1](X), y).backward()
        preconditioner.step()
        sgd.step()
    assert difference(*nets) < 1e-11


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_R5_levenberg_marquardt(momentum):
    """The ratio of reductions, with the quadratic model written densely; the damping follows it."""
    net, X, y = problem("mlp")
    damping = LevenbergMarquardt(0.3, factor=0.8)
    optimizer = KFAC(net, lr=0.2, momentum=momentum, damping=damping, kl_clip=None)
    want = 0.3
    for _ in range(6):
        optimizer.zero_grad()
        before = flattened(net(X), y)
        before.backward()
        g, start = flat_gradient(net), torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer.step()
        delta = torch.cat([p.detach().flatten() for p in net.parameters()]) - start
        predicted = g @ delta + 0.5 * delta @ (optimizer.operator @ delta + want * delta)
        after = flattened(net(X), y).detach()
        damping.update(before, after)
        rho = (after - before.detach()) / predicted
        torch.testing.assert_close(damping.ratio, rho, rtol=1e-9, atol=0)
        want *= 0.8 if rho > 0.75 else (1.25 if rho < 0.25 else 1.0)
        assert float(damping.damping) == pytest.approx(want, rel=1e-12)
    with pytest.raises(RuntimeError, match="no step"):
        damping.update(1.0, 1.0)
    for bad in ({"damping": 0.0}, {"factor": 1.0}, {"damping": 1.0, "most": 0.5}):
        with pytest.raises(ValueError, match="expected"):
            LevenbergMarquardt(**bad)


def test_the_representation_tells_what_it_is():
    assert "0 blocks, 0 steps, damping=0.001, factor_decay=0.95" in repr(KFACPreconditioner(mlp()))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"damping": 0.0}, "damping: found 0.0, expected a number > 0"),
        ({"damping": "1"}, "damping: found '1'"),
        ({"factor_decay": 1.5}, "factor_decay: found 1.5"),
        ({"factor_update_steps": 0}, "factor_update_steps: found 0, expected an integer >= 1"),
        ({"inv_update_steps": 1.5}, "inv_update_steps: found 1.5, expected an integer"),
        ({"kl_clip": -1.0}, "kl_clip: found"),
        ({"lr": -0.1}, "lr: found"),
        ({"accumulation_steps": 0}, "accumulation_steps: found 0"),
        ({"compute_method": "qr"}, "compute_method: found 'qr'"),
        ({"kfac_approx": "no"}, "kfac_approx"),
        ({"loss_average": "mean"}, "loss_average: found"),
        ({"factor_dtype": "float32"}, "factor_dtype"),
        ({"inv_dtype": torch.int64}, "inv_dtype"),
        ({"grad_scaler": 3}, "grad_scaler: found int"),
    ],
)
def test_bad_arguments(options, error):
    net = mlp()
    with pytest.raises((TypeError, ValueError), match=error):
        KFACPreconditioner(net, **options)
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_a_schedule_that_goes_wrong_is_named():
    net, X, _ = problem("mlp")
    preconditioner = KFACPreconditioner(net, factor_update_steps=lambda t: 0)
    with pytest.raises(ValueError, match="factor_update_steps: found 0"):
        net(X)
    preconditioner.close()
