"""Defects of kfac-pytorch with decompositions, layers and inputs; the table is in ``test_kfac_pytorch_defects``."""

from __future__ import annotations

import pytest
import torch
from optim.cases import F64, mlp
from optim.kfac_cases import LOSS, METHODS, close, flat_gradient, gradients_of, net_and_data, problem, step
from torch import nn

from curvops import KFACLinearOperator
from curvops.optim import KFAC, KFACPreconditioner
from curvops.optim.decompositions import ComputeMethod, eigenvectors


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e20])
def test_R11_dead_layers_and_constant_inputs(method, scale):
    """Factors of rank zero and one, and of size 1e-40 and 1e40."""
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        net[0].bias.fill_(-1e30)
    step(net, scale * torch.ones(6, 4, dtype=F64), torch.zeros(6, dtype=torch.long), compute_method=method)
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_R11_a_decomposition_that_fails_is_done_in_another_way():
    """There is no ``eigh`` for bfloat16: it raises, and float64 is next."""
    torch.manual_seed(0)
    F = torch.randn(2, 5, 9).to(torch.bfloat16)
    F = F @ F.mT
    with pytest.raises(RuntimeError):
        torch.linalg.eigh(F)
    with pytest.warns(UserWarning, match="Decomposed the block of 'layer' in float64, since simpler attempts failed"):
        found = eigenvectors({"layer": (F, F)})["layer"]
    Q = torch.linalg.eigh(((F + F.mT) / 2).double()).eigenvectors
    overlap = (Q.mT @ found.B.double()).abs()
    assert (overlap - torch.eye(5, dtype=F64)).abs().max() < torch.finfo(torch.bfloat16).eps * 5


def test_R11_what_cannot_be_decomposed_is_named():
    bad = torch.full((1, 3, 3), float("nan"), dtype=F64)
    with pytest.raises(ValueError, match="Found 18 non-finite entries in the block of 'layer'"):
        eigenvectors({"layer": (bad, bad)})


@pytest.mark.parametrize("name", ["eigen", "EIGEN", ComputeMethod.EIGEN])
@pytest.mark.parametrize("prediv", [True, False])
def test_R11_methods_by_name_are_methods(name, prediv):
    net, X, y = problem("mlp")
    _, want = gradients_of(KFACPreconditioner(net, kl_clip=None), net, X, y)
    other, X, y = problem("mlp")
    step(other, X, y, compute_method=name, compute_eigenvalue_outer_product=prediv)
    close(flat_gradient(other), want)


@pytest.mark.parametrize(
    "change", [lambda X: X.contiguous(memory_format=torch.channels_last), lambda X: X.mT.contiguous().mT]
)
@pytest.mark.parametrize("method", METHODS)
def test_R11_memory_formats_and_transposed_inputs(method, change):
    net, X, y = net_and_data()
    a, b = (step(net, x, y, compute_method=method) for x in (X, change(X)))
    close(b.operator.to_dense(), a.operator.to_dense())


def test_R11_transposed_inputs_of_linear_layers():
    net, X, y = problem("mlp")
    a, b = (step(net, x, y) for x in (X, X.T.contiguous().T))
    close(b.operator.to_dense(), a.operator.to_dense())


class Keywords(nn.Module):
    """Inputs by keyword, and activations that overwrite outputs of layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

    def forward(self, x):
        h = nn.functional.relu_(self.conv(input=x))
        return self.last(input=h.flatten(1)).mul_(1.0)


@pytest.mark.parametrize("method", METHODS)
def test_R11_keywords_and_activations_in_place(method):
    torch.manual_seed(0)
    net = Keywords().double()
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()
    plain.load_state_dict(dict(zip(plain.state_dict(), net.state_dict().values(), strict=True)))
    _, X, y = net_and_data()
    step(net, X, y, compute_method=method)
    step(plain, X, y, compute_method=method)
    close(flat_gradient(net), flat_gradient(plain))


def test_R11_layers_that_are_never_used():
    net, X, y = net_and_data()
    net.extra = nn.Linear(2, 2)
    run = nn.Sequential.forward
    net.forward = lambda x: run(nn.Sequential(*list(net)[:4]), x)
    preconditioner = step(net, X, y)
    assert net.extra.weight.grad is None
    assert "extra.weight" not in preconditioner.treatments


@pytest.mark.parametrize("frozen", ["0.bias", "3.bias", "3.weight"])
def test_R11_a_frozen_parameter_does_not_drop_its_layer(frozen):
    """The rest of the layer is preconditioned as the operator of the trained parameters says."""
    net, X, y = net_and_data()
    dict(net.named_parameters())[frozen].requires_grad_(False)
    params = {n: p for n, p in net.named_parameters() if p.requires_grad}
    K = KFACLinearOperator(net, LOSS, params, [(X, y)], fisher_type="empirical")
    LOSS(net(X), y).backward()
    g = torch.cat([p.grad.flatten() for p in params.values()])
    step(net, X, y, damping=0.05)
    assert dict(net.named_parameters())[frozen].grad is None
    close(torch.cat([p.grad.flatten() for p in params.values()]), K.inverse(0.05) @ g)


class Cell(nn.Module):
    """A recurrent cell of linear layers, used at every time."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = torch.tanh(self.inner(x[:, t]) + self.outer(h))
        return self.head(h)


