"""Results, figure and tables of the study: python -m experiments.real_model.figure [RUNS] [--readme README.md]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    arms_by_place,
    fill,
    kept,
    markdown,
    ordered,
    percent,
    row_where,
    shown,
    study,
    swept,
)

SWEEPS = {"llama.cpp": "llama.cpp", "transformers": "transformers", "heads": "transformers"}
"""Folders of the sweeps, and the engine of each; those that were not run are left out."""

ENGINES = ("llama.cpp", "transformers")

HEADS = {"eagle3": "EAGLE-3, chain", "eagle3_tree": "EAGLE-3, tree", "medusa": "Medusa tree", "block": "DFlash block"}
UNTRAINED = {
    "ngram": "n-gram, 10",
    "ngram_3": "n-gram, 3",
    "ngram_sure": "n-gram, 4, after 3 or 4 equal tokens",
    **{name: NAMES[name] for name in ("suffix", "recycling", "lookahead", "skip")},
}
ARMS = UNTRAINED | HEADS
"""Names of the arms in figure and tables, in their order."""

BASELINE = ["baseline_tokens_per_second", "baseline_roofline_share"]


def results(runs: Path) -> pd.DataFrame:
    """Return a row for each engine, temperature and arm.

    Raises:
        ValueError: none of the sweeps is there.
    """
    there = {folder: engine for folder, engine in SWEEPS.items() if (runs / folder).is_dir()}
    if not there:
        raise ValueError(f"{runs} holds none of the sweeps {', '.join(SWEEPS)}: run them first")
    tables = [swept(runs / folder).assign(engine=engine) for folder, engine in there.items()]
    return kept(pd.concat(tables, ignore_index=True), "engine", "temperature", more=BASELINE)


def places(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Return a title for each engine and temperature, and which rows of ``table`` belong to it."""
    return [
        (f"{engine}, T = {temperature:g}", (table["engine"] == engine) & (table["temperature"] == temperature))
        for engine in ENGINES
        for temperature in sorted(table.loc[table["engine"] == engine, "temperature"].unique())
    ]


def draw(table: pd.DataFrame) -> Figure:
    """Plot every arm's speed-up; a panel for each engine and temperature."""
    arms = {arm: ARMS.get(arm, arm) for arm in ordered(list(table["arm"]), [*ARMS])}
    figure = arms_by_place(table, "speedup", "", places(table), arms)
    figure.supxlabel("speed-up over the same engine's baseline, SmolLM2-135M on Spec-Bench; 95 % intervals", fontsize=9)
    ends = [end for panel in figure.axes for end in panel.get_xlim()]
    for panel in figure.axes:
        panel.set_xlim(min(ends), max(ends))
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the study's results: the finding, and speed-up and tau of each arm by engine and temperature."""
    here = places(table)
    facts = ["{} ({})".format(*baseline(table[rows])) for _, rows in here]
    lines = [["", *(title for title, _ in here)], ["baseline, tokens/s (roofline share)", *facts]]
    for arm in ordered(list(table["arm"]), [*ARMS]):
        cells = [row_where(table[rows], arm=arm) for _, rows in here]
        speeds = [f"{shown(row)}, {row['tau_macro']:.2f}" if row else "-" for row in cells]
        lines.append([ARMS.get(arm, arm), *speeds])
    figure = "![Speed-up of each draft on both engines, greedy and at temperature 1](real_model.png)"
    return f"**{finding(table)}**\n\n{figure}\n\n{markdown(lines)}"


def baseline(table: pd.DataFrame) -> tuple[str, str]:
    """Return the baseline's tokens per second and roofline share, the mean over the sweeps that the rows are of."""
    rate, share = table[BASELINE].drop_duplicates().mean()
    return f"{rate:.0f}", percent(share)


def finding(table: pd.DataFrame) -> str:
    """Say of each engine which drafts are faster than its baseline with their whole interval."""
    parts = []
    for engine in ordered(list(table["engine"]), ENGINES):
        speeds = table[table["engine"] == engine]
        faster = speeds[speeds["speedup_low"] > 1]
        best = f", at most {faster['speedup'].max():.2f} times as fast" * bool(len(faster))
        parts.append(f"{len(faster) or 'none'} of {len(speeds)} by {engine}{best}")
    return f"Drafts that beat their engine's baseline with the whole interval, T = 0 and 1: {'; '.join(parts)}."


def claim(table: pd.DataFrame) -> str:
    """Return the figure's finding: in which engines drafts are faster than the baseline with their whole interval."""
    faster, engines = table[table["speedup_low"] > 1], ordered(list(table["engine"]), ENGINES)
    if faster.empty:
        return "No draft is shown to be faster than its engine's baseline"
    gain = ordered(list(faster["engine"]), ENGINES)
    where = " and ".join(gain) + " only" * (len(gain) < len(engines))
    count = f"{len(faster)} of {len(table)}, at most {faster['speedup'].max():.2f} times"
    return f"Drafts are shown to be faster than the baseline in {where}: {count}"


def headline(table: pd.DataFrame) -> str:
    """Return the table of the repository's README: of each engine the fastest draft without training, and head."""
    kinds = {"fastest without training": UNTRAINED, "fastest trained head": HEADS}
    kinds = {name: arms for name, arms in kinds.items() if table["arm"].isin(arms).any()}
    rows = [["engine", "T", "baseline, tokens/s", "of the roofline", *kinds]]
    for title, here in places(table):
        part = table[here].sort_values("speedup", ascending=False)
        cells = []
        for arms in kinds.values():
            best = next((row for row in part.to_dict("records") if row["arm"] in arms), None)
            cells.append(f"{arms[best['arm']]}: {shown(best)}, {best['tau_macro']:.2f}" if best else "-")
        engine, _, temperature = title.partition(", T = ")
        rows.append([engine, temperature, *baseline(part), *cells])
    what = (
        "SmolLM2-135M (Q4_1; by transformers dequantised) on Spec-Bench, batch 1 ([study](experiments/real_model)): "
        "speed-up [95 %] and tau of the best of several."
    )
    return f"**{finding(table)}** {what}\n\n{markdown(rows)}\n"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--readme", type=Path, help="the repository's README, whose table of this model is written")
    chosen, others = parser.parse_known_args(arguments)
    table = study(__file__, results, draw, written, others, claim)
    if chosen.readme is not None:
        fill(chosen.readme, headline(table), "real model")
    return table


if __name__ == "__main__":
    main()
