"""Bad data, exceptions, half precision, odd nets: where others are silently wrong, or fail without a clear word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kfac.oracle import block_diagonal, dense_ggn, joint_groups, relative_error
from kfac.test_silent_errors import Net, check, mlp, regression
from losses.loss_cases import classes, rand
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from curvops import KFACLinearOperator as KFAC
from curvops import explain


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


# ---- data ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("once", [iter, lambda d: (b for b in d), lambda d: zip(*zip(*d, strict=True), strict=True)])
def test_R2_A11_one_shot_data_are_refused(once: Callable) -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"one-shot iterator.*list\(data\)"):
        KFAC(net, nn.MSELoss(), None, once(regression(net, 3)))


def test_R2_A13b_T44_nets_in_train_mode_are_refused_and_stay_as_they_are() -> None:
    norm, drop = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    active = Net(lambda m, x: F.dropout(m.a(x), 0.5), a=nn.Linear(3, 4))
    data, params = [(rand(6, 3), rand(6, 4))], None
    words = ("'1' \\(BatchNorm1d\\) is in train mode", "'1' \\(Dropout\\) is in train mode", "p=0.5")
    for net, found in zip((norm, drop, active), words, strict=True):
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises(ValueError, match=f"{found}.*allow_train_mode=True"):
            KFAC(net, nn.MSELoss(), params, data)
        params = [net[0].weight] if net is norm else None
        KFAC(net, nn.MSELoss(), params, data, allow_train_mode=True, check_deterministic=net is norm)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert net.training
        params = None
    with pytest.raises(ValueError, match="Two predictions on the first batch differ"):
        KFAC(drop, nn.MSELoss(), None, data, allow_train_mode=True, check_deterministic=True)


def test_R2_A19_shuffling_is_harmless_or_found() -> None:
    net = nn.Linear(3, 2)
    x, y = rand(7, 3), rand(7, 2, seed=5)
    loader = DataLoader(TensorDataset(x, y), 3, shuffle=True)
    K = KFAC(net, nn.MSELoss(), None, loader, fisher_type="type-2")
    assert relative_error(K.to_dense(), dense_ggn(net, nn.MSELoss(), dict(net.named_parameters()), [(x, y)])) < 1e-12
    with pytest.raises(ValueError, match=r"X of the first batch differs between two readings.*shuffling"):
        KFAC(net, nn.MSELoss(), None, loader, check_deterministic=True)


WRONG = [({"num_data": 7}, "found 7.*hold 6"), ({"num_per_example_loss_terms": 2}, "found 2.*6 loss terms for 6 data")]


@pytest.mark.parametrize(("counts", "found"), WRONG)
def test_R2_A19_counts_are_checked_not_trusted(counts: dict[str, int], found: str) -> None:
    net = nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(rand(7, 3), rand(7, 2)), 3, drop_last=True)
    with pytest.raises(ValueError, match=found):
        KFAC(net, nn.MSELoss(), None, loader, **counts)
    assert KFAC(net, nn.MSELoss(), None, loader, num_data=6, num_per_example_loss_terms=1).num_data == 6


# ---- numbers --------------------------------------------------------------------------------------------------
def test_R2_A14c_bfloat16_over_512_batches() -> None:
    """Sums over the batches are in float32: in bfloat16 they would be off by 9 % in A and 50 % in B."""
    net = Net(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).bfloat16()
    x, y = (rand(1024, 3) + 1).bfloat16(), rand(1024, 2, seed=5).bfloat16()
    data = list(zip(x.split(2), y.split(2), strict=True))
    factors = KFAC(net, nn.MSELoss(), None, data, fisher_type="empirical").factors
    hidden = [net.a(x).detach() for x, _ in data]
    last = [(2 * (net.b(h).detach().float() - y.float())).bfloat16() for h, (_, y) in zip(hidden, data, strict=True)]
    first = [g @ net.b.weight.detach() for g in last]
    for name, inputs, gradients in (("a.weight", list(x.split(2)), first), ("b.weight", hidden, last)):
        rows, g = torch.cat([torch.cat(inputs).double(), torch.ones(1024, 1)], 1), torch.cat(gradients).double()
        assert relative_error(factors[name].input.double(), rows.T @ rows / 1024) < 1e-5
        assert relative_error(factors[name].output.double(), g.T @ g / 2048) < 1e-5
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    assert relative_error(K.factors["b.weight"].output.double(), torch.eye(2)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_R2_A14_half_precision_inverts(dtype: torch.dtype) -> None:
    net = mlp().to(dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in regression(mlp(), 3)]
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    exact = K.to(dtype=torch.float64)
    for how in ("exact", "factors", "heuristic"):
        want = exact.inverse(0.1, how=how).to_dense()
        assert relative_error(K.inverse(0.1, how=how).to_dense().double(), want) < 2e-2
    assert K.inverse(0.1).torch_dtype == dtype


def test_R2_A14_autocast_changes_nothing_beyond_rounding() -> None:
    net = mlp().float()
    data = [(x.float(), y.float()) for x, y in regression(mlp(), 3)]
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    with torch.autocast("cpu", torch.bfloat16):
        L = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
        assert L.factors["a.weight"].output.dtype == L.inverse(0.1).torch_dtype == torch.float32
    assert 0 < relative_error(L.to_dense(), K.to_dense()) < 2e-2


# ---- exceptions ---------------------------------------------------------------------------------------------
def in_the_net(net: Net, x: Tensor) -> Tensor:
    if len(x) == 1:
        raise RuntimeError("boom")
    return net.b(net.a(x).tanh())


def in_the_loss(o: Tensor, y: Tensor) -> Tensor:
    if len(o) == 1:
        raise RuntimeError("boom")
    return (o - y).square().mean()


class InTheData(list):
    def __iter__(self) -> Iterator:
        yield self[0]
        raise RuntimeError("boom")


@pytest.mark.parametrize("where", ["net", "loss", "data"])
def test_R2_A9_an_exception_in_the_middle_leaves_everything_as_it_was(where: str) -> None:
    net = mlp()
    data = regression(net, 3)
    before = KFAC(net, nn.MSELoss(), None, data).to_dense()
    params, state, call = list(net.parameters()), torch.get_rng_state(), net._call
    net._call = in_the_net if where == "net" else call
    loss = in_the_loss if where == "loss" else nn.MSELoss()
    with pytest.raises(RuntimeError, match="boom"):
        KFAC(net, loss, None, InTheData(data) if where == "data" else data)
    net._call = call
    assert all(p is q and p.grad is None and p.requires_grad for p, q in zip(net.parameters(), params, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params)
    assert not _get_current_function_mode_stack()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(KFAC(net, nn.MSELoss(), None, data).to_dense(), before)


# ---- parameters and outputs ---------------------------------------------------------------------------------
def test_R2_A12_T35_unused_parameters_and_zero_jacobians_are_zero_blocks() -> None:
    net = Net(lambda m, x: m.a(x) + 0.0 * m.b(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2), c=nn.Linear(5, 5))
    data = regression(net, 3)
    for kind in ("type-2", "mc", "empirical"):
        K = KFAC(net, nn.MSELoss(), None, data, fisher_type=kind)
        M = K.to_dense()
        assert M[:8, :8].any()
        assert not M[8:].any()
        assert not M[:, 8:].any()
    assert "never reached" in K.treatments["c.weight"].detail
    assert explain(net, data=data)["c.weight"].kind == "zero"
    assert K.factors["c.weight"].kind == "zero"
    assert relative_error(K.inverse(0.1).to_dense(), torch.linalg.inv(M + 0.1 * torch.eye(len(M)))) < 1e-10


@pytest.mark.parametrize("loss", [nn.L1Loss, nn.NLLLoss])
def test_R2_A12_a_loss_without_second_derivative_is_zero_and_says_so(loss: type) -> None:
    net = mlp()
    y = rand(6, 2) if loss is nn.L1Loss else classes(2, 6)
    with pytest.warns(UserWarning, match=f"{loss.__name__} has no second derivative"):
        K = KFAC(net, loss(), None, [(rand(6, 3), y)], fisher_type="type-2")
    assert not K.to_dense().any()
    with pytest.warns(UserWarning, match="has no second derivative"):
        assert KFAC(net, loss(), None, [(rand(6, 3), y)], fisher_type="empirical").to_dense().any()


def test_R2_A13_batch_norm_with_running_statistics() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net(rand(20, 3))
    net.eval()
    data, params = regression(net, 3), dict(net.named_parameters())
    with pytest.raises(NotImplementedError, match=r"'1\.(weight|bias)' is used by batch_norm.*unsupported='exact'"):
        KFAC(net, nn.MSELoss(), None, data)
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2", unsupported="exact")
    groups = [["0.weight", "0.bias"], ["1.weight"], ["1.bias"], ["2.weight", "2.bias"]]
    want = block_diagonal(dense_ggn(net, nn.MSELoss(), params, data), params, groups)
    assert relative_error(K.to_dense(), want) < 1e-9


def test_R2_A17_one_dimensional_outputs_and_batches_of_other_lengths() -> None:
    net = Net(lambda m, x: m.b(m.a(x)).squeeze(-1), a=nn.Linear(3, 4), b=nn.Linear(4, 1))
    check(net, regression(net, 3))
    # Lengths differ from batch to batch: the risk of the whole set counts entries.
    net = Net(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    data = [(rand(n, t, 3, seed=t), rand(n, t, 2, seed=9)) for n, t in ((2, 5), (3, 1), (2, 4))]
    params, total = dict(net.named_parameters()), nn.MSELoss(reduction="sum")
    want = sum(dense_ggn(net, total, params, [batch]) for batch in data) / sum(y.numel() for _, y in data)
    K = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2")
    assert relative_error(K.to_dense(), block_diagonal(want, params, joint_groups(params))) < 1e-9


def test_R2_A17_empty_data_and_empty_batches_are_refused() -> None:
    net = mlp()
    with pytest.raises(ValueError, match="found no batches"):
        KFAC(net, nn.MSELoss(), None, [])
    for kind in ("type-2", "mc", "empirical"):
        with pytest.raises(ValueError, match=r"Batch 3: the prediction is empty.*leave empty batches out"):
            KFAC(net, nn.MSELoss(), None, [*regression(net, 3), (rand(0, 3), rand(0, 2))], fisher_type=kind)


def test_R2_A18_frozen_parameters() -> None:
    net = mlp()
    data = regression(net, 3)
    whole = KFAC(net, nn.MSELoss(), None, data)
    net.a.requires_grad_(False)
    K = KFAC(net, nn.MSELoss(), None, data)
    assert K.domain_names == ("b.weight", "b.bias")
    assert relative_error(K.to_dense(), whole.block("b.weight").to_dense()) < 1e-12
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="none requires a gradient"):
        KFAC(net, nn.MSELoss(), None, data)
    # Asked for by name, they are differentiated all the same.
    named = KFAC(net, nn.MSELoss(), dict(net.named_parameters()), data)
    assert relative_error(named.to_dense(), whole.to_dense()) < 1e-12
    assert not any(p.requires_grad for p in net.parameters())


@dataclass
class ModelOutput:
    hidden: Tensor
    logits: Tensor


FORMS: dict[str, Callable] = {
    "keyword": lambda m, x: m.b(input=m.a(input=x).tanh()),
    "functional keyword": lambda m, x: F.linear(bias=m.b.bias, input=m.a(x).tanh(), weight=m.b.weight),
    "model output": lambda m, x: ModelOutput(x, m.b(m.a(x).tanh())),
    "namespace": lambda m, x: SimpleNamespace(logits=m.b(m.a(x).tanh()), loss=None),
    "mapping": lambda m, x: {"hidden": x, "logits": m.b(m.a(x).tanh())},
    "tuple": lambda m, x: (m.b(m.a(x).tanh()), x),
}


@pytest.mark.parametrize("form", FORMS)
def test_R2_A18_calls_by_keyword_and_outputs_that_are_no_tensors(form: str) -> None:
    net = mlp()
    data = regression(net, 3)
    K = KFAC(Net(FORMS[form], a=net.a, b=net.b), nn.MSELoss(), None, data, check_deterministic=True)
    assert relative_error(K.to_dense(), KFAC(net, nn.MSELoss(), None, data).to_dense()) < 1e-12


def test_R2_A18_compiled_nets_are_exact_or_refused() -> None:
    net = mlp()
    data = regression(net, 3)
    compiled = torch.compile(net, backend="eager")
    K = KFAC(compiled, nn.MSELoss(), None, data)
    assert relative_error(K.to_dense(), KFAC(net, nn.MSELoss(), None, data).to_dense()) < 1e-12


def test_R2_A18_plain_functions_and_reductions_of_losses() -> None:
    net = mlp()
    data = regression(net, 3)
    want = KFAC(net, nn.MSELoss(), None, data, fisher_type="type-2").to_dense()
    for loss in (F.mse_loss, lambda o, y: (o - y).square().mean()):
        assert relative_error(KFAC(net, loss, None, data, fisher_type="type-2").to_dense(), want) < 1e-10
    with pytest.raises(ValueError, match=r"MSELoss has reduction='none', expected one of .*'mean', 'sum'"):
        KFAC(net, nn.MSELoss(reduction="none"), None, data)
    with pytest.raises(ValueError, match="CrossEntropyLoss has reduction='batchmean'"):
        KFAC(net, nn.CrossEntropyLoss(reduction="batchmean"), None, data)
    with pytest.raises(ValueError, match=r"returned shape \(2, 2\), expected a 0-dim tensor"):
        KFAC(net, lambda o, y: (o - y).square(), None, data)
