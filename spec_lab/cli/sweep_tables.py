"""The tables of a sweep in the terminal: the state of its runs, and their main figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from spec_lab.analysis.console import WIDE, say, show_table, standard_output
from spec_lab.analysis.run_tables import figure_table, own_figures, refuted, state_table
from spec_lab.core.terminal import visible
from spec_lab.results import run_names, sweep
from spec_lab.results.result import Cell

FIGURES = ("speedup", "tokens_per_second", "tau_pooled", "expected_tau")
"""Columns of a sweep's table on the screen."""

MORE_FIGURES = ("draft_token_rate", "time_to_first_token", "time_per_output_token", "overhead")

MAX_ROWS = 40
"""Maximum number of rows of that table."""


def print_sweep(folder: Path, console: Console | None = None, every: bool = False) -> None:
    """Print how many runs of a sweep are in which state, and a table of runs.

    Args:
        console: default standard output.
        every: whether the table has every run; else only those that are not done or ended with another code than 0.

    Raises:
        ValueError: the folder holds no sweep.
    """
    from spec_lab.analysis.metrics import sweeps

    console = console or standard_output()
    runs = sweep.runs(folder)
    shown = [run for run in runs if every or run.state != "done" or run.code]
    show_table("", state_table(shown, sweeps.run_labels(runs)), console)
    count = {state: sum(run.state == state for run in runs) for state in ("done", "running", "failed", "pending")}
    counts = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    say(console, f"{folder}: {counts or 'no runs'}", wrap=False)
    for name, values in sweep.mixed(runs).items():
        console.print(visible(f"Its runs differ in {name}: {' | '.join(values)}; do not compare their figures."))
    if count["pending"]:
        console.print("The same command resumes the pending runs.", highlight=False)
    if count["failed"]:
        console.print("retry=true runs the failed ones again; tracebacks are in ended.json.", highlight=False)


def print_results(folder: Path, console: Console | None = None, verbose: bool = False) -> None:
    """Print the main figures of each arm but the baseline, of a sweep's runs that are done; at most ``MAX_ROWS`` rows.

    Rows are told apart by the options that vary, a column for each; where these do not fit the terminal's width, by
    numbers that are explained below the table. With ``verbose``, and on a terminal of ``WIDE`` columns or more, a
    second table has ``MORE_FIGURES``.

    Raises:
        ValueError: the folder holds no sweep.
    """
    from spec_lab.analysis.metrics import sweeps
    from spec_lab.analysis.roofline_text import baselines_in_words

    console, table = console or standard_output(), sweep.collect(folder)
    if "tau_pooled" not in table or not len(table):
        return
    shown = table[(table["arm"] != "baseline") | (table.groupby("run")["arm"].transform("nunique") == 1)]
    runs = sweep.runs(folder)
    labels = sweeps.run_labels(runs)
    for line in (*refuted(table, labels), *sweeps.verdicts(table, labels)):
        console.print(visible(line), highlight=False)
    keys = list(dict.fromkeys(run_names.key(override) for run in runs for override in run.overrides))
    varied = sweeps.varied(table, keys)
    short, alone = sweeps.short_names(varied), shown["run"].nunique() == 1 < shown["arm"].nunique()
    told = [*(varied or ["run"] * (not alone)), *["arm"] * (shown["arm"].nunique() > 1)]
    heads = [short.get(key, key) for key in told]
    rows = shown.head(MAX_ROWS).to_dict("records")
    names = [[sweeps.text(row[key]) for key in told] for row in rows]
    for figures in (
        (_with_further(FIGURES, shown), MORE_FIGURES)
        if verbose or console.width >= WIDE
        else (_with_further(FIGURES, shown),)
    ):
        _print_rows(heads, names, rows, figures, console)
    base = table[table["arm"] == "baseline"].reindex(columns=["roofline_share", "memory_bound_steps"])
    if len(base):
        known = base.dropna()
        console.print(baselines_in_words(*(list(known[name]) for name in known)), highlight=False)
    if len(shown) > MAX_ROWS:
        console.print(f"The first {MAX_ROWS} of {len(shown)}; collect writes all to a file.")


def _print_rows(
    heads: Sequence[str],
    names: Sequence[Sequence[str]],
    rows: Sequence[Mapping[str, Any]],
    figures: Sequence[str],
    console: Console,
) -> None:
    """Print a table of figures; rows are told apart by ``names``, or by numbers where these do not fit."""
    full = figure_table(rows, figures, heads, [list(map(Cell, labels)) for labels in names])
    lines = [[heading for heading, _ in full.columns], *([visible(cell.whole) for cell in row] for row in full.rows)]
    fits = sum(max(map(cell_len, column)) + 1 for column in zip(*lines, strict=True)) + 1 <= console.width
    numbers = [[Cell(str(number))] for number in range(1, len(rows) + 1)]
    show_table("", full if fits else figure_table(rows, figures, [""], numbers), console)
    if not fits:
        for number, labels in enumerate(names, start=1):
            parts = (f"{head}={value}" for head, value in zip(heads, labels, strict=True) if value)
            console.print(visible(f"{number}: {', '.join(parts)}"), highlight=False)


def _with_further(figures: Sequence[str], table: Any) -> tuple[str, ...]:
    """Return the figures, with the share of correct answers where answers were checked, and metrics of one's own."""
    checked = "correct" in table and bool(table["correct"].notna().any())
    return (*figures, *["correct"] * checked, *own_figures(table))
