"""What KFACPreconditioner is told: layers to skip, dtypes, passes to wait for; what it tells; what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optim.cases import batches, mlp
from optim.kfac_cases import METHODS, close, flat_gradient, flattened, gradients_of, problem
from torch import nn

from curvops.optim import KFAC, KFACPreconditioner, LambdaParamScheduler, LevenbergMarquardt


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Linear(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.decoder = nn.Linear(4, 3)

    def forward(self, x):
        h = self.embed(x)
        return self.decoder(self.attention(h, h, h, need_weights=False)[0])


@pytest.mark.parametrize(
    ("patterns", "skipped"),
    [
        (["multihead"], ("attention",)),
        (["^embed$", "DECODER"], ("embed", "decoder")),
        (["Linear"], ("embed", "decoder", "attention.out_proj")),
        ([r"out_proj$"], ("attention.out_proj",)),
        ([], ()),
    ],
    ids=str,
)
def test_R5_layers_that_are_skipped(patterns, skipped):
    """By name or class, in any case; attention takes its projections along."""
    net = Attention().double()
    preconditioner = KFACPreconditioner(net, skip_layers=patterns, kl_clip=None, loss_average="batch+sequence")
    X, y = next(batches("tokens", 1))
    flattened(net(X), y).backward()
    before = {n: p.grad.clone() for n, p in net.named_parameters()}
    preconditioner.step()
    for name, p in net.named_parameters():
        inside = any(name.startswith(s + ".") for s in skipped)
        assert torch.equal(p.grad, before[name]) == inside, name
        assert ("skip_layers" in preconditioner.treatments[name]) == inside


@pytest.mark.parametrize("kind", ["tied", "shared"])
@pytest.mark.parametrize("pattern", ["^a$", "^b$"])
@pytest.mark.parametrize("make", [KFACPreconditioner, KFAC])
def test_R5_any_name_of_a_layer_skips_what_it_holds(make, pattern, kind):
    """PyTorch lists a tied weight, or a shared layer, under its first name only."""
    net, X, y = problem(kind)
    optimizer = make(net, skip_layers=[pattern])
    gradients_of(optimizer, net, X, y)
    names = {"a.weight", "a.bias"} if kind == "shared" else {"a.weight", f"{pattern[1]}.bias"}
    assert {n for n, t in optimizer.treatments.items() if "skip_layers" in t} == names
    assert optimizer.treatments["head.weight"] == "block 'head.weight'"


def counted(preconditioner):
    """Bytes of the tensors that are there."""
    method = preconditioner._engine.method
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors if t is not None)  # noqa: E731
    averages, solutions = method.averages.of.values(), method.solutions.values()
    return {
        "a_factors": size(f.A for f in averages),
        "g_factors": size(f.B for f in averages),
        "a_batch": 0,
        "g_batch": 0,
        "a_inverses": size(t for s in solutions for t in (s.A, s.a)),
        "g_inverses": size(t for s in solutions for t in (s.B, s.b, s.values, s.reciprocals)),
    }


def test_R5_memory_of_the_documented_example():
    """An MLP 4-5-3 with biases: the numbers of kfac-pytorch in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    X, y = torch.randn(7, 4), torch.randint(3, (7,))
    preconditioner = KFACPreconditioner(net)
    assert preconditioner.memory_usage()["total"] == 0
    flattened(net(X), y).backward()
    pending = preconditioner.memory_usage()
    assert (pending["a_batch"], pending["g_batch"], pending["total"]) == (244, 136, 380)
    preconditioner.step()
    assert preconditioner.memory_usage() == {
        "a_factors": 244, "g_factors": 136, "a_batch": 0, "g_batch": 0, "a_inverses": 244, "g_inverses": 308, "total": 932,
    }  # fmt: skip
    preconditioner.close()
    inverse = KFACPreconditioner(net, compute_method="INVERSE")
    gradients_of(inverse, net, X, y)
    assert inverse.memory_usage()["total"] == 760


@pytest.mark.parametrize("prediv", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["mlp", "conv", "tied"])
def test_R5_memory_is_that_of_the_tensors(kind, method, prediv):
    net, X, y = problem(kind)
    preconditioner = KFACPreconditioner(net, compute_method=method, compute_eigenvalue_outer_product=prediv)
    gradients_of(preconditioner, net, X, y)
    found = preconditioner.memory_usage()
    assert found.pop("total") == sum(found.values())
    assert found == counted(preconditioner)


