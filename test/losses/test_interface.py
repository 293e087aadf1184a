"""What is accepted, what is refused and how it is said, dtypes, side effects."""

from __future__ import annotations

import warnings
from collections import namedtuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses.loss_cases import OwnCrossEntropy, classes, rand, unit
from torch import Tensor, nn

from curvops.losses import Elementwise, OutputView, output_loss, register
from curvops.losses.callables import CallableLoss
from curvops.losses.categorical import CrossEntropy

TWINS = [
    (F.mse_loss, nn.MSELoss, {}),
    (F.l1_loss, nn.L1Loss, {}),
    (F.smooth_l1_loss, nn.SmoothL1Loss, {"beta": 0.4}),
    (F.huber_loss, nn.HuberLoss, {"delta": 0.4}),
    (F.poisson_nll_loss, nn.PoissonNLLLoss, {"log_input": True, "full": True, "eps": 1e-3}),
    (F.kl_div, nn.KLDivLoss, {"log_target": True, "reduction": "batchmean"}),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, {"weight": unit(3), "pos_weight": unit(3, seed=3)}),
    (F.cross_entropy, nn.CrossEntropyLoss, {"weight": unit(3), "ignore_index": 1, "label_smoothing": 0.1}),
    (F.nll_loss, nn.NLLLoss, {"weight": unit(3), "ignore_index": 1}),
]