#: Networks, shapes of a datum, and parameters that the operators have no Kronecker block for.
OTHERS = {
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3, dilation=2), nn.Flatten(), nn.Linear(9, 3)), (2, 7), ()),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 2, 2), nn.Flatten(), nn.Linear(16, 3)), (2, 3, 3, 3), ()),
    "ConvTranspose2d": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Flatten(), nn.Linear(48, 3)),
        (2, 3, 3),
        (),
    ),
    "recurrent": (Cell, (4, 5), ()),
    "LSTM": (
        lambda: nn.Sequential(nn.LSTM(5, 4, batch_first=True), Last(), nn.Linear(4, 3)),
        (4, 5),
        ("0.weight_ih_l0", "0.weight_hh_l0", "0.bias_ih_l0", "0.bias_hh_l0"),
    ),
    "GroupNorm": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(1, 4), nn.Linear(4, 3)),
        (5,),
        ("1.weight", "1.bias"),
    ),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)), None, ("0.weight",)),
}


class Last(nn.Module):
    def forward(self, x):
        return x[0][:, -1]


@pytest.mark.parametrize("kind", OTHERS)
def test_R11_other_layers(kind):
    """As the operator has them; what it has no Kronecker block for keeps its gradient, and says why."""
    torch.manual_seed(0)
    make, shape, plain = OTHERS[kind]
    net, y = make().double(), torch.randint(3, (30,))
    X = torch.randint(7, (30, 3)) if shape is None else torch.randn(30, *shape, dtype=F64)
    params = {n: p for n, p in net.named_parameters() if n not in plain}
    K = KFACLinearOperator(net, LOSS, params, [(X, y)], fisher_type="empirical")
    preconditioner = KFACPreconditioner(net, damping=0.05, kl_clip=None)
    LOSS(net(X), y).backward()
    before = {n: p.grad.clone() for n, p in net.named_parameters()}
    preconditioner.step()
    want = K.inverse(0.05) @ torch.cat([before[n].flatten() for n in params])
    close(torch.cat([p.grad.flatten() for p in params.values()]), want)
    for name, p in net.named_parameters():
        assert torch.equal(p.grad, before[name]) == (name in plain)
        assert preconditioner.treatments[name].startswith("gradient as it is: " if name in plain else "block")


@pytest.mark.parametrize("make", [KFACPreconditioner, KFAC])
def test_R11_compiled_models_have_the_names_of_theirs(make):
    net, X, y = problem("mlp")
    optimizer = make(torch.compile(net, backend="eager"), skip_layers=["^0$"])
    gradients_of(optimizer, net, X, y)
    assert optimizer.treatments["2.weight"] == "block '2.weight'"
    assert "skip_layers" in optimizer.treatments["0.weight"]
    optimizer.load_state_dict(optimizer.state_dict())


def test_R11_what_it_does_can_be_read():
    """The clipping, the spectrum of the curvature, and what became of every parameter."""
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(net, kl_clip=1e-6)
    gradients_of(preconditioner, net, X, y)
    assert 0 < preconditioner.clip_scale < 1
    dense = torch.linalg.eigvalsh(preconditioner.operator.to_dense())
    close(preconditioner.operator.eigenvalues().sort().values, dense)
    assert set(preconditioner.treatments) == {n for n, _ in mlp().named_parameters()}
