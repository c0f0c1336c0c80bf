"""Draw predicted against measured tau from replay.csv: python -m experiments.projection.replay_figure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.plots import save
from spec_lab.analysis.figures import GREY, STYLE
from spec_lab.analysis.figures.palette import verifier_colour

HERE = Path(__file__).parent
CLAIM = "Replay predicts the tau of 47 designs that were not run"
MARKERS = {"token": "o", "kseq": "s", "match": "^", "traversal": "D"}


def draw(table: pd.DataFrame) -> Figure:
    """Return predicted against measured tau, a point with its 95 % intervals for each design."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 5.2), layout="constrained")
        axes = figure.subplots()
        ends = (
            table[["predicted_low", "measured_low"]].min().min() - 0.05,
            table[["predicted_high", "measured_high"]].max().max() + 0.05,
        )
        axes.plot(ends, ends, color=GREY, ls="--", lw=1, zorder=1)
        for verifier, marker in MARKERS.items():
            rows = table[table["verifier"] == verifier]
            across, up = (
                [rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]]
                for name in ("measured", "predicted")
            )
            look = {"color": verifier_colour(verifier), "marker": marker, "ms": 4, "ls": "", "lw": 0.8, "alpha": 0.75}
            label = f"{verifier}, {len(rows)} designs"
            axes.errorbar(rows["measured"], rows["predicted"], xerr=across, yerr=up, label=label, **look)
        axes.set(xlim=ends, ylim=ends, aspect="equal")
        axes.set(
            xlabel="measured tau (95 % intervals over prompts)", ylabel="predicted tau (95 % intervals over prompts)"
        )
        axes.legend(title="verifier", loc="upper left")
        return figure


def main() -> None:
    """Draw the figure beside this file."""
    save(draw(pd.read_csv(HERE / "replay.csv")), HERE / "replay.png", CLAIM)


if __name__ == "__main__":
    main()
