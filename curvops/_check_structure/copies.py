"""Structured matrices taken apart and put together again."""

from __future__ import annotations

import copy
import io
import pickle

import torch

from curvops._check_structure.compare import same
from curvops.structured.matrix import StructuredMatrix


def check_copies(A: StructuredMatrix) -> None:
    """Rebuild the matrix from its tensors, by pickle, deepcopy, and a file that holds nothing but tensors."""
    buffer = io.BytesIO()
    torch.save(A.named_tensors(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    copies = {
        "tensors from a file": type(A).from_tensors(state),
        "with_tensors of zeros": type(A).zeros(A.dim, batch=A.batch, dtype=A.torch_dtype).with_tensors(state),
        "a pickled copy": pickle.loads(pickle.dumps(A)),
        "a deep copy": copy.deepcopy(A),
        "a clone": A._map(torch.clone),
    }
    for text, found in copies.items():
        assert type(found) is type(A), f"{text} is a {type(found).__name__}"
        same((found.domain, found.torch_dtype), (A.domain, A.torch_dtype), f"domain and dtype of {text}")
        assert torch.equal(found.to_dense_blocks(), A.to_dense_blocks()), f"{text} differs"
        assert not any(
            t.numel() and t.data_ptr() == s.data_ptr()
            for t, s in zip(found.named_tensors().values(), A.named_tensors().values(), strict=True)
        ), f"{text} shares memory"
    stacked = A.with_tensors({n: torch.stack([t, t]) for n, t in A.named_tensors().items()})
    same(stacked.batch, (2, *A.batch), "batch of a stack")
    same(type(A.to(dtype=torch.float32)), type(A), "class of op.to(dtype)")
    same(A.to(dtype=torch.float32).torch_dtype, torch.float32, "dtype of op.to(dtype)")
