"""Training practice: schedules, automatic mixed precision with gradient clipping, accumulation, checkpoints.

Run ``python docs/examples/04_advanced.py``; needs scikit-learn.
"""

from __future__ import annotations

import io

import torch
from sklearn.datasets import load_digits
from torch import nn

from curvops.optim import SINGD


def lr_cov(step: int) -> float:
    """Begin with small steps of the preconditioner."""
    return min(1e-2, 1e-3 * (step + 1))


def make() -> tuple[nn.Module, SINGD, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler]:
    """Return what a checkpoint restores."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
    optimizer = SINGD(model, lr=1e-2, damping=1e-2, lr_cov=lr_cov, T=2, grad_scaler=scaler)
    return model, optimizer, scaler, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


def main(epochs: int = 6) -> float:
    """Train, print the loss, and return the accuracy on held-out images."""
    torch.manual_seed(0)
    digits = load_digits()
    X, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    train, test = torch.randperm(len(X)).tensor_split([1500])

    model, optimizer, scaler, schedule = make()
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for batch in train[torch.randperm(len(train))].split(60):
            optimizer.zero_grad()
            for micro in batch.split(25):  # 25, 25 and 10 images: each loss is weighted by its share
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_fn(model(X[micro]), y[micro])
                scaler.scale(loss * len(micro) / len(batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, lr {schedule.get_last_lr()[0]:.4f}")

        if epoch == 2:  # go on from a file, as after an interruption
            parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}
            file = io.BytesIO()
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            optimizer.close()
            file.seek(0)
            state = torch.load(file, weights_only=True)
            model, optimizer, scaler, schedule = make()
            for name, part in {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}.items():
                part.load_state_dict(state[name])

    with torch.no_grad():
        accuracy = (model(X[test]).argmax(1) == y[test]).double().mean().item()
    print(f"accuracy on {len(test)} held-out images: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
