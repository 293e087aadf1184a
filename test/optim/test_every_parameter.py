"""Every parameter is trained, by a block or by the fallback, and once."""

from __future__ import annotations

import copy

import pytest
import torch
from optim.cases import F64, Oracle, batches, difference, loss_of, mlp
from torch import nn

from curvops.optim import KFAC, SINGD

MAKE = {
    "SINGD": lambda net, **o: SINGD(net, **{"lr": 1e-2, "damping": 1e-2, "T": 1, "lr_cov": 0.05, **o}),
    "KFAC": lambda net, **o: KFAC(net, **{"lr": 1e-2, "damping": 1e-2, **o}),
}
every_method = pytest.mark.parametrize("method", MAKE)


class Encoder(nn.Module):
    """Class token, positions, attention, norms, embedding, a scale: parameters of all kinds, some owned by containers."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        h = (
            self.encoder(h.transpose(0, 1)).transpose(0, 1)
            if not self.encoder.self_attn.batch_first
            else self.encoder(h)
        )
        return self.head(h[:, 0] * self.scale)


def step(net, optimizer, X, y, loss=nn.functional.cross_entropy):
    optimizer.zero_grad()
    value = loss(net(X), y)
    value.backward()
    optimizer.step()
    return value.item()


@every_method
@pytest.mark.parametrize("batch_first", [True, False])
def test_R6_an_encoder_is_trained_whole(batch_first, method):
    torch.manual_seed(0)
    net = Encoder(batch_first).double()
    X, y = torch.randint(11, (9, 5)), torch.randint(3, (9,))
    optimizer = MAKE[method](net)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    losses = [step(net, optimizer, X, y) for _ in range(8)]
    assert losses[-1] < losses[0]
    for name, p in net.named_parameters():
        assert not torch.equal(p, before[name]), name
    treatments = optimizer.treatments
    assert treatments.keys() == before.keys()
    kinds = {n: t.split()[0] for n, t in treatments.items()}
    assert {n for n, k in kinds.items() if k == "fallback"} == {
        *("embed.weight", "token", "positions", "scale"),
        *(f"encoder.norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")),
    }
    assert "layer_norm" in treatments["encoder.norm1.weight"]


@every_method
@pytest.mark.parametrize("batch_first", [True, False])
def test_R6_attention_has_the_statistics_of_its_projections(batch_first, method):
    """The output projection, which torch never calls as a module: A and B are those of its input and output."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
    net = nn.ModuleDict({"attention": attention})
    net.forward = lambda x: attention(x, x, x, need_weights=False)[0]
    X = torch.randn(4, 5, 8, dtype=F64)
    optimizer = KFAC(net, kl_clip=None, loss_average=None, damping=1e-3)
    net(X).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        for p in net.parameters():
            p += optimizer.param_groups[0]["lr"] * optimizer.state[p]["momentum_buffer"]  # back where it was
    inner = X @ attention.in_proj_weight[16:].T + attention.in_proj_bias[16:]
    q, k = (X @ attention.in_proj_weight[i : i + 8].T + attention.in_proj_bias[i : i + 8] for i in (0, 8))
    order = (0, 1) if batch_first else (1, 0)
    q, k, v = (t.transpose(0, order[0]).reshape(t.shape if batch_first else (5, 4, 8)) for t in (q, k, inner))
    heads = lambda t: t.unflatten(-1, (2, 4)).transpose(1, 2)  # noqa: E731
    mixed = nn.functional.scaled_dot_product_attention(*map(heads, (q, k, v))).transpose(1, 2).flatten(2)
    out = mixed @ attention.out_proj.weight.T + attention.out_proj.bias
    g = (2 * out).reshape(-1, 8)
    found = optimizer.operator.factors["attention.out_proj.weight"]
    torch.testing.assert_close(found.output, g.T @ g, rtol=1e-9, atol=1e-9)
    rows = torch.cat([mixed.reshape(-1, 8), torch.ones(20, 1, dtype=F64)], 1)
    torch.testing.assert_close(found.input, rows.T @ rows / 20, rtol=1e-9, atol=1e-9)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())[:, :3]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5, bias=False)

    def forward(self, x):
        return self.a(self.a(x).tanh())[:, :3]


