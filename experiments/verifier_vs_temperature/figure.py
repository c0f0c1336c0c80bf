"""Results, figure and table of the study: python -m experiments.verifier_vs_temperature.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    VERSUS,
    colours,
    kept,
    line,
    markdown,
    no_gain,
    ordered,
    row_where,
    shown,
    study,
    swept,
    versus,
)

VERIFIERS = ("traversal", "token", "match", "typical", "lenient")
KEYS = ("temperature", "verifier_name")
REFERENCE = "token"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each temperature, verifier and draft, also compared with ``REFERENCE``."""
    table = versus(runs, swept(runs), KEYS, {"verifier_name": REFERENCE}, REFERENCE)
    return kept(table, *KEYS, more=[f"{what}_{REFERENCE}" for what in VERSUS])


def draw(table: pd.DataFrame) -> Figure:
    """Plot expected tau and speed-up; a row for each draft, a line for each verifier, dashed if lossy."""
    names, drafts = ordered(list(table["verifier_name"]), VERIFIERS), ordered(list(table["arm"]), ("chain", "tree"))
    colour = colours(names)
    figure = Figure(figsize=(10, 3.4 * len(drafts)), layout="constrained")
    grid = figure.subplots(len(drafts), 2, squeeze=False, sharex=True)
    for axes, draft in zip(grid, drafts, strict=True):
        for name in names:
            rows = table[(table["arm"] == draft) & (table["verifier_name"] == name)]
            lossless = bool(rows["lossless"].all())
            label, style = name if lossless else f"{name} (lossy)", "-" if lossless else "--"
            line(axes[0], rows, "temperature", "expected_tau", colour[name], label, linestyle=style)
            axes[0].plot(rows["temperature"], rows["tau_pooled_raw"], "o", mfc="none", mec=colour[name], markersize=8)
            line(axes[1], rows, "temperature", "speedup", colour[name], label, linestyle=style)
        no_gain(axes[1])
        axes[0].set(ylabel=f"{NAMES[draft]}: tokens per step", title="expected (dots) and sampled (circles)")
        axes[1].set(ylabel="times the baseline's tokens/s", title="speed-up, 95 % bands over prompts")
    for axes in grid[-1]:
        axes.set_xlabel("temperature of the target and the draft")
    grid[0][0].legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and expected tau by temperature; then each verifier versus ``REFERENCE``."""
    temperatures = sorted(table["temperature"].unique())
    head = [f"T = {temperature:g}" for temperature in temperatures]
    alone, paired = [["draft", "verifier", *head]], [[f"versus `{REFERENCE}`", "verifier", *head]]
    for draft in ordered(list(table["arm"]), ("chain", "tree")):
        for name in ordered(list(table["verifier_name"]), VERIFIERS):
            rows = [
                row_where(table, arm=draft, verifier_name=name, temperature=temperature) for temperature in temperatures
            ]
            lossy = any(row and not row["lossless"] for row in rows)
            label = f"{name} (lossy)" if lossy else name
            alone.append(
                [NAMES[draft], label, *(f"{shown(row)}, {row['expected_tau']:.2f}" if row else "-" for row in rows)]
            )
            if name != REFERENCE:
                paired.append([NAMES[draft], label, *(against(row) for row in rows)])
    return f"{markdown(alone)}\n\n{markdown(paired)}"


def against(row: dict[str, Any] | None) -> str:
    """Return expected tau less that of ``REFERENCE``, and the ratio of speed-ups."""
    if row is None:
        return "-"
    return f"{shown(row, f'expected_tau_beyond_{REFERENCE}')}; x {shown(row, f'speed_over_{REFERENCE}')}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