def test_R5_memory_of_gradients_that_wait_for_eigenvectors():
    """EKFAC holds inputs and output gradients of a batch until the step: 30 data of widths 5, 4 and 4, 3 in float64."""
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(net, compute_method="ekfac")
    flattened(net(X), y).backward()
    pending = preconditioner.memory_usage()
    assert pending["a_batch"] == 8 * (30 * (5 + 4) + 6**2 + 5**2)
    assert pending["g_batch"] == 8 * (30 * (4 + 3) + 4**2 + 3**2)
    preconditioner.reset_batch()
    assert preconditioner.memory_usage()["total"] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "inv_dtype", "held"),
    [
        (torch.float64, torch.float32, torch.float64),  # float64 stays
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, None, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("factor_dtype", [None, torch.bfloat16, torch.float64])
def test_R5_dtypes(method, dtype, inv_dtype, held, factor_dtype):
    net = mlp().to(dtype)
    preconditioner = KFACPreconditioner(net, inv_dtype=inv_dtype, factor_dtype=factor_dtype, compute_method=method)
    X, y = next(batches("mlp", 1, (30,)))
    gradients_of(preconditioner, net, X.to(dtype), y)
    inside = preconditioner._engine.method
    factors = factor_dtype or torch.promote_types(dtype, torch.float32)
    assert {t.dtype for f in inside.averages.of.values() for t in (f.A, f.B)} == {factors}
    assert {t.dtype for s in inside.solutions.values() for t in s.tensors().values()} == {held}
    assert {p.grad.dtype for p in net.parameters()} == {dtype}


@pytest.mark.parametrize("method", METHODS)
def test_R5_several_passes_before_a_step(method):
    """`accumulation_steps` is how many are waited for; they count as one batch, whatever their sizes."""
    nets = [problem("mlp") for _ in range(2)]
    (whole, X, y), (parts, _, _) = nets
    options = {"damping": 0.03, "kl_clip": None, "compute_method": method}
    _, want = gradients_of(KFACPreconditioner(whole, **options), whole, X, y)
    preconditioner = KFACPreconditioner(parts, accumulation_steps=3, **options)
    for i, part in enumerate(torch.arange(len(X)).split([4, 15, 11])):
        (flattened(parts(X[part]), y[part]) * len(part) / len(X)).backward()
        if i < 2:
            with pytest.raises(RuntimeError, match=f"accumulation_steps: found {i + 1} .*expected 3"):
                preconditioner.step()
    preconditioner.step()
    close(flat_gradient(parts), want)


def test_R5_a_batch_may_be_thrown_away():
    net, X, y = problem("mlp")
    with KFACPreconditioner(net) as preconditioner:
        _, want = gradients_of(preconditioner, net, X, y)
    preconditioner = KFACPreconditioner(net)
    flattened(net(3 * X), y).backward()
    preconditioner.reset_batch()
    _, found = gradients_of(preconditioner, net, X, y)
    close(found, want)


def test_R5_numbers_of_numpy_are_numbers():
    damping, every = np.float32(0.5), np.int64(3)
    values = KFACPreconditioner(mlp(), damping=damping, inv_update_steps=every).hyperparameters.values
    assert (type(values["damping"]), type(values["inv_update_steps"])) == (float, int)


def test_R5_the_representation_tells_what_it_is():
    net, X, y = problem("mlp")
    preconditioner = KFACPreconditioner(net, damping=LevenbergMarquardt(0.5), kl_clip=None)
    assert "KFACPreconditioner of 0 blocks, 0 steps, damping=LevenbergMarquardt(0.5," in repr(preconditioner)
    gradients_of(preconditioner, net, X, y)
    assert "of 2 blocks, 1 steps" in repr(preconditioner)
    assert repr(preconditioner).endswith("factor_update_steps=1, inv_update_steps=1, kl_clip=None, lr=0.1>")
    assert all(f"{v}: " in repr(KFAC(mlp(), lr=0.25)) for v in ("lr", "momentum", "weight_decay"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"damping": 0.0}, "damping: found 0.0, expected a number > 0"),
        ({"damping": "1"}, "damping: found '1'"),
        ({"damping": float("nan")}, "damping: found nan, expected a number > 0"),
        ({"factor_decay": 1.5}, "factor_decay: found 1.5"),
        ({"factor_update_steps": 0}, "factor_update_steps: found 0, expected an integer >= 1"),
        ({"inv_update_steps": 1.5}, "inv_update_steps: found 1.5, expected an integer"),
        ({"inv_update_steps": True}, "inv_update_steps: found True, expected an integer"),
        ({"kl_clip": -1.0}, "kl_clip: found"),
        ({"lr": -0.1}, "lr: found"),
        ({"accumulation_steps": 0}, "accumulation_steps: found 0"),
        ({"compute_method": "qr"}, "compute_method: found 'qr'"),
        ({"kfac_approx": "no"}, "kfac_approx"),
        ({"loss_average": "mean"}, "loss_average: found"),
        ({"factor_dtype": "float32"}, "factor_dtype"),
        ({"inv_dtype": torch.int64}, "inv_dtype"),
        ({"grad_scaler": 3}, "grad_scaler: found int"),
        ({"skip_layers": "Linear"}, "skip_layers: found the string 'Linear', expected a list"),
        ({"skip_layers": ["."]}, "no parameter to precondition"),
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
    with pytest.raises(ValueError, match="lr: found no such hyperparameter"):
        LambdaParamScheduler(KFAC(mlp()), lr_lambda=lambda t: 1.0)
    preconditioner.close()
