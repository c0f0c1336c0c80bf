"""Show a comparison as tables in the terminal, and return it as a frame."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_lab.analysis.compare.changes import Comparison
from spec_lab.analysis.compare.pairing import ArmComparison, FigureChange
from spec_lab.analysis.compare.selection import SettingValues
from spec_lab.analysis.text import COLUMNS, WIDE, table, verdict_line
from spec_lab.core.terminal import visible


def show(comparison: Comparison, console: Console, verbose: bool = False) -> None:
    """Print the runs, their settings that differ, every change, and how to read them.

    With ``verbose``, and on a terminal of ``WIDE`` columns or more, each change is also shown with its own interval.
    """
    runs = table("Compared")
    for column in ("", "run", "contents"):
        runs.add_column(column, overflow="fold")
    for run in comparison.runs:
        runs.add_row(run.label, visible(run.name), visible(comparison.described[run.label]))
    console.print(runs)
    for line in verdict_lines(comparison):
        console.print(line, highlight=False)
    for title, heading, settings in (
        ("Configuration, where it differs", "option", comparison.configuration),
        ("Code, machine, weights, prompts, where they differ", "", comparison.provenance),
    ):
        if settings:
            console.print(_settings(title, heading, settings))
    if len(comparison.runs) > 1 and not comparison.configuration:
        console.print("The configurations are equal: differences come from chance, code or machine.\n")
    for pair in comparison.pairs:
        console.print(_pair(pair, comparison))
        if verbose or console.width >= WIDE:
            console.print(_each_alone(pair, comparison))
    for line in notes(comparison):
        console.print(line, highlight=False, soft_wrap=line.startswith("Left out"))  # folders stay on one line


def verdict_lines(comparison: Comparison) -> list[str]:
    """Return the verdict on the times of each run."""
    lines = [f"{label}: {verdict_line(verdict.summary())}" for label, verdict in comparison.verdicts.items()]
    return lines if len(lines) > 1 else [line.partition(": ")[2] for line in lines]


def as_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row for each figure of a pair of arms, for notebooks and CSV.

    Columns: ``reference`` and ``other`` (labels), their folders, arms (keys) and arms' names, ``figure``,
    ``reference_value``, ``other_value``, ``change`` (a factor where ``relative``, else a difference), its own interval
    (``low``, ``high``) and the one that holds together with all others (``simultaneous_low``, ``simultaneous_high``),
    ``smallest``, ``unit``, ``units``, ``paired``, ``verdict``, ``why``; ``identical_outputs`` belongs to the pair.
    """
    folders = {run.label: str(run.folder) for run in comparison.runs}
    rows = []
    for pair in comparison.pairs:
        runs = {
            "reference": pair.reference,
            "other": pair.other,
            "reference_folder": folders[pair.reference],
            "other_folder": folders[pair.other],
            "reference_arm": pair.arms[0],
            "other_arm": pair.arms[1],
            "reference_name": pair.names[0],
            "other_name": pair.names[1],
        }
        for one in pair.changes:
            values = {"figure": one.figure, "reference_value": one.reference, "other_value": one.other}
            changes = {"change": one.interval.mean, "relative": one.relative, "smallest": one.smallest}
            bounds = {"low": one.interval.low, "high": one.interval.high}
            _, low, high = one.simultaneous
            bounds |= {"simultaneous_low": low, "simultaneous_high": high}
            tests = {"unit": one.unit, "units": min(one.units), "paired": one.paired, "verdict": one.verdict}
            rows.append(
                runs | values | changes | bounds | tests | {"why": one.why, "identical_outputs": pair.identical}
            )
    return pd.DataFrame(rows)


def _settings(title: str, heading: str, settings: Sequence[SettingValues]) -> Table:
    shown = table(title)
    for column in (heading, "values"):
        shown.add_column(column, overflow="fold")
    for one in settings:
        values = "\n".join(f"{' '.join(labels)}: {value}" for value, labels in one.values)
        shown.add_row(visible(one.key), visible(values))
    return shown


