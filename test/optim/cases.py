"""An oracle of the published updates, written in loops over layers and groups, and small problems for optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

F64 = torch.float64
#: Uneven batches, so that means of means are wrong.
SIZES = (7, 4, 9, 5, 6)


def mlp(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3)).double()


def cnn() -> nn.Sequential:
    """Convolutions with groups, stride, dilation and padding, with and without bias."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, (2, 3), stride=2, dilation=(1, 2), padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()


def tokens() -> nn.Sequential:
    """Linear layers on sequences; a prediction for every token, classes last."""
    return mlp()


def batches(kind: str, steps: int, sizes: tuple[int, ...] = SIZES) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = {"mlp": (5,), "cnn": (2, 6, 5), "tokens": (3, 5)}[kind]
    for t in range(steps):
        n = sizes[t % len(sizes)]
        X = torch.randn(n, *shape, dtype=F64, generator=generator)
        y = torch.randint(3, (n, 3) if kind == "tokens" else (n,), generator=generator)
        yield X, y


NETS: dict[str, Callable[[], nn.Sequential]] = {"mlp": mlp, "cnn": cnn, "tokens": tokens}


def loss_of(kind: str, reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction=reduction)

    return loss


def rows(layer: nn.Module, x: Tensor, g: Tensor, approx: str) -> tuple[Tensor, Tensor]:
    """Inputs ``[G, n, d_in]`` with ones, and output gradients ``[G, n, d_out]``; reduced over positions if asked for."""
    if isinstance(layer, nn.Conv2d):
        G = layer.groups
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
        x, g = x.unflatten(2, (G, -1)), g.flatten(2).transpose(1, 2).unflatten(2, (G, -1))  # [N, S, G, d]
    else:
        x, g = (t.reshape(len(t), -1, 1, t.shape[-1]) for t in (x, g))
    x, g = (t.permute(2, 0, 1, 3) for t in (x, g))  # [G, N, S, d]
    if layer.bias is not None:
        x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
    return (x.mean(2), g.sum(2)) if approx == "reduce" else (x.flatten(1, 2), g.flatten(1, 2))


def matrix(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[G, d_out, d_in + 1]``."""
    G = getattr(layer, "groups", 1)
    W = weight.reshape(G, len(weight) // G, -1)
    return W if bias is None else torch.cat([W, bias.reshape(G, -1, 1)], -1)


@torch.no_grad()
def add_(layer: nn.Module, step: Tensor) -> None:
    """Add ``[G, d_out, d_in + 1]`` to the parameters."""
    if layer.bias is not None:
        layer.bias += step[..., -1].reshape(-1)
        step = step[..., :-1]
    layer.weight += step.reshape(layer.weight.shape)


def observed(model: nn.Module, loss: Callable[[], Tensor]) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Run a forward and backward pass; return every layer with its input and the gradient of its output."""
    seen: list[list[Any]] = []

    def note(layer: nn.Module, args: tuple, out: Tensor) -> None:
        out.retain_grad()
        seen.append([layer, args[0].detach(), out])

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    model.zero_grad()
    loss().backward()
    for handle in handles:
        handle.remove()
    return [(layer, x, out.grad) for layer, x, out in seen]


@dataclass
class Oracle:
    """SINGD as published, for dense factors."""

    lr: float = 1e-2
    momentum: float = 0.9
    damping: float = 1e-2
    alpha1: float = 0.5
    weight_decay: float = 0.01
    T: int = 1
    lr_cov: Any = 0.05
    kfac_like: bool = False
    normalize: bool = False
    approx: str = "expand"
    average: str | None = "batch"
    state: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0

    def step(self, model: nn.Module, X: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        for layer, x, g in observed(model, lambda: loss(model(X), y)):
            a, b = rows(layer, x, g, self.approx)
            terms = {None: 1, "batch": len(X), "batch+sequence": y.numel()}[self.average]
            A, B = a.mT @ a / a.shape[1], terms * b.mT @ b
            s = self.state.setdefault(layer, {"f": [self._new(A[k], B[k]) for k in range(len(A))], "buf": 0.0})
            G = matrix(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)
            W = matrix(layer, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
            P = []
            for k, f in enumerate(s["f"]):
                if self.steps % self.T == 0:
                    self._update(f, A[k], B[k])
                P.append(f["C"] @ f["C"].T @ G[k] @ f["K"] @ f["K"].T)
            P = torch.stack(P) + self.weight_decay * W
            s["buf"] = self.momentum * s["buf"] + P
            add_(layer, -self.lr * s["buf"])
        self.steps += 1

    @staticmethod
    def _new(A: Tensor, B: Tensor) -> dict[str, Any]:
        return {"K": torch.eye(len(A), dtype=F64), "C": torch.eye(len(B), dtype=F64), "mK": 0.0, "mC": 0.0}

    def _update(self, f: dict[str, Any], A: Tensor, B: Tensor) -> None:
        K, C, I, J = f["K"], f["C"], torch.eye(len(A), dtype=F64), torch.eye(len(B), dtype=F64)
        HK, HC, KK, CC = K.T @ A @ K, C.T @ B @ C, K.T @ K, C.T @ C
        mean = lambda M: M.diagonal().mean()  # noqa: E731
        alpha1 = 0.0 if self.kfac_like else self.alpha1
        s = 0.5 * (1 - alpha1) if self.normalize else 0.5
        if self.kfac_like:
            dK, dC = HK + self.damping * KK - I, HC + self.damping * CC - J
        else:
            dK = mean(HC) * HK + self.damping * mean(CC) * KK - I
            dC = mean(HK) * HC + self.damping * mean(KK) * CC - J
        f["mK"], f["mC"] = alpha1 * f["mK"] + s * dK, alpha1 * f["mC"] + s * dC
        beta = self.lr_cov(self.steps) if callable(self.lr_cov) else self.lr_cov
        for name, m in (("K", f["mK"]), ("C", f["mC"])):
            b = beta / max(1.0, m.abs().max()) if self.normalize else beta
            f[name] = f[name] - b * f[name] @ m


def difference(a: nn.Module, b: nn.Module) -> float:
    """The largest difference of two models' parameters."""
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))
