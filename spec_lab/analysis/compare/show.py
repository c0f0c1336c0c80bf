"""A comparison as tables, and as a frame."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_lab.analysis.compare.changes import Comparison, Difference, Pair
from spec_lab.analysis.compare.sides import Fact
from spec_lab.core.terminal import visible

FIGURES = {
    "speedup": "speed-up",
    "tokens_per_second": "tokens/s",
    "tau_pooled": "tau",
    "expected_tau": "E tau",
    "draft_token_rate": "accepted / drafted",
    "nodes_per_step": "nodes per step",
}


def show(comparison: Comparison, console: Console) -> None:
    """Print what is compared, what sets the runs apart, every change, and how to read them."""
    console.print(_sides(comparison))
    for title, facts in (
        ("Configuration, where it differs", comparison.configuration),
        ("Code, machine, weights, prompts, where they differ", comparison.provenance),
    ):
        if facts:
            console.print(_facts(title, facts))
    if len(comparison.sides) > 1 and not comparison.configuration:
        console.print("The configurations are the same: what differs is chance, the code or the machine.\n")
    for pair in comparison.pairs:
        console.print(_pair(pair, comparison))
    for line in _notes(comparison):
        console.print(line, highlight=False, soft_wrap=line.startswith("Left out"))  # a folder is to be copied


def as_frame(comparison: Comparison) -> pd.DataFrame:
    """One row a figure of a pair, for notebooks and CSV.

    Columns: ``reference`` and ``other`` (labels), their folders and arms, ``figure``, ``reference_value``,
    ``other_value``, ``change`` (a factor where ``relative``, else a difference), its interval alone (``low``, ``high``)
    and at the level that all share (``together_low``, ``together_high``), ``smallest``, ``units``, ``paired``,
    ``verdict``, ``why``; ``identical_outputs`` belongs to the pair.
    """
    folders = {one.label: str(one.folder) for one in comparison.sides}
    rows = [
        {
            "reference": pair.reference,
            "other": pair.other,
            "reference_folder": folders[pair.reference],
            "other_folder": folders[pair.other],
            "reference_arm": pair.arms[0],
            "other_arm": pair.arms[1],
            "figure": one.figure,
            "reference_value": one.reference,
            "other_value": one.other,
            "change": one.alone.mean,
            "relative": one.relative,
            "low": one.alone.low,
            "high": one.alone.high,
            "together_low": one.together.low,
            "together_high": one.together.high,
            "smallest": one.smallest,
            "unit": one.unit,
            "units": min(one.units),
            "paired": one.paired,
            "verdict": one.verdict,
            "why": one.why,
            "identical_outputs": pair.identical,
        }
        for pair in comparison.pairs
        for one in pair.differences
    ]
    return pd.DataFrame(rows)


def _sides(comparison: Comparison) -> Table:
    table = _table("Compared")
    for column in ("", "run", "what"):
        table.add_column(column, overflow="fold")
    for one in comparison.sides:
        table.add_row(one.label, visible(one.name), visible(comparison.described[one.label]))
    return table


def _facts(title: str, facts: Sequence[Fact]) -> Table:
    table = _table(title)
    for column in ("option" if title.startswith("Conf") else "", "values"):
        table.add_column(column, overflow="fold")
    for fact in facts:
        values = "\n".join(f"{' '.join(labels)}: {value}" for value, labels in fact.values)
        table.add_row(visible(fact.key), visible(values))
    return table


def _pair(pair: Pair, comparison: Comparison) -> Table:
    within = pair.reference == pair.other
    arms = pair.arms[0] if pair.arms[0] == pair.arms[1] else f"{pair.arms[1]} against {pair.arms[0]}"
    title = arms if within else f"{pair.other} against {pair.reference}: {arms}"
    if pair.prompts:
        title += f"; {pair.prompts} prompts in both, {pair.identical:.0%} with the same output"
    names = (pair.arms[0], pair.arms[1]) if within else (pair.reference, pair.other)
    table = _table(visible(title))
    table.add_column("", no_wrap=True)
    for column in (*map(visible, names), "change", f"[{100 * comparison.level:.4g} %]"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for one in pair.differences:
        table.add_row(
            FIGURES[one.figure],
            _number(one.reference),
            _number(one.other),
            _change(one, one.together.mean),
            _interval(one),
            _word(one),
        )
    return table


def _word(one: Difference) -> str | Text:
    if one.verdict == "real":
        return Text("real", style="bold")
    if one.verdict == "not shown":
        seen = f"×{one.smallest:.2f}" if one.relative else f"{one.smallest:.2g}"
        return f"not shown; {seen} would be"
    return f"{one.verdict}: {one.why}" if one.why else one.verdict


def _interval(one: Difference) -> str:
    if one.together.low != one.together.low or one.verdict in ("same", "too few"):
        return ""
    return f"[{_change(one, one.together.low)}, {_change(one, one.together.high)}]"


def _change(one: Difference, value: float) -> str:
    if value != value:
        return ""
    return f"×{value:.2f}" if one.relative else f"{value:+.{_digits(one)}f}"


def _digits(one: Difference) -> int:
    return 3 if one.figure == "draft_token_rate" else 2


def _number(value: float) -> str:
    return "" if value != value else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"[:5]


def _notes(comparison: Comparison) -> list[str]:
    every = [one for pair in comparison.pairs for one in pair.differences]
    words = {one.verdict for one in every}
    lines = [visible(one) for one in comparison.notes]
    if comparison.judged:
        real = sum(one.verdict == "real" for one in every)
        lines.append(
            f"Real: {real} of {comparison.judged} changes judged. All intervals hold at once at {comparison.level:.4g} "
            "(leave-one-out over prompts, of speed over groups; Student's t; Bonferroni)."
        )
    if "not shown" in words:
        lines.append(
            "not shown: the interval holds no change. This proves nothing equal; a change of that size would be real."
        )
    if "same" in words:
        lines.append("same: no prompt differs.")
    if "too few" in words:
        lines.append("too few: nothing is judged on so few prompts or groups; run more of them.")
    if any(one.figure == "speedup" and one.verdict != "not judged" for one in every):
        lines.append(
            "speed-up: over the baseline of the same run, geometric mean over groups (summary.json has the plain one)."
        )
    if len(comparison.sides) > 1 and any(one.figure == "speedup" and one.verdict == "real" for one in every):
        lines.append(
            "What differs from one run to its repetition for all prompts alike (a busy machine, memory laid out "
            "otherwise) is not in the intervals of speed: before a small change is believed, repeat both runs."
        )
    return lines


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, padding=0)
