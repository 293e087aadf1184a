"""Every defect of kfac-pytorch that was verified, as far as one process goes: where it is tested, or why it cannot arise.

"Below" is this file, or ``test_kfac_pytorch_defects_layers``.

=============================================  =====================================================================
defect                                         here
=============================================  =====================================================================
scale of convolutions' factors (no-op)         ``test_R5_the_block_of_a_single_convolution_is_its_fisher``; below
factors depend on batch size, accumulation     below; ``test_R4_micro_batches_equal_the_batch``
factors depend on the number of positions      below
average begins with an identity, no bias       ``test_R5_the_running_average_has_no_identity_in_it``
correction
deadlocks                                      impossible: hooks add to local sums, nothing is sent from them
A counted twice under checkpoints              ``test_R9_activation_checkpoints``; a forward pass without gradients: below
``torch.amp.GradScaler`` rejected              ``test_R7_the_preconditioner_between_unscale_and_step``; below
A in bfloat16 under autocast                   ``test_R7_autocast``; below
inf or NaN batch poisons factors               ``test_R7_a_preconditioner_leaves_gradients_that_are_not_finite``; below
a failed decomposition ends training           below
resume: crash, factors only, names, shapes     ``test_kfac_state``, ``test_kfac_state_elsewhere``
no versions of states                          states say what they hold: what does not fit is refused or made anew
``kl_clip=None``                               ``test_R5_kl_clip``
``'eigen'`` slips through a check              below: names and members of the enumeration are one
"case-insensitive" skipping is not             ``test_R5_layers_that_are_skipped``
schedulers compound                            ``test_R5_schedules``, ``test_R8_schedules_go_on``
groups, dilation, padding modes, ``'same'``    ``test_R5_the_gradient_is_that_of_the_operators_inverse``
channels_last, transposed inputs               below
keywords, activations in place                 below
unused layers, frozen bias                     below
tied weights, shared modules                   ``test_R5_the_gradient_is_that...[tied], [shared]``, ``test_every_parameter``
other layers, attention                        ``test_R6_an_encoder_is_trained_whole``; below: convolutions of all kinds,
                                               cells; embeddings, norms and LSTM keep their gradients, and say so
torch.compile, names with ``_orig_mod.``       ``test_R9_compiled_models``; below
hooks cannot be removed, are saved and copied  ``test_R9_nothing_is_left_behind``, ``test_R9_copies_of_an_observed_model...``
a step cannot be skipped                       ``reset_batch``: ``test_R5_a_batch_may_be_thrown_away``
no parameter groups                            ``KFAC``: ``test_R6_groups_are_as_optimizers_of_their_own``
no damping by layer                            as there: one damping for all; ``SINGD`` has one for every group
no statistics of ``ν``, no spectra             below: ``clip_scale``, ``operator.eigenvalues()``
FSDP, DTensor, DeepSpeed, GPT-NeoX, HYBRID     several processes: not here
=============================================  =====================================================================
"""

from __future__ import annotations

import torch
from optim.cases import F64
from optim.kfac_cases import LOSS, close, net_and_data, step
from torch import nn

from curvops.optim import KFACPreconditioner


def test_R11_convolutions_are_preconditioned():
    """Its normalisation made the direction of convolutional layers that of the gradient, to 1e-13."""
    net, X, y = net_and_data()
    LOSS(net(X), y).backward()
    g = net[0].weight.grad.flatten().clone()
    step(net, X, y, damping=1e-3)
    assert torch.cosine_similarity(g, net[0].weight.grad.flatten(), dim=0) < 0.9


def test_R11_factors_do_not_know_the_batch_size():
    net, X, y = net_and_data()
    once, twice = step(net, X, y), step(net, torch.cat([X, X]), torch.cat([y, y]))
    close(twice.operator.to_dense(), once.operator.to_dense())


def test_R11_factors_do_not_know_how_the_batch_was_accumulated():
    """Losses divided by the number of passes, as its users do."""
    net, X, y = net_and_data()
    once = step(net, X, y)
    preconditioner = KFACPreconditioner(net, accumulation_steps=4)
    for x, t in zip(X.split(2), y.split(2), strict=True):
        (LOSS(net(x), t) / 4).backward()
    preconditioner.step()
    close(preconditioner.operator.to_dense(), once.operator.to_dense())


def test_R11_the_curvature_does_not_know_the_number_of_positions():
    """A 1x1 convolution, averaged over positions that are all alike, is a linear layer: 'reduce' says so exactly."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 3, 1).double()
    x, y = torch.randn(8, 4, 1, 1, dtype=F64), torch.randint(3, (8,))
    dense = []
    for size in (1, 2, 5):
        net = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        dense.append(step(net, x.expand(-1, -1, size, size).contiguous(), y, kfac_approx="reduce").operator.to_dense())
    close(dense[1], dense[0])
    close(dense[2], dense[0])


def test_R11_forward_passes_without_gradients_count_nothing():
    """Evaluation and sampling in train mode entered its factors."""
    net, X, y = net_and_data()
    want = step(net, X, y)
    preconditioner = KFACPreconditioner(net, kl_clip=None)
    with torch.no_grad():
        net(7 * X)
    net(5 * X)  # and one that nothing comes back to
    net.zero_grad()
    LOSS(net(X), y).backward()
    net(3 * X)
    preconditioner.step()
    close(preconditioner.operator.to_dense(), want.operator.to_dense())


def test_R11_gradients_of_a_scaler_are_seen_unscaled():
    net, X, y = net_and_data()
    want = step(net, X, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    preconditioner = KFACPreconditioner(net, kl_clip=None, grad_scaler=scaler)
    net.zero_grad()
    scaler.scale(LOSS(net(X), y)).backward()
    scaler.unscale_(sgd)
    preconditioner.step()
    scaler.step(sgd)
    scaler.update()
    close(preconditioner.operator.to_dense(), want.operator.to_dense())


def test_R11_autocast_does_not_reach_the_factors():
    """``A`` is that of the layer's float32 inputs, before autocast rounds them."""
    torch.manual_seed(0)
    net, X, y = nn.Linear(6, 3), torch.randn(40, 6), torch.randint(3, (40,))
    preconditioner = KFACPreconditioner(net)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(X)
    assert out.dtype == torch.bfloat16
    LOSS(out.float(), y).backward()
    preconditioner.step()
    found = preconditioner.operator.factors["weight"].input
    rows = torch.cat([X.double(), torch.ones(40, 1, dtype=F64)], 1)
    assert found.dtype == torch.float32
    close(found.double(), rows.T @ rows / 40, 1e-6)
