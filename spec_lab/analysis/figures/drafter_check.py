"""Figures of ``task=check_drafter``: tau of readings, figures by depth and along the texts, reliability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.ranges import ends
from spec_lab.analysis.figures.style import STYLE

NAMES = {"used": "in use", "best": "best", "used_head": "confidence head", "best_head": "confidence head, best"}
"""Readings of which all figures are shown, as ``summary.json`` and as tables and figures call them."""


@rc_context(STYLE)
def reading_taus(readings: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the expected tau of every reading with its interval, that in use in another colour.

    Args:
        readings: those of ``summary.json`` with a tau, that in use first.
    """
    cut = style.short([f"{number} {reading['label']}" for number, reading in enumerate(readings)], 44)
    names = [name.partition(" ")[2] for name in cut.values()]
    figure, (axes,) = style.panels(1, 6.0, style.ROW * len(names) + 0.2, left=style.text_width(names) + 0.1)
    for line, reading in enumerate(readings):
        style.interval_mark(axes, *ends(reading["tau"]), line, palette.COLOURS[1 if line else 0])
    style.rows(axes, names)
    axes.set_xlabel("expected tokens per step")
    axes.set_title("Readings of the drafter and its prompts")
    return figure


@rc_context(STYLE)
def by_depth(readings: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw agreement and alpha by depth.

    Args:
        readings: of ``summary.json``, by their label.
    """
    figure, panels = style.panels(2, 6.6, 2.6, right=1.2)
    for panel, (key, label) in zip(panels, (("agreed", "likeliest tokens agree"), ("alpha", "alpha")), strict=True):
        for number, (name, reading) in enumerate(readings.items()):
            depths = np.arange(len(reading[key])) + 1
            values = [float("nan") if value is None else value for value in reading[key]]
            panel.plot(depths, values, "o-", ms=4, color=palette.COLOURS[number], label=name)
        panel.set(xlabel="depth", ylabel=label, ylim=(0, 1))
    style.legend_right(panels[-1])
    return figure


@rc_context(STYLE)
def reliability(calibrations: Mapping[str, Mapping[str, Any]], key: str = "agreed") -> Figure:
    """Draw the reliability diagram: what happened by confidence.

    Args:
        calibrations: as ``metrics.reliability`` returns them, by what is shown of each.
        key: of what happened.
    """
    names = {name: f"{short}, ECE {calibrations[name]['ece']:.3f}" for name, short in style.short(calibrations).items()}
    legend = style.legend_width(names.values())
    figure, (axes,) = style.panels(1, 3.2, style.legend_height(3.0, names), right=legend)
    axes.plot([0, 1], [0, 1], color=palette.GREY, linestyle="--", linewidth=1)
    for number, (name, facts) in enumerate(calibrations.items()):
        confidence, happened = ([entry[column] for entry in facts["bins"]] for column in ("confidence", key))
        axes.plot(confidence, happened, "o-", ms=4, color=palette.COLOURS[number % len(palette.COLOURS)],
                  label=names[name])  # fmt: skip
    axes.set(xlabel="confidence", ylabel="agreement" if key == "agreed" else "acceptance", xlim=(0, 1), ylim=(0, 1))
    style.legend_right(axes)
    return figure
