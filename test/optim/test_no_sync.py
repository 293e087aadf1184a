"""A step reads nothing back from the device."""

from __future__ import annotations

import pytest
import torch
from optim.cases import batches, loss_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvops.optim import KFAC, SINGD, KFACPreconditioner, LevenbergMarquardt
from curvops.structured import STRUCTURES


class Reads(TorchDispatchMode):
    """Counts what waits for the device: reading a number, or finding out how many there are."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal", "_to_copy_to_host")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in self.WAITING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def reads(model, optimizer, steps=4, scaled=False):
    loss, found = loss_of("mlp", "mean"), []
    scale = torch.tensor(4.0)
    for X, y in batches("mlp", steps):
        model.zero_grad()
        (loss(model(X), y) * (4.0 if scaled else 1.0)).backward()
        if scaled:  # what a gradient scaler hands over, which reads nothing either
            optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(0.0)
        with Reads() as mode:
            optimizer.step()
        found += mode.found
    return found


def test_the_counter_counts():
    with Reads() as mode:
        torch.ones(2).sum().item()
        bool(torch.tensor(True))
    assert len(mode.found) == 2


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_R10_no_reads_of_any_structure(structure, T):
    model = net()
    optimizer = SINGD(model, structures=(structure, structure), T=T, weight_decay=0.1, normalize_lr_cov=T == 1)
    assert reads(model, optimizer) == []


@pytest.mark.parametrize("fallback", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "options", [{"kfac_like": True, "alpha1": 0.0}, {"kfac_approx": "reduce"}, {"momentum": 0.0}], ids=str
)
def test_R10_no_reads_of_any_setting(options, fallback):
    model = net()
    assert reads(model, SINGD(model, T=1, fallback=fallback, **options), scaled=True) == []


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize(
    "options", [{}, {"inv_update_steps": 3}, {"kl_clip": None}, {"damping": LevenbergMarquardt()}], ids=str
)
def test_R10_no_reads_of_kfac(method, options):
    model = net()
    assert reads(model, KFAC(model, compute_method=method, **options), scaled=True) == []
    model = net()
    assert reads(model, KFACPreconditioner(model, compute_method=method, **options)) == []
