"""The figure of the distance between masked outputs and valid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE


@rc_context(STYLE)
def distance(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the total variation of every prompt, with its 95 % interval where it was sampled; None without one.

    Args:
        rows: ``prompts`` of the ``summary.json`` of ``task=constraint_distance``.
    """
    rows = [row for row in rows if row.get("tv") is not None]
    if not rows:
        return None
    cut = style.short([row["prompt"] for row in rows], 40)
    names = [cut[row["prompt"]] for row in rows]
    figure, (axes,) = style.panels(1, 6.0, style.ROW * len(rows) + 0.2, left=style.text_width(names) + 0.1)
    for line, row in enumerate(rows):
        tv = row["tv"] if isinstance(row["tv"], Mapping) else {"mean": row["tv"]}
        axes.barh(line, tv["mean"], color=palette.COLOURS[0], height=0.64)
        if tv.get("low") is not None:
            axes.plot([tv["low"], tv["high"]], [line, line], color="black", lw=1)
    style.rows(axes, names)
    axes.set_xlim(0, 1)
    axes.set_xlabel("total variation, 0 to 1")
    axes.set_title("Masked outputs against the model's given a valid output")
    return figure
