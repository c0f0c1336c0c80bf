"""The figure of a served stream of requests."""

from __future__ import annotations

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE

LATENCIES = {"ttft": "time to first token, milliseconds", "tpot": "time per further token, milliseconds"}


@rc_context(STYLE)
def latency(frame: pd.DataFrame) -> Figure:
    """Draw the cumulative distributions of the time to first token and of the time per further token, in that order.

    The second is over the requests with more than one token.

    Args:
        frame: of ``serving.latencies``.
    """
    arms = list(dict.fromkeys(frame["arm"]))
    names, dashes = style.short(arms), palette.dashes(arms)
    height, legend = style.legend_height(2.6, names), style.legend_width(names.values())
    figure, axes = style.panels(2, 6.6, height, right=legend, between=0.55, sharey=True)
    for panel, (column, label) in zip(axes, LATENCIES.items(), strict=True):
        for arm in arms:
            milliseconds = 1e3 * frame.loc[frame["arm"] == arm, column].dropna().to_numpy()
            plot = panel.ecdf if len(milliseconds) else panel.plot  # of nothing, only the entry of the legend
            plot(milliseconds, color=palette.colour(arm), linestyle=dashes[arm], label=names[arm])
        panel.set_xlabel(label)
    axes[0].set(ylabel="share of requests", title="Requests that were at least as fast")
    style.legend_right(axes[1])
    return figure
