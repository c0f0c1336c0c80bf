"""Figures of one run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from spec_lab.analysis import metrics
from spec_lab.analysis.figures.layout import lay_out
from spec_lab.analysis.figures.style import (
    BASELINE,
    GREY,
    PHASES,
    SEQUENCE,
    STYLE,
    colours,
    panels,
    room,
    short,
    whiskers,
)
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.metrics.frames import Ranks


@rc_context(STYLE)
def acceptance(tables: Tables) -> Figure | None:
    """Survival and conditional acceptance by depth, with 95 % bands over groups."""
    frame = frames.by_depth(tables)
    if not len(frame):
        return None
    drafting, colour = list(frame["arm"].unique()), colours(metrics.arms(tables))
    names = short(drafting)
    legend = room(names.values()) + 0.4 if len(drafting) > 1 else 0.0
    figure, axes = panels(2, 8.0, 2.9, right=0.2 + legend, between=0.25, sharey=True)
    for panel, kind in zip(axes, ("survival", "conditional"), strict=True):
        for arm in drafting:
            own = frame[(frame["arm"] == arm) & (frame["kind"] == kind)]
            panel.plot(own["depth"], own["value"], "o-", ms=4, color=colour[arm], label=names[arm])
            panel.fill_between(own["depth"], own["low"], own["high"], color=colour[arm], alpha=0.15, linewidth=0)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set(title="Survival: steps that accepted k or more / all steps", ylabel="share, with 95 % bands")
    axes[0].set_ylim(0, 1.03)
    axes[1].set_title("Conditional: accepted k / reached k")
    for panel in axes:
        panel.set_xlabel("depth k")
    if len(drafting) > 1:
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=9)
    return figure


@rc_context(STYLE)
def throughput(tables: Tables) -> Figure | None:
    """Each group's decode throughput against the baseline's, and the paired speed-up with its interval."""
    frame, means = frames.throughput(tables), frames.speedups(tables).set_index("arm")
    if not len(frame):
        return None
    colour = colours(metrics.arms(tables))
    others = [arm for arm in frame["arm"].unique() if arm != "baseline"]
    if not others or frame["baseline"].isna().all():
        return _alone(frame, colour)
    names = short(others)
    figure, (left, right) = panels(2, 7.6, max(2.7, 0.42 * len(others) + 0.4), between=room(names.values()) + 0.35)
    top = frame["tokens_per_second"].max() * 1.05
    left.plot([0, top], [0, top], color=GREY, linestyle="--", linewidth=1)
    right.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    for place, arm in enumerate(others):
        own = frame[frame["arm"] == arm]
        left.plot(own["baseline"], own["tokens_per_second"], "o", ms=4, alpha=0.6, color=colour[arm])
        if arm not in means.index:
            continue
        ratio = own["speedup"].dropna()
        scatter = np.random.default_rng(0).uniform(-0.12, 0.12, len(ratio))
        right.plot(ratio, place + 0.16 + scatter, "o", ms=3, alpha=0.4, color=colour[arm])
        mean, low, high = (float(means.loc[arm, name]) for name in ("mean", "low", "high"))
        _mean(right, mean, low, high, place - 0.14, colour[arm])
    left.set(xlabel="baseline, tokens/s", ylabel="tokens/s", xlim=(0, top), ylim=(0, top))
    left.set_title("Each group of prompts; dashed: the baseline's speed")
    farthest = np.nanmax([frame["speedup"].max(), means["high"].max(), 1.0])
    right.set(xlabel="times the baseline's tokens/s on the same prompts", xlim=(0, farthest * 1.06))
    right.set_title("Speed-up of each group; mean, 95 % interval")
    right.set_yticks(range(len(others)), list(names.values()), fontsize=9)
    right.set_ylim(len(others) - 0.5, -0.65)
    for label, arm in zip(right.get_yticklabels(), others, strict=True):
        label.set_color(colour[arm])
    right.grid(axis="y", visible=False)
    return figure


@rc_context(STYLE)
def phases(tables: Tables) -> Figure | None:
    """Where decode time goes: milliseconds per emitted token by phase, stacked, one bar per arm."""
    frame = frames.time_by_phase(tables)
    if not len(frame):
        return None
    arms = list(frame["arm"].unique())
    names = short(arms)
    figure, (axes,) = panels(1, 6.4, 0.34 * len(arms) + 0.2, left=room(names.values()) + 0.1, right=2.2, bottom=1.35)
    end = np.zeros(len(arms))
    for phase, colour in PHASES.items():
        own = frame[frame["phase"] == phase]
        if own["ms_per_token"].max() > 0:
            width = own["ms_per_token"].to_numpy()
            axes.barh(range(len(arms)), width, left=end, color=colour, label=metrics.PHASES[phase], height=0.62)
            end = end + width
    for place, (whole, share) in enumerate(zip(end, frame.drop_duplicates("arm")["overhead"], strict=True)):
        axes.annotate(f"  {whole:.2f} ms, overhead {share:.1%}", (whole, place), va="center", fontsize=9)
    axes.set(xlabel="milliseconds of decoding per emitted token", xlim=(0, end.max() * 1.01))
    axes.set_yticks(range(len(arms)), list(names.values()), fontsize=9)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_title("Where the time goes")
    axes.grid(axis="y", visible=False)
    below = -0.5 / (0.34 * len(arms) + 0.2)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, below), ncols=4, fontsize=8, columnspacing=1.2)
    return figure


@rc_context(STYLE)
def tokens(tables: Tables) -> Figure | None:
    """How many tokens a step gave: shares of steps, one bar per arm, with tau."""
    frame = frames.tokens_per_step(tables)
    if not len(frame):
        return None
    arms = list(frame["arm"].unique())
    names = short(arms)
    figure, (axes,) = panels(1, 6.4, 0.34 * len(arms) + 0.2, left=room(names.values()) + 0.1, right=0.9, bottom=1.0)
    places = {arm: place for place, arm in enumerate(arms)}
    end = np.zeros(len(arms))
    last = len(SEQUENCE) - 1
    frame = frame.assign(shown=frame["tokens"].clip(upper=last))
    for count, colour in enumerate(SEQUENCE):
        own = frame[frame["shown"] == count].groupby("arm")["share"].sum()
        if not len(own):
            continue
        width = np.array([own.get(arm, 0.0) for arm in arms])
        axes.barh(range(len(arms)), width, left=end, color=colour, height=0.66, edgecolor="white", linewidth=0.6,
                  label=f"{count} or more" if count == last else str(count))  # fmt: skip
        for place in np.flatnonzero(width > 0.06).tolist():
            ink = "white" if count > 3 else "#222222"
            middle = float(end[place] + width[place] / 2)
            axes.text(middle, place, f"{width[place]:.0%}", color=ink, fontsize=8, ha="center", va="center")
        end = end + width
    for arm, tau in frame.drop_duplicates("arm").set_index("arm")["tau"].items():
        axes.annotate(f"  tau {tau:.2f}", (1.0, places[arm]), va="center", fontsize=9)
    axes.set(xlabel="share of steps", xlim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_yticks(range(len(arms)), list(names.values()), fontsize=9)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_title("Tokens that a step gave")
    axes.grid(visible=False)
    below = -0.5 / (0.34 * len(arms) + 0.2)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, below), ncols=8, fontsize=8, columnspacing=1.2)
    return figure


@rc_context(STYLE)
def cost(tables: Tables) -> Figure | None:
    """Time of the phase target by drafted nodes per sequence; one panel for each number of live sequences.

    Contexts are pooled, and nodes are as the arms came to draft them; ``spec_lab.tasks.cost`` varies nodes alone.
    """
    frame = frames.cost_of_nodes(tables)
    if not len(frame):
        return None
    commonest = sorted(frame.groupby("live")["rounds"].sum().nlargest(3).index, reverse=True)
    arms, colour = list(frame["arm"].unique()), colours(metrics.arms(tables))
    width = {1: 5.6, 2: 8.0, 3: 9.6}[len(commonest)]
    names = short(arms)
    legend = room(names.values()) + 0.4
    figure, axes = panels(len(commonest), width, 2.9, right=0.2 + legend, between=0.3, sharey=True)
    for panel, live in zip(axes, commonest, strict=True):
        for arm in arms:
            own = frame[(frame["arm"] == arm) & (frame["live"] == live)]
            spread = np.array([own["ms"] - own["low"], own["high"] - own["ms"]])
            panel.errorbar(own["nodes"], own["ms"], yerr=spread, fmt="o", ms=4, lw=1, color=colour[arm],
                           label=names[arm])  # fmt: skip
        panel.set(xlabel="drafted nodes per sequence", title=f"{live} live sequence{'s' * (live != 1)}")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("ms of phase target: median, quartiles")
    axes[0].set_ylim(0, None)
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=9)
    return figure


@rc_context(STYLE)
def accepted_trees(tables: Tables, trees: Mapping[str, Collection[Ranks]] | None = None) -> Figure | None:
    """Accepted paths drawn on each arm's draft tree: discs by the share of steps that accepted a node."""
    arms = metrics.arms(tables)
    steps = {arm: metrics.decode_steps(tables.steps, arm) for arm in arms}
    found = {arm: frames.accepted_tree(own, (trees or {}).get(arm, ())) for arm, own in steps.items()}
    found = {arm: own for arm, own in found.items() if len(own)}
    if not found:
        return None
    colour, names, columns = colours(arms), short(found), min(2, len(found))
    down, above, line = [0.0] * columns, 0.42, 0.25  # inches: filled of each column, of a title, of a leaf
    placed = {}
    for arm, own in found.items():
        column = down.index(min(down))
        placed[arm] = column, down[column] + above
        down[column] += above + line * (_lines(own) + 1.3)
    whole = max(down)
    figure = Figure(figsize=(5.4 * columns, whole))
    for arm, (column, top) in placed.items():
        height = line * (_lines(found[arm]) + 0.3)
        box = (column + 0.03) / columns, (whole - top - height) / whole, 0.94 / columns, height / whole
        axes = figure.add_axes(box, label=arm)
        _tree(axes, found[arm], colour[arm])
        axes.set_title(f"{names[arm]}: share of steps that accepted each node")
    return figure


