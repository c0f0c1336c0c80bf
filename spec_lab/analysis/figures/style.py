"""How figures look: colours, letters, and room for names. Margins are set in inches, so nothing is drawn twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = (
    "#1f6fb2", "#d1662a", "#2f8f57", "#8457a8", "#b03a5b", "#7a6a3c", "#3aa0a8", "#e0a100", "#5b6fd6", "#a05a2c",
    "#4f7f1f", "#c050a0",
)  # fmt: skip
GREY = "#8a8a8a"
BASELINE = "#4d4d4d"

PHASES = {
    "target_forward": "#1f6fb2",
    "propose_forward": "#2f8f57",
    "target_rest": "#8fb8d8",
    "propose_rest": "#97c7ab",
    "mask_wait": "#c9b458",
    "probabilities": "#d1662a",
    "verify": "#b03a5b",
    "commit": "#8457a8",
    "between": "#8a8a8a",
}
"""Colour of each phase, in the order stacked."""

SEQUENCE = ("#dfe5ea", "#b9d3ea", "#8fb8dc", "#629bcb", "#3d7fb8", "#22639c", "#114a7d", "#06315c")
"""Colours of 0, 1, 2, ... tokens; the last one is of all above."""

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 120,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,  # ticks show their true values
    "legend.frameon": False,
    "svg.hashsalt": "spec_lab",
    "text.parse_math": False,  # names may hold dollar signs
}

LETTER = 0.078
"""Inches of a letter, about, at nine points."""


def colours(arms: Iterable[str]) -> dict[str, str]:
    """One colour for each arm, the same in every figure of a run; the baseline is always grey."""
    others = [arm for arm in arms if arm != "baseline"]
    return {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(others)} | {"baseline": BASELINE}


def shortened(name: str, most: int = 32) -> str:
    """The name, its middle left out where it is too long."""
    if len(name) <= most:
        return name
    return f"{name[: most - most // 2 - 1]}…{name[len(name) - most // 2 :]}"


def short(names: Iterable[str], most: int = 32) -> dict[str, str]:
    """Each name shortened, to more letters than ``most`` where they would else be alike."""
    every = list(dict.fromkeys(names))
    longest = max(map(len, every), default=0)
    while True:
        cut = {name: shortened(name, most) for name in every}
        if len(set(cut.values())) == len(every) or most >= longest:
            return cut
        most += 8


def room(names: Iterable[str]) -> float:
    """Inches that these names take, as they are, at nine points."""
    return max(map(len, names), default=0) * LETTER + 0.1


def panels(
    count: int,
    width: float,
    height: float,
    left: float = 0.65,
    right: float = 0.2,
    top: float = 0.35,
    bottom: float = 0.6,
    between: float = 0.7,
    **options: Any,
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels side by side.

    Args:
        count: of panels.
        width: inches of the panels together, without margins.
        height: inches of a panel.
        left, right, top, bottom: margins in inches.
        between: inches between panels.
        options: of matplotlib's ``subplots``.
    """
    whole = width + left + right + between * (count - 1), height + top + bottom
    figure = Figure(figsize=whole)
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    figure.subplots_adjust(
        left=left / whole[0],
        right=1 - right / whole[0],
        bottom=bottom / whole[1],
        top=1 - top / whole[1],
        wspace=between / (width / count),
    )
    return figure, list(axes)


def whiskers(mean: float, low: float, high: float) -> np.ndarray | None:
    """Both arms of an error bar; None without an interval."""
    return None if np.isnan(low) or np.isnan(high) else np.array([[mean - low], [high - mean]])
