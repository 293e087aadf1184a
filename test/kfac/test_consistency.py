"""R1: two ways to say the same thing give the same numbers, and nothing else is touched; in float64."""

from __future__ import annotations

import io
from itertools import product

import pytest
import torch
from kfac.nets import (
    FISHERS,
    LOSSES,
    NETS,
    Mixing,
    Then,
    UNet,
    cnn,
    every_approx,
    every_loss,
    joint_or_separate,
    kfac,
    mlp,
    setting,
)
from kfac.oracle import batches, relative_error
from torch import nn

from curvops import FisherType, KFACLinearOperator, KFACType
from curvops.structured.kronecker import Kronecker

TOL = 1e-11


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def whole_and_flat(loss: nn.Module, *sizes: int) -> tuple:
    """Return a net that mixes tokens, with outputs ``[N, ..., C]`` and ``[N * ..., C]``, each with its data."""
    net, classes = Mixing(), isinstance(loss, nn.CrossEntropyLoss)
    whole, flat = Then(net, lambda y: y.movedim(-1, 1) if classes else y), Then(net, lambda y: y.flatten(0, 2))
    data = batches(whole, loss, *(torch.randn(n, 3, 2, 4) for n in sizes))
    return whole, data, flat, [(X, y.flatten() if classes else y.flatten(0, 2)) for X, y in data]


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "empirical-per-term", "forward-only"])
@every_approx
@every_loss
def test_R1_flattened_outputs_change_nothing(loss: nn.Module, approx: str, fisher: str) -> None:
    whole, data, flat, rows = whole_and_flat(loss, 3, 2)
    options = {"fisher_type": fisher, "kfac_approx": approx}
    want = kfac(whole, loss, None, data, **options).to_dense()
    assert want.norm() > 0
    assert relative_error(kfac(flat, loss, None, rows, batch_size_fn=len, **options).to_dense(), want) < TOL


@pytest.mark.parametrize("fisher", ["mc", "signs"])
@every_approx
@pytest.mark.parametrize("loss", LOSSES)
def test_R1_flattened_outputs_keep_the_law_of_draws(loss: str, approx: str, fisher: str) -> None:
    # Draws are keyed by rows of the output, so the numbers differ.
    whole, data, flat, rows = whole_and_flat(LOSSES[loss](), 16)
    options = {"fisher_type": fisher, "kfac_approx": approx, "mc_samples": 500}
    want = kfac(whole, LOSSES[loss](), None, data, **options).to_dense()
    got = kfac(flat, LOSSES[loss](), None, rows, batch_size_fn=len, **options).to_dense()
    torch.testing.assert_close(got / want.abs().max(), want / want.abs().max(), rtol=1e-1, atol=3e-2)


@pytest.mark.parametrize("fisher", FISHERS)
@every_approx
@pytest.mark.parametrize("loss", LOSSES)
def test_R1_sum_and_mean_differ_by_what_the_loss_divides_by(loss: str, approx: str, fisher: str) -> None:
    model = UNet()
    data = batches(model, LOSSES[loss](), torch.randn(2, 2, 6, 4), torch.randn(1, 2, 6, 4))
    K = {
        r: kfac(model, LOSSES[loss](reduction=r), None, data, fisher_type=fisher, kfac_approx=approx).to_dense()
        for r in ("sum", "mean")
    }
    factor = 1 if fisher == "forward-only" else 3 * 6 * 4 * (1 if loss == "ce" else 3)
    assert relative_error(K["sum"], factor * K["mean"]) < TOL


