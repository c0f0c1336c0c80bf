"""Fonts and layout that all figures share. Margins are computed in inches, so each figure is drawn once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from numpy.typing import ArrayLike

from spec_lab.analysis.figures.palette import GREY, GRID
from spec_lab.core.terminal import visible

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 120,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,  # ticks show true values
    "legend.frameon": False,
    "svg.hashsalt": "spec_lab",
    "text.parse_math": False,  # names may contain dollar signs
}

SPEEDUP = "speed-up (ratio of sums)"
"""Label of ``metrics.speedup``: total tokens per total seconds over the baseline's."""

ROW = 0.34
"""Height of a row of bars, in inches."""


def shortened(name: str, length: int = 32) -> str:
    """Return the name; a longer one without its middle."""
    if len(name) <= length:
        return name
    return f"{name[: length - length // 2 - 1]}…{name[len(name) - length // 2 :]}"


def short(names: Iterable[str], length: int = 32) -> dict[str, str]:
    """Return each name as it is drawn: shortened, but long enough to be unique, control characters made visible."""
    texts = {name: visible(name) for name in dict.fromkeys(names)}
    longest = max(map(len, texts.values()), default=0)
    while True:
        cut = {name: shortened(text, length) for name, text in texts.items()}
        if len(set(cut.values())) == len(set(texts.values())) or length >= longest:
            return cut
        length += 8


def text_width(names: Iterable[str], size: float = 9) -> float:
    """Return the width of the longest name, in inches.

    Args:
        size: of their letters, in points.
    """
    with rc_context(STYLE):
        widths = [TextPath((0, 0), name, size=size).get_extents().width / 72 for name in names if name.strip()]
    return 1.05 * max(widths, default=0.0) + 0.1  # hinted letters are wider than their outlines


def legend_width(names: Iterable[str]) -> float:
    """Return the width that ``legend_right`` requires, in inches."""
    return text_width(names, 8.5) + 0.6


def legend_height(min_height: float, names: Collection[str]) -> float:
    """Return a height of the axes on which the legend of these names has room, in inches."""
    return max(min_height, 0.18 * len(names) + 0.1)


