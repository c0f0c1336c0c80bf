"""Project a chain of drafts on dense models and mixtures of experts, by batch: python -m experiments.moe.projected.

No model runs: the roofline of a nominal H100, free drafts of four tokens, each of which is accepted with 0.8.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments import plots
from spec_lab.analysis.figures import STYLE, option_colours
from spec_lab.analysis.projection import Acceptance, Deployment, speedup
from spec_lab.analysis.projection.catalogue import hardware, models, precision, runtime
from spec_lab.analysis.projection.costs import RooflineForward
from spec_lab.analysis.projection.drafting import Drafting

LENGTH, RATE, CONTEXT = 4, 0.8, 1024
BATCHES = [1 << power for power in range(10)]
MODELS = {"qwen3-14b": "--", "qwen3-32b": "--", "mixtral-8x7b": "-", "qwen3-30b-a3b": "-", "glm-4.5-air": "-"}
"""Dense models, dashed, and mixtures of experts."""

CLAIM = "In small batches a draft gains least on a mixture of experts, in large ones longer than on a dense model"

HERE = Path(__file__).parent


def projected() -> pd.DataFrame:
    """Return the speed-up of the chain by model and batch, and the experts that its steps read."""
    (device,), number, nominal = hardware(["h100-sxm"]), precision("bf16"), runtime("nominal")
    chain = Acceptance(np.ones((1, LENGTH)), np.ones((1, 1)), RATE ** np.arange(1.0, LENGTH + 1)[None])
    rows = []
    for name in MODELS:
        shape = models()[name]
        work = shape.work(number)
        deployment = Deployment(name, RooflineForward(work, shape.layers, device, nominal, number), {})
        for batch in BATCHES:
            gain = float(speedup(chain, LENGTH, deployment, Drafting(), batch, CONTEXT)[0])
            read = [np.nan if work.experts is None else float(work.experts.expected(rows_of_step))
                    for rows_of_step in (batch, batch * (LENGTH + 1))]  # fmt: skip
            rows.append({"model": name, "batch": batch, "speedup": gain, "plain_experts": read[0], "experts": read[1]})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame) -> Figure:
    """Draw the speed-up by batch, a line for each model."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes, colour = figure.subplots(), option_colours(list(MODELS))
    for name, dashes in MODELS.items():
        here = table[table["model"] == name]
        axes.plot(here["batch"], here["speedup"], dashes, color=colour[name], label=name)
    plots.no_gain(axes)
    axes.set(xlabel="batch", ylabel="projected speed-up")
    axes.set_xscale("log")
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.minorticks_off()
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, the figure, and the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="where results, figure and README are")
    folder = parser.parse_args(arguments).folder
    table = projected()
    table.to_csv(folder / "projected.csv", index=False, float_format="%.4g")
    with rc_context(STYLE):
        plots.save(draw(table), folder / "projected.png", CLAIM)
    wide = table.pivot(index="model", columns="batch", values="speedup").loc[list(MODELS)]
    rows = [["model", *(f"batch {batch}" for batch in wide.columns)]]
    rows += [[name, *(f"{gain:.2f}" for gain in wide.loc[name])] for name in MODELS]
    plots.fill(folder / "README.md", plots.markdown(rows), "projected")
    print(plots.markdown(rows))


if __name__ == "__main__":
    main()
