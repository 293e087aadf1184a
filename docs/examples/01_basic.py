"""SINGD in ten lines: a small network on scikit-learn's digits.

Run ``python docs/examples/01_basic.py``; needs scikit-learn.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from curvops.optim import SINGD


def main(epochs: int = 5) -> float:
    """Train, print the loss, and return the accuracy on held-out images."""
    torch.manual_seed(0)
    digits = load_digits()
    X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = torch.randperm(len(X)).tensor_split([1500])

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = SINGD(model, lr=5e-3, damping=1e-2, lr_cov=1e-2, T=1)
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