def panels(
    count: int,
    width: float,
    height: float,
    left: float = 0.75,
    right: float = 0.2,
    top: float = 0.35,
    bottom: float = 0.6,
    between: float = 0.7,
    **options: Any,
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels side by side.

    Args:
        width: of all panels together, without margins, in inches.
        height: of a panel, in inches.
        left, right, top, bottom: margins in inches.
        between: space between panels in inches.
        options: of matplotlib's ``subplots``.
    """
    size = width + left + right + between * (count - 1), height + top + bottom
    figure = Figure(figsize=size)
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    figure.subplots_adjust(
        left=left / size[0],
        right=1 - right / size[0],
        bottom=bottom / size[1],
        top=1 - top / size[1],
        wspace=between / (width / count),
    )
    for panel in axes:
        panel.tick_params(labelleft=True)  # where the y axis is shared as well: a page may stack the panels
    return figure, list(axes)


def stacked_bars(
    widths: pd.DataFrame, parts: Mapping[Any, tuple[str, str]], texts: Sequence[str], **margins: float
) -> tuple[Figure, Axes]:
    """Return a figure with one stacked bar for each arm.

    Args:
        widths: the widths, a row for each arm and a column for each part, in stacking order.
        parts: label and colour of each part.
        texts: a text behind each bar.
        margins: in inches, as in ``panels``.
    """
    names, height = list(short(widths.index).values()), ROW * len(widths) + 0.2
    figure, (axes,) = panels(1, 6.0, height, left=text_width(names) + 0.1, **margins)
    ends = widths.cumsum(axis=1)
    for part, width in widths.items():
        label, colour = parts[part]
        axes.barh(range(len(names)), width, left=ends[part] - width, color=colour, height=0.64, edgecolor="white",
                  linewidth=0.4, label=label)  # fmt: skip
    for line, (end, text) in enumerate(zip(ends.iloc[:, -1], texts, strict=True)):
        axes.annotate(text, (end, line), (6, 0), textcoords="offset points", va="center", fontsize=9)
    rows(axes, names)
    axes.set_xlim(0, ends.iloc[:, -1].max() * 1.01)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.5 / height), ncols=4, fontsize=8, columnspacing=1.2)
    return figure, axes


def rows(axes: Axes, names: Sequence[str], size: float = 9) -> None:
    """Label the rows of the y axis from the top."""
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.grid(axis="y", visible=False)


def legend_right(axes: Axes, lines: Sequence[Line2D] | None = None) -> None:
    """Put the legend to the right of the axes, of all labelled lines or the ones given."""
    options = {} if lines is None else {"handles": lines}
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=8.5, **options)


def curve(axes: Axes, x: Any, value: Any, low: Any, high: Any, colour: str, label: str, dash: str = "-") -> Line2D:
    """Draw a line with markers and its band; returns the line."""
    (line,) = axes.plot(x, value, "o", linestyle=dash, ms=4, color=colour, label=label)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    return line


def interval_text(mean: float, low: float, high: float) -> str:
    """Return a mean with its interval as text; without one the mean alone."""
    return f"{mean:.2f}" if np.isnan(low) or np.isnan(high) else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def interval_mark(axes: Axes, mean: float, low: float, high: float, y: float, colour: str, end: float = np.inf) -> str:
    """Draw a mean with its interval into a row; returns both as text. What is beyond the axis' end is a triangle."""
    if max(mean, high if high == high else mean) > end:
        axes.plot(end, y, ">", color=colour, ms=5, zorder=6)
    text = interval_text(mean, low, high)
    mean, low, high = min(mean, end), min(low, end), min(high, end)
    known = not (np.isnan(low) or np.isnan(high))
    whiskers = np.array([[mean - low], [high - mean]]) if known else None
    axes.errorbar(mean, y, xerr=whiskers, fmt="D", color=colour, ms=5, capsize=3, lw=1.4, zorder=5)
    return text


def axis_end(values: ArrayLike) -> float:
    """Return the largest of positive values that is no outlier, so that a few of them do not squeeze all others.

    Outliers are above twice the median, and above it by 3.5 standard deviations of the logarithms, estimated from the
    median absolute deviation (Iglewicz and Hoaglin 1993). NaN of no value.
    """
    x = np.asarray(values, dtype=float).ravel()
    x = x[np.isfinite(x) & (x > 0)]
    if not len(x):
        return float("nan")
    away = np.log(x / np.median(x))
    return float(x[away <= max(np.log(2), 3.5 * 1.4826 * float(np.median(np.abs(away))))].max())


def clipped(
    axes: Axes, x: ArrayLike, y: ArrayLike, colour: str, ends: tuple[float, float], label: str = "", **marks: Any
) -> int:
    """Draw points; those beyond the ends of the axes are drawn at the end, as triangles. Returns their number.

    Args:
        colour: of all marks.
        ends: the ends of the x and the y axis; infinite for one that holds all points.
        label: in the legend; empty for none.
        marks: further options of matplotlib's ``plot``.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    right, above = x > ends[0], y > ends[1]
    inside = ~right & ~above
    axes.plot(x[inside], y[inside], "o", color=colour, label=label or None, **marks)
    for mark, beyond in ((">", right), ("^", above & ~right)):
        if beyond.any():
            axes.plot(np.minimum(x[beyond], ends[0]), np.minimum(y[beyond], ends[1]), mark, color=colour, **marks)
    return int((right | above).sum())


def note_clipped(axes: Axes, count: int, total: int) -> None:
    """State below the axes how many of its marks are beyond its end."""
    if count:
        text = f"{count} of {total} beyond the axis (triangles)"
        axes.annotate(text, (1, -34), xycoords=("axes fraction", "axes points"), ha="right", va="top", fontsize=7.5)


def one_line(axes: Axes, axis: str = "x") -> None:
    """Mark the baseline's speed, a speed-up of 1."""
    (axes.axvline if axis == "x" else axes.axhline)(1.0, color=GREY, linestyle="--", linewidth=1)
