"""Figures along the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE
from spec_lab.analysis.figures.ticks import number_axis

Ranges = Sequence[Mapping[str, Any]]
"""Ranges as ``metrics.ranges.in_ranges`` returns them, NaN as None."""


def ends(value: Mapping[str, float | None]) -> tuple[float, float, float]:
    """Return mean, low and high of an interval; NaN where one is not known."""
    mean, low, high = (float("nan") if (end := value[name]) is None else end for name in ("mean", "low", "high"))
    return mean, low, high


@rc_context(STYLE)
def by_range(
    panels: Mapping[str, Mapping[str, Ranges]], figure: str, label: str, names: Mapping[str, str],
    marked: tuple[float, str] | None = None, colours: Mapping[str, str] | None = None,
) -> Figure:  # fmt: skip
    """Draw a figure by where in the text steps begin, with 95 % bands; each range at its last position.

    Args:
        panels: for each panel its ranges by curve; the panel's key is the label of its axis.
        names: how curves are shown; others by their key.
        marked: a position and what it is, which is shown on the last panel where the texts reach it; None: none.
        colours: of the curves; None: in their order.
    """
    keys = list(dict.fromkeys(key for curves in panels.values() for key in curves))
    shown = style.short(names.get(key, key) for key in keys)
    chosen = colours or {key: palette.COLOURS[number] for number, key in enumerate(keys)}
    dashes, legend = palette.dashes(keys), style.legend_width(shown.values())
    drawing, axes = style.panels(len(panels), 3.3 * len(panels), style.legend_height(2.6, shown), right=legend)
    for panel, (axis, curves) in zip(axes, panels.items(), strict=True):
        for key, rows in curves.items():
            mean, low, high = np.array([ends(row[figure]) for row in rows]).reshape(-1, 3).T
            name = shown[names.get(key, key)]
            style.curve(panel, [row["last"] for row in rows], mean, low, high, chosen[key], name, dashes[key])
        panel.set(xlabel=axis, ylabel=label)
        number_axis(panel, [row["last"] for rows in curves.values() for row in rows])
    longest = max((row["last"] for rows in [*panels.values()][-1].values() for row in rows), default=0)
    if marked is not None and longest > marked[0]:
        axes[-1].axvline(marked[0], color=palette.GREY, linestyle="--", linewidth=1)
        axes[-1].set_title(f"dashed: {marked[1]}")
    lines = {line.get_label(): line for panel in axes for line in panel.lines}
    style.legend_right(axes[-1], [lines[name] for name in shown.values() if name in lines])
    return drawing
