"""Figures of a training: its learning curve, and its acceptance on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import style
from spec_lab.analysis.figures.palette import SHADES
from spec_lab.analysis.figures.style import STYLE
from spec_lab.analysis.figures.ticks import number_axis

Curve = Sequence[Mapping[str, Any]]
"""The lines of ``training/learning.jsonl``: step, seconds, and lists of one value for each draft position."""

PANELS = (
    ("loss", "loss, nats"),
    ("accepted", "chance that a drafted token is accepted"),
    ("agreed", "share of likeliest tokens that agree"),
)


@rc_context(STYLE)
def learning(curve: Curve) -> Figure | None:
    """Draw loss, acceptance and agreement on the training texts at each draft position; None without a line."""
    if not curve:
        return None
    labels = [str(position + 1) for position in range(len(curve[0]["loss"]))]
    height = style.legend_height(2.9, [*labels, "title"])
    figure, axes = style.panels(3, 9.6, height, right=1.2, between=0.95)
    for panel, (key, label) in zip(axes, PANELS, strict=True):
        _by_position(panel, curve, "step", key, labels)
        panel.set(xlabel="training step", ylabel=label)
        number_axis(panel, [line["step"] for line in curve], log=False)
    axes[0].set_title("On the texts of the training")
    axes[-1].legend(title="draft position", loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=8.5)
    return figure


@rc_context(STYLE)
def held_out(curve: Curve) -> Figure | None:
    """Draw acceptance and estimated accepted length on held-out prompts by time; None where they were not measured."""
    lines = [line for line in curve if line.get("held_out")]
    if not lines:
        return None
    minutes = [line["seconds"] / 60 for line in lines]
    labels = [str(position + 1) for position in range(len(lines[0]["held_out"]["accepted"]))]
    height = style.legend_height(2.9, [*labels, "title"])
    figure, (left, right) = style.panels(2, 6.6, height, right=1.2, between=0.75)
    for kind, dash, label in (("accepted_length", "-", "sampled"), ("agreed_length", "--", "greedy")):
        left.plot(minutes, [line["held_out"][kind] for line in lines], f"o{dash}", ms=4, color=SHADES[0], label=label)
    left.set(xlabel="minutes of training", ylabel="accepted tokens per step, estimated", ylim=(0, None))
    left.set_title("On held-out prompts")
    left.legend(loc="lower right", fontsize=8.5)
    for position, label in enumerate(labels):
        values = [line["held_out"]["accepted"][position] for line in lines]
        right.plot(minutes, values, "o-", ms=4, color=_shade(position, len(labels)), label=label)
    right.set(xlabel="minutes of training", ylabel="chance that a drafted token is accepted")
    right.legend(title="draft position", loc="upper left", bbox_to_anchor=(1.0, 1.03), fontsize=8.5)
    return figure


def _by_position(panel: Any, curve: Curve, x: str, key: str, labels: Sequence[str]) -> None:
    for position, label in enumerate(labels):
        values = [line[key][position] for line in curve]
        mark = "o-" if len(curve) == 1 else "-"
        panel.plot([line[x] for line in curve], values, mark, ms=4, color=_shade(position, len(labels)), label=label)


def _shade(position: int, of: int) -> str:
    """Return the colour of a draft position: darker ones come first."""
    return SHADES[round(position * (len(SHADES) - 1) / max(1, of - 1))]
