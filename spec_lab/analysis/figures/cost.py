"""The figure of measured step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette
from spec_lab.analysis.figures.style import STYLE
from spec_lab.analysis.figures.ticks import number_axis


@rc_context(STYLE)
def step_costs(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw t(n): a column of panels for each context, a line for each batch size.

    The upper panels show milliseconds with the quartiles over repeats, the lower ones t(n) / t(0).

    Args:
        rows: ``nodes`` of the ``summary.json`` of ``task=cost``.
    """
    frame = pd.DataFrame(rows)
    contexts, batches = sorted(frame["context"].unique()), sorted(frame["batch"].unique())
    colour = palette.option_colours([str(batch_size) for batch_size in batches])
    figure = Figure(figsize=(3.6 * len(contexts) + 1.6, 6.2), layout="constrained")
    grid = figure.subplots(2, len(contexts), squeeze=False, sharex=True, sharey="row")
    for panels, context in zip(grid.T, contexts, strict=True):
        for batch, of_batch in frame[frame["context"] == context].groupby("batch"):
            of_batch, ink = of_batch.sort_values("nodes"), colour[str(batch)]
            look = {"color": ink, "marker": "o", "markersize": 3.5, "label": f"batch {batch}"}
            panels[0].plot(of_batch["nodes"], 1e3 * of_batch["seconds"], **look)
            panels[0].fill_between(
                of_batch["nodes"], 1e3 * of_batch["low"], 1e3 * of_batch["high"], color=ink, alpha=0.2, lw=0
            )
            panels[1].plot(of_batch["nodes"], of_batch["seconds"] / of_batch["seconds"].iloc[0], **look)
        panels[1].axhline(1, color=palette.GREY, linestyle="--", linewidth=1)
        panels[0].set_title(f"{context} tokens of context")
        panels[1].set_xlabel("draft nodes n per sequence")
        number_axis(panels[1], frame["nodes"], log=False)
        for panel in panels:
            panel.tick_params(labelleft=True)  # a page may stack the columns
    grid[0][0].set(ylabel="t(n), milliseconds of a step", ylim=(0, None))
    grid[1][0].set(ylabel="t(n) / t(0)", ylim=(0, None))
    grid[0][-1].legend(fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    return figure
