"""What every benchmark needs: alternating measurements, peak memory, a section of a page that it may rewrite."""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks on stderr otherwise

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
UNIT = "gradient"


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """784-512-256-10 on a batch of 256."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(256, 784), torch.randint(10, (256,))


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """Five 3x3 convolutions and a linear layer on a batch of 64 colour images of 32x32 pixels."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


def gradient(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> Callable[[], Any]:
    """The unit of all benchmarks: one forward and backward pass for the gradient of all parameters."""
    params = list(model.parameters())
    return lambda: torch.autograd.grad(loss(model(X), y), params)


def alternate(contestants: dict[str, Callable[[], Any]], seconds: float, least: int = 7) -> dict[str, list[float]]:
    """Time the contestants in turn, for ``seconds`` and at least ``least`` rounds, after one round of warming up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    gc.collect()
    gc.disable()
    end = perf_counter() + seconds
    try:
        while perf_counter() < end or len(times[next(iter(times))]) < least:
            for name, run in contestants.items():
                start = perf_counter()
                run()
                times[name].append(perf_counter() - start)
    finally:
        gc.enable()
    return times


def ratio(times: dict[str, list[float]], name: str, unit: str = UNIT) -> float:
    """Median over rounds of a contestant's time in units of another one's in the same round."""
    return median(t / u for t, u in zip(times[name], times[unit], strict=True))


def memory(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that torch holds at most during a call, and those of the result, beyond what it held before.

    Every allocation counts, from the profiler's trace: exact and repeatable, where the process size is neither.
    """
    run()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    del result
    return peak, held


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose columns line up in the source, too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name:start -->`` and ``<!-- name:end -->``."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    page = path.read_text(encoding="utf-8")
    page, found = re.subn(
        f"{re.escape(start)}.*?{re.escape(end)}", lambda _: f"{start}\n{text}\n{end}", page, flags=re.DOTALL
    )
    if found != 1:
        raise ValueError(f"{path} has {found} sections {start} ... {end}, expected one.")
    path.write_text(page, encoding="utf-8")
