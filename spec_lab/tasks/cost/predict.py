"""Predict a proposer's speed-up from the measured cost of steps.

Source: Leviathan et al. (2211.17192, theorem 3.8): the speed-up of a chain of g tokens is tau / (g c + 1), with c the
cost of a draft forward in target forwards; verification is free. Sequoia (2402.12374, section 4.3) adds the cost of
verification: tau / (t(n) + d c), with t(n) the seconds of a forward over n nodes relative to a forward without nodes.
Here t also depends on batch and context and includes everything that depends on the number of nodes (the target's
forward, probabilities, commit, the loop); drafting and verification are measured for each arm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.projection.costs import COLUMNS, MINIMUM, PROPOSER
from spec_lab.analysis.projection.drafting import passes
from spec_lab.core.grid import Grid

OF_NODES = ("target", "probabilities", "commit", "between")
"""Phases of a step whose seconds depend on the number of nodes, not on the proposer."""

OF_ARM = ("propose", "verify")
"""Phases of a step whose seconds depend on the proposer and its way of drawing."""


@dataclass(frozen=True)
class Cost:
    """Measured seconds of a step.

    Args:
        nodes: t(nodes, batch, context), seconds of the phases ``OF_NODES``.
        arms: for each arm, seconds(batch, context) of the phases ``OF_ARM``.
    """

    nodes: Grid
    arms: Mapping[str, Grid]

    @staticmethod
    def of(frame: pd.DataFrame) -> Cost:
        """Return the medians over repeats of the rows of ``measure``, after ``without_drift``.

        Raises:
            ValueError: a point of the grid has no row.
        """
        frame = without_drift(frame)
        fixed, arms = frame[frame["fixed"]], frame[~frame["fixed"]]
        return Cost(
            _grid(fixed, ("nodes", "batch", "context"), OF_NODES),
            {str(name): _grid(frame, ("batch", "context"), OF_ARM) for name, frame in arms.groupby("arm", sort=False)},
        )

    def step(self, arm: str, nodes: ArrayLike, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """Return the seconds of a step of an arm.

        Args:
            nodes: mean number of draft nodes of a sequence.
            batch: number of live sequences.
            context: mean number of tokens of a sequence.

        Raises:
            ValueError: the arm was not measured, or the point lies outside the measured grid.
        """
        if arm not in self.arms:
            raise ValueError(f"the costs of arm '{arm}' were not measured; measured arms are {', '.join(self.arms)}")
        fixed = self.arms[arm](batch=batch, context=context)
        return fixed + self.nodes(nodes=nodes, batch=batch, context=context)


def without_drift(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows of ``measure`` as if each repeat had found the machine equally fast.

    A speed-up is a ratio of seconds to those of steps without nodes, which are a factor of every prediction. Within a
    repeat the arms of a batch size and context are timed shortly after one another, so what slows down the machine
    meanwhile slows down all of them. Each repeat's seconds are therefore divided by those of its own steps without
    nodes (of all arms that drafted none, the phases ``OF_NODES``), and multiplied by their median over repeats.
    """
    keys, parts = ["batch", "context"], [*OF_NODES, *OF_ARM]
    none = frame[frame["nodes"] == 0]
    sums = none[list(OF_NODES)].sum(axis=1).groupby([none[name] for name in ("turn", *keys)]).mean()
    usual = sums.groupby(level=keys).median()
    factor = (usual.reindex(sums.index.droplevel("turn")).to_numpy() / sums).rename("factor")
    each = frame[["turn", *keys]].join(factor, on=["turn", *keys])["factor"].fillna(1.0).to_numpy()
    return frame.assign(**{name: frame[name] * each for name in parts})


