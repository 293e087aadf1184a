"""Parameter groups: convolutions with block-diagonal factors that are updated rarely, the classifier with dense ones.

Run ``python docs/examples/02_groups.py``; needs scikit-learn.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from curvops.optim import SINGD


def main(epochs: int = 4) -> float:
    """Train, print the loss, and return the accuracy on held-out images."""
    torch.manual_seed(0)
    digits = load_digits()
    X, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    train, test = torch.randperm(len(X)).tensor_split([1500])

    features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding="valid"))
    model = nn.Sequential(features, nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = SINGD(
        model,
        [
            {
                "params": list(features.parameters()),
                "structures": ("block30diagonal", "diagonal"),
                "kfac_approx": "reduce",
                "T": 5,
            },
            {"params": list(model[3].parameters()), "lr": 5e-3},
        ],
        lr=1e-2,
        damping=1e-2,
        T=2,
        weight_decay=1e-4,
    )
    for epoch in range(epochs):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            loss = loss_fn(model(X[batch]), y[batch])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

    with torch.no_grad():
        accuracy = (model(X[test]).argmax(1) == y[test]).double().mean().item()
    print(f"accuracy on {len(test)} held-out images: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
