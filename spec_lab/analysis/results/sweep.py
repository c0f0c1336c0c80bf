"""The result of a sweep, from the summaries of its runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from spec_lab.analysis import figures
from spec_lab.analysis.metrics import sweeps
from spec_lab.analysis.run_tables import figure_cell, figure_table, own_figures, refuted, state_table
from spec_lab.analysis.text import KEY_FIGURES, lossless_cell, losslessness
from spec_lab.core.terminal import short_path
from spec_lab.results import run_names, run_state, sweep
from spec_lab.results.result import UNNAMED, Cell, DataTable, Result, Section

MAX_UNFINISHED = 200

MAX_KEY = 6
"""Number of arms at the top of the page."""

FIGURES = (
    "speedup", "correct", "correct_change", "correct_cut", "tau_pooled", "expected_tau", "tokens_per_second",
    "baseline_tokens_per_second", "nodes_per_step", "draft_token_rate", "overhead", "roofline_share",
    "baseline_roofline_share", "repeated_8gram_share", "requests",
)  # fmt: skip
"""Columns of the table of rows."""

SPEEDUPS = (
    "Total tokens per total seconds over the baseline's on the same groups of prompts, with the 95 % interval over "
    f"groups, the fastest first (at most {figures.MAX_ROWS}; the table has all rows). Intervals to the right of the "
    "dashed line are faster than the baseline. Each interval holds for its row alone: the best of many are "
    "overestimated, because chance put them first; spec-lab compare corrects for the number of comparisons."
)
TAU = (
    "Each point is an arm of a run. Points of the same tau and different speed-ups differ in the cost of their drafts."
)
BY_OPTION = (
    "One line for each setting of the other options, the 8 best where there are more; bands are 95 % intervals. Runs "
    "that differ only in the seed are one point, their mean, with the means of their own bounds: they share their "
    "prompts, so several cover no more prompts than one. Runs without a number are left out."
)
ROWS = (
    "One row for each arm of each finished run, without baselines of other arms, the fastest first. Speed-up: the "
    "arm's total tokens per total seconds over the baseline's on the same groups of prompts. A click on a heading "
    "sorts; a run's name leads to its own report where there is one."
)
NO_SPEEDUP = "No finished run was compared with a baseline, so there is no speed-up."
NO_FIGURES = "No run is finished yet, so there are no figures."


def result(folder: Path) -> Result:
    """Return the result of a sweep, from the summaries of its runs.

    Raises:
        ValueError: files that are not readable.
    """
    runs, table = sweep.runs(folder), sweep.collect(folder)
    keys = list(dict.fromkeys(run_names.key(override) for run in runs for override in run.overrides))
    names = sweeps.run_labels(runs)
    if not len(table):
        table = pd.DataFrame(columns=["run", "arm"])
    keys = [key for key in keys if key in table]
    varied = sweeps.varied(table, keys)
    count, unfinished = Counter(run.state for run in runs), [run for run in runs if run.state != "done"]
    experiments = sorted({*table["experiment"].dropna()} - {UNNAMED}) if "experiment" in table else []
    of = f" of {', '.join(experiments)}" if experiments else ""
    states = ", ".join(f"{count[state]} {state}" for state in ("done", "running", "failed", "pending") if count[state])
    note = [f"The first {MAX_UNFINISHED} of {len(unfinished)}."] * (len(unfinished) > MAX_UNFINISHED)
    sections = [
        Section("State", f"{states or 'No runs'}.", state_table(unfinished[:MAX_UNFINISHED], names), notes=note),
        *drawings(table, keys),
    ]
    rows = _rows(folder, table, varied, names)
    sections.append(Section("All rows", ROWS, rows, missing="" if rows.rows else NO_FIGURES))
    short = list(sweeps.short_names(varied).values())
    over = f" over {', '.join(short[:3])}{f' and {len(short) - 3} more' * (len(short) > 3)}" * bool(short)
    return Result(
        f"{', '.join(experiments) or folder.resolve().name}: sweep{over}",
        f"{len(runs)} runs{of}; varied: {', '.join(varied) or 'nothing'}",
        sections,
        sweeps.verdicts(table, names),
        [*refuted(table, names), *_warnings(runs, table)],
        _facts(table, keys, varied),
        key=_key(table, varied),
    )


def _key(table: pd.DataFrame, varied: Sequence[str]) -> Section | None:
    """Return speed-up, tau, acceptance and losslessness of the fastest arms."""
    rows = sweeps.over_sweep(table, varied)
    figures = [name for name in KEY_FIGURES if name in rows and rows[name].notna().any()]
    if not figures:
        return None
    cells = [
        [Cell(str(row["label"])), *(figure_cell(row, name) for name in figures), lossless_cell(row)]
        for row in rows.head(MAX_KEY).to_dict("records")
    ]
    columns = [("arm", False), *((KEY_FIGURES[name], True) for name in figures), ("lossless", False)]
    how = f"The fastest {MAX_KEY} of {len(rows)} arms." * (len(rows) > MAX_KEY)
    return Section("", how, DataTable(columns, cells))


def drawings(table: pd.DataFrame, keys: Sequence[str]) -> list[Section]:
    """Return the sections of figures: speed-ups, speed-up against tau by varied option, and by each numeric option.

    Args:
        table: of ``spec_lab.results.sweep.collect``.
        keys: its columns that are options.
    """
    scatter = {
        figures.file_name("tau_speedup", name): partial(figures.tau_and_speedup, table, keys, name)
        for name in sweeps.tau_and_speedup(table, keys)[1]
    }
    sections = [
        Section("Speed-ups", SPEEDUPS, None, {"speedups": partial(figures.forest, table, keys)}, missing=NO_SPEEDUP),
        Section("Speed-up against tau", TAU, None, scatter, missing=NO_SPEEDUP),
    ]
    for key in sweeps.numeric(table, keys):
        drawn = {figures.file_name("by", key): partial(figures.lines, table, keys, key)}
        missing = f"No two runs with figures differ in {key} alone."
        sections.append(Section(f"By {key}", BY_OPTION, None, drawn, missing=missing))
    return sections


def _rows(folder: Path, table: pd.DataFrame, varied: Sequence[str], run_names: Mapping[str, str]) -> DataTable:
    """Return the table of all arms of all finished runs; runs have their labels of ``sweeps.run_labels``."""
    rows = sweeps.over_sweep(table, varied)
    others = table[~table["run"].isin(rows["run"])]  # baselines alone, and tasks without arms
    parts = [frame for frame in (rows, others) if len(frame)]
    rows = pd.concat(parts, ignore_index=True) if parts else table
    names = [name for name in (*FIGURES, *own_figures(rows)) if name in rows and rows[name].notna().any()]
    state = "lossless" in rows and bool(rows["lossless"].notna().any())
    judged = "verdict" in rows and bool(rows["verdict"].notna().any())
    heads = ["arm", *varied, *["losslessness"] * state, *["verdict"] * judged]
    reports = {name for name in rows["run"].unique() if os.path.isfile(folder / str(name) / "report.html")}
    records, labels, links = rows.to_dict("records"), [], []
    for row in records:
        line = [Cell(sweeps.text(row[name])) for name in ("arm", *varied)] + [Cell(losslessness(row)[0])] * state
        labels.append(
            line + [Cell(sweeps.text(row["verdict"]), title=sweeps.text(row.get("verdict_reasons")))] * judged
        )
        link = f"{quote(str(row['run']))}/report.html" if row["run"] in reports else ""
        run = sweeps.text(row["run"])
        links.append(Cell(run_names.get(run, run), link=link, title=run))
    shown = figure_table(records, names, heads, labels)
    cells = [[*line, link] for line, link in zip(shown.rows, links, strict=True)]
    filters = ("arm", *varied, "losslessness", "verdict")
    return replace(shown, columns=[*shown.columns, ("run", False)], rows=cells, searchable=True, filters=filters)


def _warnings(runs: Sequence[run_state.RunState], table: pd.DataFrame) -> list[str]:
    warnings = [
        f"The runs differ in {name} ({', '.join(value[:16] for value in values)}): compare their figures with care."
        for name, values in sweep.mixed(runs).items()
    ]
    if "code" in table and (failed := table.loc[table["code"].fillna(0) != 0, "run"].nunique()):
        warnings.append(f"{failed} runs ended with an exit code other than 0.")
    return warnings


def _facts(table: pd.DataFrame, keys: Sequence[str], varied: Sequence[str]) -> dict[str, str]:
    """Return what all finished runs share."""
    shared = {key: f"{table[key].iloc[0]}" for key in keys if key not in varied and len(table)}
    for name in ("target_name", "constraint_name", "temperature", "batch_size", "commit"):
        if name in table and table[name].notna().all() and table[name].nunique() == 1:
            shared.setdefault(name, f"{table[name].iloc[0]}")
    if "job_seconds" in table:
        shared["time of all runs"] = f"{table.drop_duplicates('run')['job_seconds'].sum() / 60:.1f} minutes"
    return {name: short_path(value) for name, value in shared.items()}
