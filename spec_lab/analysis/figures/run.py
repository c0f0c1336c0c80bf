"""Figures of one run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spec_lab.analysis import metrics
from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE
from spec_lab.analysis.figures.ticks import number_axis
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.metrics.frames import Ranks


@rc_context(STYLE)
def acceptance(tables: Tables) -> Figure | None:
    """Draw survival and conditional acceptance by depth, with 95 % bands over groups."""
    frame = frames.by_depth(tables)
    if not len(frame):
        return None
    arms, colour = list(frame["arm"].unique()), palette.colours(metrics.arms(tables))
    names, dashes = style.short(arms), palette.dashes(arms)
    legend = style.legend_width(names.values()) if len(arms) > 1 else 0.2
    figure, axes = style.panels(2, 7.4, style.legend_height(2.9, names), right=legend, between=0.55, sharey=True)
    for panel, kind in zip(axes, ("survival", "conditional"), strict=True):
        for arm in arms:
            curve = frame[(frame["arm"] == arm) & (frame["kind"] == kind)]
            style.curve(panel, curve["depth"], curve["value"], curve["low"], curve["high"], colour[arm], names[arm],
                        dashes[arm])  # fmt: skip
        number_axis(panel, frame["depth"], log=False)
        panel.set_xlabel("depth k, tokens")
    axes[0].set(title="Survival: steps that accepted ≥ k / all steps", ylabel="share of steps, 95 % bands")
    axes[0].set_ylim(0, 1.03)
    axes[1].set_title("Conditional: accepted k / reached k")
    if len(arms) > 1:
        style.legend_right(axes[1])
    return figure


@rc_context(STYLE)
def throughput(tables: Tables) -> Figure | None:
    """Draw each group's decode speed against the baseline's, and the speed-up (ratio of sums) with its interval.

    None without a baseline.
    """
    frame, means = frames.throughput(tables), frames.speedups(tables).set_index("arm")
    colour = palette.colours(metrics.arms(tables))
    others = [arm for arm in frame["arm"].unique() if arm != "baseline"]
    if not others or frame["baseline"].isna().all():
        return None
    names = list(style.short(others).values())
    figure, (left, right) = style.panels(
        2, 7.2, max(2.7, 0.42 * len(others) + 0.4), left=0.95, right=0.9, between=style.text_width(names) + 0.35
    )
    end = max(style.axis_end(frame["tokens_per_second"]), style.axis_end(frame["baseline"]))
    farthest = max(style.axis_end([*frame["speedup"], *means["mean"]]), 1.0)
    highest = means["high"].max()
    farthest = np.fmax(farthest, min(highest, 2 * farthest) if highest == highest else 0.0)
    top, counts = end * 1.05, [0, 0]
    left.plot([0, top], [0, top], color=palette.GREY, linestyle="--", linewidth=1)
    style.one_line(right)
    for line, arm in enumerate(others):
        groups = frame[frame["arm"] == arm]
        speeds = groups["baseline"], groups["tokens_per_second"]
        counts[0] += style.clipped(left, *speeds, colour[arm], (end, end), ms=4, alpha=0.6)
        if arm not in means.index:
            continue
        ratios = groups["speedup"].dropna()
        jitter = np.random.default_rng(0).uniform(-0.12, 0.12, len(ratios))
        ends = farthest, np.inf
        counts[1] += style.clipped(right, ratios, line + 0.16 + jitter, colour[arm], ends, ms=3, alpha=0.4)
        mean, low, high = (float(means.loc[arm, name]) for name in ("mean", "low", "high"))
        text = style.interval_mark(right, mean, low, high, line - 0.14, colour[arm], farthest)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        right.annotate(text, (min(mean, farthest), line - 0.28), ha="center", va="bottom", fontsize=8, bbox=box)
    left.set(xlabel="baseline, tokens/s", ylabel="arm, tokens/s", xlim=(0, top), ylim=(0, top))
    left.locator_params(nbins=5)
    left.set_title("Groups of prompts; dashed: the baseline's speed")
    style.note_clipped(left, counts[0], int(frame["arm"].isin(others).sum()))
    style.note_clipped(right, counts[1], int(frame["speedup"].notna().sum()))
    right.set(xlabel=style.SPEEDUP, xlim=(0, farthest * 1.06))
    right.locator_params(axis="x", nbins=5)
    right.set_title("Speed-up, 95 % interval; dots: ratios of groups")
    style.rows(right, names)
    right.set_ylim(len(others) - 0.5, -0.75)
    return figure


@rc_context(STYLE)
def phases(tables: Tables) -> Figure | None:
    """Draw decode time by phase: milliseconds per emitted token, one bar per arm."""
    frame = frames.time_by_phase(tables)
    if not len(frame):
        return None
    widths = frame.pivot(index="arm", columns="phase", values="ms_per_token").loc[frame["arm"].unique()]
    widths = widths[[phase for phase in palette.PHASES if widths[phase].max() > 0]]
    parts = {phase: (metrics.PHASES[phase], colour) for phase, colour in palette.PHASES.items()}
    shares = frame.drop_duplicates("arm")["overhead"]
    texts = [f"{ms:.2f} ms, overhead {share:.1%}" for ms, share in zip(widths.sum(axis=1), shares, strict=True)]
    figure, axes = style.stacked_bars(widths, parts, texts, right=2.0, bottom=1.35)
    axes.set(title="Decode time by phase", xlabel="milliseconds per emitted token")
    return figure


LOST = {
    "tau": ("emitted (tau)", "#22639c"),
    "verifier": ("lost to the verifier", "#d9822b"),
    "open": ("open: no known verifier", "#f0c48e"),
    "tree": ("lost to the tree", "#7b9a5b"),
    "draft": ("lost to the draft", "#c9c9c9"),
}
"""Parts of the most tokens that a step can emit: label and colour."""


@rc_context(STYLE)
def lost(bounds: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Draw where the tokens of a step are lost: depth + 1 tokens in parts, one bar per arm.

    Args:
        bounds: ``bounds`` of ``summary.json``, by the arms' shown names.
    """
    rows, texts = {}, []
    for arm, of_arm in bounds.items():
        if verifier := next((verifier for verifier in of_arm.get("verifiers", {}).values() if verifier["used"]), None):
            parts = {"tau": verifier["tau"]["mean"]} | {part: value["mean"] for part, value in verifier["lost"].items()}
            if any(parts.get(part) is None for part in LOST):
                continue
            rows[arm] = {part: max(parts[part], 0.0) for part in LOST}
            most = "optimum" if of_arm.get("kind") == "exact" else "bound"
            texts.append(
                f"{verifier['share']['mean']:.0%} of the {most}" if verifier["share"]["mean"] is not None else ""
            )
    if not rows:
        return None
    figure, axes = style.stacked_bars(pd.DataFrame(rows).T, LOST, texts, right=1.6, bottom=1.35)
    axes.set(title="Where tokens are lost", xlabel="tokens a step, of at most depth + 1")
    return figure


