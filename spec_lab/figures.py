"""A run's figures, drawn from its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab import metrics
from spec_lab.metrics import Tables

COLOURS = ("#1f6fb2", "#d1662a", "#2f8f57", "#8457a8", "#b03a5b", "#7a6a3c", "#3aa0a8", "#e0a100", "#222222")
GREY = "#8a8a8a"

PHASES = {
    "target_forward": "#1f6fb2",
    "propose_forward": "#2f8f57",
    "target_rest": "#8fb8d8",
    "propose_rest": "#97c7ab",
    "mask_wait": "#c9b458",
    "law": "#d1662a",
    "verify": "#b03a5b",
    "commit": "#8457a8",
    "between": "#8a8a8a",
}
"""Colour of each phase, in the order stacked."""

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw(tables: Tables, folder: Path) -> list[Path]:
    """Draw what the run has data for; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with rc_context(STYLE):
        for name, draw_one in (("acceptance", acceptance), ("throughput", throughput), ("phases", phases)):
            figure = draw_one(tables)
            if figure is not None:
                drawn.append(folder / f"{name}.png")
                figure.savefig(drawn[-1], bbox_inches="tight")
    return drawn


def acceptance(tables: Tables) -> Figure | None:
    """Survival and conditional acceptance by depth, with 95 % bands over requests."""
    drafting = [arm for arm in metrics.arms(tables) if metrics.decode_steps(tables.steps, arm)["depth"].max() > 0]
    if not drafting:
        return None
    figure = Figure(figsize=(9.5, 3.8))
    panels = figure.subplots(1, 2, sharey=True)
    deepest = 1
    colours = _colours(tables)
    for arm in drafting:
        steps = metrics.decode_steps(tables.steps, arm)
        bands = metrics.depth_bands(steps)
        curves = {"survival": metrics.survival(steps), "conditional": metrics.conditional(steps)}
        for panel, (name, curve) in zip(panels, curves.items(), strict=True):
            depth = np.arange(1, len(curve) + 1)
            deepest = max(deepest, len(curve))
            panel.plot(depth, curve, marker="o", markersize=4, color=colours[arm], label=arm)
            panel.fill_between(depth, *bands[name], color=colours[arm], alpha=0.18, linewidth=0)
    panels[0].set(title="Survival", ylabel="share", ylim=(0, 1.02))
    panels[1].set(title="Conditional")
    panels[0].set_xlabel("depth k: steps that accepted k or more / all steps")
    panels[1].set_xlabel("depth k: accepted k / reached k")
    for panel in panels:
        panel.set_xticks(range(1, deepest + 1))
    if len(drafting) > 1:
        panels[1].legend()
    figure.suptitle("Acceptance by depth, 95 % bands over requests", y=1.02)
    return figure


def throughput(tables: Tables) -> Figure | None:
    """Each group's decode throughput against the baseline's, and the paired speed-up with its interval."""
    speeds = {arm: metrics.group_speeds(tables.requests, arm) for arm in metrics.arms(tables)}
    speeds = {arm: one for arm, one in speeds.items() if one.max() > 0}  # one token a prompt is all prefill
    others = [arm for arm in speeds if arm != "baseline"]
    if not speeds:
        return None
    if "baseline" not in speeds or not others:
        return _alone(speeds)
    figure = Figure(figsize=(9.5, 0.4 * len(others) + 3.6))
    left, right = figure.subplots(1, 2)
    colours = _colours(tables)
    top = max(float(one.max()) for one in speeds.values()) * 1.05
    left.plot([0, top], [0, top], color=GREY, linestyle="--", linewidth=1)
    right.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    for place, arm in enumerate(others):
        pair = speeds[arm].to_frame("own").join(speeds["baseline"].rename("base"), how="inner")
        left.plot(pair["base"], pair["own"], "o", markersize=4, alpha=0.6, color=colours[arm])
        ratio = metrics.walltime_speedup_paired(tables.requests, arm).to_numpy()
        if not len(ratio):
            continue
        mean, low, high = metrics.interval(ratio)
        scatter = np.random.default_rng(0).uniform(-0.15, 0.15, len(ratio))
        right.plot(ratio, place + 0.1 + scatter, "o", markersize=3, alpha=0.4, color=colours[arm])
        right.errorbar(
            mean, place - 0.2, xerr=_whiskers(mean, low, high), fmt="D", color=colours[arm], markersize=5, capsize=4
        )
        text = f"{mean:.2f}" if np.isnan(low) else f"{mean:.2f}  [{low:.2f}, {high:.2f}]"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        right.annotate(text, (mean, place - 0.28), ha="center", va="bottom", fontsize=9, bbox=box)
    left.set(xlabel="baseline, tokens/s", ylabel="tokens/s", xlim=(0, top), ylim=(0, top))
    left.set_title("Each group of prompts; dashed: as fast as the baseline", fontsize=10)
    right.set(xlabel="times the baseline's tokens/s on the same prompts", xlim=(0, None))
    right.set_title("Speed-up of each group; mean with 95 % interval", fontsize=10)
    right.set_yticks(range(len(others)), others)
    right.set_ylim(len(others) - 0.5, -0.7)
    for label in right.get_yticklabels():
        label.set_color(colours[label.get_text()])
    right.grid(axis="y", visible=False)
    figure.tight_layout()
    return figure


def phases(tables: Tables) -> Figure | None:
    """Where decode time goes: milliseconds per emitted token by phase, stacked, one bar per arm."""
    tokens = tables.requests.groupby("arm")["decode_tokens"].sum()
    names = [arm for arm in metrics.arms(tables) if metrics.decode_seconds(tables.rounds, arm) > 0 < tokens[arm]]
    if not names:
        return None
    figure = Figure(figsize=(9.5, 0.55 * len(names) + 2.0))
    axes = figure.subplots()
    left = np.zeros(len(names))
    spent = [metrics.phase_seconds(tables.rounds, arm) for arm in names]
    for phase, colour in PHASES.items():
        width = np.array([1e3 * one[phase] / tokens[arm] for one, arm in zip(spent, names, strict=True)])
        if width.max() > 0:
            axes.barh(names, width, left=left, color=colour, label=metrics.PHASES[phase], height=0.6)
            left += width
    for place, (arm, end) in enumerate(zip(names, left, strict=True)):
        share = metrics.overhead(tables.rounds, arm)
        axes.annotate(f" {end:.2f} ms, overhead {share:.1%}", (end, place), va="center", fontsize=9)
    axes.set(xlabel="milliseconds of decoding per emitted token", xlim=(0, left.max() * 1.3))
    axes.set_title("Where the time goes")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    below = -0.6 / axes.get_position().height / figure.get_figheight()  # inches below the axes
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, below), ncols=4, fontsize=8)
    return figure


def _alone(speeds: dict[str, Any]) -> Figure:
    """Throughput without anything to compare with."""
    figure = Figure(figsize=(6, 3.2))
    axes = figure.subplots()
    for number, arm in enumerate(speeds):
        axes.plot(speeds[arm].index, speeds[arm], "o", markersize=4, color=COLOURS[number % len(COLOURS)], label=arm)
    axes.set(xlabel="group of prompts", ylabel="tokens/s", title="Decode throughput of each group", ylim=(0, None))
    axes.legend()
    return figure


def _whiskers(mean: float, low: float, high: float) -> np.ndarray | None:
    return None if np.isnan(low) else np.array([[mean - low], [high - mean]])


def _colours(tables: Tables) -> dict[str, str]:
    """One colour for each arm, the same in every figure."""
    return {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(metrics.arms(tables))}
