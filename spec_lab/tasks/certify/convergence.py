"""How the distance of sampled texts from the target's distribution falls with their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_lab.tasks.certify.significance import distance, expected_distance

Texts = tuple[np.ndarray, np.ndarray]
"""Numbers of sampled texts, and their exact distribution."""


def convergence(pairs: Sequence[tuple[str, bool, Texts]], control: Texts) -> dict[str, Any]:
    """Return how the distance of sampled texts from the target's distribution falls with their number.

    Args:
        pairs: for each its verifier's name, whether that is declared lossless, and the texts.
        control: texts of a wrong verifier.

    Returns:
        ``sizes``, numbers of samples; the total variation at each of them: ``expected`` of samples of the target's
        distribution, ``pairs``, and ``control``.
    """
    sizes = _sizes(len(control[0]))
    return {
        "sizes": sizes.tolist(),
        "expected": expected_distance(control[1], sizes).tolist(),
        "pairs": [
            {"verifier": name, "lossless": lossless, "distances": _distances(*texts, sizes)}
            for name, lossless, texts in pairs
        ],
        "control": _distances(*control, sizes),
    }


def _sizes(samples: int) -> np.ndarray:
    return np.unique(np.geomspace(min(100, samples), samples, 40).astype(int))


def _distances(texts: np.ndarray, expected: np.ndarray, sizes: np.ndarray) -> list[float]:
    counts, begun, distances = np.zeros(len(expected), dtype=np.int64), 0, []
    for size in sizes:
        counts += np.bincount(texts[begun:size], minlength=len(expected))
        begun = size
        distances.append(distance(counts, expected))
    return distances
