"""The figure of a comparison: every change of one figure, with its interval."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE

MAX_CHANGES = 40
"""Most rows of the figure; of more, the largest changes are drawn."""


@rc_context(STYLE)
def changes(table: pd.DataFrame, figure: str, heading: str) -> Figure | None:
    """Draw the changes of one figure from the reference, with the intervals that hold for all tested changes at once.

    Filled marks are significant, hollow ones are not; a change without an interval is a mark alone. None without a
    tested change.

    Args:
        table: of ``compare.as_frame``, with a column ``label`` for the rows of the figure.
        figure: the name of the figure.
        heading: its heading in tables.
    """
    rows = table[(table["figure"] == figure) & (table["verdict"] != "not tested") & np.isfinite(table["change"])]
    if not len(rows):
        return None
    relative = bool(rows["relative"].iloc[0])
    size = np.abs(np.log(rows["change"])) if relative else rows["change"].abs()
    kept = rows.loc[size.sort_values(ascending=False, kind="stable").index[:MAX_CHANGES].sort_values()]
    cut = style.short(kept["label"], 48)
    names = [cut[label] for label in kept["label"]]
    drawn, (axes,) = style.panels(
        1, 4.4, style.ROW * len(kept) + 0.2, left=style.text_width(names, 8) + 0.1, right=2.0, bottom=0.5
    )
    none = 1.0 if relative else 0.0
    end, clipped = np.inf, 0
    if relative:  # differences have both signs, and no outliers by factors
        most = style.axis_end(kept["change"])
        end = np.fmax(1.5 * most, style.axis_end(kept.loc[kept["change"] <= most, "simultaneous_high"]))
    axes.axvline(none, color=palette.GREY, linestyle="--", linewidth=1)
    sign = "×" if relative else ""
    for line, row in enumerate(kept.to_dict("records")):
        middle, low, high = (float(row[name]) for name in ("change", "simultaneous_low", "simultaneous_high"))
        known = row["verdict"] in ("significant", "not significant")
        ink = palette.colour(row["other_arm"])
        face = ink if row["verdict"] == "significant" else "white"
        if max(middle, high if known else middle) > end:
            clipped += 1
            axes.plot(end, line, ">", color=ink, ms=5.5, zorder=6)
        if known:
            axes.plot(
                np.minimum([low, high], end), [line, line], color=ink, linewidth=1.6, solid_capstyle="butt", zorder=4
            )
        axes.plot(min(middle, end), line, "D", color=ink, markerfacecolor=face, ms=5.5, zorder=5)
        form = ".2f" if relative else "+.3f"
        text = f"{sign}{middle:{form}}" + (f" [{low:{form}}, {high:{form}}]" if known else "")
        axes.annotate(text, (1.02, line), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    style.rows(axes, names, size=8)
    style.note_clipped(axes, clipped, len(kept))
    unit = "factor" if relative else "difference"
    axes.set_xlabel(f"{heading}: {unit} from the reference")
    of = f", the {len(kept)} largest of {len(rows)}" if len(kept) < len(rows) else ""
    axes.set_title(f"Change of {heading}{of}")
    return drawn
