"""Figures of a sweep, from the table that ``spec_lab.results.sweep.collect`` makes; colours as in its report."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures.style import COLOURS, GREY, STYLE, colours, panels, short, whiskers
from spec_lab.analysis.metrics import frames

MOST_RUNS = 40
"""Rows of a forest plot; of more, the fastest are drawn."""


@rc_context(STYLE)
def forest(table: pd.DataFrame, keys: Sequence[str]) -> Figure | None:
    """Speed-ups with 95 % intervals, the fastest first.

    Each interval is for its row alone, and the best of many look better than they are; they are compared together in
    ``spec_lab.analysis.compare``.
    """
    frame = frames.over_sweep(table, keys)
    frame = frame[frame["speedup"].notna()] if "speedup" in frame else frame.iloc[:0]
    if not len(frame):
        return None
    shown = frame.head(MOST_RUNS)
    cut = short(shown["label"], 64)
    names = [cut[label] for label in shown["label"]]
    left = max(map(len, names)) * 0.075 + 0.2
    figure, (axes,) = panels(1, 5.4, 0.22 * len(shown) + 0.2, left=left, right=1.3, bottom=0.5)
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    colour = colours(frames.compared_arms(table))
    for place, one in enumerate(shown.to_dict("records")):
        mean, low, high = (float(one[name]) for name in ("speedup", "speedup_low", "speedup_high"))
        spread = whiskers(mean, low, high)
        axes.errorbar(mean, place, xerr=spread, fmt="D", ms=4, capsize=3, lw=1.2, color=colour[one["arm"]])
        text = f"{mean:.2f}" if spread is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"
        axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, None)
    axes.set_xlabel("times the baseline's tokens/s on the same prompts, 95 % interval")
    what = f"the {len(shown)} fastest of {len(frame)}" if len(shown) < len(frame) else f"{len(frame)}"
    axes.set_title(f"Speed-ups: {what}")
    axes.grid(axis="y", visible=False)
    return figure


@rc_context(STYLE)
def worth(table: pd.DataFrame, keys: Sequence[str], by: str) -> Figure | None:
    """What acceptance is worth: tau against speed-up, a point for each row, coloured ``by`` 'arm' or a varied key.

    Points of the same tau and different speed-ups differ in what their drafts cost.
    """
    frame, shades = frames.worth(table, keys)
    if not len(frame):
        return None
    words = [word for word in shades[by].cat.categories if (shades[by] == word).any()]
    cut = short(words, 40)
    legend = max(map(len, cut.values())) * 0.075 + 0.5
    figure, (axes,) = panels(1, 5.0, 3.4, right=0.1 + legend)
    for number, word in enumerate(words):
        own = frame[shades[by] == word]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(own["tau_pooled"], own["speedup"], "o", ms=5, alpha=0.75, color=colour, label=cut[word])
    axes.set(xlabel="tau, tokens per step", ylabel="speed-up over the baseline", title="What acceptance is worth")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=8.5)
    return figure


def worth_file(by: str) -> str:
    """The name, without ending, of the file with tau against speed-up, coloured by a key or 'arm'."""
    return "worth_" + _plain(by)


def lines_file(key: str) -> str:
    """The name, without ending, of the file with the figure against a key."""
    return "along_" + _plain(key)


def _plain(key: str) -> str:
    return re.sub(r"[^\w.@-]", "_", key)


@rc_context(STYLE)
def lines(table: pd.DataFrame, keys: Sequence[str], key: str) -> Figure | None:
    """Tau and speed-up against a swept number, with 95 % bands; one line for each setting of the other options.

    Runs that differ in their seed alone are one point; its band has the means of their bounds (``frames.along``).
    """
    values = {"tau_pooled": "tau, tokens per step", "speedup": "times the baseline's tokens/s"}
    every = frames.along(table, keys, key, list(values))
    if not len(every):
        return None
    found = {name: every[every["what"] == name] for name in values if (every["what"] == name).any()}
    names = list(dict.fromkeys(every["line"]))
    colour = dict(zip(names, COLOURS * (1 + len(names)), strict=False))
    cut = short(names, 40)
    legend = max(map(len, cut.values())) * 0.075 + 0.5
    width = 4.0 * len(found)
    figure, axes = panels(len(found), width, 2.9, right=0.1 + legend, between=0.65)
    for panel, (value, frame) in zip(axes, found.items(), strict=True):
        for name, own in frame.groupby("line", sort=False):
            panel.plot(own["x"], own["value"], "o-", ms=4, color=colour[name])
            panel.fill_between(own["x"], own["low"], own["high"], color=colour[name], alpha=0.15, linewidth=0)
        panel.set(xlabel=key, title=values[value])
        if value == "speedup":
            panel.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    for name in names:
        axes[-1].plot([], [], "o-", ms=4, color=colour[name], label=cut[name])
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=8.5)
    return figure
