"""KFAC as a preconditioner of any optimizer, with kl-clip: the arguments are those of kfac-pytorch.

Run ``python docs/examples/05_kfac.py``; needs scikit-learn.
"""

from __future__ import annotations

import torch
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from torch import nn

from curvops.optim import KFACPreconditioner


def main(epochs: int = 5) -> float:
    """Train, print the loss, and return the accuracy on held-out images."""
    torch.manual_seed(0)
    digits = load_digits()
    X, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    train, test = torch.randperm(len(X)).tensor_split([1500])

    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding="same"), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(144, 10)),
    )
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    preconditioner = KFACPreconditioner(
        model,
        factor_update_steps=1,
        inv_update_steps=10,
        damping=0.01,
        kl_clip=0.001,
        lr=lambda step: optimizer.param_groups[0]["lr"],
    )
    for epoch in range(epochs):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            loss = loss_fn(model(X[batch]), y[batch])
            loss.backward()
            preconditioner.step()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, kl-clip scale {preconditioner.clip_scale.item():.3f}")

    top = eigsh(preconditioner.operator, k=3, return_eigenvectors=False)[::-1]
    print(f"largest eigenvalues of the curvature: {top}")
    print(f"memory: {preconditioner.memory_usage()}")
    with torch.no_grad():
        accuracy = (model(X[test]).argmax(1) == y[test]).double().mean().item()
    print(f"accuracy on {len(test)} held-out images: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
