"""What every test finds: one torch thread, fixed seeds, the default dtype as torch has it, no plotting window."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(1)  # pytest-xdist runs one process per core

hypothesis.settings.register_profile("curvops", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("curvops")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Seed all global generators; put the default dtype back."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
