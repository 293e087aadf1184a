"""Statistics are those of the training loss alone, whatever else happens to the model; nothing is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from optim.cases import F64, batches, loss_of, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from curvops import KFACLinearOperator
from curvops.kfac.uses import Use
from curvops.optim import KFAC, SINGD, KFACPreconditioner
from curvops.optim.passes import ForwardPass

LOSS = loss_of("mlp", "mean")


def factors(preconditioner):
    return preconditioner.operator.to_dense()


def wanted(net, X, y, **options):
    """The curvature of one batch, from an operator on a copy."""
    options = {"fisher_type": "empirical", **options}
    return KFACLinearOperator(copy.deepcopy(net), nn.CrossEntropyLoss(), None, [(X, y)], **options).to_dense()


def observed(net):
    return KFACPreconditioner(net, kl_clip=None)


def close_to(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def penalty(net, X, y):
    X = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(LOSS(net(X), y), X, create_graph=True)
    return g.square().sum()


DISTURBANCES = {
    "gradient of inputs before": lambda net, X, y: torch.autograd.grad(
        LOSS(net(x := X.clone().requires_grad_()), y), x
    ),
    "gradient of parameters": lambda net, X, y: torch.autograd.grad(LOSS(net(X), y), list(net.parameters())),
    "evaluation": lambda net, X, y: _no_grad(lambda: net(X)),
    "evaluation in evaluation mode": lambda net, X, y: (net.eval(), _no_grad(lambda: net(X)), net.train()),
    "inference mode": lambda net, X, y: _inference(lambda: net(X)),
    "a forward pass that is thrown away": lambda net, X, y: net(2 * X),
    "a pass that fails": lambda net, X, y: _fails(lambda: net(X[:, :3])),
    "a penalty that is not trained": lambda net, X, y: penalty(net, X, y),
    "functorch": lambda net, X, y: torch.func.grad(lambda p: LOSS(torch.func.functional_call(net, p, (X,)), y))(
        {n: p.detach() for n, p in net.named_parameters()}
    ),
}


def _no_grad(f):
    with torch.no_grad():
        return f()


def _inference(f):
    with torch.inference_mode():
        return f()


def _fails(f):
    with pytest.raises(RuntimeError, match="shapes"):
        f()


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("what", DISTURBANCES)
def test_R9_what_is_not_training_leaves_no_trace(what, when):
    net, (X, y) = mlp(), next(batches("mlp", 1))
    preconditioner = observed(net)
    if when == "before":
        DISTURBANCES[what](net, X, y)
    loss = LOSS(net(X), y)
    if when == "between":
        DISTURBANCES[what](net, X, y)
    loss.backward()
    if when == "after":
        DISTURBANCES[what](net, X, y)
    preconditioner.step()
    close_to(factors(preconditioner), wanted(net, X, y))


def test_R9_gradient_penalties():
    """The penalty is part of the loss: its gradient is trained, its double backward pass does not enter twice."""
    net, (X, y) = mlp(), next(batches("mlp", 1))
    plain = copy.deepcopy(net)
    preconditioner = observed(net)
    (LOSS(net(X), y) + 0.1 * penalty(net, X, y)).backward()
    g = [p.grad.clone() for p in net.parameters()]
    (LOSS(plain(X), y) + 0.1 * penalty(plain, X, y)).backward()
    for a, p in zip(g, plain.parameters(), strict=True):
        close_to(a, p.grad)
    preconditioner.step()
    assert torch.isfinite(factors(preconditioner)).all()


def test_R9_zero_grad_forgets_what_belongs_to_the_gradients():
    net = mlp()
    optimizer = KFAC(net, kl_clip=None, lr=0.0)
    (X, y), (Z, t) = batches("mlp", 2)
    LOSS(net(X), y).backward()
    optimizer.zero_grad()
    LOSS(net(Z), t).backward()
    optimizer.step()
    close_to(factors(optimizer), wanted(net, Z, t))


def test_R9_several_forwards_before_one_backward():
    net = mlp()
    data = list(batches("mlp", 3))
    preconditioner = observed(net)
    n = sum(len(X) for X, _ in data)
    losses = [LOSS(net(X), y) * len(X) / n for X, y in data]
    sum(losses).backward()
    preconditioner.step()
    close_to(factors(preconditioner), wanted(net, torch.cat([X for X, _ in data]), torch.cat([y for _, y in data])))


def test_R9_another_model_and_shared_layers():
    """A second model with a layer in common: its passes are its own."""
    net, (X, y) = mlp(), next(batches("mlp", 1))
    other = nn.Sequential(net[0], nn.Tanh(), nn.Linear(4, 2).double())
    preconditioner = observed(net)
    LOSS(net(X), y).backward()
    g = [p.grad.clone() for p in net.parameters()]
    other(X).square().sum().backward()
    for p, a in zip(net.parameters(), g, strict=True):
        p.grad = a
    preconditioner.step()
    close_to(factors(preconditioner), wanted(net, X, y))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.reentrant = nn.Linear(5, 4), nn.Linear(4, 3), reentrant

    def forward(self, x):
        inner = lambda h: self.b(self.a(h).tanh())  # noqa: E731
        return inner(x) if self.reentrant is None else checkpoint(inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_R9_activation_checkpoints(reentrant):
    net, (X, y) = Checkpointed(reentrant).double(), next(batches("mlp", 1))
    preconditioner = observed(net)
    LOSS(net(X.requires_grad_(reentrant)), y).backward()
    preconditioner.step()
    net.reentrant = None
    close_to(factors(preconditioner), wanted(net, X.detach(), y))


@pytest.mark.parametrize("order", ["hooks first", "compiled first", "compiled and run first"])
def test_R9_compiled_models(order):
    """Steps that observe run eagerly, the others compiled, the whole model as one graph."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    net, data = mlp(), list(batches("mlp", 6, (8,)))
    run = torch.compile(net, backend=backend) if order != "hooks first" else None
    if order == "compiled and run first":
        run(data[0][0])
    preconditioner = KFACPreconditioner(net if order != "compiled first" else run, factor_update_steps=2, kl_clip=None)
    run = run or torch.compile(net, backend=backend)
    graphs.clear()
    for t, (X, y) in enumerate(data):
        net.zero_grad()
        LOSS(run(X), y).backward()
        preconditioner.step()
        if t == 0:
            close_to(factors(preconditioner), wanted(mlp(), X, y))
            assert graphs == []
    assert len(graphs) == 1
    assert len([name for name in graphs[0] if "linear" in name]) == 2
    K = KFACLinearOperator(mlp(), nn.CrossEntropyLoss(), None, [data[0]], fisher_type="empirical")
    for X, y in data[2::2]:
        K.update([(X, y)], 0.95)
    close_to(factors(preconditioner), K.to_dense())
    preconditioner.close()