def quiet(loss: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return output_loss(loss, **options)


def assert_same(a: OutputView, b: OutputView) -> None:
    for f in (OutputView.gradient, OutputView.hessian, lambda v: v.normalizer):
        torch.testing.assert_close(f(a), f(b), rtol=0, atol=0)


@pytest.mark.parametrize(("function", "module", "options"), TWINS, ids=lambda p: getattr(p, "__name__", ""))
def test_A18_functional_twins_are_the_modules(function: Any, module: type[nn.Module], options: dict[str, Any]) -> None:
    x = rand(5, 3)
    y = classes(3, 5) if function in (F.cross_entropy, F.nll_loss) else unit(5, 3)
    assert_same(quiet(function).view(x, y), quiet(module()).view(x, y))
    nested = partial(partial(function, **options), **({} if "reduction" in options else {"reduction": "sum"}))
    twin = quiet(nested)
    known = quiet(module(**{"reduction": "sum", **options}))
    assert type(twin) is type(known)
    assert twin.reduction == known.reduction
    assert_same(twin.view(x, y), known.view(x, y))
    assert quiet(function, reduction="sum").reduction == "sum"


def test_A18_functional_gaussian_nll() -> None:
    x, y, v = rand(5, 3), rand(5, 3, seed=1), unit(5, 3)
    view = output_loss(partial(F.gaussian_nll_loss, eps=0.3)).view(x, (y, v))
    assert_same(view, output_loss(nn.GaussianNLLLoss(eps=0.3)).view(x, (y, v)))
    torch.testing.assert_close(view.hessian(), torch.diag_embed(1 / v.clamp(min=0.3)).unsqueeze(1))


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (partial(F.mse_loss, weight=unit(3)), {}, r"mse_loss with keywords \['weight'\] is not supported"),
        (partial(F.mse_loss, size_average=False), {}, r"keywords \['size_average'\]"),
        (partial(F.mse_loss, unit(3)), {}, "mse_loss with positional arguments"),
        (partial(F.mse_loss, reduction="sum"), {"reduction": "mean"}, "reduction='sum' but reduction='mean' was asked"),
        (nn.MSELoss(), {"reduction": "sum"}, "MSELoss has reduction='mean' but reduction='sum' was asked"),
        (nn.MSELoss(), {"reduction": "average"}, "Found reduction='average', expected 'mean' or 'sum'"),
        (nn.BCELoss(), {"reduction": "sum"}, "BCELoss has reduction='mean' but"),
        (nn.MSELoss(reduction="none"), {}, r"MSELoss has reduction='none', expected one of .*: use MSELoss"),
        (nn.CrossEntropyLoss(reduction="none"), {}, "reduction='none'"),
        (partial(F.cross_entropy, reduction="none"), {}, "CrossEntropyLoss has reduction='none'"),
        (nn.BCELoss(reduction="none"), {}, "BCELoss has reduction='none', expected 'mean' or 'sum'"),
        (nn.MSELoss(reduction="batchmean"), {}, "reduction='batchmean'"),
        (nn.CrossEntropyLoss(torch.tensor([1.0, -0.5])), {}, "weight holds -0.5, expected values >= 0"),
        (nn.NLLLoss(torch.tensor([1.0, -0.5])), {}, "weight holds -0.5"),
        (nn.BCEWithLogitsLoss(weight=torch.tensor([-2.0])), {}, "weight holds -2"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([-2.0])), {}, "pos_weight holds -2"),
        (nn.MSELoss(), {"class_dim": 1}, "class_dim=1 means nothing to MSELoss"),
        (lambda x, y: x.sum(), {"class_dim": 1}, "class_dim=1 means nothing to <lambda>"),
    ],
)
def test_A6_unsupported_options_are_refused(loss: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        output_loss(loss, **options)


@pytest.mark.parametrize("loss", ["mse", None, nn.MSELoss])
def test_what_is_not_a_loss_is_refused(loss: Any) -> None:
    with pytest.raises(TypeError, match="expected an instance of a loss module or a callable"):
        output_loss(loss)


X = rand(4, 3)


@pytest.mark.parametrize(
    ("loss", "output", "target", "error", "message"),
    [
        (nn.MSELoss(), X, rand(4), ValueError, r"shape \(4, 3\) but the target \(4,\)"),
        (nn.MSELoss(), rand(4, 1), rand(4), ValueError, r"shape \(4, 1\) but the target \(4,\)"),
        (nn.MSELoss(), X, X > 0, TypeError, "floating point target, found torch.bool"),
        (nn.MSELoss(), X, [1.0], TypeError, "needs a tensor as target, found list"),
        (nn.MSELoss(), X, X.to("meta"), ValueError, "output is on cpu but the target on meta"),
        (nn.HuberLoss(), X, classes(2, 4, 3), TypeError, "floating point target, found torch.int64"),
        (nn.BCEWithLogitsLoss(), X, classes(2, 4, 3), TypeError, "floating point target, found torch.int64"),
        (nn.BCEWithLogitsLoss(pos_weight=3 * X.new_ones(3)), X, X - 9, ValueError, "make the loss concave"),
        (nn.BCEWithLogitsLoss(weight=unit(2)), X, unit(4, 3), ValueError, r"weight has shape \(2,\)"),
        (nn.BCEWithLogitsLoss(pos_weight=unit(4)), X, unit(4, 3), ValueError, r"pos_weight has shape \(4,\)"),
        (nn.PoissonNLLLoss(log_input=False), unit(4, 3), X - 9, ValueError, "expected counts >= 0"),
        (nn.CrossEntropyLoss(), X, torch.tensor([0, 3, 1, 1]), ValueError, "class 3 is out of range, expected 0"),
        (nn.CrossEntropyLoss(), X, torch.tensor([0, -1, 1, 1]), ValueError, "target class -1 is out of range"),
        (nn.CrossEntropyLoss(), X, classes(3, 4).int(), TypeError, r"torch.int64, found torch.int32: use \.long"),
        (nn.CrossEntropyLoss(), X, rand(4), TypeError, "torch.int64, found torch.float64"),
        (nn.CrossEntropyLoss(), X, classes(3, 4, 3), TypeError, "class probabilities and must be floating point"),
        (nn.CrossEntropyLoss(), X, classes(3, 5), ValueError, r"of shape \(4,\), found a target of shape \(5,\)"),
        (nn.CrossEntropyLoss(), rand(4, 2, 3), classes(3, 4, 2), ValueError, r"say class_dim="),
        (nn.CrossEntropyLoss(), rand(3), torch.tensor(1), ValueError, "add a batch axis"),
        (nn.CrossEntropyLoss(unit(4)), X, classes(3, 4), ValueError, r"weight has shape .* the output has 3 classes"),
        (nn.CrossEntropyLoss(ignore_index=1), X, X.softmax(1), ValueError, "ignore_index=1 means nothing"),
        (nn.CrossEntropyLoss(), X, -X.softmax(1), ValueError, "negative sum"),
        (nn.GaussianNLLLoss(), X, X, ValueError, r"pair \(y, variance\)"),
        (nn.GaussianNLLLoss(), X, (X, X, X), ValueError, "has 3 entries"),
        (nn.GaussianNLLLoss(), X, (X, -unit(4, 3)), ValueError, "found a variance -"),
        (nn.GaussianNLLLoss(), X, (X, unit(2)), ValueError, r"variance has shape \(2,\)"),
        (nn.GaussianNLLLoss(), X, (X.long(), unit(4, 3)), TypeError, "floating point target"),
    ],
)  # fmt: skip
def test_A6_bad_targets_are_refused_by_view_and_total(loss, output, target, error, message) -> None:
    with pytest.raises(error, match=message):
        output_loss(loss).view(output, target)
    if not any(word in message for word in ("concave", "counts", "negative", "weight has")):  # linear in these
        with pytest.raises(error, match=message):
            output_loss(loss).total(output, target)


def test_A12_losses_without_curvature_say_so() -> None:
    with pytest.warns(UserWarning, match="NLLLoss has no second derivative.*CrossEntropyLoss on logits"):
        output_loss(nn.NLLLoss())
    with pytest.warns(UserWarning, match="KLDivLoss has no second derivative.*class probabilities"):
        output_loss(F.kl_div, reduction="sum")
    with pytest.warns(UserWarning, match="L1Loss has no second derivative.*HuberLoss") as record:
        output_loss(nn.L1Loss())
    assert record[0].filename == __file__


def test_subclasses_with_their_own_forward_are_other_losses() -> None:
    class Same(nn.CrossEntropyLoss):
        pass

    assert isinstance(output_loss(Same()), CrossEntropy)
    assert isinstance(output_loss(OwnCrossEntropy()), CallableLoss)
    patched = nn.CrossEntropyLoss()
    patched.forward = lambda x, y: x.square().sum()
    assert isinstance(output_loss(patched), CallableLoss)


def test_R2_modules_with_hooks_or_their_own_call_are_other_losses() -> None:
    class Tripled(nn.MSELoss):
        def __call__(self, *args: Any) -> Any:
            return 3 * super().__call__(*args)

    hooked = nn.MSELoss()
    hooked.register_forward_hook(lambda module, args, value: 3 * value)
    output, target = torch.zeros(4, 2), torch.ones(4, 2)
    for loss in (Tripled(), hooked):
        view = output_loss(loss).view(output, target)
        H = view.hessian() / view.normalizer
        torch.testing.assert_close(H, 3 * torch.eye(2).expand(4, 1, 2, 2) / 4)


def test_R2_a_bound_forward_is_its_module() -> None:
    loss = output_loss(nn.CrossEntropyLoss(ignore_index=1).forward)
    view = loss.view(torch.zeros(3, 4), torch.tensor([1, 1, 2]))
    assert view.normalizer == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_R2_scripted_losses_are_refused() -> None:
    """Their options cannot be read, and a mean over a batch is not one over the data."""
    scripted = torch.jit.script(nn.CrossEntropyLoss(ignore_index=1))
    with pytest.raises(ValueError, match=r"scripted CrossEntropyLoss.* pass the CrossEntropyLoss itself"):
        output_loss(scripted)


def test_losses_that_torch_differentiates_only_once_say_so() -> None:
    view = output_loss(nn.MultiMarginLoss(p=2)).view(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(NotImplementedError, match="MultiMarginLoss cannot be differentiated twice"):
        view.hessian()


def test_compiled_modules_are_recognised() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert output_loss(torch.compile(loss, backend="eager")).loss is loss


def test_an_output_loss_passes_through() -> None:
    loss = output_loss(nn.MSELoss())
    assert output_loss(loss) is loss


Pair = namedtuple("Pair", "prediction state")


@pytest.mark.parametrize(
    "output",
    [
        X,
        (X, 1),
        [X],
        Pair(X, None),
        SimpleNamespace(logits=X, loss=0),
        {"logits": X, "a": 0},
        {"loss_free": X, "hidden": 0},
    ],
)
def test_A18_prepare_finds_the_prediction(output: Any) -> None:
    assert output_loss(nn.MSELoss()).prepare(output) is X
    assert output_loss(lambda x, y: x.sum()).prepare(output) is X


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (None, TypeError, "the model returned NoneType, expected a tensor"),
        ((), TypeError, "the model returned tuple"),
        ([[X]], TypeError, "the model returned list"),
        (X.long(), TypeError, "dtype torch.int64, expected a real floating"),
        (X.to(torch.complex128), TypeError, "dtype torch.complex128"),
        (X.sum(), ValueError, "0-dim tensor"),
    ],
)
def test_A18_prepare_refuses_what_is_no_prediction(output: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        output_loss(nn.MSELoss()).prepare(output)


def test_prepare_stacks_mean_and_variance() -> None:
    loss = output_loss(nn.GaussianNLLLoss())
    mean, v = rand(4, 3).requires_grad_(), unit(4, 3)
    for variance in (v, v[:, :1], v[:, 0], torch.tensor(2.0, dtype=torch.float64)):
        stacked = loss.prepare((mean, variance))
        assert stacked.shape == (4, 3, 2)
        assert stacked.requires_grad
        assert stacked[..., 0].equal(mean)
    assert loss.prepare((mean, v[:, 0]))[1, 2, 1] == v[1, 0]
    with pytest.raises(ValueError, match="returned 3 tensors"):
        loss.prepare((mean, v, v))
    with pytest.raises(ValueError, match=r"variance has shape \(2,\)"):
        loss.prepare((mean, v[0, :2]))
    with pytest.raises(TypeError, match="variance of type NoneType"):
        loss.prepare((mean, None))
    assert loss.prepare((mean, 0.5)).equal(loss.prepare((mean, torch.full_like(mean, 0.5))))
    assert loss.prepare(mean) is mean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), F.huber_loss, F.mse_loss]
)
def test_low_precision_is_computed_in_float32_and_cast_once(loss: Any, dtype: torch.dtype) -> None:
    loss = (lambda x, y: (x - y).pow(4).sum(1).mean()) if loss is F.huber_loss else loss
    x = rand(5, 3).to(dtype)
    y = classes(3, 5) if isinstance(loss, nn.CrossEntropyLoss) else rand(5, 3, seed=4).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    built, index = output_loss(loss), torch.arange(5)
    view = built.view(x, y)
    reference = built.view(x.to(wide), y.to(wide) if y.is_floating_point() else y)
    for f in (
        OutputView.gradient,
        lambda v: v.sample(0, index, 0),
        lambda v: v.signs(0, index, 0),
        lambda v: v.column(torch.zeros(5, 1, dtype=torch.long)),
        lambda v: v.root(rand(5, 1, v.columns)),
    ):
        assert f(view).dtype == dtype
        assert f(view).equal(f(reference).to(dtype))
    assert view.hessian().dtype == wide
    assert view.normalizer.dtype == torch.float64
    assert built.total(x, y).dtype == wide