@rc_context(STYLE)
def tokens(tables: Tables) -> Figure | None:
    """Draw the distribution of tokens per step: shares of steps, one bar per arm, with tau."""
    frame = frames.tokens_per_step(tables)
    if not len(frame):
        return None
    last = len(palette.SEQUENCE) - 1
    frame["count"] = frame["tokens"].clip(upper=last)
    shares = frame.pivot_table(index="arm", columns="count", values="share", aggfunc="sum", fill_value=0.0)
    labels = [*map(str, range(last)), f"{last} or more"]
    texts = [f"tau {tau:.2f}" for tau in frame.drop_duplicates("arm")["tau"]]
    parts = dict(enumerate(zip(labels, palette.SEQUENCE, strict=True)))
    figure, axes = style.stacked_bars(shares.loc[frame["arm"].unique()], parts, texts, right=0.9, bottom=1.1)
    axes.set(title="Tokens emitted per step", xlabel="share of steps")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for count, bars in zip(shares, axes.containers, strict=True):
        assert isinstance(bars, BarContainer)
        shown = [f"{bar.get_width():.0%}" if bar.get_width() > 0.06 else "" for bar in bars]
        axes.bar_label(bars, shown, label_type="center", fontsize=8,
                       color="black" if count < palette.LIGHT_SEQUENCE else "white")  # fmt: skip
    return figure


@rc_context(STYLE)
def cost(tables: Tables) -> Figure | None:
    """Draw the time of the phase target by drafted nodes per sequence, a panel for each number of live sequences.

    Contexts are pooled, and nodes are as the arms drafted them; ``spec_lab.tasks.cost`` varies nodes alone.
    """
    frame = frames.cost_of_nodes(tables)
    if not len(frame):
        return None
    commonest = sorted(frame.groupby("live")["forwards"].sum().nlargest(3).index, reverse=True)
    arms, colour = list(frame["arm"].unique()), palette.colours(metrics.arms(tables))
    names, width = style.short(arms), {1: 5.2, 2: 7.4, 3: 8.6}[len(commonest)]
    legend, height = style.legend_width(names.values()), style.legend_height(2.9, names)
    figure, axes = style.panels(len(commonest), width, height, right=legend, between=0.55, sharey=True)
    for panel, live in zip(axes, commonest, strict=True):
        for arm in arms:
            curve = frame[(frame["arm"] == arm) & (frame["live"] == live)]
            spread = np.array([curve["ms"] - curve["low"], curve["high"] - curve["ms"]])
            panel.errorbar(curve["nodes"], curve["ms"], yerr=spread, fmt="o", ms=4, lw=1, color=colour[arm],
                           label=names[arm])  # fmt: skip
        panel.set(xlabel="drafted nodes per sequence", title=f"{live} live sequence{'s' * (live != 1)}")
        number_axis(panel, frame.loc[frame["live"] == live, "nodes"], log=False)
    axes[0].set_ylabel("target, milliseconds: median, quartiles")
    axes[0].set_ylim(0, None)
    style.legend_right(axes[-1])
    return figure


