"""Every defect of singd 0.0.5 (D1 to D25) and every row of its issue table: where it is tested, or why it cannot arise.

======  ==========================================================  =====================================================
defect  what was wrong                                              here
======  ==========================================================  =====================================================
D1      block-diagonal products without transposes                  structured: ``test_R3_float64`` on non-symmetric
                                                                    elements; ``test_R2_one_block_reproduces_dense...``
D2-D4   accumulation: IKFAC, sums, uneven micro-batches             ``test_R4_micro_batches_equal_the_batch``
D5-D8   distribution                                                no communication in ``optim``: sums and counts are
                                                                    reduced by ``distributed``
D9      checkpoints with pickled classes, mutated by loading        ``test_R8_training_goes_on_bit_for_bit``
D10     attention crashes                                           ``test_R6_an_encoder_is_trained_whole``
D11     parameters of containers are dropped                        the same
D12     tied weights are stepped twice                              ``test_R6_tied_weights_make_one_step...``
D13     unused and frozen layers crash                              ``test_R6_frozen...``, ``..._layers_without_gradient``
D14     keyed by ``data_ptr``                                       ``test_R8_another_dtype_afterwards``
D15     means over groups of convolutions                           ``test_R1_shared_weights[cnn...]``
D16     padding modes ignored                                       below
D17     float64 for two structures only                             ``test_R2_every_structure_trains``
D18     dtypes of preconditioner and weights collide                ``test_R7_dtypes_of_the_preconditioner``
D19     ``unscale_`` and clipping                                   ``test_R7_powers_of_two_change_nothing``
D20     other backward passes, ``zero_grad``, NaN for ever          ``test_R9_what_is_not_training...``, ``test_R7_a_batch...``
D21     hooks for ever                                              ``test_R9_nothing_is_left_behind``, ``..._copies_...``
D22     ``torch.compile`` in either order                           ``test_R9_compiled_models``
D23     even kernels with padding "same", unusual inputs            below
D24     Toeplitz structures of d x d                                structured: ``test_matrices_cost``; below
D25     no checks of type and shape                                 structured: ``check_structure`` (rejections)
======  ==========================================================  =====================================================

Issue table, by row: 1, 24 dense fallbacks of recursive structures (``test_matrices_cost``: nothing is d x d); 2 an
operation that nobody calls (not there); 3, 16, 28, 33 one KFAC for all, any layer seen at its operation (``Projected``
and ``Factors`` are fed by the recorder; graph layers: rules); 4 loss terms apart from the approximation
(``test_R4_masked_tokens...``); 5 tensors registered (``named_tensors``); 6, 17 scales for half precision
(``test_R7_moments_of_half_precision...``, ``..._dense_stable...``); 7 safeguards (``check_structure``); 8 accumulation
(``test_accumulation``); 9, 27 padding and dilation (below, ``convolutions``); 12, 19, 31, 34 examples that are executed
(``test_examples``); 13 dimension 1 (``test_R3_float64``); 15 in-place activations (below); 18 grouped patches (D15);
20-23, 25, 10, 11, 14 tidiness of that project; 26 DistributedDataParallel (``distributed``); 29 average trace
(``mean_trace`` in ``check_structure``); 30 expand and reduce by group (``test_R6_groups...``); 32 sums
(``test_R2_a_sum_is_a_mean...``); 35 structures to look at (``to_dense_blocks``); 36 damping in IKFAC
(``test_R1...[IKFAC]``); 37 one hook for both sides (the recorder).
"""

from __future__ import annotations

import warnings

import pytest
import torch
from optim.cases import F64, difference
from torch import nn

from curvops import KFACLinearOperator
from curvops.optim import SINGD, KFACPreconditioner

LOSS = nn.CrossEntropyLoss()


def check(net, X, approx="expand"):
    """The factors of a training pass are those of the operator, which is judged by brute force elsewhere."""
    y = torch.randint(3, (len(X),))
    preconditioner = KFACPreconditioner(net, kl_clip=None, kfac_approx=approx)
    LOSS(net(X), y).backward()
    preconditioner.step()
    K = KFACLinearOperator(net, LOSS, None, [(X, y)], fisher_type="empirical", kfac_approx=approx)
    torch.testing.assert_close(preconditioner.operator.to_dense(), K.to_dense(), rtol=1e-11, atol=1e-13)
    preconditioner.close()
    optimizer = SINGD(net, T=1, kfac_approx=approx)
    net.zero_grad()
    LOSS(net(X), y).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert {t.split()[0] for t in optimizer.treatments.values()} == {"block"}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_R11_D16_padding_modes(mode, approx):
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), nn.Flatten(), nn.Linear(75, 3)).double()
    check(net, torch.randn(4, 2, 5, 5, dtype=F64), approx)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch says so on its own account
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("kernel", [2, (3, 4)])
@pytest.mark.parametrize("dilation", [1, 3])
def test_R11_D23_even_kernels_with_padding_same(kernel, dilation, approx):
    net = nn.Sequential(nn.Conv2d(2, 3, kernel, padding="same", dilation=dilation), nn.Flatten(), nn.Linear(108, 3))
    check(net.double(), torch.randn(4, 2, 6, 6, dtype=F64), approx)


@pytest.mark.parametrize("dims", [1, 3])
def test_R11_D23_convolutions_of_other_dimensions(dims):
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims](2, 3, 2)
    net = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(3))
    X = torch.randn(4, 2, *[4] * dims)
    net(X)
    check(net.double(), X.double())


def test_R11_D23_unusual_inputs():
    """One vector, an image without batch, keywords."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(1, 2, 2), nn.Linear(8, 3)

        def forward(self, image):
            return self.linear(input=self.conv(input=image).flatten())

    net = Net().double()
    before = Net().double()
    before.load_state_dict(net.state_dict())
    optimizer = SINGD(net, T=1, loss_average=1)
    image, target = torch.randn(1, 3, 3, dtype=F64), torch.tensor(2)
    LOSS(net(image=image), target).backward()
    optimizer.step()
    assert difference(net, before) > 0
    assert {t.split()[0] for t in optimizer.treatments.values()} == {"block"}


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.ELU(inplace=True)], ids=repr)
def test_R11_row_15_activations_in_place(activation):
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = activation(self.a(x))
            h = self.b(h).add_(h)
            return self.c(h)

    check(Residual().double(), torch.randn(7, 5, dtype=F64))


@pytest.mark.parametrize("structure", ["triltoeplitz", "triutoeplitz", "hierarchical15_15", "block30diagonal"])
def test_R11_D24_no_structure_warns_in_training(structure):
    net, X = nn.Linear(40, 3), torch.randn(6, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = SINGD(net, structures=(structure, structure), T=1)
        for _ in range(3):
            optimizer.zero_grad()
            net(X).square().mean().backward()
            optimizer.step()


def test_R11_D18_the_example_of_the_documentation():
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(torch.bfloat16)
    optimizer = SINGD(net, preconditioner_dtype=(torch.float32, None), T=1, lr_cov=lambda step: 1e-3 * step)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(6, 5).to(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