@pytest.mark.parametrize("wrap", ["dict", "tuple", "object"])
def test_R9_answers_of_all_shapes(wrap):
    class Output(dict):
        @property
        def logits(self):
            return self["logits"]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            out = self.net(x)
            hidden = x.square()
            return {
                "dict": {"logits": out, "hidden": hidden},
                "tuple": (out, [hidden]),
                "object": Output(hidden=hidden, logits=out),
            }[wrap]

    net, (X, y) = Net(), next(batches("mlp", 1))
    preconditioner = observed(net)
    out = net(X)
    LOSS(out[0] if wrap == "tuple" else out["logits"], y).backward()
    preconditioner.step()
    close_to(factors(preconditioner), wanted(net.net, X, y))


def test_R9_models_that_are_not_called_as_a_whole():
    net, (X, y) = mlp(), next(batches("mlp", 1))
    preconditioner = observed(net)

    def run():
        return net[2](net[1](net[0](X)))

    LOSS(run(), y).backward()
    with pytest.raises(RuntimeError, match="no forward and backward pass of the model was observed"):
        preconditioner.step()
    net.zero_grad()
    with preconditioner.observe(loss_terms=len(X)):
        out = run()
    LOSS(out, y).backward()
    preconditioner.step()
    close_to(factors(preconditioner), wanted(net, X, y))
    net.zero_grad()
    with (
        pytest.raises(RuntimeError, match="leave the block before the backward pass"),
        preconditioner.observe(loss_terms=9),
    ):
        LOSS(run(), y).backward()


def test_R9_a_backward_pass_inside_observe():
    net, (X, y) = mlp(), next(batches("mlp", 1))
    preconditioner = observed(net)
    with preconditioner.observe(loss_terms=len(X)):
        LOSS(net(X), y).backward()
    preconditioner.step()
    close_to(factors(preconditioner), wanted(net, X, y))


