"""Results, figure and table of the study: python -m experiments.real_model.figure [SWEEP]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import NAMES, forest, kept, markdown, no_gain, ordered, percent, row_where, shown, study, swept

ENGINES = ("llama.cpp", "transformers")
ARMS = ("ngram", "ngram_3", "ngram_sure", "suffix", "recycling")
SHOWN = NAMES | {"ngram": "n-gram, 10", "ngram_3": "n-gram, 3", "ngram_sure": "n-gram, 4, after 3 or 4 equal tokens"}
"""Names of the arms with their most drafted tokens."""

FIGURES = ("tau_macro", "baseline_tokens_per_second", "baseline_roofline_share", "roofline_share", "nodes_per_step")


def results(runs: Path) -> pd.DataFrame:
    """Return a row for each engine, temperature and arm."""
    table = swept(runs).rename(columns={"target.engine": "engine"})
    return kept(table, "engine", "temperature", "groups", more=FIGURES)


def draw(table: pd.DataFrame) -> Figure:
    """Plot speed-up and tau; a row for each engine and temperature, a colour for each proposer."""
    table = table.assign(place=[f"{row.engine}, T = {row.temperature:g}" for row in table.itertuples()])
    figure = Figure(figsize=(10.5, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, value, label in (
        (panels[0], "speedup", "times the same engine's baseline"),
        (panels[1], "tau_macro", "tokens per step, mean over prompts"),
    ):
        forest(axes, table, value, "place", "arm", ARMS)
        axes.set_xlabel(label)
    no_gain(panels[0], along="x")
    labels = [SHOWN.get(arm, arm) for arm in ordered(list(table["arm"]), ARMS)]
    panels[1].legend(panels[1].get_legend_handles_labels()[0], labels, fontsize=8)
    figure.suptitle(f"SmolLM2-135M on Spec-Bench: {finding(table)}", fontsize=11)
    return figure


def finding(table: pd.DataFrame) -> str:
    """Say for each engine how many of its drafts are faster than its baseline with their whole interval."""
    parts = []
    for engine in ordered(list(table["engine"]), ENGINES):
        speeds = table.loc[table["engine"] == engine, ["speedup", "speedup_low"]]
        faster = speeds[speeds["speedup_low"] > 1]
        most = f", up to {faster['speedup'].max():.2f} times" if len(faster) else ""
        parts.append(f"{len(faster)} of {len(speeds)} drafts gain on {engine}{most}")
    return "; ".join(parts)


def written(table: pd.DataFrame) -> str:
    """Return the README's table: for each engine and temperature the baseline, then speed-up and tau of each arm."""
    arms = ordered(list(table["arm"]), ARMS)
    rows = [["engine", "T", "baseline, tokens/s", "roofline share", *(SHOWN.get(arm, arm) for arm in arms)]]
    for engine in ordered(list(table["engine"]), ENGINES):
        for temperature in sorted(table["temperature"].unique()):
            cells = [row_where(table, engine=engine, temperature=temperature, arm=arm) for arm in arms]
            known = next((row for row in cells if row), None)
            if known is not None:
                facts = f"{known['baseline_tokens_per_second']:.0f}", percent(known["baseline_roofline_share"])
                speeds = [f"{shown(row)}, {row['tau_macro']:.2f}" if row else "-" for row in cells]
                rows.append([engine, f"{temperature:g}", *facts, *speeds])
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
