"""The terminal tables and the figures of the verifier study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis.figures import COLOURS, GREY, STYLE
from spec_lab.analysis.names import arm_names, renamed
from spec_lab.analysis.show import bounds_notes
from spec_lab.core.files import own_folder, replacing
from spec_lab.tasks.verifier_study.pooled import OUTCOME

ROW = 0.27  # inches of a verifier's row


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print ``summary.json`` as tables."""
    console.print(
        f"{summary['experiment']}: {summary['requests']} prompts, {summary['tokens']} tokens of the target at "
        f"temperature {summary['temperature']:g}, a draft every {summary['every']} tokens; 95 % intervals over prompts",
        style="bold",
        highlight=False,
    )
    proposers = {name: one for name, one in _by_shown_name(summary).items() if one["drafts"]}
    for name, one in proposers.items():
        console.print(_accepted(name, one))
    if proposers:
        console.print(_time(proposers))
    for line in (_notes(summary), *bounds_notes(renamed(summary.get("bounds", {}), _shown_names(summary)))):
        console.print(line, highlight=False)


def _by_shown_name(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the numbers of each proposer, by the name under which its arm is shown."""
    return renamed(summary["proposers"], _shown_names(summary))


def _shown_names(summary: Mapping[str, Any]) -> dict[str, str]:
    return arm_names({arm: one["name"] for arm, one in summary["proposers"].items()})


def _accepted(name: str, proposer: Mapping[str, Any]) -> Table:
    kind = "" if name == proposer["name"] else f"{proposer['name']} "
    table = _table(
        f"{name}: {kind}drawn {proposer['drawn']}, {proposer['drafted_per_draft']:.3g} nodes, "
        f"{proposer['drafts']} drafts, bound {_interval(proposer['bound'])}"
    )
    table.add_column("verifier", no_wrap=True)
    for heading in ("E accepted", f"minus {proposer['compared_with']}", "of the bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for verifier, one in proposer["verifiers"].items():
        table.add_row(
            label(verifier, one),
            _interval(one["expected_accepted"]),
            "" if verifier == proposer["compared_with"] else _interval(one["difference"], "+.3f"),
            _interval(one["share_of_bound"]),
        )
    return table


def _time(proposers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("Microseconds of verification and choice, and their share of the target's forward")
    table.add_column("verifier", no_wrap=True)
    for name in proposers:
        table.add_column(name, justify="right")
    table.add_row("target", *(f"{one['target_forward_us']:.0f}" for one in proposers.values()))
    table.add_row(
        "probabilities",
        *(
            _spent(one["probabilities_us"], one["probabilities_us"] / one["target_forward_us"])
            for one in proposers.values()
        ),
    )
    for verifier in dict.fromkeys(key for one in proposers.values() for key in one["verifiers"]):
        each = [one["verifiers"].get(verifier) for one in proposers.values()]
        table.add_row(
            verifier,
            *("" if one is None else _spent(one["verify_us"]["median"], one["share_of_forward"]) for one in each),
        )
    return table


def _notes(summary: Mapping[str, Any]) -> str:
    lines = [
        "E accepted: expected accepted tokens per draft, from the verifier's exact probabilities given the draft; mean "
        "over sampled drafts. bound: the largest probability that at least one token is accepted, by optimal "
        "transport; of the bound: the verifier's probability, as a share of it. Lossy verifiers may exceed the bound, "
        "lossless ones by the sampling error of the drafts only. Times are medians, with p in the processor's cache."
    ]
    every = [one for proposer in summary["proposers"].values() for one in proposer["verifiers"].values()]
    if any(one["kind"] == OUTCOME for one in every):
        lines.append(
            "*: a sampled outcome. The noise of the draft determines what is accepted, so these are means of outcomes "
            "rather than of probabilities, with a larger sampling error."
        )
    left_out: dict[str, list[str]] = {}
    names = _shown_names(summary)
    for one in summary["left_out"]:
        left_out.setdefault(f"{names[one['proposer']]} (drawn {one['drawn']})", []).append(one["verifier"])
    if left_out:
        pairs = "; ".join(f"{proposer}: {', '.join(names)}" for proposer, names in left_out.items())
        lines.append(f"Left out, as the verifiers do not support such drafts: {pairs}.")
    if summary["errors"]:
        lines.append(f"{len(summary['errors'])} prompts had errors: see 'errors' in summary.json.")
    return "\n".join(lines)


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, padding=0)


def _spent(microseconds: float, share: float) -> str:
    return f"{microseconds:.0f} ({share:.1%})"


def label(verifier: str, one: Mapping[str, Any]) -> str:
    """Return the verifier's name, marked if it is lossy or a sampled outcome."""
    lossy = "" if one["lossless"] else " (lossy)"
    return f"{verifier}{lossy}{' *' if one['kind'] == OUTCOME else ''}"


def _interval(value: Mapping[str, float | None], form: str = ".2f") -> str:
    mean = _number(value["mean"], form)
    return mean if value["low"] is None else f"{mean} [{value['low']:{form}}, {value['high']:{form}}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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


ACCEPTED = (
    Column("Expected accepted tokens", "tokens per draft, 95 % interval over prompts", _three("expected_accepted")),
    Column("At least one accepted", "times the transport bound, 95 % interval", _three("share_of_bound"), line=1.0),
)
TIME = (
    Column("Verification and choice", "microseconds: median and middle half", _three("verify_us", "median")),
    Column(
        "The same, relative to the target's forward", "percent of it", lambda one: (1e2 * one["share_of_forward"],) * 3
    ),
)


def draw(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the figures for which there are data; return the files."""
    own_folder(folder)
    proposers = {name: one for name, one in _by_shown_name(summary).items() if one["verifiers"]}
    drawn = []
    with rc_context(STYLE):
        for name, columns in (("accepted", ACCEPTED), ("time", TIME)):
            if proposers:
                drawn.append(folder / f"{name}.png")
                with replacing(drawn[-1]) as stream:
                    panels(proposers, columns).savefig(stream, bbox_inches="tight")
    return drawn


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
                axes.axvline(column.line, color=GREY, linestyle="--", linewidth=1)
            _dots(axes, one["verifiers"], column, COLOURS[number % len(COLOURS)])
            labels = [label(name, of) for name, of in one["verifiers"].items()]
            axes.set_yticks(range(rows[number]), [""] * len(labels) if place else labels)
            axes.set_xlim(0, 1.04 * furthest)
            axes.tick_params(labelbottom=one is [*proposers.values()][-1])
        grid[-1][place].set_xlabel(f"{column.title}\n{column.unit}")
    for axes, (name, one) in zip(grid[:, 0], proposers.items(), strict=True):
        title = f"{name}: drawn {one['drawn']}, {one['drafted_per_draft']:.3g} nodes"
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
