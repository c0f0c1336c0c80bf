"""Colours, fonts and layout that all figures share. Margins are computed in inches, so each figure is drawn once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spec_lab.core.terminal import visible

COLOURS = (
    "#1f6fb2", "#d1662a", "#2f8f57", "#8457a8", "#b03a5b", "#7a6a3c", "#3aa0a8", "#e0a100", "#5b6fd6", "#a05a2c",
    "#4f7f1f", "#c050a0",
)  # fmt: skip
GREY = "#8a8a8a"
BASELINE = "#4d4d4d"

PROPOSERS = {
    "medusa": COLOURS[0], "draft_chain": COLOURS[1], "draft_model": COLOURS[1], "draft_tree": COLOURS[4],
    "draft_best_first": "#ee9090", "draft_reranked": "#f0284f",
    "ngram": COLOURS[2], "ngram_chain": COLOURS[2], "ngram_tree": COLOURS[6],
    "eagle": "#500a8c", "eagle3": "#c478f5", "hydra": "#a5b800", "mtp": "#10bb58", "pard": "#f0309a",
    "block": "#12306a", "suffix": "#6b4226", "sam": "#b5843c", "rest": "#d9c27a", "recycling": "#00a0a0",
    "jacobi": "#5f8f8f", "lookahead": "#7ad0d0", "pld_plus": "#8fc31f", "union": "#d00000", "best_of": "#ff7f50",
    "cascade": "#8a2be2", "early_exit": "#006d5b", "kangaroo": "#c04a00", "skip": "#9e5f8a",
}  # fmt: skip
"""Fixed colours of the bundled proposers, by the name in their records or of their config."""

PHASES = {
    "target_forward": "#1f6fb2",
    "propose_forward": "#2f8f57",
    "target_rest": "#8fb8d8",
    "propose_rest": "#97c7ab",
    "mask_wait": "#c9b458",
    "probabilities": "#d1662a",
    "verify": "#b03a5b",
    "commit": "#8457a8",
    "between": "#8a8a8a",
}
"""Colour of each phase (``metrics.PHASES``), in stacking order."""

DASHES = ("-", "--", ":", "-.")

SEQUENCE = ("#dfe5ea", "#b9d3ea", "#8fb8dc", "#629bcb", "#3d7fb8", "#22639c", "#114a7d", "#06315c")
"""Colours of 0, 1, 2, ... tokens; the last one stands for all larger numbers."""

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 120,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,  # ticks show true values
    "legend.frameon": False,
    "svg.hashsalt": "spec_lab",
    "text.parse_math": False,  # names may contain dollar signs
}

SPEEDUP = "speed-up (ratio of sums)"
"""Label of ``metrics.speedup``: total tokens per total seconds over the baseline's."""

LETTER = 0.078
"""Approximate width of a letter at nine points, in inches."""

ROW = 0.34
"""Height of a row of bars, in inches."""


def colours(arms: Iterable[str]) -> dict[str, str]:
    """Return the colour of each arm; a proposer has the same colour in every figure of every run.

    Bundled proposers have fixed colours (``PROPOSERS``), the baseline is grey. Any other arm has a colour that its name
    determines; if two arms of one figure would share it, the later one gets the next free colour.
    """
    names = [arm for arm in dict.fromkeys(arms) if arm != "baseline"]
    chosen = {arm: PROPOSERS[arm] for arm in names if arm in PROPOSERS} | {"baseline": BASELINE}
    others = [colour for colour in COLOURS if colour not in PROPOSERS.values()]
    for arm in names:
        if arm not in chosen:
            start = crc32(arm.encode()) % len(others)
            order = [*others[start:], *others[:start], *COLOURS]
            chosen[arm] = next((one for one in order if one not in chosen.values()), order[0])
    return {arm: chosen[arm] for arm in (*names, "baseline")}


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


def text_width(names: Iterable[str]) -> float:
    """Return the approximate width of the longest name at nine points, in inches."""
    return max(map(len, names), default=0) * LETTER + 0.1


def panels(
    count: int,
    width: float,
    height: float,
    left: float = 0.65,
    right: float = 0.2,
    top: float = 0.35,
    bottom: float = 0.6,
    between: float = 0.7,
    **options: Any,
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels side by side.

    Args:
        count: number of panels.
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
    for place, (end, text) in enumerate(zip(ends.iloc[:, -1], texts, strict=True)):
        axes.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
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


def interval_mark(axes: Axes, mean: float, low: float, high: float, place: float, colour: str) -> str:
    """Draw a mean with its interval into a row; returns both as text."""
    known = not (np.isnan(low) or np.isnan(high))
    whiskers = np.array([[mean - low], [high - mean]]) if known else None
    axes.errorbar(mean, place, xerr=whiskers, fmt="D", color=colour, ms=5, capsize=3, lw=1.4, zorder=5)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]" if known else f"{mean:.2f}"


def one_line(axes: Axes, axis: str = "x") -> None:
    """Mark the baseline's speed, a speed-up of 1."""
    (axes.axvline if axis == "x" else axes.axhline)(1.0, color=GREY, linestyle="--", linewidth=1)


def option_colours(categories: Sequence[str]) -> dict[str, str]:
    """Return a colour for each value of an option."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(categories)}
