"""Results, figure and table of the study: python -m experiments.drafters.length_figure [RUNS]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import colours, kept, line, markdown, row_where, shown, study, swept
from experiments.runs import TRAINING
from spec_lab.train.objectives import expected_length

KEYS = ("temperature",)


CLAIM = "Each doubling of the training raises accepted length; the estimate without decoding agrees"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each temperature and head, by tokens of training.

    ``accepted_length`` is measured: tau, before the cut at the last token, less the bonus token. ``estimated_length``
    is the sum of products of the acceptance by position, without decoding.
    """
    table, learned = swept(runs), json.loads((runs / TRAINING).read_text())
    for end in ("", "_low", "_high"):
        table[f"accepted_length{end}"] = table[f"tau_pooled_raw{end}"] - 1
    table["tokens_learned"] = [learned[arm]["texts"] * learned[arm]["tokens_of_a_text"] for arm in table["arm"]]
    table["training_seconds"] = [learned[arm]["seconds"] for arm in table["arm"]]
    places = zip(table["arm"], table["temperature"], strict=True)
    table["estimated_length"] = [
        expected_length(learned[arm]["agreed" if temperature == 0 else "accepted"]) for arm, temperature in places
    ]
    more = ("accepted_length", "estimated_length", "tokens_learned", "training_seconds")
    return kept(table, *KEYS, more=more).sort_values([*KEYS, "tokens_learned"], ignore_index=True)


def draw(table: pd.DataFrame) -> Figure:
    """Plot accepted length by tokens of training, measured and estimated; a panel for each temperature."""
    temperatures = sorted(table["temperature"].unique())
    colour = colours(["eagle3"])["eagle3"]
    figure = Figure(figsize=(4.2 * len(temperatures), 3.4), layout="constrained")
    for axes, temperature in zip(figure.subplots(1, len(temperatures), squeeze=False)[0], temperatures, strict=True):
        here = table[table["temperature"] == temperature]
        line(axes, here, "tokens_learned", "accepted_length", colour, "measured by decoding")
        axes.plot(here["tokens_learned"], here["estimated_length"], "--o", mfc="none", color=colour, label="estimated")
        axes.set(
            title=f"T = {temperature:g}", xlabel="tokens of training", ylabel="accepted tokens per step", xscale="log"
        )
        axes.set_xticks(here["tokens_learned"], [f"{tokens / 1e6:.2g} M" for tokens in here["tokens_learned"]])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: accepted length, measured and estimated, by tokens of training."""
    temperatures = sorted(table["temperature"].unique())
    lines = [
        [
            "tokens of training",
            "training",
            *(f"T = {temperature:g}: measured; estimated" for temperature in temperatures),
        ]
    ]
    for tokens in sorted(table["tokens_learned"].unique()):
        rows = [row_where(table, tokens_learned=tokens, temperature=temperature) for temperature in temperatures]
        cells = [f"{shown(row, 'accepted_length')}; {row['estimated_length']:.2f}" if row else "-" for row in rows]
        seconds = next(row["training_seconds"] for row in rows if row)
        lines.append([f"{tokens / 1e6:.2f} M", f"{seconds / 60:.0f} min", *cells])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM, "training_length")


if __name__ == "__main__":
    main()
