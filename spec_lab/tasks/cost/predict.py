"""From what rounds cost to how much faster a proposer decodes.

Source: Leviathan et al. (2211.17192, theorem 3.8) give the speed-up of a chain of g tokens as tau / (g c + 1), where c
is what a step of the draft costs in forwards of the target, and verifying is free. Sequoia (2402.12374, section 4.3)
lets verifying cost: tau / (t(n) + d c), with t(n) the seconds of a forward over n nodes in units of one without. Here
t also depends on batch and context, it holds all that nodes cost (the forward, laws, committing, the loop), and what
the draft brings along is measured as well: drafting, and verifying in its way of drawing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables

OF_NODES = ("target", "probabilities", "commit", "between")
"""Parts of a round that depend on how many nodes there are, not on who drafted them."""

OF_ARM = ("propose", "verify")
"""Parts of a round that depend on who drafted, and how."""


@dataclass(frozen=True)
class Grid:
    """Seconds at the points of a grid, linear in between.

    Args:
        axes: the points of each axis, by its name, rising.
        seconds: ``[len of each axis]``.
    """

    axes: Mapping[str, tuple[float, ...]]
    seconds: np.ndarray

    def __call__(self, **places: ArrayLike) -> np.ndarray:
        """Seconds at places given axis by axis; arrays broadcast.

        Raises:
            ValueError: a place outside; nothing is extrapolated.
        """
        for name, points in self.axes.items():
            asked = np.asarray(places[name], dtype=float)
            if asked.size and not (points[0] <= asked.min() and asked.max() <= points[-1]):
                what = f"from {points[0]:g} to {points[-1]:g}, not from {asked.min():g} to {asked.max():g}"
                raise ValueError(f"costs are known for {name} {what}: measure them with more")
        between = RegularGridInterpolator(tuple(np.array(points) for points in self.axes.values()), self.seconds)
        asked_for = np.broadcast_arrays(*(np.asarray(places[name], dtype=float) for name in self.axes))
        return between(np.stack(asked_for, axis=-1)).reshape(asked_for[0].shape)


@dataclass(frozen=True)
class Cost:
    """What rounds cost.

    Args:
        nodes: t(nodes, batch, context), seconds of all that nodes cost, with none as well: the target, laws, committing
            and what the loop does between rounds.
        arms: for each arm seconds(batch, context) of what it adds: drafting and verifying.
    """

    nodes: Grid
    arms: Mapping[str, Grid]

    @staticmethod
    def of(frame: pd.DataFrame) -> Cost:
        """The medians over turns of what ``measure`` timed.

        Raises:
            ValueError: rows that are no full grid.
        """
        fixed, arms = frame[frame["fixed"]], frame[~frame["fixed"]]
        return Cost(
            _grid(fixed, ("nodes", "batch", "context"), OF_NODES),
            {str(name): _grid(own, ("batch", "context"), OF_ARM) for name, own in arms.groupby("arm", sort=False)},
        )

    def round(self, arm: str, nodes: ArrayLike, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """Seconds of an arm's rounds.

        Args:
            arm: who drafts.
            nodes: below each sequence, the mean.
            batch: live sequences.
            context: their tokens, the mean.

        Raises:
            ValueError: an arm that was not measured, a place outside of what was.
        """
        if arm not in self.arms:
            raise ValueError(f"the costs of arm '{arm}' were not measured; known are {', '.join(self.arms)}")
        own = self.arms[arm](batch=batch, context=context)
        return own + self.nodes(nodes=nodes, batch=batch, context=context)


def predict(
    cost: Cost,
    arm: str,
    tau: float,
    nodes: float,
    batch: float = 1,
    context: float = 256,
    baseline: str = "baseline",
) -> float:
    """The speed-up where nothing changes from round to round: tau x seconds without a draft / seconds with it.

    Args:
        cost: measured.
        arm: who drafts.
        tau: tokens a sequence gets in a step, the one after the accepted ones included.
        nodes: drafted below each sequence.
        batch: live sequences.
        context: tokens of each.
        baseline: the arm that drafts nothing.

    Raises:
        ValueError: an arm or a place that was not measured.
    """
    return tau * float(cost.round(baseline, 0, batch, context) / cost.round(arm, nodes, batch, context))


def predicted_speedups(cost: Cost, tables: Tables, arm: str, baseline: str = "baseline") -> pd.Series:
    """Of each group of a run the speed-up that costs measured elsewhere predict, as ``walltime_speedup_paired`` has it.

    ``predict``, summed over rounds, as contexts grow and groups thin out. Of the run it takes how often it stepped,
    with which nodes, live sequences and contexts, and the exact expectation of the tokens of each step (less those
    that stop tokens and limits cut); none of its seconds.

    Args:
        cost: measured, at this temperature.
        tables: the run's.
        arm: who drafts.
        baseline: the arm that drafts nothing.

    Raises:
        ValueError: an arm or a place that was not measured.
    """
    speeds = {name: _tokens(tables, name) / _seconds(cost, tables, name) for name in (arm, baseline)}
    measured = metrics.walltime_speedup_paired(tables.requests, arm, baseline)
    return (speeds[arm] / speeds[baseline]).reindex(measured.index)


def beside_measured(cost: Cost, tables: Tables, arm: str, baseline: str = "baseline") -> pd.DataFrame:
    """``predicted`` and ``measured`` speed-ups of the same groups: those of which both are known.

    Args and errors as in ``predicted_speedups``.
    """
    measured = metrics.walltime_speedup_paired(tables.requests, arm, baseline)
    both = pd.DataFrame({"predicted": predicted_speedups(cost, tables, arm, baseline), "measured": measured})
    return both[np.isfinite(both).all(axis=1) & (both > 0).all(axis=1)]


def _tokens(tables: Tables, arm: str) -> pd.Series:
    """Of each group the tokens that its steps were expected to emit, less what was cut."""
    steps = metrics.decode_steps(tables.steps, arm)
    return (steps["expected_emitted"] - steps["emitted"] + steps["emitted_kept"]).groupby(steps["group"]).sum()


def _seconds(cost: Cost, tables: Tables, arm: str) -> pd.Series:
    """Of each group the seconds that its decode rounds should have taken."""
    steps = tables.steps[(tables.steps["arm"] == arm) & ~tables.steps["prefill"]]
    rounds = steps.groupby(["group", "round"]).agg(
        nodes=("nodes", "mean"), batch=("request", "size"), context=("context", "mean")
    )
    took = cost.round(arm, rounds["nodes"], rounds["batch"], rounds["context"])
    return pd.Series(took, index=rounds.index).groupby(level="group").sum()


def _grid(frame: pd.DataFrame, axes: tuple[str, ...], parts: tuple[str, ...]) -> Grid:
    """Medians of the parts' sum at every point of the grid.

    Raises:
        ValueError: a point is missing.
    """
    each = frame[list(parts)].sum(axis=1).groupby([frame[name] for name in axes]).median()
    points = {name: tuple(sorted(float(value) for value in frame[name].unique())) for name in axes}
    if not len(each) or len(each) != np.prod([len(values) for values in points.values()]):
        raise ValueError(
            f"the costs hold {len(each)} places, which are no full grid of {points}: measure them to the end"
        )
    return Grid(points, each.sort_index().to_numpy().reshape([len(values) for values in points.values()]))
