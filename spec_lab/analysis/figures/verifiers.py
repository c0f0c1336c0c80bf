"""The figures of the verifier study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE

ROW = 0.27
"""Height of a verifier's row, in inches."""

OUTCOME = "sampled outcome"
"""Kind of numbers that are means of sampled outcomes, not of probabilities."""


def verifier_label(verifier: str, one: Mapping[str, Any]) -> str:
    """Return the verifier's name, marked if it is lossy or a sampled outcome."""
    lossy = "" if one["lossless"] else " (lossy)"
    return f"{verifier}{lossy}{' *' if one['kind'] == OUTCOME else ''}"


class Column(NamedTuple):
    """One column of panels: its title, its unit, what is drawn of a verifier (middle, low, high), and the position of a
    dashed line.
    """

    title: str
    unit: str
    of: Callable[[Mapping[str, Any]], tuple[float | None, float | None, float | None]]
    line: float | None = None


def _three(name: str, middle: str = "mean") -> Callable[[Mapping[str, Any]], tuple]:
    return lambda one: (one[name][middle], one[name]["low"], one[name]["high"])


def _percent(one: Mapping[str, Any]) -> float | None:
    return None if one["share_of_forward"] is None else 1e2 * one["share_of_forward"]


ACCEPTED = (
    Column("Expected accepted tokens", "tokens per draft, 95 % interval over prompts", _three("expected_accepted")),
    Column("At least one accepted", "times the transport bound, 95 % interval", _three("share_of_bound"), line=1.0),
)
TIME = (
    Column("Verification and choice", "microseconds: median and quartiles", _three("verify_us", "median")),
    Column("The same, relative to the target's forward", "percent of it", lambda one: (_percent(one),) * 3),
)


def verifier_panels(proposers: Mapping[str, Mapping[str, Any]], name: str) -> Figure | None:
    """Draw what each verifier accepts (``accepted``) or how long it takes (``time``); None without a verifier.

    Args:
        proposers: ``proposers`` of the ``summary.json`` of ``task=verifier_study``, by the arms' shown names.
        name: of the figure.
    """
    proposers = {arm: facts for arm, facts in proposers.items() if facts["verifiers"]}
    return panels(proposers, {"accepted": ACCEPTED, "time": TIME}[name]) if proposers else None


@rc_context(STYLE)
def panels(proposers: Mapping[str, Mapping[str, Any]], columns: tuple[Column, ...]) -> Figure:
    """Return a figure with a row of panels for each proposer, verifiers from top to bottom, lossy ones hollow."""
    rows = [len(one["verifiers"]) for one in proposers.values()]
    figure = Figure(figsize=(9.5, ROW * sum(rows) + 0.55 * len(rows) + 0.9), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, height_ratios=[count + 1 for count in rows])
    for place, column in enumerate(columns):
        drawn = [column.of(one) for proposer in proposers.values() for one in proposer["verifiers"].values()]
        furthest = max((value for three in drawn for value in three if value is not None), default=1.0) or 1.0
        for number, one in enumerate(proposers.values()):
            axes = grid[number][place]
            if column.line is not None:
                axes.axvline(column.line, color=palette.GREY, linestyle="--", linewidth=1)
            _dots(axes, one["verifiers"], column, palette.colour(list(proposers)[number]))
            labels = list(style.short(verifier_label(name, of) for name, of in one["verifiers"].items()).values())
            axes.set_yticks(range(rows[number]), [""] * len(labels) if place else labels)
            axes.set_xlim(0, 1.04 * furthest)
            axes.tick_params(labelbottom=number == len(rows) - 1)
        grid[-1][place].set_xlabel(f"{column.title}\n{column.unit}")
    names = style.short(proposers)
    for axes, (name, one) in zip(grid[:, 0], proposers.items(), strict=True):
        nodes = "" if one["drafted_per_draft"] is None else f", {one['drafted_per_draft']:.3g} nodes"
        title = f"{names[name]}: drawn {one['drawn']}{nodes}"
        axes.set_title(title, loc="left", fontsize=10)
    figure.suptitle(_legend(proposers, columns), fontsize=9, x=0.01, ha="left")
    return figure


def _legend(proposers: Mapping[str, Mapping[str, Any]], columns: tuple[Column, ...]) -> str:
    """Describe the marks."""
    notes = ["filled: lossless, hollow: lossy"]
    if any(column.line is not None for column in columns):
        notes.append("dashed: no lossless verifier accepts more on average")
    if any(of["kind"] == OUTCOME for one in proposers.values() for of in one["verifiers"].values()):
        notes.append("*: mean of sampled outcomes")
    return "; ".join(notes)


def _dots(axes: Axes, verifiers: Mapping[str, Mapping[str, Any]], column: Column, colour: str) -> None:
    """Draw one panel."""
    for place, one in enumerate(verifiers.values()):
        middle, low, high = column.of(one)
        if middle is None:
            continue
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.5, zorder=2)
        face = colour if one["lossless"] else "white"
        axes.plot(middle, place, "o", color=colour, markerfacecolor=face, markersize=6, zorder=3)
    axes.set_ylim(len(verifiers) - 0.5, -0.5)
