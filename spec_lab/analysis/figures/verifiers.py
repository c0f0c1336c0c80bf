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


def verifier_label(verifier: str, summary: Mapping[str, Any]) -> str:
    """Return the verifier's name, marked if it is lossy or a sampled outcome."""
    lossy = "" if summary["lossless"] else " (lossy)"
    return f"{verifier}{lossy}{' *' if summary['kind'] == OUTCOME else ''}"


class Column(NamedTuple):
    """One column of panels: its title, its unit, what is drawn of a verifier (middle, low, high), and the position of a
    dashed line.
    """

    title: str
    unit: str
    of: Callable[[Mapping[str, Any]], tuple[float | None, float | None, float | None]]
    line: float | None = None


def _three(name: str, middle: str = "mean") -> Callable[[Mapping[str, Any]], tuple]:
    return lambda verifier: (verifier[name][middle], verifier[name]["low"], verifier[name]["high"])


def _percent(verifier: Mapping[str, Any]) -> float | None:
    return None if verifier["share_of_forward"] is None else 1e2 * verifier["share_of_forward"]


ACCEPTED = (
    Column("Expected accepted tokens", "tokens per draft, 95 % interval over prompts", _three("expected_accepted")),
    Column("At least one accepted", "times the transport bound, 95 % interval", _three("share_of_bound"), line=1.0),
)
TIME = (
    Column("Verification and choice", "microseconds: median and quartiles", _three("verify_us", "median")),
    Column("The same, relative to the target's forward", "percent of it", lambda verifier: (_percent(verifier),) * 3),
)


def verifier_panels(proposers: Mapping[str, Mapping[str, Any]], name: str) -> Figure | None:
    """Draw what each verifier accepts (``accepted``) or how long it takes (``time``); None without a verifier.

    Args:
        proposers: ``proposers`` of the ``summary.json`` of ``task=verifier_study``, by the arms' shown names.
    """
    proposers = {arm: facts for arm, facts in proposers.items() if facts["verifiers"]}
    return panels(proposers, {"accepted": ACCEPTED, "time": TIME}[name]) if proposers else None


@rc_context(STYLE)
def panels(proposers: Mapping[str, Mapping[str, Any]], columns: tuple[Column, ...]) -> Figure:
    """Return a figure with a row of panels for each proposer, verifiers from top to bottom, lossy ones hollow."""
    rows = [len(proposer["verifiers"]) for proposer in proposers.values()]
    figure = Figure(figsize=(9.5, ROW * sum(rows) + 0.55 * len(rows) + 0.9), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, height_ratios=[count + 1 for count in rows])
    for across, column in enumerate(columns):
        drawn = [column.of(verifier) for proposer in proposers.values() for verifier in proposer["verifiers"].values()]
        furthest = max((value for three in drawn for value in three if value is not None), default=1.0) or 1.0
        for down, proposer in enumerate(proposers.values()):
            axes = grid[down][across]
            if column.line is not None:
                axes.axvline(column.line, color=palette.GREY, linestyle="--", linewidth=1)
            _dots(axes, proposer["verifiers"], column, palette.colour(list(proposers)[down]))
            labels = list(style.short(verifier_label(name, of) for name, of in proposer["verifiers"].items()).values())
            axes.set_yticks(range(rows[down]), [""] * len(labels) if across else labels)
            axes.set_xlim(0, 1.04 * furthest)
            axes.tick_params(labelbottom=down == len(rows) - 1)
        grid[-1][across].set_xlabel(f"{column.title}\n{column.unit}")
    names = style.short(proposers)
    for axes, (name, proposer) in zip(grid[:, 0], proposers.items(), strict=True):
        nodes = "" if proposer["drafted_per_draft"] is None else f", {proposer['drafted_per_draft']:.3g} nodes"
        title = f"{names[name]}: drawn {proposer['drawn']}{nodes}"
        axes.set_title(title, loc="left", fontsize=10)
    figure.suptitle(_legend(proposers, columns), fontsize=9, x=0.01, ha="left")
    return figure


def _legend(proposers: Mapping[str, Mapping[str, Any]], columns: tuple[Column, ...]) -> str:
    """Describe the marks."""
    notes = ["filled: lossless, hollow: lossy"]
    if any(column.line is not None for column in columns):
        notes.append("dashed: no lossless verifier accepts more on average")
    if any(of["kind"] == OUTCOME for proposer in proposers.values() for of in proposer["verifiers"].values()):
        notes.append("*: mean of sampled outcomes")
    return "; ".join(notes)


def _dots(axes: Axes, verifiers: Mapping[str, Mapping[str, Any]], column: Column, colour: str) -> None:
    """Draw one panel."""
    for line, verifier in enumerate(verifiers.values()):
        middle, low, high = column.of(verifier)
        if middle is None:
            continue
        if low is not None and high is not None:
            axes.plot([low, high], [line, line], color=colour, linewidth=1.5, zorder=2)
        face = colour if verifier["lossless"] else "white"
        axes.plot(middle, line, "o", color=colour, markerfacecolor=face, markersize=6, zorder=3)
    axes.set_ylim(len(verifiers) - 0.5, -0.5)
