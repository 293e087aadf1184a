"""Dense curvature by brute force, and models whose operations have no forward mode or no second fused derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kfac.oracle import concatenated, predictor
from torch import Tensor, nn
from torch.func import jacrev


def flattened(f, params: dict[str, Tensor]):
    """Return ``f`` as a function of one flat vector, and the vector."""
    sizes = [p.numel() for p in params.values()]

    def of(x: Tensor):
        pieces = x.split(sizes)
        return f({n: v.reshape(p.shape) for (n, p), v in zip(params.items(), pieces, strict=True)})

    return of, torch.cat([p.detach().flatten() for p in params.values()])


def jacobian(model, params, X) -> Tensor:
    """Return the Jacobian ``[outputs, D]`` of the predictions."""
    f, x = flattened(lambda p: predictor(model)(p, X).flatten(), params)
    return jacrev(f)(x).detach()


def dense_hessian(model, loss, params, data) -> Tensor:
    """Return the Hessian of the whole-set risk."""
    X, y = concatenated(data)
    f, x = flattened(lambda p: loss(predictor(model)(p, X), y), params)
    return jacrev(jacrev(f))(x).detach()


class Attention(nn.Module):
    """Fused attention: no forward mode, and no second derivative of the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1)).movedim(-1, 1)


class Recurrent(nn.Module):
    """A recurrent layer of a kind, then a linear one on its last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = kind(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Twice(nn.Module):
    """One layer applied twice; a parameter that nothing uses; a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 3))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()).sin())


class Words(nn.Module):
    """An embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.embed(x)).mean(1))