class Mixed(nn.Module):
    """A loss with a matrix product, which autocast would compute in bfloat16."""

    reduction = "mean"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) @ torch.eye(3)).square().sum(1).mean()


@register(Mixed)
class MixedAtOutput(Elementwise):
    def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * (x - y), torch.full_like(x, 2)


@pytest.mark.parametrize("loss", [Mixed(), Mixed().forward])
def test_autocast_does_not_reach_into_a_loss(loss: Any) -> None:
    x, y = rand(4, 3).float(), rand(4, 3, seed=1).float()
    built = output_loss(loss)

    def everything() -> list[Tensor]:
        view = built.view(x, y)
        return [view.gradient(), view.root(x.unsqueeze(1)), view.hessian(), built.total(x, y)]

    with torch.autocast("cpu", torch.bfloat16):
        inside = everything()
    for a, b in zip(inside, everything(), strict=True):
        assert a.equal(b)


def test_no_side_effects() -> None:
    weight = unit(3).float()
    loss = nn.CrossEntropyLoss(weight, reduction="mean")
    before, state = dict(vars(loss)), torch.get_rng_state()
    torch.set_default_dtype(torch.float16)
    x = rand(4, 3).requires_grad_()
    built = output_loss(loss)
    view = built.view(x, classes(3, 4))
    built.total(x, classes(3, 4))
    for t in (view.sample(0, torch.arange(4), 0), view.signs(0, torch.arange(4), 0), view.gradient(), view.hessian()):
        assert t.dtype == torch.float64
        assert not t.requires_grad
    assert x.grad is None
    assert vars(loss) == before
    assert loss.weight is weight
    assert loss._buffers["weight"] is weight
    assert torch.get_rng_state().equal(state)


