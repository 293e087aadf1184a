"""Pictures of a KFAC operator or of its inverse: factors, spectra of the blocks, how curvature spreads over the layers.

Needs matplotlib: ``pip install 'curvops[demo]'``. Every function returns the figure, and saves it if given a path.
No global state of matplotlib is used, so the pictures can be drawn anywhere, in notebooks as on servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvops.kfac.factors import factors_of
from curvops.structured.direct_sum import DirectSum, Part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito: colours that colour-blind people tell apart, too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_MOST = 12  #: blocks that are drawn as heat maps, and named in legends
_ROUNDING = 1e-12  #: relative size of eigenvalues that are not drawn
LINES = ("-", "--", "-.", ":")


def require(module: str, extra: str = "demo") -> ModuleType:
    """Import an optional dependency, or say which extra installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.split(".")[0]
        if (error.name or name).split(".")[0] != name:
            raise  # it is there, but something that it needs is not
        package = {"sklearn": "scikit-learn"}.get(name, name)
        raise ModuleNotFoundError(
            f"{package} is not installed, and this part of curvops needs it: pip install 'curvops[{extra}]'", name=name
        ) from error


def plot_factors(K: DirectSum, path: str | Path | None = None) -> Figure:
    """Draw the Kronecker factors of every block as heat maps, input factors above output factors.

    Of grouped convolutions the first group is drawn; of more than a dozen blocks, the dozen with the largest traces. Colours
    are cut at the 99.5 % quantile of each factor.
    """
    factors = [(part, factors_of(part)) for part in K.parts]
    blocks = [(part, f) for part, f in factors if f.input is not None and f.output is not None]
    if not blocks:
        kinds = sorted({f.kind for _, f in factors})
        raise ValueError(f"plot_factors: found blocks {kinds}, expected Kronecker products (see plot_spectra).")
    chosen = _largest([part for part, _ in blocks])
    shown = [(part.label, f) for part, f in blocks if part.label in chosen]
    across = min(len(shown), 4)
    down = -(-len(shown) // across)
    figure = _figure(2.8 * across + 0.8, 5.4 * down + 0.4)
    axes = figure.subplots(2 * down, across, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for at, (label, factor) in enumerate(shown):
        for role, M in (("input", factor.input), ("output", factor.output)):
            axis = axes[2 * (at // across) + (role == "output"), at % across]
            axis.set_visible(True)
            _heat_map(figure, axis, M, f"{label}\n{role}" if role == "input" else role)
    few = len(shown) < len(blocks)
    figure.suptitle(f"Kronecker factors of the {_MOST} blocks with the largest traces" if few else "Kronecker factors")
    return _save(figure, path)


def _largest(parts: Sequence[Part]) -> frozenset[str]:
    """Return the labels of the blocks with the largest traces."""
    ranked = sorted(parts, key=lambda part: float(part.operator.trace()), reverse=True)
    return frozenset(part.label for part in ranked[:_MOST])


def plot_spectra(K: DirectSum, path: str | Path | None = None) -> Figure:
    """Draw the sorted eigenvalues of every block on logarithmic axes; what is zero up to rounding is left out.

    Of more than a dozen blocks, the dozen with the largest traces is named; the others are grey.
    """
    figure = _figure(9.6, 4.8)
    axes = figure.subplots()
    styles = cycle((c, s) for s in LINES for c in COLOURS)
    named = _largest(K.parts)
    others = "others"
    for part in K.parts:
        values = part.operator.eigenvalues().detach().double().flatten().cpu().sort(descending=True).values
        values = values[values > _ROUNDING * values[0]]
        at = range(1, len(values) + 1)
        if part.label in named:
            colour, style = next(styles)
            axes.plot(at, values.numpy(), style, color=colour, label=f"{part.label} ({part.operator.shape[0]})")
        else:
            axes.plot(at, values.numpy(), color="0.8", linewidth=0.8, zorder=1, label=others)
            others = "_" + others.lstrip("_")  # once in the legend
    axes.set(xscale="log", yscale="log", xlabel="index", ylabel="eigenvalue")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(title="block (size)", frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, path)


def plot_layer_bars(K: DirectSum, path: str | Path | None = None) -> Figure:
    """Draw the trace of every block as a bar, with its share of the whole."""
    traces = {part.label: float(part.operator.trace()) for part in K.parts}
    total = sum(traces.values()) or 1.0
    figure = _figure(7.2, 0.45 * len(traces) + 1.6)
    axes = figure.subplots()
    bars = axes.barh(list(traces), list(traces.values()), color=COLOURS[0])
    axes.bar_label(bars, [f"{100 * t / total:.1f} %" for t in traces.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="trace")
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)


def plot_density(densities: Mapping[str, Any] | Any, path: str | Path | None = None) -> Figure:
    """Draw a spectral density, or several by name, with two standard errors to each side.

    Args:
        densities: What ``lanczos_approximate_spectrum`` returns, or a dictionary of these.
        path: Where to save the figure.
    """
    if not isinstance(densities, Mapping):
        densities = {"": densities}
    figure = _figure(7.2, 2.6 * len(densities) + 0.6)
    rows = figure.subplots(len(densities), 1, squeeze=False)[:, 0]
    for axes, (name, found), colour in zip(rows, densities.items(), cycle(COLOURS), strict=False):
        grid, density, error = (t.detach().double().cpu() for t in (found.grid, found.density, found.stderr))
        floor = 1e-6 * float(density.max())
        seen = torch.where(density > floor, density, torch.nan)  # a line at the floor would look like data
        axes.plot(grid.numpy(), seen.numpy(), color=colour)
        if torch.isfinite(error).all():
            low, high = ((density + s * error).clamp(min=floor).numpy() for s in (-2, 2))
            axes.fill_between(grid.numpy(), low, high, color=colour, alpha=0.25, linewidth=0)
        axes.set(yscale="log", xlabel="eigenvalue", ylabel="density", title=name)
        axes.grid(True, which="major", alpha=0.3)
    return _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    require("matplotlib")
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="tight")


def _heat_map(figure: Figure, axes: Any, M: Tensor, title: str) -> None:
    M = (M[0] if M.ndim == 3 else M).detach().double().cpu()
    limit = float(torch.quantile(M.abs().flatten()[:: max(1, M.numel() // 10**6)], 0.995)) or 1.0
    image = axes.imshow(M.numpy(), cmap="PuOr", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set_title(f"{title} {len(M)} x {len(M)}", fontsize="small")
    axes.set(xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04)
    bar.ax.tick_params(labelsize="x-small")


def _save(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