def _pair(pair: ArmComparison, comparison: Comparison) -> Table:
    reference, other = pair.names if pair.reference == pair.other else (pair.reference, pair.other)
    shown = table(visible(pair_title(pair)))
    shown.add_column("", no_wrap=True)
    for column in (*map(visible, (reference, other)), "change", f"[{100 * comparison.level:.4g} %]"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("")
    for one in pair.changes:
        bounds = f"[{change_text(one, one.simultaneous.low)}, {change_text(one, one.simultaneous.high)}]"
        known = one.simultaneous.low == one.simultaneous.low and one.verdict not in ("identical", "too few")
        shown.add_row(
            heading(one.figure),
            *(value_text(value) for value in (one.reference, one.other)),
            change_text(one, one.simultaneous.mean),
            bounds if known else "",
            Text(verdict_text(one), style="bold" if one.verdict == "significant" else ""),
        )
    return shown


def pair_title(pair: ArmComparison) -> str:
    """Return which arms of which runs are compared, and on how many prompts."""
    reference, other = pair.names if pair.reference == pair.other else (pair.reference, pair.other)
    title = f"{other} compared with {reference}"
    if pair.reference != pair.other:
        title += f": {pair.names[0]}" if pair.names[0] == pair.names[1] else f": {pair.names[1]} with {pair.names[0]}"
    if pair.prompts:
        title += f"; {pair.prompts} prompts in both, {pair.identical:.0%} with the same output"
    return title


def _each_alone(pair: ArmComparison, comparison: Comparison) -> Table:
    """Each tested change with the interval that holds for it alone, and what it was measured on."""
    shown = table("Each change alone")
    for column in ("", f"[{100 * comparison.level:.4g} %] alone", "significant from", "units"):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for one in (one for one in pair.changes if one.change is not None):
        low, high = (change_text(one, value) for value in (one.interval.low, one.interval.high))
        smallest = "" if one.smallest != one.smallest else change_text(one, one.smallest)
        units = f"{min(one.units)} {one.unit}s, {'paired' if one.paired else 'not paired'}"
        shown.add_row(heading(one.figure), f"[{low}, {high}]" if low else "", smallest, units)
    return shown


def heading(figure: str) -> str:
    """Return the heading of a figure."""
    return COLUMNS[figure].heading.removesuffix(" [95 %]")


def verdict_text(one: FigureChange) -> str:
    """Return the verdict, and why nothing was tested or what would be significant."""
    if one.verdict == "not significant":
        smallest = f"×{one.smallest:.2f}" if one.relative else f"{one.smallest:.2g}"
        return f"{one.verdict}; {smallest} would be"
    return f"{one.verdict}: {one.why}" if one.why else one.verdict


def change_text(one: FigureChange, value: float) -> str:
    """Return a change of this figure as text, a factor or a difference; empty for NaN."""
    if value != value:
        return ""
    digits = 3 if one.figure in ("draft_token_rate", "correct") else 2
    return f"×{value:.2f}" if one.relative else f"{value:+.{digits}f}"


def value_text(value: float) -> str:
    """Return a figure's value as text; empty for NaN."""
    return "" if value != value else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"[:5]


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader must know of these runs, and the meaning of the verdicts that occur."""
    changes = [one for pair in comparison.pairs for one in pair.changes]
    verdicts = {one.verdict for one in changes}
    lines = [visible(note) for note in comparison.notes]
    if comparison.tested:
        significant = sum(one.verdict == "significant" for one in changes)
        lines.append(
            f"Significant: {significant} of {comparison.tested} tested changes. All intervals hold at once at "
            f"{comparison.level:.4g} (jackknife over prompts, of speed over groups; Student's t; Bonferroni)."
        )
    explained = {
        "not significant": "the interval contains no change. This does not prove equality; the named change would be "
        "significant.",
        "identical": "no prompt differs.",
        "too few": "too few prompts or groups for a test; run more of them.",
    }
    lines += [f"{verdict}: {text}" for verdict, text in explained.items() if verdict in verdicts]
    if any(one.figure == "speedup_geometric_mean" for one in changes):
        lines.append(
            "speed-up: total tokens/s over those of the baseline of the same run; the test uses the geometric mean "
            "over groups."
        )
    if len(comparison.runs) > 1 and any(
        one.figure == "speedup_geometric_mean" and one.verdict == "significant" for one in changes
    ):
        lines.append(
            "The intervals of speed do not contain differences between a run and its repetition that affect all "
            "prompts (a busy machine, another memory layout): repeat both runs before relying on a small change."
        )
    return lines
