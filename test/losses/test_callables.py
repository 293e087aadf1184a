"""Any callable (output, target) -> scalar, by autograd at the output."""

from __future__ import annotations

import pytest
import torch
from losses.loss_cases import classes, rand, unit
from torch import Tensor, nn

from curvops.losses import callables, output_loss

X, Y = rand(4, 3), rand(4, 3, seed=1)


@pytest.mark.parametrize("name", ["MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss"])
def test_A18_callables_give_the_same_curvature_as_the_known_losses(name: str) -> None:
    module = getattr(nn, name)()
    y = classes(3, 4) if name == "CrossEntropyLoss" else unit(4, 3)
    known, generic = output_loss(module).view(X, y), output_loss(lambda a, b: module(a, b)).view(X, y)
    assert generic.normalizer == 4
    torch.testing.assert_close(generic.hessian() / 4, known.hessian() / known.normalizer, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(generic.gradient() / 4, known.gradient() / known.normalizer, rtol=1e-12, atol=1e-14)


def test_roots_are_symmetric_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) @ rand(3, 3)).square().sum()

    whole = output_loss(loss, reduction="sum").view(X, Y)
    R = torch.stack([whole.column(torch.full((4, 1), j)) for j in range(3)], -1)
    torch.testing.assert_close(R, R.mT)
    monkeypatch.setattr(callables, "_CHUNK", 1)
    chunked = output_loss(loss, reduction="sum").view(X, Y)
    torch.testing.assert_close(chunked.root(X.unsqueeze(1)), whole.root(X.unsqueeze(1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: (x.mean(0) - y.mean(0)).square().sum(),
        lambda x, y: torch.logsumexp(x.flatten(), 0),
        lambda x, y: (x[0] * x[1]).sum() + x.square().sum(),
        lambda x, y: x.square().sum().square(),
    ],
)
def test_losses_that_couple_data_are_refused(loss) -> None:
    view = output_loss(loss).view(X, Y)
    view.gradient()
    with pytest.raises(ValueError, match="<lambda> couples data"):
        view.column(torch.zeros(4, 1, dtype=torch.long))


def test_losses_that_are_not_convex_are_refused() -> None:
    def sine(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).sin().sum()

    view = output_loss(sine).view(X, Y)
    torch.testing.assert_close(view.gradient(), 4 * (X - Y).cos())
    with pytest.raises(ValueError, match=r"Hessian of sine at the output is indefinite: eigenvalues from -.*convex"):
        view.root(X.unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_off_is_not_taken_for_concavity_or_coupling(dtype: torch.dtype) -> None:
    x, y = (1e3 * rand(5, 40)).to(dtype), classes(40, 5)
    view = output_loss(lambda a, b: nn.functional.cross_entropy(a, b)).view(x, y)
    view.column(torch.zeros(5, 1, dtype=torch.long))
    cancels = output_loss(lambda a, b: (a.exp().log() + a).sum()).view(x / 1e3, y)
    assert cancels.column(torch.zeros(5, 1, dtype=torch.long)).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda x, y: (x - y).square(), r"shape \(4, 3\)"),
        (lambda x, y: (x - y).square().mean().reshape(1), r"shape \(1,\)"),
        (lambda x, y: float(y.sum()), "float"),
        (lambda x, y: None, "NoneType"),
    ],
)
def test_A18_callables_return_a_scalar(loss, found: str) -> None:
    with pytest.raises(ValueError, match=f"<lambda> returned {found}, expected a 0-dim tensor"):
        output_loss(loss).view(X, Y).gradient()
    with pytest.raises(ValueError, match=found):
        output_loss(loss).total(X, Y)


@pytest.mark.parametrize(
    ("loss", "slope"),
    [
        (lambda x, y: y.sum(), 0.0),
        (lambda x, y: x.detach().square().sum(), 0.0),
        (lambda x, y: (y * PARAMETER).sum(), 0.0),
        (lambda x, y: x.sum(), 4.0),
        (lambda x, y: x.abs().sum() - x.abs().sum() + 2 * x.mean(), 4 * 2 / 12),
    ],
)
def test_A12_losses_without_second_derivative_give_zero(loss, slope: float) -> None:
    view = output_loss(loss).view(X, Y)
    torch.testing.assert_close(view.gradient(), torch.full_like(X, slope))
    assert not view.hessian().any()
    for t in (view.sample(0, torch.arange(4), 0), view.signs(0, torch.arange(4), 0), view.root(X.unsqueeze(1))):
        assert t.shape == X.shape
        assert not t.any()


PARAMETER = nn.Parameter(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_callables_run_with_gradients_in_any_mode_and_leave_no_trace(context) -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.full((), 3.0, dtype=torch.float64))
    seen = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        x.sub_(y)  # in place on what it was given
        return (module.scale * x.square()).sum(1).mean()

    leaf = X.clone().requires_grad_()
    kept = X.clone()
    output = leaf * 1
    with context():
        view = output_loss(loss).view(output, Y)
        H, g = view.hessian(), view.gradient()
    assert H.equal((6 * torch.eye(3, dtype=torch.float64)).expand(4, 1, 3, 3))
    torch.testing.assert_close(g, 6 * (X - Y))
    assert output.equal(kept)
    assert leaf.grad is None
    assert module.scale.grad is None
    assert not g.requires_grad
    assert not H.requires_grad
    assert all(x.data_ptr() != output.data_ptr() for x in seen)


def test_derivatives_are_computed_once_and_only_when_asked() -> None:
    calls = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return x.square().sum()

    view = output_loss(loss).view(X, Y)
    assert not calls
    for draw in range(3):
        view.sample(0, torch.arange(4), draw)
        view.column(torch.zeros(4, 1, dtype=torch.long))
    assert len(calls) == 1


def test_values_that_are_not_finite_are_named() -> None:
    view = output_loss(lambda x, y: x.sqrt().sum()).view(-unit(4, 3), Y)
    with pytest.raises(ValueError, match="gradient of <lambda> at the output is not finite"):
        view.gradient()
    view = output_loss(lambda x, y: x.abs().pow(1.5).sum()).view(torch.zeros(4, 3), Y)
    with pytest.raises(ValueError, match="Hessian of <lambda> at the output is not finite"):
        view.hessian()


def test_targets_may_be_anything() -> None:
    def loss(x: Tensor, y: dict[str, Tensor]) -> Tensor:
        return (y["mask"] * (x - y["value"])).square().sum()

    mask = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    view = output_loss(loss, reduction="sum").view(X, {"mask": mask, "value": Y})
    torch.testing.assert_close(view.hessian()[:, 0], torch.diag(2 * mask**2).expand(4, 3, 3))
