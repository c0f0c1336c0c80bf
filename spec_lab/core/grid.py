"""Measured seconds on a grid, interpolated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator


@dataclass(frozen=True)
class Grid:
    """Seconds at the points of a grid, interpolated linearly.

    Args:
        axes: the points of each axis by name, ascending.
        seconds: one value for each point; its shape is the length of each axis.
    """

    axes: Mapping[str, tuple[float, ...]]
    seconds: np.ndarray

    def __call__(self, **places: ArrayLike) -> np.ndarray:
        """Return the seconds at points given by axis; arrays broadcast.

        Raises:
            ValueError: a point lies outside the grid; nothing is extrapolated.
        """
        for name, points in self.axes.items():
            asked = np.asarray(places[name], dtype=float)
            if asked.size and not (points[0] <= asked.min() and asked.max() <= points[-1]):
                raise ValueError(
                    f"costs were measured for {name} from {points[0]:g} to {points[-1]:g}, not from {asked.min():g} to "
                    f"{asked.max():g}: measure again with a wider range"
                )
        between = RegularGridInterpolator(tuple(np.array(points) for points in self.axes.values()), self.seconds)
        asked_for = np.broadcast_arrays(*(np.asarray(places[name], dtype=float) for name in self.axes))
        return between(np.stack(asked_for, axis=-1)).reshape(asked_for[0].shape)
