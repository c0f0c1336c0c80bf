"""Compare predicted with measured speed-ups of the study's costs, and divide the error into its causes.

python -m experiments.projection.costs --out OUT --folder OUT
python -m experiments.projection.measured OUT

Reads the rows of that study; writes ``measured.csv``, ``measured.png`` and tables of the README. No model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.plots import fill, markdown, save
from experiments.projection import published
from experiments.projection.costs import by_size, runs_of
from spec_lab.analysis import metrics
from spec_lab.analysis.figures import COLOURS, GREY, STYLE
from spec_lab.analysis.metrics.phases import since_last_step
from spec_lab.analysis.projection import Deployment, speedup
from spec_lab.analysis.projection.acceptance import of_steps
from spec_lab.analysis.projection.costs import ConstantForward, MeasuredForward
from spec_lab.analysis.projection.drafting import Drafting
from spec_lab.core.grid import Grid
from spec_lab.tasks import cost as costs

HERE = Path(__file__).resolve().parent
percent = partial(published.percent, decimals=1)

CLAIM = "Predicted step by step, all 32 speed-ups are within 10 %; the projection is too high in groups of four"


def results(out: Path) -> pd.DataFrame:
    """Return one row for each temperature, batch size and method.

    Columns: ``error``, of the speed-up predicted step by step (geometric mean over groups, less 1); ``raw_error``, the
    same without ``costs.without_drift``; ``projected_error``, of ``projection.speedup``, which knows drafts, acceptance
    and a mean context only; ``seconds`` and ``baseline_seconds``, predicted over measured decode seconds of the method
    and of its baseline, less 1.
    """
    rows: list[dict[str, Any]] = []
    for temperature, batch, folder in runs_of(out):
        frame = costs.load(out / f"cost-{temperature}")
        cost, raw = costs.Cost.of(frame), costs.Cost.of(frame.assign(turn=0))
        tables = metrics.load(folder)
        taken = {arm: _seconds_error(cost, tables, arm) for arm in metrics.arms(tables)}
        for arm in sorted(set(taken) - {"baseline"}, key=by_size):
            error, before = (
                _error(costs.predicted_and_measured(prediction, tables, arm)) for prediction in (cost, raw)
            )
            rows.append(
                {
                    "temperature": temperature,
                    "batch": batch,
                    "method": arm,
                    "measured": metrics.speedup(tables.requests, arm).mean,
                    "error": error,
                    "raw_error": before,
                    "projected_error": _projected(cost, tables, arm, batch),
                    "seconds": taken[arm],
                    "baseline_seconds": taken["baseline"],
                }
            )
    return pd.DataFrame(rows)


def _error(both: pd.DataFrame) -> float:
    """Return the geometric mean of predicted / measured, less 1."""
    return float(np.exp(np.log(both["predicted"] / both["measured"]).mean()) - 1)


def _seconds_error(cost: costs.Cost, tables: metrics.Tables, arm: str) -> float:
    """Return predicted over measured seconds of all decode steps of an arm, less 1."""
    steps = tables.steps[(tables.steps["arm"] == arm) & ~tables.steps["prefill"]]
    each = steps.groupby(["group", "forward"]).agg(
        nodes=("nodes", "mean"), batch=("request", "size"), context=("context", "mean")
    )
    forwards = tables.forwards[tables.forwards["arm"] == arm].sort_values(["group", "forward"])
    took = since_last_step(forwards)[~forwards["prefill"]].sum()
    return float(cost.step(arm, each["nodes"], each["batch"], each["context"]).sum() / took - 1)


def _projected(cost: costs.Cost, tables: metrics.Tables, arm: str, batch: int) -> float:
    """Return ``projection.speedup`` over the measured speed-up, less 1, at the run's batch size and mean context.

    Seconds of forwards and of drafting are the measured ones; those of the baseline's own phases are part of t(1).
    """
    steps = metrics.decode_steps(tables.steps, arm)
    context = float(steps["context"].mean())
    acceptance = of_steps(steps, arm, arm, "token").draws(0)
    length = acceptance.drafts.shape[1]
    drafted, plain = (float(cost.arms[name](batch=batch, context=context)) for name in (arm, "baseline"))
    forward = MeasuredForward(
        Grid(
            {"tokens": tuple(1 + n for n in cost.nodes.axes["nodes"]), **_rest(cost.nodes)}, cost.nodes.seconds + plain
        )
    )
    drafting = Drafting(step=ConstantForward(drafted - plain))
    speedups = speedup(acceptance, length, Deployment("here", forward, {}), drafting, batch, context)
    return float(speedups[0]) / metrics.speedup(tables.requests, arm).mean - 1


def _rest(grid: Grid) -> dict[str, tuple[float, ...]]:
    return {name: points for name, points in grid.axes.items() if name != "nodes"}


def lengths(out: Path) -> pd.DataFrame:
    """Return tau of shorter chains: from the steps of the longest chain of the same run, and as they measured it."""
    rows = []
    for temperature, batch, folder in runs_of(out):
        tables = metrics.load(folder)
        chains = [arm for arm in metrics.arms(tables) if arm.startswith("draft_chain ")]
        depth = {chain: int(chain.split()[1]) for chain in chains}
        longest = max(chains, key=lambda chain_name: depth[chain_name])
        acceptance = of_steps(metrics.decode_steps(tables.steps, longest), longest, longest, "token").draws(999)
        for chain in sorted(set(chains) - {longest}, key=lambda chain_name: depth[chain_name]):
            taus, measured = acceptance.tau(depth[chain]), metrics.decode_steps(tables.steps, chain)
            rows.append(
                {
                    "temperature": temperature,
                    "batch": batch,
                    "length": depth[chain],
                    "from_length": depth[longest],
                    "projected": taus[0],
                    "low": np.quantile(taus[1:], 0.025),
                    "high": np.quantile(taus[1:], 0.975),
                    "measured": metrics.tau_pooled_raw(measured),
                }
            )
    return pd.DataFrame(rows)


# README ------------------------------------------------------------------------------------------------------------


def by_run(frame: pd.DataFrame) -> str:
    """Return the errors of each run: what its methods share, and how they differ."""
    head = ["temperature", "batch", "shared error", "spread of methods", "baseline's seconds", "methods' seconds"]
    rows = [[*head, "largest error", "before the correction"]]
    for (temperature, batch), cell in frame.groupby(["temperature", "batch"]):
        logs = np.log1p(cell["error"])
        seconds = np.log1p(cell["seconds"]).mean(), float(cell["baseline_seconds"].iloc[0])
        rows.append([
            f"{temperature}", f"{batch}", percent(np.expm1(logs.mean())), f"{100 * logs.std():.1f} %",
            percent(seconds[1]), percent(np.expm1(seconds[0])), percent(_largest(cell["error"])),
            percent(_largest(cell["raw_error"])),
        ])  # fmt: skip
    return markdown(rows)


def in_words(frame: pd.DataFrame) -> str:
    """Return how far off each of the predictions is."""
    sentences = []
    for name, what in ERRORS.items():
        within = (frame[name].abs() <= 0.10).sum()
        median, largest = (
            percent(value).lstrip("+") for value in (frame[name].abs().median(), frame[name].abs().max())
        )
        sentences.append(f"{what}: {within} of {len(frame)} within 10 %, half within {median}, all within {largest}.")
    return "\n".join(sentences)


ERRORS = {
    "error": "Step by step",
    "raw_error": "Before the correction",
    "projected_error": "By the projection's formula",
}
"""The predictions that are compared, by column."""


def _largest(errors: pd.Series) -> float:
    return float(errors.loc[errors.abs().idxmax()])


def draw(frame: pd.DataFrame) -> Figure:
    """Plot the errors of all methods, of either prediction; a column for each run."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("error", "projected_error"), strict=True):
        axes.axhspan(-10, 10, color=GREY, alpha=0.15, lw=0)
        axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
        runs = list(frame.groupby(["temperature", "batch"]))
        for x, (_, rows) in enumerate(runs):
            axes.plot(x + np.linspace(-0.2, 0.2, len(rows)), 100 * rows[name], "o", color=COLOURS[0], markersize=4)
            axes.hlines(100 * rows[name].mean(), x - 0.32, x + 0.32, color=COLOURS[0], linewidth=1.6)
        axes.set_xticks(range(len(runs)), [f"T = {t}\nbatch {b}" for (t, b), _ in runs], fontsize=8.5)
        axes.set_title(ERRORS[name])
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("error of the predicted speed-up, %\n(a point: a method; a line: their mean)")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Write results, figure and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("outputs/cost_of_nodes"), help="--out of the study")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of results, figure and README")
    parser.add_argument("--redraw", action="store_true", help="draw the figure from measured.csv, without the runs")
    chosen = parser.parse_args(arguments)
    frame = pd.read_csv(chosen.folder / "measured.csv") if chosen.redraw else results(chosen.out)
    with rc_context(STYLE):
        save(draw(frame), chosen.folder / "measured.png", CLAIM)
    if chosen.redraw:
        return
    frame.to_csv(chosen.folder / "measured.csv", index=False, float_format="%.6g")
    lengths(chosen.out).to_csv(chosen.folder / "lengths.csv", index=False, float_format="%.6g")
    fill(chosen.folder / "README.md", by_run(frame), "runs")
    print(by_run(frame), in_words(frame), sep="\n\n")


if __name__ == "__main__":
    main()
