"""The result of a task, declared once: the console, the page and the tracker read the same declaration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_lab.core.faults import warn
from spec_lab.core.files import Unreadable, expect
from spec_lab.core.terminal import short_path
from spec_lab.results.old_names import read_summary

Value = Mapping[str, float | None] | float | None
"""A number, or a mean with its ends: ``mean``, ``low``, ``high``."""

REAL = (float, None)
INTERVAL = {"mean": REAL, "low": REAL, "high": REAL}
"""Shapes of ``core.files.expect`` of a number that may be unknown, and of an interval."""


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as text; nothing for None, NaN and infinities."""
    return "" if value is None or not math.isfinite(value) else format(value, form)


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        value: what a number sorts by; None where the cell is not a number.
        ends: the interval of a number, such as "[1.25, 1.75]"; a console without room for it leaves it out.
        badge: a CSS class of a badge around the text.
        title: a text shown on hovering.
        colour: of a square before the text.
    """

    text: str
    value: float | None = None
    ends: str = ""
    link: str = ""
    badge: str = ""
    title: str = ""
    colour: str = ""

    @property
    def whole(self) -> str:
        """The text with the interval."""
        return f"{self.text} {self.ends}" if self.ends else self.text


def cell(value: Value, form: str = ".2f", scale: float = 1.0) -> Cell:
    """Return the cell of a number, or of an interval, which sorts by its mean; empty for None and NaN."""
    three = value if isinstance(value, Mapping) else {"mean": value}
    mean, low, high = (None if (end := three.get(name)) is None else scale * end for name in ("mean", "low", "high"))
    text, ends = number(mean, form), [number(end, form) for end in (low, high)]
    shown = f"[{', '.join(ends)}]" if text and all(ends) else ""
    return Cell(text, three["mean"] if text and three["mean"] is not None else float("nan"), shown)


def interval(value: Value, form: str = ".2f", scale: float = 1.0) -> str:
    """Return a mean with its ends, such as "1.50 [1.25, 1.75]"; the mean alone where it has none."""
    return cell(value, form, scale).whole


@dataclass(frozen=True)
class DataTable:
    """A table.

    Args:
        columns: headings, each with whether it holds numbers.
        searchable: whether a page filters its rows by an input.
        filters: headings of columns by whose values a page filters the rows, where there are several values.
        more: headings of columns that a console shows only where it is wide, or when it shows everything.
        meanings: what columns hold, by heading; a console explains those that it shows.
    """

    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    searchable: bool = False
    filters: Sequence[str] = ()
    more: Sequence[str] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> dict[int, list[str]]:
        """The values of each column of ``filters``, by the column's number."""
        headings = [name for name, _ in self.columns]
        numbers = [headings.index(name) for name in self.filters if name in headings]
        values = {column: list(dict.fromkeys(row[column].text for row in self.rows)) for column in numbers}
        return {column: each for column, each in values.items() if len(each) > 1}


@dataclass(frozen=True)
class Section:
    """A part of a result.

    Args:
        how: what it shows, and how it was measured.
        figures: draw its figures, by name; None where there is nothing to draw.
        notes: sentences below.
        details: further sentences, which a console shows only when it shows everything.
        failures: what contradicts what was declared.
        missing: a sentence in place of figures where there are none.
    """

    title: str
    how: str = ""
    table: DataTable | None = None
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    failures: Sequence[str] = ()
    missing: str = ""

    def explanation(self, headings: Sequence[str] | None = None) -> str:
        """Return what the section shows, and what the columns of its table hold: all, or those of ``headings``."""
        table = self.table or DataTable([], [])
        shown = [name for name, _ in table.columns if headings is None or name in headings]
        return " ".join(
            [
                *[self.how] * bool(self.how),
                *dict.fromkeys(table.meanings[name] for name in shown if name in table.meanings),
            ]
        )


@dataclass(frozen=True)
class Result:
    """The result of a task.

    Args:
        title: the name of the experiment.
        lead: what was measured, in a line.
        sections: in the order shown.
        verdict: on the times, a line or several; empty of a result without times.
        warnings: what a reader must know first.
        facts: further facts about the run, for its page.
        constraint: the name of the run's constraint.
        key: the figures that a page shows first: speed-up, tau, acceptance, losslessness; its table has few columns.
        verdict_first: whether the verdict stands before the first table on a terminal too, as on a page.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    verdict: Sequence[str] = ()
    warnings: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    constraint: str | None = None
    key: Section | None = None
    verdict_first: bool = False

    def draw(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the figures that there is data for, by name: all, or those of ``names``. One that cannot be drawn is
        left out, with a warning.
        """
        makers = {name: make for section in self.sections for name, make in section.figures.items()}
        made: dict[str, Any] = {}
        for name, make in makers.items():
            if names is None or name in names:
                try:
                    made[name] = make()
                except Exception as error:
                    no_figure(name, error)
        return {name: figure for name, figure in made.items() if figure is not None}


def no_figure(name: str, error: Exception) -> None:
    """Warn that a figure cannot be drawn."""
    warn(f"figure '{name}'", error, __name__, "it is left out; the run's rows and summary are complete")


def read_run(folder: Path, shape: Mapping[str, Any], file: str = "summary.json") -> tuple[dict[str, Any], ...]:
    """Return the manifest of a task and the contents of its summary, which is empty where it has not ended.

    Args:
        shape: what is read of the summary, for ``core.files.expect``.
        file: name of the summary.

    Raises:
        Unreadable: the contents are not those of this task.
    """
    from spec_lab.results.manifest import begun  # which imports torch; commands that print tables do not need it

    path = folder / file
    try:
        summary = read_summary(path) or {}
        if summary:
            expect(summary, shape, "")
    except ValueError as error:
        why = str(error) if str(path) in str(error) else f"{path} is not readable ({error})"
        raise Unreadable(f"{why}; run the same command again to write it anew") from error
    return dict(begun(folder) or {}), summary


def ended_run(folder: Path, shape: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the manifest of a task that has ended and the contents of its summary.

    Raises:
        ValueError: the task has not ended.
        Unreadable: the contents are not those of this task.
    """
    manifest, summary = read_run(folder, shape)
    if not summary:
        raise ValueError(
            f"{folder} has no summary.json: its task has not ended; run the same command again to resume it"
        )
    return manifest, summary


UNNAMED = "custom"
"""The default of the option ``name``."""


def target_name(manifest: Mapping[str, Any]) -> str:
    """Return the name of a run's target: its path, shortened, or its name on the hub; empty where it is not known."""
    target = manifest["config"].get("target") or {}
    return short_path(target.get("path") or (manifest.get("target") or {}).get("name"))


def run_title(manifest: Mapping[str, Any]) -> str:
    """Return the title of a run: the name of its experiment; where none was given "PROPOSER on TARGET"."""
    name, target = str(manifest["config"].get("name", "run")), target_name(manifest)
    if name != UNNAMED or not target:
        return name
    drafters = [facts.get("name") for facts in (manifest.get("proposers") or {}).values()]
    proposer = next((drafter for drafter in drafters if drafter and drafter != "none"), "")
    return f"{proposer} on {target}" if proposer else target
