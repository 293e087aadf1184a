"""The transpose of a structured matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvops._operator import LinearOperator


class Adjoint(LinearOperator):
    """The transpose of a structured matrix, which in general lies in another space."""

    def __init__(self, M: Any):
        super().__init__(M.domain, M.domain, dtype=M.torch_dtype, device=M.device)
        self.arg = M

    def _apply(self, V: list[Tensor]) -> list[Tensor]:
        return [self.arg._adjoint_times(V[0].movedim(0, -1)).movedim(-1, 0)]

    def _adjoint(self) -> LinearOperator:
        return self.arg

    def _to(self, device: torch.device, dtype: torch.dtype) -> LinearOperator:
        return Adjoint(self.arg._convert(device, dtype))

    def to_dense(self) -> Tensor:
        return self.arg.to_dense().T

    def diagonal(self) -> Tensor:
        return self.arg.diagonal()

    def trace(self) -> Tensor:
        return self.arg.trace()

    def frobenius_norm(self) -> Tensor:
        return self.arg.frobenius_norm()
