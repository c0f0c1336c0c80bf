"""Heat maps of projected speed-ups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, TwoSlopeNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from spec_lab.analysis.figures.palette import GREY, colours
from spec_lab.analysis.figures.style import short

DIVERGING: Colormap = LinearSegmentedColormap.from_list("slower_faster", ["#b03a5b", "#f6f4f0", "#114a7d"])
"""Red below a speed-up of 1, blue above."""

CELL = 0.46
"""Width and height of a cell, in inches."""

MAX_ROWS = 16
"""Most designs of ``best_designs`` that the legend names."""


def speedups_by_batch_and_length(cells: pd.DataFrame, design: str) -> Figure | None:
    """Draw the speed-up of one design over batch and draft length: a panel for each device; None without a cell.

    Cells that do not fit into memory are left empty; a frame marks the fastest length of each batch size.

    Args:
        cells: of ``analysis.projection.project``.
    """
    of_design = cells[cells["design"] == design]
    if not of_design["fits"].any():
        return None
    devices, lengths, batches = (
        list(of_design["hardware"].unique()),
        sorted(of_design["length"].unique()),
        _batches(of_design),
    )
    figure, panels = _panels(len(devices), len(batches), len(lengths))
    norm = _norm(of_design["speedup"].to_numpy())
    for axes, device in zip(panels, devices, strict=True):
        here = of_design[of_design["hardware"] == device]
        values = here.pivot(index="length", columns="batch", values="speedup").reindex(lengths, columns=batches)
        grid = values.to_numpy(dtype=float)
        axes.imshow(grid, cmap=DIVERGING, norm=norm, aspect="auto")
        _numbers(axes, grid, norm)
        for column in range(grid.shape[1]):
            if np.isfinite(grid[:, column]).any():
                x, y = column - 0.46, int(np.nanargmax(grid[:, column])) - 0.44
                axes.add_patch(Rectangle((x, y), 0.92, 0.88, fill=False, edgecolor="black", linewidth=1.2))
        _axes(axes, batches, [str(length) for length in lengths], device)
    panels[0].set_ylabel("draft length")
    title = f"Projected speed-up: {short([design], 36)[design]}\nFrames: the fastest length"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def best_designs(cells: pd.DataFrame) -> Figure | None:
    """Draw the fastest design and its speed-up for each device and batch size; None where nothing fits into memory.

    Args:
        cells: of ``analysis.projection.project``.
    """
    best = cells[cells["best"]]
    if not len(best):
        return None
    devices, batches = list(cells["hardware"].unique()), _batches(cells)
    names = list(dict.fromkeys(best["design"]))
    proposers = cells.drop_duplicates("design").set_index("design")["proposer"]
    known = {name: proposers[name] for name in names}
    if len(set(known.values())) == len(names):
        by_proposer = colours(known.values())
        colour = {name: by_proposer[known[name]] for name in names}
    else:
        colour = colours(names)
    labels = short(devices, 24)
    width = CELL * 1.9 * len(batches)
    figure = Figure(figsize=(width + 2.4, CELL * 1.15 * len(devices) + 1.5), layout="constrained")
    axes = figure.subplots()
    for row in best.to_dict("records"):
        x, y = batches.index(row["batch"]), devices.index(row["hardware"])
        slower = row["speedup"] < 1
        patch = Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour[row["design"]], alpha=0.25 if slower else 0.85)
        axes.add_patch(patch)
        ink = "black" if slower or _bright(colour[row["design"]]) else "white"
        text = f"{row['speedup']:.2f}, k={row['length']}"
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xlim(-0.5, len(batches) - 0.5)
    _axes(axes, batches, [labels[device] for device in devices], "Fastest design: speed-up, draft length k")
    axes.set_ylim(len(devices) - 0.5, -0.5)
    shown = short(names, 40)
    for name in names[:MAX_ROWS]:
        axes.plot([], [], "s", color=colour[name], label=shown[name])
    figure.legend(loc="outside lower left", fontsize=8.5, ncols=2)
    if (best["speedup"] < 1).any():
        axes.set_xlabel("batch size. Pale: slower than no draft")
    return figure


def _bright(colour: str) -> bool:
    """Return whether black text is easier to read on this colour than white text."""
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.52


def _batches(cells: pd.DataFrame) -> list[int]:
    """Return the batch sizes that fit somewhere."""
    return sorted(int(batch) for batch in cells.loc[cells["fits"], "batch"].unique())


def _panels(count: int, columns: int, rows: int) -> tuple[Figure, Sequence[Axes]]:
    across = min(count, 3)
    down = -(-count // across)
    size = (CELL * 1.15 * columns + 0.7) * across, (CELL * 0.75 * rows + 0.85) * down + 0.45
    figure = Figure(figsize=(max(size[0], 4.4), size[1]), layout="constrained")
    every = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in every[count:]:
        axes.set_visible(False)
    return figure, every[:count]


def _norm(values: np.ndarray) -> TwoSlopeNorm:
    """Return the colour scale, white at 1."""
    known = values[np.isfinite(values)]
    return TwoSlopeNorm(1.0, min(known.min(), 0.5), max(known.max(), 2.0))


def _numbers(axes: Axes, grid: np.ndarray, norm: TwoSlopeNorm) -> None:
    for y, x in np.argwhere(np.isfinite(grid)):
        dark = abs(float(norm(grid[y, x])) - 0.5) > 0.3
        axes.text(x, y, f"{grid[y, x]:.2f}", ha="center", va="center", fontsize=7.5, color="white" if dark else "black")


def _axes(axes: Axes, batches: Sequence[int], rows: Sequence[str], title: str) -> None:
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches], fontsize=8.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=8.5)
    axes.set_xlabel("batch size")
    axes.set_title(title, loc="left")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_color(GREY)
        spine.set_linewidth(0.5)
