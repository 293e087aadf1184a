"""How near approximations are to a curvature matrix, block by block, by products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvops._random import signs

EXACT = 512  #: up to so many parameters all columns are formed


def add_quality(rows: list[dict[str, Any]], G: Any, approximations: dict[str, Any], probes: int, seed: int) -> None:
    """Add to every block how near the approximations are to the GGN's block: distance and cosine, and their errors."""
    merged = _disjoint([row["names"] for row in rows])
    names, shapes, N = list(G.domain_names), dict(zip(G.domain_names, G.domain, strict=True)), G.shape[1]
    exactly = max(EXACT, probes) >= N
    if exactly:
        z = torch.eye(N, dtype=G.torch_dtype, device=G.device)
    else:
        index = torch.arange(probes, device=G.device).unsqueeze(1)
        z = signs(seed, index, torch.arange(N, device=G.device)).to(G.torch_dtype).T.contiguous()
    Z = dict(zip(names, _split(z, shapes), strict=True))
    exact = G.block_diagonal(merged) @ Z
    for title, op in approximations.items():
        near = op @ Z
        for row in rows:
            g, k = (torch.cat([y[n].reshape(-1, z.shape[1]) for n in row["names"]]).double() for y in (exact, near))
            sums = torch.stack([(g - k).square().sum(0), g.square().sum(0), k.square().sum(0), (g * k).sum(0)])
            for what, f in (("distance", _distance), ("cosine", _cosine)):
                row[f"{title} {what}"] = float(f(sums.sum(1)))
                row[f"{title} {what} error"] = 0.0 if exactly else _jackknife(f, sums)


def _distance(sums: Tensor) -> Tensor:
    apart, size, _, _ = sums
    return torch.where(size > 0, apart / size, 0.0).sqrt()


def _cosine(sums: Tensor) -> Tensor:
    _, size, other, both = sums
    return torch.where(size * other > 0, both / (size * other).sqrt(), 1.0)


def _jackknife(f: Callable[[Tensor], Tensor], sums: Tensor) -> float:
    """Return the standard error of ``f`` of sums over probes ``[4, probes]``."""
    n = sums.shape[1]
    left_out = f(sums.sum(1, keepdim=True) - sums)
    return float(((n - 1) / n * (left_out - left_out.mean()).square().sum()).sqrt())


def _disjoint(blocks: list[list[str]]) -> list[list[str]]:
    """Merge blocks that hold pieces of one parameter."""
    merged: list[list[str]] = []
    for block in blocks:
        touching = [m for m in merged if set(m) & set(block)]
        names = dict.fromkeys(n for m in (*touching, block) for n in m)
        merged = [m for m in merged if m not in touching] + [list(names)]
    return merged


def _split(z: Tensor, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(s).numel() for s in shapes.values()]
    return [p.reshape(*s, -1) for p, s in zip(z.split(sizes), shapes.values(), strict=True)]