def _tree(axes: Axes, frame: pd.DataFrame, colour: str) -> None:
    """Draw one tree into the axes: edges as wide, and discs as large, as the node is accepted often."""
    places = lay_out(frame["path"])
    deepest = max(place.across for place in places.values())
    for path, share in zip(frame["path"], frame["share"], strict=True):
        at = places[path]
        if path:
            above = places[path[:-1]]
            line = {"color": colour if share else "#c9c9c9", "linewidth": 0.8 + 5 * share, "alpha": 0.75, "zorder": 1}
            axes.plot([above.across, above.across + 0.35, at.across], [above.down, at.down, at.down], **line)
        size = 14 + 110 * share
        axes.scatter(at.across, at.down, s=size, color=colour if share else "white", zorder=2,
                     edgecolors="white" if share else "#b5b5b5", linewidths=0.8)  # fmt: skip
        if share and path:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
            text = f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"
            axes.annotate(text, (at.across + 0.1, at.down - 0.14), fontsize=7, va="bottom", zorder=3, bbox=box)
    axes.set_xlim(-0.2, max(deepest, 4) + 0.5)
    axes.set_ylim(max(place.down for place in places.values()) + 0.5, -0.8)
    axes.axis("off")


def _lines(frame: pd.DataFrame) -> int:
    return 1 + int(max(place.down for place in lay_out(frame["path"]).values()))


def _mean(axes: Axes, mean: float, low: float, high: float, place: float, colour: str) -> None:
    """A mean with its interval, and the numbers above it."""
    axes.errorbar(mean, place, xerr=whiskers(mean, low, high), fmt="D", color=colour, ms=5, capsize=4, zorder=5)
    text = f"{mean:.2f}" if np.isnan(low) else f"{mean:.2f} [{low:.2f}, {high:.2f}]"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    axes.annotate(text, (mean, place - 0.14), ha="center", va="bottom", fontsize=8, bbox=box)


def _alone(frame: pd.DataFrame, colour: Mapping[str, str]) -> Figure:
    """Throughput without anything to compare with."""
    arms = list(frame["arm"].unique())
    names = short(arms)
    figure, (axes,) = panels(1, 6.4, 2.7, right=room(names.values()) + 0.6)
    for arm in arms:
        own = frame[frame["arm"] == arm]
        axes.plot(own["group"], own["tokens_per_second"], "o", ms=4, color=colour.get(arm, BASELINE),
                  label=names[arm])  # fmt: skip
    axes.set(xlabel="group of prompts", ylabel="tokens/s", title="Decode throughput of each group", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=9)
    return figure
