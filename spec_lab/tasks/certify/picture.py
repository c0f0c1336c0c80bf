"""The convergence picture: an empirical law comes closer to the target's as 1 / sqrt(n), unless it is another law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import COLOURS, STYLE
from spec_lab.tasks.certify.statistics import distance, expected_distance

Texts = tuple[np.ndarray, np.ndarray]
"""Sampled texts, by number, and the law they should have."""


def convergence(pairs: Sequence[tuple[str, bool, Texts]], control: Texts) -> Figure:
    """Distance of the empirical law from the target's against the number of samples.

    Args:
        pairs: of each its verifier's name, whether that declares itself lossless, and the texts. Pairs of one verifier
            share a colour.
        control: of a broken verifier.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        sizes = _sizes(len(control[0]))
        (line,) = axes.plot(sizes, expected_distance(control[1], sizes), color="black", lw=6, alpha=0.15)
        line.set_label("samples of the target's law itself: 1/sqrt(n)")
        names = list(dict.fromkeys(name for name, _, _ in pairs))
        several = {name: sum(other == name for other, _, _ in pairs) for name in names}
        told = set()
        for name, lossless, texts in pairs:
            (line,) = axes.plot(
                sizes, _distances(*texts, sizes), lw=1.2, color=COLOURS[names.index(name) % len(COLOURS)]
            )
            line.set_linestyle("-" if lossless else "--")
            if name not in told:
                more = f", {several[name]} pairs" if several[name] > 1 else ""
                line.set_label(f"{name}{'' if lossless else ' (lossy)'}{more}")
                told.add(name)
        (line,) = axes.plot(sizes, _distances(*control, sizes), color="black", lw=2, ls=":")
        line.set_label("broken: emits from p after a rejection")
        axes.set(
            xscale="log", yscale="log", xlabel="sampled texts of four tokens (256 are possible)",
            ylabel="total variation from the target's law", title="Lossless pairs converge to the target's law",
        )  # fmt: skip
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _sizes(samples: int) -> np.ndarray:
    return np.unique(np.geomspace(min(100, samples), samples, 40).astype(int))


def _distances(texts: np.ndarray, law: np.ndarray, sizes: np.ndarray) -> list[float]:
    counts, begun, found = np.zeros(len(law), dtype=np.int64), 0, []
    for size in sizes:
        counts += np.bincount(texts[begun:size], minlength=len(law))
        begun = size
        found.append(distance(counts, law))
    return found
