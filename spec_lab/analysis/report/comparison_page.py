"""The page about a comparison of runs or sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from spec_lab.analysis import figures
from spec_lab.analysis.compare import Comparison, FigureChange, SettingValues, as_frame
from spec_lab.analysis.compare.show import (
    change_text,
    heading,
    notes,
    pair_title,
    value_text,
    verdict_lines,
    verdict_text,
)
from spec_lab.analysis.figures import Figures
from spec_lab.analysis.metrics import Interval
from spec_lab.analysis.report.page import Cell, DataTable, Page, Section, render, short_path
from spec_lab.core.files import write_text

BADGES = {"significant": "strong", "too few": "warn"}

CHANGES = (
    "Each row is one figure of an arm in another run against the reference's, paired over the prompts or groups that "
    "both have. Interval, all: holds for all tested changes at once; alone: for this change only. A change is "
    "significant if the interval for all excludes no change (factor 1, difference 0)."
)
DRAWN = (
    "Changes with the intervals that hold for all tested changes at once. Filled: significant; hollow: not. Dashed: no "
    "change."
)


def write_comparison(comparison: Comparison, file: Path) -> Path:
    """Write the page about a comparison, and its figures to a folder beside it, ``<name>_figures``.

    Args:
        comparison: the comparison.
        file: the page.

    Returns:
        The page.

    Raises:
        OSError: a file cannot be written.
    """
    write_text(file, page(comparison, file), errors="backslashreplace")
    return file


def page(comparison: Comparison, file: Path) -> str:
    """Return the page's text; writes the figures as well."""
    frame = as_frame(comparison)
    columns = [frame[name] for name in ("reference", "other", "reference_name", "other_name")]
    frame["label"] = [_label(*row) for row in zip(*columns, strict=True)]
    drawn = _drawn(frame)
    several = len(comparison.runs) > 1
    lead = f"{len(comparison.runs)} runs, the first is the reference" if several else "The arms of one run"
    content = Page(
        title="Comparison",
        lead=f"{lead}; {comparison.tested} tested changes",
        warnings=[f"Left out, not readable: {one}" for one in comparison.unreadable],
        drawn=drawn,
        facts={},
        files=f"{file.stem}_figures",
        verdict=verdict_lines(comparison),
    )
    sections = [
        Section("Compared", "", _runs(comparison)),
        Section("Changes", CHANGES, _changes(comparison), notes=[*_outputs(comparison), *notes(comparison)]),
        Section("Changes with intervals", DRAWN, None, list(drawn), missing="No change was tested."),
    ]
    for title, settings in (("Configuration, where it differs", comparison.configuration),
                            ("Code, machine, weights, prompts, where they differ", comparison.provenance)):  # fmt: skip
        if settings:
            sections.append(Section(title, "", _settings(settings)))
    return render("sections", content, file.parent, sections=sections)


def _drawn(frame: pd.DataFrame) -> Figures:
    found = {}
    for name in dict.fromkeys(frame["figure"]):
        if figure := figures.changes(frame, name, heading(name)):
            found[figures.file_name("change", name)] = figure
    return found


def _label(reference: str, other: str, reference_name: str, other_name: str) -> str:
    """Return a row's label: the runs where there are two, and the arms."""
    arms = other_name if other_name == reference_name else f"{other_name} / {reference_name}"
    return arms if reference == other else f"{other} / {reference}: {arms}"


def _runs(comparison: Comparison) -> DataTable:
    rows = [
        [Cell(one.label), Cell(short_path(one.name)), Cell(comparison.described[one.label])] for one in comparison.runs
    ]
    return DataTable([(name, False) for name in ("", "run", "contents")], rows, len(rows) > 12)


def _changes(comparison: Comparison) -> DataTable:
    rows = []
    for pair in comparison.pairs:
        parts = [one if one == other else f"{other} / {one}" for one, other in zip(*pair.parts, strict=True)]
        for one in pair.changes:
            tested = one.verdict not in ("identical", "too few", "not tested")
            both = [(_ends(one, bounds), bounds.mean) for bounds in (one.simultaneous, one.interval)]
            units = f"{min(one.units)} {one.unit}s, {'paired' if one.paired else 'not paired'}" if one.change else ""
            rows.append(
                [
                    Cell(_label(pair.reference, pair.other, *pair.names), colour=figures.colour(pair.names[1])),
                    *(Cell(part) for part in parts),
                    Cell(heading(one.figure)),
                    Cell(value_text(one.reference), one.reference),
                    Cell(value_text(one.other), one.other),
                    Cell(change_text(one, one.simultaneous.mean), one.simultaneous.mean),
                    *(Cell(text if tested else "", value if tested else float("nan")) for text, value in both),
                    Cell(one.verdict, badge=BADGES.get(one.verdict, "plain"), title=str(verdict_text(one))),
                    Cell(units),
                    Cell(str(verdict_text(one)).removeprefix(one.verdict).lstrip(":; ")),
                ]
            )
    level = f"{100 * comparison.level:.4g}\u00a0%"
    columns = [(name, False) for name in ("arm", "proposer", "verifier", "prompts", "figure")]
    numbers = ("reference", "other", "change", f"interval, all [{level}]", f"alone [{level}]")
    columns += [(name, True) for name in numbers]
    columns += [(name, False) for name in ("verdict", "units", "why")]
    return DataTable(columns, rows, True, ("arm", "proposer", "verifier", "prompts", "figure", "verdict"))


def _ends(one: FigureChange, bounds: Interval) -> str:
    ends = [change_text(one, end) for end in (bounds.low, bounds.high)]
    return f"[{ends[0]}, {ends[1]}]" if all(ends) else ""


def _outputs(comparison: Comparison) -> list[str]:
    """Return how many prompts of each pair have the same output."""
    return [f"{pair_title(pair)}." for pair in comparison.pairs if pair.prompts]


def _settings(settings: Sequence[SettingValues]) -> DataTable:
    rows = [[Cell(one.key), Cell("; ".join(f"{' '.join(labels)}: {value}" for value, labels in one.values))]
            for one in settings]  # fmt: skip
    return DataTable([("option", False), ("values", False)], rows, len(rows) > 12)