@every_method
@pytest.mark.parametrize("kind", [Tied, Twice])
def test_R6_tied_weights_make_one_step_with_joint_statistics(kind, method):
    torch.manual_seed(0)
    net = kind().double()
    X, y = next(batches("mlp", 1))
    x1, W = X, net.a.weight.detach().clone()
    x2 = (x1 @ W.T).tanh()
    out = (x2 @ W.T).requires_grad_()
    loss_of("mlp", "mean")(out[:, :3], y).backward()
    g2 = out.grad
    g1 = (g2 @ W) * (1 - x2**2)
    rows, grads = torch.cat([x1, x2]), torch.cat([g1, g2])
    optimizer = MAKE[method](net, **({"kl_clip": None} if method == "KFAC" else {}))
    step(net, optimizer, X, y)
    A, B, G = rows.T @ rows / len(rows), len(X) * grads.T @ grads, g1.T @ x1 + g2.T @ x2
    if method == "KFAC":
        P = torch.linalg.solve(torch.kron(B, A) + 1e-2 * torch.eye(25, dtype=F64), G.flatten()).reshape(5, 5)
    else:
        f = Oracle()._new(A, B)
        Oracle()._update(f, A, B)
        P = f["C"] @ f["C"].T @ G @ f["K"] @ f["K"].T
    torch.testing.assert_close(net.a.weight, W - 1e-2 * P, rtol=1e-10, atol=1e-12)


@every_method
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight"])
def test_R6_frozen_parameters_stay(method, frozen):
    net = mlp()
    net.get_parameter(frozen).requires_grad_(False)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer = MAKE[method](net)
    for X, y in batches("mlp", 4):
        step(net, optimizer, X, y)
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]) == (name == frozen)


@every_method
def test_R6_parameters_that_are_frozen_or_unfrozen_later(method):
    net = mlp()
    net[0].requires_grad_(False)
    optimizer = MAKE[method](net, params=list(net.parameters()))
    data = list(batches("mlp", 6))
    for X, y in data[:2]:
        step(net, optimizer, X, y)
    net[0].requires_grad_(True)
    net[2].requires_grad_(False)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for X, y in data[2:]:
        step(net, optimizer, X, y)
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("2.")
    assert {t.split()[0] for t in optimizer.treatments.values()} == {"block"}


class Experts(nn.Module):
    """Which layer is used changes from step to step; one never is."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.chosen = 0

    def forward(self, x):
        return self.experts[self.chosen](x)


@every_method
def test_R6_layers_without_gradient_in_a_step(method):
    torch.manual_seed(0)
    net = Experts().double()
    optimizer = MAKE[method](net, weight_decay=0.0)
    for t, (X, y) in enumerate(batches("mlp", 8)):
        net.chosen = t % 2 if t != 1 else 0
        before = [e.weight.detach().clone() for e in net.experts]
        step(net, optimizer, X, y)
        for k, expert in enumerate(net.experts):
            assert torch.equal(expert.weight, before[k]) == (k != net.chosen)
    assert {n: t.split()[0] for n, t in optimizer.treatments.items()} == {
        f"experts.{k}.{p}": "block" for k in (0, 1) for p in ("weight", "bias")
    }


@every_method
def test_R6_partly_used_parameters(method):
    """Rows of one weight, used by two operations: every part has a block; the unused part keeps its gradient of zero."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 5))

        def forward(self, x):
            return nn.functional.linear(x, self.weight[:3]) + nn.functional.linear(x.tanh(), self.weight[3:6])

    net = Net().double()
    optimizer = MAKE[method](net, weight_decay=0.0)
    before = net.weight.detach().clone()
    for X, y in batches("mlp", 3):
        step(net, optimizer, X, y)
    assert torch.equal(net.weight[6:], before[6:])
    assert (net.weight[:6] != before[:6]).all()
    assert len(optimizer._engine.blocks) == 2


