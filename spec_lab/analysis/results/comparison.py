"""The result of ``spec-lab compare``: every change between runs, and which are significant."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from spec_lab.analysis import figures
from spec_lab.analysis.compare import ArmComparison, Comparison, FigureChange, SettingValues, as_frame
from spec_lab.analysis.compare.changes import fewest_units
from spec_lab.analysis.figures.style import shortened
from spec_lab.analysis.metrics import Interval
from spec_lab.analysis.text import OWN, column, verdict_line
from spec_lab.core.terminal import short_path
from spec_lab.results.result import Cell, DataTable, Result, Section, number

BADGES = {"significant": "strong", "too few": "warn"}

KEY_CHANGES = {"speedup_geometric_mean": "speed-up", "tau_pooled": "tau", "draft_token_rate": "acceptance"}
"""The changes at the top of the page, with their headings."""

MAX_KEY = 6
"""Number of pairs of arms at the top of the page."""

CHANGES = (
    "Each row is one figure of an arm in another run against the reference's, paired over the prompts or groups that "
    "both have. The interval holds for all tested changes at once; a change is significant if it excludes no change "
    "(factor 1, difference 0)."
)
MEANINGS = {
    "alone": "Alone: the interval for this change only.",
    "significant from": "Significant from: the smallest change that would be.",
}
DRAWN = (
    "Changes with the intervals that hold for all tested changes at once. Filled: significant; hollow: not. Dashed: no "
    "change."
)
VERDICTS = {
    "not significant": "the interval contains no change. This does not prove equality: smaller changes than those of "
    "the column significant from (a page, or --verbose) are not detected.",
    "identical": "no prompt differs.",
    "too few": "too few prompts or groups for a test; run more of them. More changes at once need more of them.",
}


def result(comparison: Comparison) -> Result:
    """Return the result of a comparison: its tables of changes, figures and notes."""
    several = len(comparison.runs) > 1
    lead = f"{len(comparison.runs)} runs, the first is the reference" if several else "the arms of one run"
    verdicts_given = {change.verdict for pair in comparison.pairs for change in pair.changes}
    few = _too_few(verdicts_given)
    rows = [[Cell(run.label), Cell(short_path(run.name)), Cell(comparison.described[run.label])]
            for run in comparison.runs]  # fmt: skip
    compared = DataTable([(name, False) for name in ("", "run", "contents")], rows, len(rows) > 12)
    equal = "The configurations are equal: differences come from chance, code or machine."
    verdicts = [
        (label, line)
        for label, judged in comparison.verdicts.items()
        for line in (verdict_line(judged.summary()), *comparison.lossy[label])
    ]
    frame = as_frame(comparison)
    columns = [frame[name] for name in ("reference", "other", "reference_arm", "other_arm")]
    frame["label"] = [_label(*row) for row in zip(*columns, strict=True)]
    drawn = {figures.file_name("change", name): partial(figures.changes, frame, name, heading(name))
             for name in dict.fromkeys(frame["figure"])}  # fmt: skip
    last, names = comparison.pairs[-1], {shortened(Path(run.name).name, 40) for run in comparison.runs}
    title = f"Comparison of {len(comparison.runs)} runs"
    if len(names) == len(comparison.runs) < 4:  # not runs of a sweep, whose long names look the same
        title = f"Comparison of {' and '.join(shortened(Path(run.name).name, 40) for run in comparison.runs)}"
    return Result(
        title, f"{lead}; " + ("too few prompts to test" if few else f"{comparison.tested} tested changes"),
        [
            Section("Compared", "", compared, notes=[equal] * (several and not comparison.configuration)),
            *_settings("Configuration, where it differs", comparison.configuration),
            *_settings("Code, machine, weights, prompts, where they differ", comparison.provenance),
            *(Section(pair_title(pair), CHANGES * (pair is last), _changes(pair, comparison.level, pair is last))
              for pair in comparison.pairs),
            Section("Changes with intervals", DRAWN, None, drawn, notes(comparison), missing="No change was tested."),
        ],
        [f"{label}: {line}" if several else line for label, line in verdicts],
        [f"Left out, not readable: {file}" for file in comparison.unreadable],
        key=_key(comparison),
    )  # fmt: skip


def _key(comparison: Comparison) -> Section | None:
    """Return the changes of speed-up, tau and acceptance, and how many outputs are the same."""
    rows = []
    for pair in comparison.pairs[:MAX_KEY]:
        changes = {change.figure: change for change in pair.changes}
        cells = [Cell(_label(pair.reference, pair.other, *pair.arms))]
        for name in KEY_CHANGES:
            change = changes.get(name)
            text = change_text(change, change.simultaneous.mean) if change else ""
            value = change.simultaneous.mean if change else float("nan")
            cells.append(Cell(text, value, f"({change.verdict})" if change and text else ""))
        rows.append([*cells, Cell(f"{pair.identical:.0%}" if pair.prompts else "", pair.identical)])
    columns = [("arm", False), *((heading, True) for heading in KEY_CHANGES.values()), ("same outputs", True)]
    more = len(comparison.pairs) - MAX_KEY
    return Section("", f"The first {MAX_KEY} of {len(comparison.pairs)} pairs." * (more > 0), DataTable(columns, rows))


def _label(reference: str, other: str, reference_arm: str, other_arm: str) -> str:
    """Return a row's label: the runs where there are two, and the arms."""
    arms = other_arm if other_arm == reference_arm else f"{other_arm} / {reference_arm}"
    return arms if reference == other else f"{other} / {reference}: {arms}"