@pytest.mark.parametrize("net", NETS)
@every_approx
@joint_or_separate
@every_loss
def test_R1_forward_only_is_empirical_without_output_factors(loss, separate: bool, approx: str, net: str) -> None:
    model, *inputs = setting(net, 2)
    data, options = batches(model, loss, *inputs), {"kfac_approx": approx, "separate_weight_and_bias": separate}
    empirical = kfac(model, loss, None, data, fisher_type="empirical", **options)
    eyes = [torch.eye(p.operator.array[1]).unsqueeze(0) for p in empirical.parts]
    assert all(not torch.allclose(p.operator.B, eye) for p, eye in zip(empirical.parts, eyes, strict=True))
    want = empirical.map_parts(
        lambda p: Kronecker(torch.eye(p.operator.array[1]), p.operator.A, shape=p.operator.array)
    )
    got = kfac(model, loss, None, data, fisher_type="forward-only", **options)
    assert relative_error(got.to_dense(), want.to_dense()) < TOL


IN_PLACE = {
    "mlp": (lambda act: mlp(5, 4, 3, act=act), (5,)),
    "positions": (lambda act: Then(mlp(5, 4, 3, act=act), lambda y: y.mean(1)), (6, 5)),
    "cnn": (cnn, (2, 5, 4)),
}


@pytest.mark.parametrize("net", IN_PLACE)
@every_approx
@pytest.mark.parametrize("fisher", FISHERS)
def test_R1_in_place_activations(fisher: str, approx: str, net: str) -> None:
    make, shape = IN_PLACE[net]
    loss, plain, in_place = nn.MSELoss(), make(nn.ReLU), make(lambda: nn.ReLU(inplace=True))
    in_place.load_state_dict(plain.state_dict())
    data = batches(plain, loss, torch.randn(4, *shape))
    want, got = (
        kfac(m, loss, None, data, fisher_type=fisher, kfac_approx=approx).to_dense() for m in (plain, in_place)
    )
    assert want.norm() > 0
    assert relative_error(got, want) < TOL


def test_R1_grad_is_not_touched() -> None:
    model, loss = mlp(5, 4, 3, act=nn.ReLU), nn.CrossEntropyLoss()
    own = dict(model.named_parameters())
    for n, p in own.items():
        p.grad = torch.randn_like(p) if "weight" in n else None
    before = {n: (p.grad, None if p.grad is None else p.grad.clone()) for n, p in own.items()}
    data = batches(model, loss, torch.randn(3, 5))
    for fisher, params in product(FISHERS, (None, own)):
        kfac(model, loss, params, data, fisher_type=fisher).inverse(1e-2).to_dense()
        for n, (grad, value) in before.items():
            assert own[n].grad is grad
            assert grad is None or torch.equal(grad, value)


def test_R1_saving() -> None:
    model, loss = cnn(), nn.CrossEntropyLoss()
    K = kfac(model, loss, None, batches(model, loss, torch.randn(3, 2, 5, 4)))
    for saved, weights_only in ((K, False), (K.state_dict(), True)):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        loaded = loaded if saved is K else KFACLinearOperator.from_state_dict(loaded)
        assert torch.equal(loaded.to_dense(), K.to_dense())
        assert torch.equal(loaded.inverse(1e-2).to_dense(), K.inverse(1e-2).to_dense())


@pytest.mark.parametrize(("fisher", "approx"), list(product(FisherType, KFACType)))
def test_R1_strings_and_enums(fisher: FisherType, approx: KFACType) -> None:
    model, loss = mlp(5, 4, 3), nn.BCEWithLogitsLoss()
    data = batches(model, loss, torch.randn(3, 5))
    enums, strings = (
        kfac(model, loss, None, data, fisher_type=f, kfac_approx=a)
        for f, a in ((fisher, approx), (fisher.value, approx.value))
    )
    assert fisher.value in FISHERS
    assert torch.equal(enums.to_dense(), strings.to_dense())


@pytest.mark.parametrize("inverse", [None, "exact", "factors"])
def test_R1_products_compile_without_graph_breaks(inverse: str | None) -> None:
    model, loss = mlp(5, 4, 3), nn.MSELoss()
    K = kfac(model, loss, None, batches(model, loss, torch.randn(3, 5)))
    op, v = K if inverse is None else K.inverse(1e-2, how=inverse), torch.randn(K.shape[1])
    found = torch._dynamo.explain(lambda x: op @ x)(v)
    assert found.graph_break_count == 0, found.break_reasons[0].reason