@pytest.mark.parametrize("fisher_type", ["type-2", "mc", "signs", "empirical-per-term"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_R9_other_fishers(fisher_type, approx):
    net, loss = mlp(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=F64))
    X, y = next(batches("mlp", 1))
    preconditioner = KFACPreconditioner(net, kl_clip=None, kfac_approx=approx)
    with preconditioner.observe(fisher_type=fisher_type, loss=loss, target=y, mc_samples=2, seed=3):
        loss(net(X), y).backward()
    preconditioner.step()
    K = KFACLinearOperator(net, loss, None, [(X, y)], fisher_type=fisher_type, mc_samples=2, seed=3, kfac_approx=approx)
    close_to(factors(preconditioner), K.to_dense())
    for options, error in (
        ({"fisher_type": "mc"}, "needs loss= and target="),
        ({"fisher_type": "MC", "loss": loss, "target": y}, "fisher_type"),
        ({"loss": loss}, "takes the user's own gradients"),
    ):
        with pytest.raises(ValueError, match=error), preconditioner.observe(**options):
            pass


def hooks_of(net):
    found = [len(h) for m in net.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    return found + [len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()]


@pytest.mark.parametrize("make", [SINGD, KFAC, KFACPreconditioner])
def test_R9_nothing_is_left_behind(make):
    net, (X, y) = mlp(), next(batches("mlp", 1))
    before = hooks_of(net)
    optimizer = make(net)
    LOSS(net(X), y).backward()
    optimizer.step()
    assert hooks_of(net) != before
    optimizer.close()
    assert hooks_of(net) == before
    with make(net) as other:
        LOSS(net(X), y).backward()
        other.step()
    assert hooks_of(net) == before
    for _ in range(9 if make is SINGD else 0):
        other.step()  # not due
    LOSS(net(X), y).backward()
    with pytest.raises(RuntimeError, match="closed"):
        other.step()
    # One that is forgotten goes, with its hooks, as if it had been closed.
    net.zero_grad()
    third = make(net)
    LOSS(net(X), y).backward()
    third.step()
    gone = weakref.ref(third)
    del third, optimizer, other
    gc.collect()
    assert gone() is None
    assert hooks_of(net) == before
    make(net).close()


@pytest.mark.parametrize("make", [SINGD, KFAC, KFACPreconditioner])
def test_R9_copies_of_an_observed_model_are_free(make):
    net, (X, y) = mlp(), next(batches("mlp", 1))
    optimizer = make(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        LOSS(other(X), y).backward()
        assert optimizer._engine.observer.counts.passes == 0
        make(other).close()
    LOSS(net(X), y).backward()
    assert optimizer._engine.observer.counts.passes == 1


def test_R9_one_observer_at_a_time():
    net = mlp()
    first = SINGD(net)
    with pytest.raises(ValueError, match="observed by another optimizer"):
        KFACPreconditioner(net)
    first.close()
    KFACPreconditioner(net)


def test_R9_nothing_of_the_users_is_touched():
    """Random state, buffers, gradients, flags: as without the optimizer."""

    def run(observe):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        optimizer = observe(net)
        X, y = next(batches("mlp", 1))
        LOSS(net(X), y).backward()
        state = [p.grad for p in net.parameters()] + list(net.buffers()) + [torch.get_rng_state()]
        assert X.grad is None
        del optimizer
        return [t.clone() for t in state]

    plain = run(lambda net: None)
    for make in (
        SINGD,
        KFACPreconditioner,
        lambda n: SINGD(n, kfac_approx="reduce"),
        lambda n: KFAC(n, compute_method="ekfac"),
    ):
        for a, b in zip(plain, run(make), strict=True):
            assert torch.equal(a, b)


def test_R9_steps_that_do_not_observe_cost_nothing():
    """Between updates the model runs without the recorder: what it computes there is not even seen."""
    net = mlp()
    optimizer = SINGD(net, T=3)
    seen = []
    for X, y in batches("mlp", 6):
        optimizer.zero_grad()
        LOSS(net(X), y).backward()
        seen.append(optimizer._engine.observer.counts.passes)
        optimizer.step()
    assert seen == [1, 0, 0, 1, 0, 0]


def forward_passes():
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is ForwardPass]


def test_R9_nothing_goes_in_circles_through_the_graph():
    """Python cannot collect circles through nodes of autograd: none with uncovered and drawn uses, nor after errors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    X, y = next(batches("mlp", 1))
    before = len(forward_passes())
    optimizer = KFAC(net)
    for fisher in ({}, {"fisher_type": "mc", "loss": nn.CrossEntropyLoss(), "target": y}):
        optimizer.zero_grad()
        with optimizer.observe(**fisher):
            out = net(X)
        LOSS(out, y).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="leave the block"), optimizer.observe():
        LOSS(net[2](net[1](net[0](X))), y).backward()
    net(X)
    optimizer.zero_grad()
    del out
    optimizer.close()
    assert len(forward_passes()) == before


@pytest.mark.parametrize(
    "make", [lambda n: SINGD(n, T=1), lambda n: KFAC(n, compute_method="ekfac")], ids=["SINGD", "EKFAC"]
)
def test_R9_losses_that_are_kept_keep_no_activations(make):
    """Summing up losses with their graphs is a common slip; after a step those graphs are empty, as without the optimizer."""
    before = {id(o) for o in forward_passes()}
    net, kept = mlp(), []
    optimizer = make(net)
    for X, y in batches("mlp", 3):
        optimizer.zero_grad()
        kept.append(LOSS(net(X), y))
        kept[-1].backward()
        optimizer.step()
    passes = [o for o in forward_passes() if id(o) not in before]
    assert len(passes) == 3  # the graphs are there, and what watched them
    held = [t for o in passes for part in gc.get_referents(vars(o)) for t in gc.get_referents(part)]
    assert not [t for t in held if type(t) in (torch.Tensor, Use)]
