"""R7: the same numbers as other libraries, wherever they are right; nothing is rescaled unless a test says so.

curvlinops 3.0.1 back-propagates one vector per class for all loss terms of a datum together. With several terms per
datum its type-2 factors hold cross terms between them, unless the terms never meet: that is compared.
"""

from __future__ import annotations

import copy
import warnings
from itertools import product

import pytest
import torch
from kfac.nets import Then, every_approx, every_loss, every_mse, joint_or_separate, kfac, mlp
from kfac.oracle import batches, relative_error
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they import is deprecated
    from backpack import backpack, extend
    from backpack.extensions import KFAC, KFLR
    from curvlinops import KFACInverseLinearOperator as TheirInverse
    from curvlinops import KFACLinearOperator as Theirs

TOL = 1e-11


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def strided() -> nn.Sequential:
    """Convolutions with stride, dilation and unequal kernels and paddings."""
    first, second = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Conv2d(3, 4, (2, 3), dilation=(1, 2), padding=(1, 2))
    return nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), nn.Flatten(), nn.Linear(80, 3))


def named_padding() -> nn.Sequential:
    """Convolutions whose padding has a name, one without bias, and an in-place activation."""
    first = nn.Conv2d(2, 3, (3, 5), padding="same", dilation=(2, 1))
    second = nn.Conv2d(3, 2, 2, stride=(1, 2), padding="valid", bias=False)
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.Flatten(), nn.Linear(24, 3))


def pixels() -> nn.Sequential:
    """Loss terms of all pixels, which meet in the first layer."""
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 2))


#: Nets, and shapes of a datum. First those with one loss term per datum.
SINGLE = {
    "mlp": (lambda: mlp(5, 4, 6, 3, act=nn.Tanh), (5,)),
    "strided": (strided, (2, 7, 8)),
    "named padding": (named_padding, (2, 5, 6)),
}
MANY = {"tokens": (lambda: mlp(5, 4, 3, act=nn.Tanh), (4, 2, 5)), "pixels": (pixels, (2, 5, 6))}
AGREED = [
    *product(SINGLE, ["type-2", "empirical", "forward-only"], ["expand", "reduce"]),
    *product(MANY, ["empirical", "forward-only"], ["expand", "reduce"]),
    ("tokens", "type-2", "expand"),
]


def setting(net: str, loss: nn.Module, *sizes: int) -> tuple[nn.Module, list]:
    """Return a net, with classes where the loss wants them, and batches."""
    make, shape = {**SINGLE, **MANY}[net]
    model = make()
    if net == "tokens" and isinstance(loss, nn.CrossEntropyLoss):
        model = Then(model, lambda y: y.movedim(-1, 1))
    return model, batches(model, loss, *(torch.randn(n, *shape) for n in sizes))


def both(model: nn.Module, loss: nn.Module, data: list, **options) -> tuple:
    params = list(model.parameters())
    options = {"fisher_type": "type-2", "separate_weight_and_bias": False, **options}
    return kfac(model, loss, params, data, **options), Theirs(
        model, loss, params, data, check_deterministic=False, **options
    )


def dense(op) -> Tensor:
    return op @ torch.eye(op.shape[0])


@pytest.mark.parametrize(("net", "fisher", "approx"), AGREED)
@joint_or_separate
@every_loss
def test_R7_curvlinops_factors(loss: nn.Module, separate: bool, net: str, fisher: str, approx: str) -> None:
    model, data = setting(net, loss, 3, 2)
    options = {"fisher_type": fisher, "kfac_approx": approx, "separate_weight_and_bias": separate}
    ours, theirs = both(model, loss, data, **options)
    assert relative_error(dense(ours), dense(theirs)) < TOL
    v = [torch.randn(p.shape) for p in model.parameters()]
    for a, b in zip(ours @ v, theirs @ v, strict=True):
        assert relative_error(a, b) < TOL


@every_mse
def test_R7_curvlinops_parameter_subsets_in_another_order(loss: nn.Module) -> None:
    model, data = setting("strided", loss, 3, 2)
    names = ["5.bias", "2.weight", "0.bias", "5.weight"]
    params = [model.get_parameter(n) for n in names]
    ours = kfac(model, loss, params, data)
    theirs = Theirs(model, loss, params, data, fisher_type="type-2", separate_weight_and_bias=False)
    assert ours.domain_names == tuple(names)
    assert relative_error(dense(ours), dense(theirs)) < TOL


