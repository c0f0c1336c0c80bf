"""Tables for figures, and what can be seen of a figure once it is drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from spec_lab.analysis import figures
from spec_lab.analysis.figures import STYLE
from spec_lab.analysis.metrics import Tables
from spec_lab.results.result import Result, Section
from tests.analysis.metrics.tables import steps

SHARES = {
    "propose": 0.2, "propose_forward": 0.1, "target": 0.5, "target_forward": 0.45, "probabilities": 0.1, "verify": 0.1,
    "commit": 0.05, "mask_wait": 0.0, "mask_busy": 0.0,
}  # fmt: skip
"""Parts of a step's time."""

PATHS = [(), (0,), (0, 0), (0, 0, 0), (1,), (0, 1)]


def tables(arms: list[str], groups: int = 4, fast: float = 1.0, accepts: bool = True, drafts: bool = True) -> Tables:
    """Rows of a run: the arms, then the baseline; each later arm is faster by a factor of ``fast``."""
    forwards, rows, requests = [], [], []
    for number, arm in enumerate([*arms, "baseline"]):
        speed = 1.0 if arm == "baseline" else 1.3 * fast**number
        nodes = 0 if arm == "baseline" or not drafts else 3 + number
        for group in range(groups):
            paths = [path if accepts and nodes else () for path in (PATHS[group % 6], PATHS[number % 6])]
            start = 1.0
            for index, path in enumerate(((), *paths)):
                seconds = 1.0 if not index else (1 + 0.1 * group) / speed
                phases = {name: seconds * share for name, share in SHARES.items()}
                forwards.append({"arm": arm, "group": group, "prefill": not index, "start": start - 1.0,
                               "whole": seconds, "live": 1, "nodes": nodes, **phases})  # fmt: skip
                start += seconds
                if index:
                    rows.append({"arm": arm, "request": group, "group": group, "accepted": len(path), "path": path,
                                 "nodes": nodes, "depth": min(nodes, 3), "sequence": 0, "forward": index})  # fmt: skip
            tokens = sum(len(path) + 1 for path in paths)
            requests.append({"arm": arm, "group": group, "request": group, "order": number, "sequence": 0,
                             "decode_tokens": tokens, "decode_seconds": start - 2.0, "prefill_tokens": 1,
                             "prompt_tokens": 10, "prefill_seconds": 1.0, "prefill_compute_seconds": 0.5,
                             "queue_seconds": 0.0, "finish": "length", "violated": -1})  # fmt: skip
    return Tables(pd.DataFrame(forwards), steps(*rows), pd.DataFrame(requests))


def swept(values: list[float], arms: list[str], fast: float = 1.0) -> pd.DataFrame:
    """The table of a sweep over a numeric option."""
    rows = []
    for index, value in enumerate(values):
        for number, arm in enumerate([*arms, "baseline"]):
            speed = (1 + number / 10) * fast**index
            rows.append({"run": f"run{index}", "arm": arm, "proposer.depth": value,
                         "tau_pooled": 1 + index + number / 10, "tau_pooled_low": 1.0 + index,
                         "tau_pooled_high": 2.5 + index, "speedup": speed,
                         "speedup_low": speed * 0.9, "speedup_high": speed * 1.1})  # fmt: skip
    return pd.DataFrame(rows)


def raster(figure: Figure) -> np.ndarray:  # [height, width, 4]
    """Draw the figure as its files are drawn."""
    with rc_context(STYLE):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())


def faults(figure: Figure) -> list[str]:
    """Faults of a figure as it is drawn; empty for none."""
    picture = raster(figure)
    messages = []
    edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])[:, :3]
    if (edge < 250).any():
        messages.append("something is drawn at the edge of the canvas")
    if (picture[..., :3] < 250).any(-1).mean() < 0.002:
        messages.append("it is blank")
    height, width = picture.shape[:2]
    fixed, free = [], {text for axes in figure.axes for text in axes.texts}
    shown = shown_texts(figure)
    for text in shown:
        box = text.get_window_extent()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1:
            messages.append(f"{text.get_text()!r} leaves the figure")
        if not isinstance(text, Annotation) and text not in free:
            fixed.append((text.get_text(), box.padded(-1)))
    messages += [f"{label!r} and {other!r} overlap" for (label, box), (other, other_box) in combinations(fixed, 2)
              if box.overlaps(other_box)]  # fmt: skip
    for axes in figure.axes:
        if not axes.axison:
            continue
        if not axes.get_xlabel() and any(tick.label1 in shown for tick in axes.xaxis.get_major_ticks()):
            messages.append(f"axis x of {axes.get_title(loc='left')!r} has no label")
        legend = axes.get_legend()
        if legend is not None:
            box = legend.get_window_extent().padded(-1)
            points = [axes.transData.transform(line.get_xydata()) for line in axes.lines if len(line.get_xydata())]
            if any(box.contains(*point) for line in points for point in line if np.isfinite(point).all()):
                messages.append("the legend covers data")
    return messages


def shown_texts(figure: Figure) -> list[Text]:
    """The texts that are drawn: not empty, and of ticks those inside their axis."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                outside = not low - slack <= tick.get_loc() <= high + slack
                hidden |= {tick.label2, *[tick.label1] * (outside or not axes.axison)}
    return [
        text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible() and text not in hidden
    ]


def drawn_of(sections: Sequence[Section]) -> dict[str, Figure]:
    """The figures of sections that there is data for."""
    return Result("", "", sections).draw()


def run_figures(tables: Tables, trees: Mapping[str, Collection] | None = None) -> dict[str, Figure]:
    """The figures of a run that there is data for."""
    makers = [figures.throughput, figures.acceptance, figures.tokens, figures.phases, figures.cost]
    made = {make.__name__: make(tables) for make in makers}
    made["accepted_trees"] = figures.accepted_trees(tables, trees)
    return {name: figure for name, figure in made.items() if figure is not None}
