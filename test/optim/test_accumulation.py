"""Micro-batches equal the batch; the number of loss terms may be said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optim.cases import NETS, Oracle, batches, difference, loss_of, tokens

from curvops.optim import KFAC, SINGD

METHODS = {
    "INGD": lambda net, average: SINGD(net, lr=1e-2, damping=1e-2, T=1, lr_cov=0.05, loss_average=average),
    "IKFAC": lambda net, average: SINGD(
        net, lr=1e-2, damping=1e-2, T=1, lr_cov=0.05, loss_average=average, kfac_like=True, alpha1=0.0
    ),
    "KFAC": lambda net, average: KFAC(net, lr=1e-2, damping=1e-2, kl_clip=None, loss_average=average),
    "EKFAC": lambda net, average: KFAC(
        net, lr=1e-2, damping=1e-2, kl_clip=None, loss_average=average, compute_method="ekfac", inv_update_steps=3
    ),
}


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("split", [[10, 10, 10], [5, 1, 24], [30]], ids=["even", "uneven", "one"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", METHODS)
def test_R4_micro_batches_equal_the_batch(method, reduction, split, kind):
    """Gradients add up as PyTorch has it: a mean loss is weighted by the share of its micro-batch."""
    nets, loss = (NETS[kind](), NETS[kind]()), loss_of(kind, reduction)
    whole, parts = (METHODS[method](net, "batch" if reduction == "mean" else None) for net in nets)
    # More data than inputs of any layer: in the null space of a factor EKFAC has no eigenvectors of its own.
    for X, y in batches(kind, 6, (30,)):
        whole.zero_grad()
        loss(nets[0](X), y).backward()
        whole.step()
        parts.zero_grad()
        for x, t in zip(X.split(split), y.split(split), strict=True):
            value = loss(nets[1](x), t)
            (value * len(x) / len(X) if reduction == "mean" else value).backward()
        parts.step()
    assert difference(*nets) < 1e-12
    assert difference(nets[0], NETS[kind]()) > 1e-3


def masked(net, X, y, chosen):
    """Mean over the tokens that count."""
    return F.cross_entropy(net(X).flatten(0, 1), torch.where(chosen, y, -100).flatten())


@pytest.mark.parametrize("method", METHODS)
def test_R4_masked_tokens_count_as_the_user_says(method):
    """With `loss_terms` a mean over some tokens is the same problem as a sum over them, scaled."""
    nets = tokens(), tokens()
    said, scaled = (METHODS[method](net, average) for net, average in zip(nets, ("batch+sequence", None), strict=True))
    generator = torch.Generator().manual_seed(0)
    for X, y in batches("tokens", 6):
        chosen = torch.rand(y.shape, generator=generator) < 0.6
        chosen[0, 0] = True
        n = int(chosen.sum())
        said.zero_grad()
        with said.observe(loss_terms=n):
            loss = masked(nets[0], X, y, chosen)
        loss.backward()
        said.step()
        # The sum has n times the gradient g, so n g g' of the mean is the sum's over n: divide by sqrt(n) before backward.
        scaled.zero_grad()
        with_sum = masked(nets[1], X, y, chosen) * n**0.5
        with_sum.backward()
        for p in nets[1].parameters():
            p.grad /= n**0.5
        scaled.step()
    assert difference(*nets) < 1e-12


def test_R4_a_mean_over_sequences_counts_tokens():
    nets, loss = (tokens(), tokens()), loss_of("tokens", "mean")
    optimizer = SINGD(nets[0], lr=1e-2, damping=1e-2, T=1, lr_cov=0.05, loss_average="batch+sequence")
    oracle = Oracle(weight_decay=0.0, average="batch+sequence")
    for X, y in batches("tokens", 10):
        optimizer.zero_grad()
        loss(nets[0](X), y).backward()
        optimizer.step()
        oracle.step(nets[1], X, y, loss)
    assert difference(*nets) < 1e-12


def test_a_number_of_loss_terms_that_is_said_for_some_passes_only_is_refused():
    net = tokens()
    optimizer, loss = SINGD(net, T=1, loss_average="batch+sequence"), loss_of("tokens", "mean")
    X, y = next(batches("tokens", 1))
    with optimizer.observe(loss_terms=3):
        loss(net(X), y).backward()
    loss(net(X), y).backward()
    with pytest.raises(ValueError, match="expected all or none"):
        optimizer.step()


@pytest.mark.parametrize("terms", [0, -1, 2.5, True, "3"])
def test_bad_numbers_of_loss_terms(terms):
    optimizer = SINGD(tokens())
    with pytest.raises(ValueError, match="loss_terms: found"), optimizer.observe(loss_terms=terms):
        pass


def test_a_fixed_number_of_loss_terms():
    nets, loss = (tokens(), tokens()), loss_of("tokens", "mean")
    for net, average in zip(nets, (24, "batch+sequence"), strict=True):
        optimizer = SINGD(net, T=1, loss_average=average)
        for X, y in batches("tokens", 4, (8,)):
            optimizer.zero_grad()
            loss(net(X), y).backward()
            optimizer.step()
    assert difference(*nets) == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_R4_micro_batches_may_come_in_the_same_memory(method):
    nets, loss = (NETS["mlp"](), NETS["mlp"]()), loss_of("mlp", "sum")
    whole, parts = (METHODS[method](net, None) for net in nets)
    buffer = torch.empty(5, 5, dtype=torch.float64)
    for X, y in batches("mlp", 4, (30,)):
        whole.zero_grad()
        loss(nets[0](X), y).backward()
        whole.step()
        parts.zero_grad()
        for x, t in zip(X.split(5), y.split(5), strict=True):
            buffer.numpy()[:] = x.numpy()
            loss(nets[1](buffer), t).backward()
        parts.step()
    assert difference(*nets) < 1e-12