def test_A17_an_empty_batch_adds_nothing() -> None:
    none = torch.zeros(0, 3, dtype=torch.float64)
    for loss, y in [
        (nn.MSELoss(), none),
        (nn.BCEWithLogitsLoss(), none),
        (nn.CrossEntropyLoss(), torch.zeros(0, dtype=torch.long)),
        (lambda x, y: (x - y).square().mean(), none),
    ]:
        built = output_loss(loss)
        view = built.view(none, y)
        assert view.normalizer == 0
        assert built.total(none, y) == 0
        index = torch.zeros(0, dtype=torch.long)
        for t in (view.gradient(), view.sample(0, index, 0), view.column(torch.zeros(0, view.T).long())):
            assert t.shape == none.shape


def test_A6_a_batch_of_ignored_targets_adds_nothing() -> None:
    x, y = rand(3, 4), torch.full((3,), -100)
    built = output_loss(nn.CrossEntropyLoss(label_smoothing=0.2))
    view = built.view(x, y)
    assert view.normalizer == 0
    assert built.total(x, y) == 0
    assert not view.gradient().any()
    assert not view.hessian().any()


def test_registered_losses_of_users() -> None:
    class LogCosh(nn.Module):
        reduction = "mean"

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = (x - y).cosh().log()
            return z.mean() if self.reduction == "mean" else z.sum()

    x, y = rand(4, 3), rand(4, 3, seed=1)
    generic = output_loss(LogCosh()).view(x, y)
    assert (generic.T, generic.C) == (1, 3)

    @register(LogCosh)
    class LogCoshAtOutput(Elementwise):
        def derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (x - y).tanh(), (x - y).cosh().pow(-2)

    built = output_loss(LogCosh())
    assert type(built) is LogCoshAtOutput
    view = built.view(x, y)
    assert built.total(x, y) == LogCosh()(x, y) * 12
    torch.testing.assert_close(view.hessian() / view.normalizer, generic.hessian() / generic.normalizer)