@rc_context(STYLE)
def accepted_trees(tables: Tables, trees: Mapping[str, Collection[Ranks]] | None = None) -> Figure | None:
    """Draw the accepted paths on each arm's draft tree: discs by the share of steps that accepted a node.

    Args:
        trees: the arms' static draft trees, as paths of child ranks.
    """
    arms = metrics.arms(tables)
    steps = {arm: metrics.decode_steps(tables.steps, arm) for arm in arms}
    accepted = {arm: frames.accepted_tree(rows, (trees or {}).get(arm, ())) for arm, rows in steps.items()}
    accepted = {arm: frame for arm, frame in accepted.items() if len(frame)}
    if not accepted:
        return None
    places = {arm: tree_layout(frame["path"]) for arm, frame in accepted.items()}
    colour, names, columns = palette.colours(arms), style.short(accepted, 24), min(2, len(accepted))
    column_width, share_of_column = 4.8, 0.94  # inches
    level = {arm: column_width * share_of_column / _levels(each) for arm, each in places.items()}
    filled, title = [0.0] * columns, 0.42  # inches: used of each column, of a title
    boxes = {}
    for arm in accepted:
        line = 0.25 if level[arm] >= LABEL_WIDTH else 0.25 + LABEL_WIDTH - LABEL_HEIGHT  # inches of a leaf
        column, height = filled.index(min(filled)), line * (max(node.y for node in places[arm].values()) + 1.3)
        boxes[arm] = column, filled[column] + title, height
        filled[column] += title + height + line
    figure = Figure(figsize=(column_width * columns, total := max(filled)))
    for arm, (column, top, height) in boxes.items():
        box = (column + 0.03) / columns, (total - top - height) / total, share_of_column / columns, height / total
        axes = figure.add_axes(box, label=arm)
        _draw_tree(axes, accepted[arm], places[arm], colour[arm], level[arm])
        axes.set_title(f"{names[arm]}: share of steps", fontsize=9)
    return figure


LABEL_WIDTH, LABEL_HEIGHT = 0.32, 0.12
"""Inches of the label of a node in ``accepted_trees``, with what separates it from the next one."""


def _levels(places: Mapping[Ranks, NodePosition]) -> float:
    """Return the width of a tree's axes in levels."""
    return max(*(node.x for node in places.values()), 4) + 0.7


def _draw_tree(
    axes: Axes, frame: pd.DataFrame, places: Mapping[Ranks, NodePosition], colour: str, level: float
) -> None:
    """Draw one tree into the axes: widths of edges and areas of discs grow with the share of acceptance.

    Args:
        frame: of ``frames.accepted_tree``.
        places: of ``tree_layout``.
        level: inches from one level to the next. Labels that are wider are turned, and where even turned ones have no
            room only every second, third, ... level has labels. Discs are smaller on levels that are close together.
    """
    turned, disc = level < LABEL_WIDTH, min(1.0, level / LABEL_WIDTH) ** 2
    every = max(1, ceil(LABEL_HEIGHT / level))
    for path, share in zip(frame["path"], frame["share"], strict=True):
        node = places[path]
        if path:
            parent = places[path[:-1]]
            line = {"color": colour if share else "#c9c9c9", "linewidth": 0.8 + 5 * share, "alpha": 0.75, "zorder": 1}
            axes.plot([parent.x, parent.x + 0.35, node.x], [parent.y, node.y, node.y], **line)
        axes.scatter(node.x, node.y, s=disc * (14 + 110 * share), color=colour if share else "white", zorder=2,
                     edgecolors="white" if share else "#b5b5b5", linewidths=0.8)  # fmt: skip
        if share and path and len(path) % every == 0:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
            text = f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"
            at, rotation, side = (node.x, 90, "center") if turned else (node.x + 0.1, 0, "left")
            axes.annotate(text, (at, node.y - 0.14), fontsize=7, va="bottom", ha=side, rotation=rotation, zorder=3,
                          bbox=box)  # fmt: skip
    axes.set_xlim(-0.2, _levels(places) - 0.2)
    axes.set_ylim(max(node.y for node in places.values()) + 0.5, -0.8)
    axes.axis("off")


class NodePosition(NamedTuple):
    """The position of a node: ``x`` is its depth, ``y`` counts leaves from the top."""

    x: float
    y: float


def tree_layout(paths: Iterable[Ranks]) -> dict[Ranks, NodePosition]:
    """Return a position for every node: each leaf in a row of its own, every parent in the row of its first child.

    Args:
        paths: the nodes, ``()`` for the root; each with its parent.
    """
    nodes = sorted(paths)  # a node, then its descendants, then its next sibling
    first_child: dict[Ranks, Ranks] = {}
    for path in nodes:
        if path:
            first_child.setdefault(path[:-1], path)
    y: dict[Ranks, float] = {}
    row = 0
    for path in nodes:
        if path and path[:-1] in y and first_child[path[:-1]] == path:
            y[path] = y[path[:-1]]
        else:
            y[path] = float(row)
            row += 1
    return {path: NodePosition(float(len(path)), y[path]) for path in nodes}