@pytest.mark.parametrize("net", SINGLE)
@every_approx
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(reduction="sum"), nn.CrossEntropyLoss()], ids=str)
def test_R7_curvlinops_draws_have_the_same_law(loss: nn.Module, approx: str, net: str) -> None:
    model, data = setting(net, loss, 24)
    ours, theirs = map(dense, both(model, loss, data, fisher_type="mc", mc_samples=800, kfac_approx=approx))
    torch.testing.assert_close(ours / theirs.abs().max(), theirs / theirs.abs().max(), rtol=1e-1, atol=4e-2)


@pytest.mark.parametrize("how", ["factors", "heuristic", "exact"])
@pytest.mark.parametrize("net", SINGLE)
@joint_or_separate
@every_loss
def test_R7_curvlinops_inverses(loss: nn.Module, separate: bool, net: str, how: str) -> None:
    model, data = setting(net, loss, 3, 2)
    ours, theirs = both(model, loss, data, separate_weight_and_bias=separate)
    keep = torch.ones(ours.shape[0], dtype=torch.bool)
    if how == "heuristic" and separate:
        # A bias that is a block of its own has one factor, which we damp with all of λ, they as B of its weight.
        keep = torch.cat([torch.full((p.numel(),), "weight" in n) for n, p in model.named_parameters()])
    options = {"factors": {}, "heuristic": {"use_heuristic_damping": True}, "exact": {"use_exact_damping": True}}[how]
    for damping in (1e-3, 1e-2, 1.0):
        want = dense(TheirInverse(theirs, damping=damping, **options))
        assert relative_error(ours.inverse(damping, how=how).to_dense()[keep], want[keep]) < TOL


@joint_or_separate
@every_mse
def test_R7_curvlinops_trace_determinant_and_norm(loss: nn.Module, separate: bool) -> None:
    model = mlp(3, 4, 3, act=nn.Tanh)
    ours, theirs = both(model, loss, batches(model, loss, torch.randn(40, 3)), separate_weight_and_bias=separate)
    assert relative_error(ours.trace(), theirs.trace) < TOL
    assert relative_error(ours.frobenius_norm(), theirs.frobenius_norm) < TOL
    assert relative_error(ours.logdet(), theirs.logdet) < TOL
    assert relative_error(ours.det(), theirs.det) < 1e-9


BACKPACK = {
    "mlp": SINGLE["mlp"],
    "strided": SINGLE["strided"],
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1), nn.Sigmoid(), nn.Conv1d(3, 2, 2, stride=2), nn.Flatten(), nn.Linear(6, 3)
        ),
        (2, 7),
    ),
}
#: Output positions of the convolutions.
POSITIONS = {"mlp": {}, "strided": {"0.weight": 16, "2.weight": 20}, "conv1d": {"0.weight": 7, "2.weight": 3}}


@pytest.mark.parametrize("net", BACKPACK)
@pytest.mark.parametrize("kind", [KFLR, KFAC])
@pytest.mark.parametrize(
    "loss",
    [kind(reduction=r) for kind in (nn.MSELoss, nn.CrossEntropyLoss) for r in ("mean", "sum")],
    ids=lambda m: f"{type(m).__name__}-{m.reduction}",
)
def test_R7_backpack_factors(loss: nn.Module, kind: type, net: str) -> None:
    """BackPACK's scale: linear layers agree as they are, output factors too; inputs of convolutions are summed.

    For a convolution with ``S`` output positions, BackPACK's input factor is ``S`` times ours of KFAC-expand (a sum
    over positions, not a mean), and its output factor is ours of KFAC-reduce (gradients are summed over positions
    first).
    """
    make, shape = BACKPACK[net]
    model = make()
    ((X, y),) = data = batches(model, loss, torch.randn(24, *shape))
    options = {"separate_weight_and_bias": True}
    expand, reduce = (kfac(model, loss, None, data, kfac_approx=a, **options).factors for a in ("expand", "reduce"))
    extended = extend(copy.deepcopy(model))
    extension = KFLR() if kind is KFLR else KFAC(mc_samples=1000)
    with backpack(extension):
        extend(type(loss)(reduction=loss.reduction))(extended(X.clone().requires_grad_()), y).backward()
    for name, p in extended.named_parameters():
        output, *inputs = getattr(p, extension.savefield)
        if kind is KFLR:
            assert relative_error(output, reduce[name].output) < TOL
        else:
            size = reduce[name].output.abs().max()
            torch.testing.assert_close(output / size, reduce[name].output / size, rtol=1e-1, atol=3e-2)
        for A in inputs:
            assert relative_error(A, POSITIONS[net].get(name, 1) * expand[name].input) < TOL
        assert len(inputs) == ("weight" in name)