@every_method
@pytest.mark.parametrize(
    "fallback", ["adamw", "sgd", lambda groups: torch.optim.Adam(groups)], ids=["adamw", "sgd", "own"]
)
def test_R6_the_fallback_is_the_optimizer_that_was_asked_for(method, fallback):
    """Norms get what that optimizer makes of their gradients, along the same trajectory, with the schedule of lr."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    twin = nn.LayerNorm(4).double()
    groups = [{"params": [p], "weight_decay": 0.01} for p in twin.parameters()]
    their = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=3e-3),
        "sgd": lambda: torch.optim.SGD(groups, lr=3e-3, momentum=0.9),
    }
    reference = their[fallback]() if isinstance(fallback, str) else torch.optim.Adam(groups, lr=3e-3)
    optimizer = MAKE[method](net, fallback=fallback, fallback_lr=3e-3, weight_decay=0.01, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (optimizer, reference)]
    for X, y in batches("mlp", 6):
        optimizer.zero_grad()
        loss_of("mlp", "mean")(net(X), y).backward()
        for p, q in zip(twin.parameters(), net[1].parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert difference(twin, net[1]) < 1e-14


@every_method
def test_R6_the_fallback_may_refuse(method):
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    optimizer = MAKE[method](net, fallback="raise")
    X, y = next(batches("mlp", 1))
    loss_of("mlp", "mean")(net(X), y).backward()
    with pytest.raises(NotImplementedError, match=r"'1.weight' has no block \(layer_norm"):
        optimizer.step()
    with pytest.raises(ValueError, match="fallback: found 'adam'"):
        MAKE[method](mlp(), fallback="adam")


@every_method
def test_R6_groups_are_as_optimizers_of_their_own(method):
    """Two groups with settings of their own, in one optimizer and in two."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.a(x), self.b(x.tanh())

    settings = {
        "SINGD": (
            {"lr": 1e-2, "structures": ("diagonal", "dense"), "T": 3, "damping": 0.1},
            {"lr": 3e-2, "T": 2, "kfac_like": True, "lr_cov": 0.02, "momentum": 0.5},
        ),
        "KFAC": ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-2, "momentum": 0.5}),
    }[method]
    options = {"kl_clip": None} if method == "KFAC" else {}
    nets = Pair().double(), Pair().double()
    own = [list(m.parameters()) for m in (nets[0].a, nets[0].b)]
    together = MAKE[method](nets[0], params=[{"params": p, **s} for p, s in zip(own, settings, strict=True)], **options)
    apart = [
        MAKE[method](m, **{**options, **s}) for m, s in zip((nets[1].a, nets[1].b), settings, strict=True)
    ]  # each observes its own layer
    loss = loss_of("mlp", "mean")
    for X, y in batches("mlp", 12):
        for net, optimizers in ((nets[0], [together]), (nets[1], apart)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            a, b = net(X)
            (loss(a, y) + loss(b, y)).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert difference(*nets) < 1e-13


@every_method
def test_bad_groups(method):
    net = mlp()
    with pytest.raises(ValueError, match=r"\['0.weight', '0.bias'\] in different groups"):
        MAKE[method](net, params=[{"params": [net[0].weight]}, {"params": [net[0].bias]}])
    with pytest.raises(ValueError, match="not a parameter of the model"):
        MAKE[method](net, params=[nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="params: found none"):
        MAKE[method](net, params=[])
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MAKE[method](mlp().requires_grad_(False))
    assert not net._forward_hooks


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": -1.0}, "lr: found -1.0"),
        ({"momentum": "a"}, "momentum: found 'a'"),
        ({"damping": -1e-3}, "damping: found -0.001"),
        ({"alpha1": -0.5}, "alpha1"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"lr_cov": -1.0}, "lr_cov"),
        ({"T": 0}, "T: found 0"),
        ({"T": 2.0}, "T: found 2.0"),
        ({"loss_average": "token"}, "loss_average: found 'token'"),
        ({"loss_average": 0}, "loss_average: found 0"),
        ({"structures": "dense"}, "structures: found 'dense'"),
        ({"structures": ("dense",)}, "structures"),
        ({"structures": (3, "dense")}, "structure"),
        ({"kfac_approx": "full"}, "kfac_approx"),
        ({"preconditioner_dtype": (torch.int32, None)}, "preconditioner_dtype"),
        ({"preconditioner_dtype": None}, "preconditioner_dtype"),
    ],
)
def test_bad_arguments_of_singd(options, error):
    net = mlp()
    with pytest.raises((TypeError, ValueError), match=error):
        SINGD(net, **options)
    with pytest.raises((TypeError, ValueError), match=error):
        SINGD(net, [{"params": list(net.parameters()), **options}])
    assert not net._forward_hooks


