"""Parameters without a Kronecker rule: a small vision transformer, every parameter of which is trained by one optimizer.

Embeddings of positions, the class token and the norms go to the fallback, AdamW; all of it is in ``optimizer.treatments``.
Run ``python docs/examples/03_every_parameter.py``; needs scikit-learn.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvops.optim import SINGD


class VisionTransformer(nn.Module):
    """Sixteen patches of 2x2 pixels, a class token, one encoder layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x).mean(1))


def main(epochs: int = 8) -> float:
    """Train, print what became of every parameter and the loss, and return the accuracy on held-out images."""
    torch.manual_seed(0)
    digits = load_digits()
    X, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    train, test = torch.randperm(len(X)).tensor_split([1500])

    model = VisionTransformer()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = SINGD(model, lr=5e-3, damping=1e-2, T=2, fallback="adamw", fallback_lr=3e-3)
    for epoch in range(epochs):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            loss = loss_fn(model(X[batch]), y[batch])
            loss.backward()
            optimizer.step()
        if epoch == 0:
            for name, treatment in optimizer.treatments.items():
                print(f"{name:32s} {treatment}")
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    assert optimizer.treatments.keys() == dict(model.named_parameters()).keys()

    with torch.no_grad():
        accuracy = (model(X[test]).argmax(1) == y[test]).double().mean().item()
    print(f"accuracy on {len(test)} held-out images: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
