"""Figures of a sweep, from the table that ``spec_lab.results.sweep.collect`` makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE
from spec_lab.analysis.figures.ticks import number_axis
from spec_lab.analysis.metrics import sweeps
from spec_lab.core.terminal import visible

MAX_ROWS = 40
"""Most rows of a forest plot; of more, the fastest are drawn."""

VALUES = {"tau_pooled": "tau, tokens per step", "speedup": style.SPEEDUP}
"""Label of each figure that is drawn against an option."""


@rc_context(STYLE)
def forest(table: pd.DataFrame, keys: Sequence[str]) -> Figure | None:
    """Draw speed-ups with 95 % intervals, the fastest first.

    Each interval holds for its row alone, and the best of many are overestimated; ``spec_lab.analysis.compare``
    corrects for the number of comparisons.
    """
    frame = sweeps.over_sweep(table, keys)
    frame = frame[frame["speedup"].notna()] if "speedup" in frame else frame.iloc[:0]
    if not len(frame):
        return None
    shown = frame.head(MAX_ROWS)
    cut = style.short(shown["label"], 48)
    names = [cut[label] for label in shown["label"]]
    intervals = shown[["speedup", "speedup_low", "speedup_high"]].to_numpy(dtype=float)
    right = style.text_width([style.interval_text(*interval) for interval in intervals], 8) + 0.15
    figure, (axes,) = style.panels(
        1, 4.2, 0.24 * len(shown) + 0.2, left=style.text_width(names, 8) + 0.15, right=right, bottom=0.5
    )
    style.one_line(axes)
    colour = palette.colours(sweeps.compared_arms(table))
    fastest = style.axis_end(intervals[:, 0])
    end = np.fmax(1.5 * fastest, style.axis_end(intervals[intervals[:, 0] <= fastest, 2]))
    for line, row in enumerate(shown.to_dict("records")):
        mean, low, high = (float(row[name]) for name in ("speedup", "speedup_low", "speedup_high"))
        text = style.interval_mark(axes, mean, low, high, line, colour[row["arm"]], end)
        axes.annotate(text, (1.02, line), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    style.rows(axes, names, size=8)
    axes.set_xlim(0, None)
    style.note_clipped(axes, int((np.nanmax(intervals, axis=1) > end).sum()), len(shown))
    axes.set_xlabel(f"{style.SPEEDUP}, 95 % interval")
    count = f"the {len(shown)} fastest of {len(frame)}" if len(shown) < len(frame) else f"{len(frame)} rows"
    axes.set_title(f"Speed-ups: {count}")
    return figure


@rc_context(STYLE)
def tau_and_speedup(table: pd.DataFrame, keys: Sequence[str], by: str) -> Figure | None:
    """Draw speed-up against tau, a point for each row, coloured by 'arm' or a varied option.

    Points of the same tau and different speed-ups differ in the cost of their drafts.
    """
    frame, categories = sweeps.tau_and_speedup(table, keys)
    if not len(frame):
        return None
    present = set(categories[by])
    words = [word for word in categories[by].cat.categories if word in present]
    names = style.short(words, 40)
    arms = [list(frame.loc[categories[by] == word, "arm"].unique()) for word in words]
    if len({tuple(of_word) for of_word in arms}) == sum(map(len, arms)):  # each word stands for an arm
        of_arm = palette.colours(sweeps.compared_arms(table))
        colour = {word: of_arm[arm] for word, (arm,) in zip(words, arms, strict=True)}
    else:
        colour = palette.option_colours(words)
    figure, (axes,) = style.panels(
        1, 4.4, style.legend_height(3.2, names), left=0.95, right=style.legend_width(names.values())
    )
    style.one_line(axes, "y")
    end, count = style.axis_end(frame["speedup"]), 0
    for word in words:
        tau, speedup = (frame.loc[categories[by] == word, name] for name in ("tau_pooled", "speedup"))
        count += style.clipped(axes, tau, speedup, colour[word], (np.inf, end), names[word], ms=5, alpha=0.75)
    style.note_clipped(axes, count, len(frame))
    axes.set(xlabel=VALUES["tau_pooled"], ylabel=style.SPEEDUP, title="Speed-up against tau")
    style.legend_right(axes)
    return figure


@rc_context(STYLE)
def lines(table: pd.DataFrame, keys: Sequence[str], key: str) -> Figure | None:
    """Draw tau and speed-up against a numeric option, with 95 % bands; a line for each setting of the other options.

    Lines have the colours of their arms where there are several, and differ in their dashes.

    Runs that differ only in the seed are one point; its band is the mean of their bounds (``sweeps.by_option``).
    """
    frame = sweeps.by_option(table, keys, key, list(VALUES))
    values = [name for name in VALUES if (frame["what"] == name).any()]
    if not values:
        return None
    lines_of = frame.drop_duplicates("line")[["line", "arm"]].to_numpy().tolist()
    names, colour = style.short(frame["line"], 40), palette.colours(sweeps.compared_arms(table))
    options = palette.option_colours(list(names))
    several_arms = len({arm for _, arm in lines_of}) > 1 or len(lines_of) == 1
    right = style.legend_width(names.values()) if len(names) > 1 else 0.2
    height = style.legend_height(2.9, names)
    figure, axes = style.panels(len(values), 3.7 * len(values), height, right=right, between=0.65)
    drawn: dict[str, Line2D] = {}
    for panel, value in zip(axes, values, strict=True):
        used = Counter[str]()
        for line, arm in lines_of:
            points = frame[(frame["what"] == value) & (frame["line"] == line)]
            ink = colour[arm] if several_arms else options[line]
            dash = palette.DASHES[used[ink] % len(palette.DASHES)]
            used[ink] += 1
            x, value_at, low, high = (points[name] for name in ("x", "value", "low", "high"))
            drawn[names[line]] = style.curve(panel, x, value_at, low, high, ink, names[line], dash)
        panel.set(xlabel=visible(key), ylabel="95 % bands over groups", title=VALUES[value])
        number_axis(panel, frame["x"])
        if value == "speedup":
            style.one_line(panel, "y")
    if len(names) > 1:
        style.legend_right(axes[-1], list(drawn.values()))
    return figure