def _changes(pair: ArmComparison, level: float, explained: bool) -> DataTable:
    reference, other = pair.arms if pair.reference == pair.other else (pair.reference, pair.other)
    rows = []
    for change in pair.changes:
        tested = change.verdict not in ("identical", "too few", "not tested")
        units = f"{min(change.units)} {change.unit}s, {'paired' if change.paired else 'not paired'}"
        smallest = change_text(change, change.smallest) if change.change else ""
        rows.append(
            [
                Cell(heading(change.figure)),
                *(Cell(value_text(change, value), value) for value in (change.reference, change.other)),
                Cell(change_text(change, change.simultaneous.mean), change.simultaneous.mean),
                *(_ends(change, bounds, tested) for bounds in (change.simultaneous, change.interval)),
                Cell(smallest, change.smallest if smallest else float("nan")),
                Cell(change.verdict, badge=BADGES.get(change.verdict, "plain"), title=change.why),
                Cell(units if change.change else ""),
            ]
        )
    names = (f"{reference}", f"{other}", "change", f"[{100 * level:.4g} %]", "alone", "significant from")
    columns = [("figure", False), *((name, True) for name in names), ("verdict", False), ("units", False)]
    return DataTable(columns, rows, filters=("figure", "verdict"), more=("alone", "significant from", "units"),
                     meanings=MEANINGS if explained else {})  # fmt: skip


def _ends(change: FigureChange, bounds: Interval, tested: bool) -> Cell:
    ends = [change_text(change, end) for end in (bounds.low, bounds.high)]
    return Cell(f"[{ends[0]}, {ends[1]}]", bounds.mean) if tested and all(ends) else Cell("", float("nan"))


def _settings(title: str, settings: Sequence[SettingValues]) -> list[Section]:
    rows = [[Cell(setting.key), Cell("; ".join(f"{' '.join(labels)}: {value}" for value, labels in setting.values))]
            for setting in settings]  # fmt: skip
    table = DataTable([("option", False), ("values", False)], rows, len(rows) > 12)
    return [Section(title, "", table)] * bool(rows)


def pair_title(pair: ArmComparison) -> str:
    """Return which arms of which runs are compared, and on how many prompts."""
    reference, other = pair.arms if pair.reference == pair.other else (pair.reference, pair.other)
    title = f"{other} compared with {reference}"
    if pair.reference != pair.other:
        title += f": {pair.arms[0]}" if pair.arms[0] == pair.arms[1] else f": {pair.arms[1]} with {pair.arms[0]}"
    if pair.prompts:
        title += f"; {pair.prompts} prompts in both, {pair.identical:.0%} with the same output"
    return title


def heading(figure: str) -> str:
    """Return the heading of a figure."""
    return column(figure).heading.removesuffix(" [95 %]")


def change_text(change: FigureChange, value: float) -> str:
    """Return a change of this figure as text, a factor or a difference; empty for NaN."""
    if value != value:
        return ""
    if change.figure.startswith(OWN) and not change.relative:
        return f"{value:+.3g}"
    digits = 3 if change.figure in ("draft_token_rate", "correct") else 2
    return f"×{value:.2f}" if change.relative else f"{value:+.{digits}f}"


def value_text(change: FigureChange, value: float) -> str:
    """Return a value of this figure as text; empty for NaN."""
    if change.figure.startswith(OWN):
        return number(value, ".4g")
    return "" if value != value else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"[:5]


def _too_few(verdicts: Collection[str]) -> bool:
    """Return whether changes could not be tested, and no other was."""
    return "too few" in verdicts and not {"significant", "not significant"} & set(verdicts)


def notes(comparison: Comparison) -> list[str]:
    """Return what a reader must know of these runs, and the meaning of the verdicts that occur."""
    changes = [change for pair in comparison.pairs for change in pair.changes]
    verdicts = {change.verdict for change in changes}
    lines = [*comparison.notes]
    if _too_few(verdicts):
        fewest = fewest_units(comparison.tested, comparison.level)
        lines.append(f"No change could be tested: at least {fewest} prompts (for speed: groups) are needed.")
    elif comparison.tested:
        significant = sum(change.verdict == "significant" for change in changes)
        lines.append(
            f"Significant: {significant} of {comparison.tested} tested changes. All intervals hold at once at "
            f"{comparison.level:.4g} (jackknife over prompts, of speed over groups; Student's t; Bonferroni)."
        )
    lines += [f"{verdict}: {text}" for verdict, text in VERDICTS.items() if verdict in verdicts]
    reasons: dict[str, dict[str, None]] = {}
    for change in changes:
        if change.why:
            reasons.setdefault(f"{change.verdict}, {change.why}", {})[heading(change.figure)] = None
    lines += [f"{why}: {', '.join(named)}." for why, named in reasons.items()]
    if any(change.figure == "speedup_geometric_mean" for change in changes):
        lines.append(
            "speed-up: total tokens/s over those of the baseline of the same run; the test uses the geometric mean "
            "over groups."
        )
    if len(comparison.runs) > 1 and any(
        change.figure == "speedup_geometric_mean" and change.verdict == "significant" for change in changes
    ):
        lines.append(
            "The intervals of speed do not contain differences between a run and its repetition that affect all "
            "prompts (a busy machine, another memory layout): repeat both runs before relying on a small change."
        )
    return lines