def forwards(frame: pd.DataFrame, arms: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """Return rows of ``measure`` as the table of measured forwards that ``spec-lab project --costs`` reads.

    - ``target``: seconds of a step of a fixed tree; ``tokens`` is 1 + its nodes.
    - each arm: what its drafting and verification take more than without nodes, for each pass of what drafts (of
      lookups, each step). Rows of a pass were not varied: it has the same seconds for 1 and for the most tokens.

    Args:
        frame: the rows; medians over repeats after ``without_drift``.
        arms: the arms that draft: the name under which each is shown, and its proposer's.
    """
    frame, point = without_drift(frame), ["batch", "context"]
    if "depth" not in frame:  # an older run: as deep as a chain of so many nodes
        frame = frame.assign(depth=frame["nodes"])
    frame = frame.assign(depth=frame["depth"].fillna(frame["nodes"]))
    frame = frame.assign(own=frame[list(OF_ARM)].sum(axis=1), shared=frame[list(OF_NODES)].sum(axis=1))
    fixed = frame[frame["fixed"]]
    usual = fixed[fixed["nodes"] == 0].groupby(point)["own"].median()
    target = fixed.groupby([*point, "nodes"])["shared"].median() + usual
    most = 1 + frame["nodes"].max()
    rows = [("target", 1 + nodes, *where, seconds, "") for (*where, nodes), seconds in target.items()]
    for arm, (shown, proposer) in arms.items():
        costs = frame[frame["arm"] == arm].groupby(point)[["own", "depth"]].median()
        count = [passes(proposer, max(depth, 1.0)) for depth in costs["depth"]]
        seconds = ((costs["own"] - usual) / count).clip(lower=MINIMUM)
        rows += [(shown, tokens, *where, each, proposer) for tokens in (1.0, most) for where, each in seconds.items()]
    return pd.DataFrame(rows, columns=[*COLUMNS, PROPOSER])


def predict(
    cost: Cost,
    arm: str,
    tau: float,
    nodes: float,
    batch: float = 1,
    context: float = 256,
    baseline: str = "baseline",
) -> float:
    """Return the speed-up if all steps were alike: tau * seconds of a baseline step / seconds of the arm's step.

    Args:
        arm: name of the speculative arm.
        tau: mean number of tokens that a step emits, bonus or recovered token included.
        nodes: draft nodes of each sequence.
        batch: live sequences.
        context: tokens of each sequence.
        baseline: name of the autoregressive arm.

    Raises:
        ValueError: an arm was not measured, or the point lies outside the measured grid.
    """
    return tau * float(cost.step(baseline, 0, batch, context) / cost.step(arm, nodes, batch, context))


def predicted_speedups(cost: Cost, tables: Tables, arm: str, baseline: str = "baseline") -> pd.Series:
    """Return the predicted speed-up of each group of a run, comparable to ``walltime_speedup_paired``.

    This is ``predict`` summed over the run's steps, since contexts grow and sequences finish. It uses each step's
    nodes, live sequences and contexts, and the exact expectation of its emitted tokens (less those that stop tokens and
    limits cut); it uses none of the run's seconds.

    Args:
        cost: measured costs, at the run's temperature.
        arm: name of the speculative arm.
        baseline: name of the autoregressive arm.

    Raises:
        ValueError: an arm was not measured, or a step lies outside the measured grid.
    """
    speeds = {name: _tokens(tables, name) / _seconds(cost, tables, name) for name in (arm, baseline)}
    measured = metrics.walltime_speedup_paired(tables.requests, arm, baseline)
    return (speeds[arm] / speeds[baseline]).reindex(measured.index)


def predicted_and_measured(cost: Cost, tables: Tables, arm: str, baseline: str = "baseline") -> pd.DataFrame:
    """Return the columns ``predicted`` and ``measured``: the speed-ups of the groups for which both are known.

    Arguments and errors as in ``predicted_speedups``.
    """
    measured = metrics.walltime_speedup_paired(tables.requests, arm, baseline)
    both = pd.DataFrame({"predicted": predicted_speedups(cost, tables, arm, baseline), "measured": measured})
    return both[np.isfinite(both).all(axis=1) & (both > 0).all(axis=1)]


def _tokens(tables: Tables, arm: str) -> pd.Series:
    """Return the expected number of tokens of each group's steps, less the tokens that were cut."""
    steps = metrics.decode_steps(tables.steps, arm)
    return (steps["expected_emitted"] - steps["emitted"] + steps["emitted_kept"]).groupby(steps["group"]).sum()


def _seconds(cost: Cost, tables: Tables, arm: str) -> pd.Series:
    """Return the predicted decode seconds of each group."""
    steps = tables.steps[(tables.steps["arm"] == arm) & ~tables.steps["prefill"]]
    each = steps.groupby(["group", "forward"]).agg(
        nodes=("nodes", "mean"), batch=("request", "size"), context=("context", "mean")
    )
    took = cost.step(arm, each["nodes"], each["batch"], each["context"])
    return pd.Series(took, index=each.index).groupby(level="group").sum()


def _grid(frame: pd.DataFrame, axes: tuple[str, ...], parts: tuple[str, ...]) -> Grid:
    """Return the median over repeats of the sum of ``parts``, at every point of the grid."""
    each = frame[list(parts)].sum(axis=1).groupby([frame[name] for name in axes]).median()
    points = {name: tuple(sorted(float(value) for value in frame[name].unique())) for name in axes}
    if not len(each) or len(each) != np.prod([len(values) for values in points.values()]):
        raise ValueError(
            f"the cost rows cover {len(each)} points, not the whole grid {points}: run the measurement to its end"
        )
    return Grid(points, each.sort_index().to_numpy().reshape([len(values) for values in points.values()]))
