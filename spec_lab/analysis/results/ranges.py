"""The section of a run along its texts: tau and acceptance by position, context length and turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from spec_lab.analysis import figures
from spec_lab.results.result import Cell, DataTable, Section, cell, interval

KINDS = {"by_position": "position in the output", "by_context": "context length", "by_turn": "turn"}
"""Where steps begin, by its key in ``summary.json``."""

AXES = {"by_position": "tokens of the output before the step", "by_context": "context, tokens", "by_turn": "turn"}

HOW = (
    "tau and acceptance rate of the steps that begin in each range: by tokens of the output before the step, by tokens "
    "of the context (prompt included), by turn of the conversation, with 95 % intervals over groups. In the last range "
    "of positions the ends of outputs cut steps off; expected tau is not cut."
)


def along_text(arms: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """Return the section of the arms' ranges; none where no arm has two ranges of a kind.

    Args:
        arms: figures of each arm, NaN as None; older ones lack ranges.
    """
    ranges = {kind: _of_kind(arms, kind) for kind in KINDS}
    ranges = {kind: by_arm for kind, by_arm in ranges.items() if by_arm}
    if not ranges:
        return []
    rows = [
        [Cell(KINDS[kind]), Cell(arm, colour=figures.colour(arm)), Cell(_ends(row)), cell(row["steps"], ".0f"),
         cell(row["tau_pooled"]), cell(row["expected_tau"]), cell(row["draft_token_rate"], ".1f", 100)]
        for kind, by_arm in ranges.items()
        for arm, each in by_arm.items()
        for row in each
    ]  # fmt: skip
    columns = [("by", False), ("arm", False), ("tokens or turn", False), ("steps", True), ("tau [95 %]", True),
               ("expected tau [95 %]", True), ("acceptance rate % [95 %]", True)]  # fmt: skip
    table = DataTable(columns, rows, filters=("by", "arm"), more=[name for name, _ in columns])
    panels = {AXES[kind]: by_arm for kind, by_arm in ranges.items()}
    drawn = {
        name: partial(figures.by_range, panels, figure, label, {}, colours=figures.colours(arms))
        for name, figure, label in (
            ("tau_along", "tau_pooled", "tau"), ("acceptance_along", "draft_token_rate", "acceptance rate"),
        )
    }  # fmt: skip
    return [Section("Along the text", HOW, table, drawn, _changes(ranges))]


def _of_kind(arms: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the ranges of the arms that have two or more."""
    return {arm: rows for arm, values in arms.items() if len(rows := values.get(kind) or ()) > 1}


def _ends(row: Mapping[str, Any]) -> str:
    return str(row["first"]) if row["first"] == row["last"] else f"{row['first']} to {row['last']}"


def _changes(ranges: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Return where tau changes along the text: the intervals of the first and of a later range do not overlap."""
    lines = []
    for kind, by_arm in ranges.items():
        for arm, (first, *later) in by_arm.items():
            apart = [row for row in later if _apart(first["expected_tau"], row["expected_tau"])]
            if apart:
                last, word = apart[-1], {"by_turn": "turn"}.get(kind, "tokens")
                lines.append(
                    f"Expected tau of {arm} changes by {KINDS[kind]}: {interval(first['expected_tau'])} at {word} "
                    f"{_ends(first)}, {interval(last['expected_tau'])} at {word} {_ends(last)}."
                )
    return lines


def _apart(first: Mapping[str, float | None], later: Mapping[str, float | None]) -> bool:
    """Return whether two intervals do not overlap; unknown ones do."""
    ends = first["low"], first["high"], later["low"], later["high"]
    low, high, later_low, later_high = (float("nan") if end is None else end for end in ends)
    return high < later_low or later_high < low
