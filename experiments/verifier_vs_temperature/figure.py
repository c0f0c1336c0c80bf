"""Results, figure and table of the study: python -m experiments.verifier_vs_temperature.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    VERSUS,
    kept,
    line,
    markdown,
    ordered,
    row_where,
    shown,
    study,
    swept,
    versus,
)
from spec_lab.analysis.figures.palette import verifier_colour

VERIFIERS = ("traversal", "token", "match", "typical", "lenient")
KEYS = ("temperature", "verifier_name")
REFERENCE = "token"
ON_PAGE = (0.3, 1, 1.4)  # temperatures in the table of the page
CLAIM = "Match accepts ever less; traversal gains over token on a chain at T = 1, and not on a tree"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each temperature, verifier and draft, also compared with ``REFERENCE``."""
    table = versus(runs, swept(runs), KEYS, {"verifier_name": REFERENCE}, REFERENCE)
    return kept(table, *KEYS, more=[f"{what}_{REFERENCE}" for what in VERSUS])


def draw(table: pd.DataFrame) -> Figure:
    """Plot expected tau by temperature; a panel for each draft, a line for each verifier, dashed if lossy."""
    names, drafts = ordered(list(table["verifier_name"]), VERIFIERS), ordered(list(table["arm"]), ("chain", "tree"))
    figure = Figure(figsize=(4.6 * len(drafts), 3.9), layout="constrained")
    panels = figure.subplots(1, len(drafts), squeeze=False, sharey=True)[0]
    for axes, draft in zip(panels, drafts, strict=True):
        for name in names:
            rows = table[(table["arm"] == draft) & (table["verifier_name"] == name)]
            lossless = bool(rows["lossless"].all())
            label, style = name if lossless else f"{name} (lossy)", "-" if lossless else "--"
            line(axes, rows, "temperature", "expected_tau", verifier_colour(name), label, linestyle=style)
        axes.set(title=NAMES[draft], xlabel="temperature of the target and the draft")
    panels[0].set_ylabel("expected tokens per step,\n95 % bands over prompts")
    panels[0].legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up and expected tau at some temperatures."""
    temperatures = [value for value in sorted(table["temperature"].unique()) if value in ON_PAGE]
    lines = [["draft", "verifier", *(f"T = {temperature:g}" for temperature in temperatures)]]
    for draft in ordered(list(table["arm"]), ("chain", "tree")):
        for name in ordered(list(table["verifier_name"]), VERIFIERS):
            where = {"arm": draft, "verifier_name": name}
            rows = [row_where(table, **where, temperature=temperature) for temperature in temperatures]
            label = f"{name} (lossy)" if any(row and not row["lossless"] for row in rows) else name
            cells = [f"{shown(row)}, {row['expected_tau']:.2f}" if row else "-" for row in rows]
            lines.append([NAMES[draft], label, *cells])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
