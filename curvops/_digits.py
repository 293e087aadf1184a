"""The problem at hand when none is given: a small convolutional network on scikit-learn's digits, which are real images."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from curvops.viz import require

TRAIN = 1500  #: images to train on; the others are held out


def digits() -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] and their labels, shuffled."""
    data = require("sklearn.datasets").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.as_tensor(data.target)[order]


def network(seed: int) -> nn.Sequential:
    """Return a convolutional network with initial weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(8, 16, 3, padding=1, stride=2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(256, 32),
            relu3=nn.ReLU(),
            classes=nn.Linear(32, 10),
        )
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Train with Adam, showing progress."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in (bar := tqdm(range(epochs), desc="training", unit="epoch")):
        for batch in torch.randperm(len(images), generator=generator).split(50):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def problem(epochs: int = 5, seed: int = 0) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Any]:
    """Return model, loss, parameters and data of the trained network."""
    images, labels = digits()
    model = network(seed)
    train(model, images[:TRAIN], labels[:TRAIN], epochs, seed)
    data = DataLoader(TensorDataset(images[:TRAIN], labels[:TRAIN]), 250)
    return model, nn.CrossEntropyLoss(), dict(model.named_parameters()), data
