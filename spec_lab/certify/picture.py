"""The convergence picture: an empirical law comes closer to the target's as 1 / sqrt(n), unless it is another law."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.certify.statistics import distance, expected_distance
from spec_lab.figures import COLOURS, GREY, STYLE

Texts = tuple[np.ndarray, np.ndarray]
"""Sampled texts, by number, and the law they should have."""


def convergence(pairs: Mapping[str, tuple[np.ndarray, np.ndarray, bool]], control: Texts) -> Figure:
    """Distance of the empirical law from the target's against the number of samples.

    Args:
        pairs: by name the sampled texts, their law, and whether the verifier declares itself lossless.
        control: of a broken verifier.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5), layout="constrained")
        axes = figure.add_subplot()
        sizes = _sizes(len(control[0]))
        law = next(iter(pairs.values()))[1] if pairs else control[1]
        (line,) = axes.plot(sizes, expected_distance(law, sizes), color="black", lw=5, alpha=0.15)
        line.set_label("samples of the law itself: 1/sqrt(n)")
        for number, (name, (texts, law, lossless)) in enumerate(pairs.items()):
            (line,) = axes.plot(sizes, _distances(texts, law, sizes), lw=1.3, color=COLOURS[number % len(COLOURS)])
            line.set_linestyle("-" if lossless else "--")
            line.set_label(name if lossless else f"{name}: lossy")
        axes.plot(sizes, _distances(*control, sizes), color=GREY, lw=1.6, ls=":", label="broken: p after a rejection")
        axes.set(
            xscale="log", yscale="log", xlabel="sampled texts of four tokens (toy world, 256 texts possible)",
            ylabel="total variation from the target's law",
            title="A lossless pair comes ever closer to the target's law; a biased one stops",
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
