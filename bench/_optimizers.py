"""Models and peers of the optimizer benchmark: a convolutional net, a small language model, and KFAC as one writes it first."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Problem = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def cnn(batch: int) -> Problem:
    """Three 3x3 convolutions and two linear layers on colour images of 32x32 pixels."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    X, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return model, lambda net: F.cross_entropy(net(X), y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.first(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(
        self, vocabulary: int = 512, length: int = 64, width: int = 128, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


def transformer(batch: int) -> Problem:
    """A language model of two blocks, 64 tokens of a vocabulary of 512."""
    X, y = torch.randint(512, (batch, 64)), torch.randint(512, (batch * 64,))
    return Transformer(), lambda net: F.cross_entropy(net(X).flatten(0, 1), y)


def kronecker_params(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every contestant treats: those of linear layers and convolutions; others are frozen."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    chosen = [p for m in layers for p in m.parameters()]
    for p in model.parameters():
        p.requires_grad_(any(p is q for q in chosen))
    return chosen


class PlainKFAC:
    """KFAC with module hooks and ``unfold``, layer by layer: eigenvectors, running averages, kl-clip."""

    def __init__(self, model: nn.Module, damping: float, decay: float, clip: float, lr: float, inverses: int) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        self.damping, self.decay, self.clip, self.lr, self.inverses, self.steps = damping, decay, clip, lr, inverses, 0
        self.inputs: dict[nn.Module, Tensor] = {}
        self.A: dict[nn.Module, Tensor] = {}
        self.B: dict[nn.Module, Tensor] = {}
        self.spectra: dict[nn.Module, tuple[Tensor, ...]] = {}
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda m, args: self.inputs.__setitem__(m, args[0].detach()))
            layer.register_full_backward_hook(lambda m, _, grads: self.observe(m, grads[0]))

    def observe(self, layer: nn.Module, g: Tensor) -> None:
        x = self.inputs.pop(layer)
        if isinstance(layer, nn.Conv2d):
            x = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride).transpose(1, 2)
            g = g.flatten(2).transpose(1, 2)
        N = len(x)
        x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        for factors, new in ((self.A, x.T @ x / len(x)), (self.B, N * g.T @ g)):
            factors[layer] = self.decay * factors[layer] + (1 - self.decay) * new if layer in factors else new

    @torch.no_grad()
    def step(self) -> None:
        found, total = [], 0.0
        for layer in self.layers:
            if self.steps % self.inverses == 0:
                self.spectra[layer] = (*torch.linalg.eigh(self.A[layer]), *torch.linalg.eigh(self.B[layer]))
            a, QA, b, QB = self.spectra[layer]
            G = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1)
            P = QB @ ((QB.T @ G @ QA) / (torch.outer(b, a) + self.damping)) @ QA.T
            total += (P * G).sum().item() * self.lr**2
            found.append(P)
        scale = min(1.0, (self.clip / abs(total)) ** 0.5)
        for layer, P in zip(self.layers, found, strict=True):
            layer.weight.grad = (scale * P[:, :-1]).view_as(layer.weight)
            layer.bias.grad = scale * P[:, -1]
        self.steps += 1
