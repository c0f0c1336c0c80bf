"""Axes of numbers: ticks show true values, and whole numbers only where only whole numbers are possible."""

from __future__ import annotations

from collections.abc import Iterable
from math import log10

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

WIDE_RANGE = 25
"""From this ratio of the largest to the smallest positive value on an axis of numbers is logarithmic."""

CLOSE = 0.055
"""Ticks closer than this part of the axis overlap."""

NEEDED = 4
"""Fewest different values of a logarithmic axis."""


def number_axis(axes: Axes, values: Iterable[float], which: str = "x", log: bool = True) -> None:
    """Scale an axis of measured values and put its ticks at true values.

    The axis is logarithmic if ``NEEDED`` or more different values, all positive, span a factor of ``WIDE_RANGE``. Ticks
    stand at the values themselves where there is room, else at round numbers: whole ones if all values are whole.

    Args:
        which: "x" or "y".
        log: whether the axis may be logarithmic.
    """
    known = np.unique([float(value) for value in values if np.isfinite(value)])
    axis = getattr(axes, f"{which}axis")
    if not len(known):
        return
    if log and len(known) >= NEEDED and known[0] > 0 and known[-1] / known[0] >= WIDE_RANGE:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_locator(LogLocator())
        places = np.log10(known)
    else:
        places = known
        axis.set_major_locator(MaxNLocator(nbins=7, integer=bool((known % 1 == 0).all())))
        if known[0] == known[-1]:  # a single value: without this its axis is a few thousandths wide
            (axes.set_xlim if which == "x" else axes.set_ylim)(known[0] - 1, known[0] + 1)
    span = places[-1] - places[0]
    if len(known) <= 12 and (len(known) == 1 or np.diff(places).min() >= CLOSE * span * _letters(known) / 3):
        axis.set_ticks(known)
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def log_axis(axis: Axis) -> None:
    """Show the ticks of a logarithmic axis with its data as plain numbers (0.02, 10, 2000), without minor labels.

    Below three decades 2 and 5 have ticks as well, below one decade more digits.
    """
    low, high = (max(end, 1e-300) for end in axis.get_view_interval())
    decades = log10(high / low)
    subs = (1.0,) if decades >= 3 else (1.0, 2.0, 5.0) if decades >= 0.9 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def plain(value: float) -> str:
    """Return a number as a tick shows it: six digits, no exponent between 0.0001 and a million."""
    return f"{value:.6g}" if value == 0 or abs(log10(abs(value))) < 6 else f"{value:.3g}"


def _letters(values: np.ndarray) -> int:
    return max(3, max(len(plain(value)) for value in values))