@every_method
def test_R6_a_frozen_weight_with_a_trained_bias(method):
    """The bias is preconditioned in the block of its weight, whose gradient is zero."""
    net, (X, y) = mlp(), next(batches("mlp", 1))
    net[0].weight.requires_grad_(False)
    weight, bias = net[0].weight.clone(), net[0].bias.detach().clone()
    optimizer = MAKE[method](net, params=list(net.parameters()))
    step(net, optimizer, X, y)
    assert torch.equal(net[0].weight, weight)
    assert not torch.equal(net[0].bias, bias)
    assert optimizer.treatments["0.bias"] == "block '0.weight'"


@every_method
def test_R6_groups_that_join_later(method):
    """Layers that are unfrozen one after the other: a group that joins is as one that was there all the time."""
    nets, data = (mlp(), mlp()), list(batches("mlp", 8))
    for net in nets:
        net[0].requires_grad_(False)
    early = MAKE[method](
        nets[0],
        params=[{"params": list(nets[0][2].parameters())}, {"params": list(nets[0][0].parameters()), "lr": 0.03}],
    )
    late = MAKE[method](nets[1], params=list(nets[1][2].parameters()))
    for t, (X, y) in enumerate(data):
        if t == 3:
            for net in nets:
                net[0].requires_grad_(True)
            late.add_param_group({"params": list(nets[1][0].parameters()), "lr": 0.03})
        for net, optimizer in zip(nets, (early, late), strict=True):
            step(net, optimizer, X, y)
    assert difference(*nets) < 1e-15
    groups = len(late.param_groups)
    for bad, error in (
        ({"params": [nn.Parameter(torch.zeros(2))]}, "not a parameter of the model"),
        ({"params": list(nets[1][2].parameters())}, "more than one parameter group"),
    ):
        with pytest.raises(ValueError, match=error):
            late.add_param_group(bad)
        assert len(late.param_groups) == groups


@every_method
def test_R6_sparse_gradients(method):
    """An embedding with sparse gradients is trained as one with dense ones."""

    def make(sparse):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 5, sparse=sparse), nn.Flatten(), nn.Linear(15, 3)).double()

    nets = make(True), make(False)
    optimizers = [MAKE[method](net) for net in nets]
    for _ in range(3):
        X, y = torch.randint(10, (4, 3)), torch.randint(3, (4,))
        for net, optimizer in zip(nets, optimizers, strict=True):
            step(net, optimizer, X, y)
    assert difference(*nets) == 0.0


def test_R6_complex_parameters_need_an_optimizer_for_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64)), nn.Linear(3, 3)

        def forward(self, x):
            return self.head((x.to(torch.complex64) @ self.w).abs())

    net, X, y = Net(), torch.randn(4, 5), torch.randint(3, (4,))
    optimizer = SINGD(net)
    nn.functional.cross_entropy(net(X), y).backward()
    with pytest.raises(NotImplementedError, match=r"'w' is complex.*Give a function"):
        optimizer.step()
    optimizer.close()
    optimizer, before = SINGD(net, fallback=lambda groups: torch.optim.AdamW(groups)), net.w.detach().clone()
    step(net, optimizer, X, y)
    assert not torch.equal(net.w, before)


@every_method
@pytest.mark.parametrize(
    "net", [nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))], ids=["norm", "frozen"]
)
def test_R6_models_in_which_no_trained_parameter_has_a_rule(net, method):
    """They are trained by the fallback alone."""
    net = copy.deepcopy(net).double()
    if isinstance(net, nn.Sequential):
        net[0].requires_grad_(False)
    optimizer, (X, y) = MAKE[method](net), next(batches("mlp", 1))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for _ in range(3):
        step(net, optimizer, X, y)
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad
    assert {t.split(":")[0] for t in optimizer.treatments.values()} == {"fallback adamw"}
