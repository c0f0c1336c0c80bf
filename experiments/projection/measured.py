"""Compare predicted with measured speed-ups of the study cost_of_nodes, and divide the error into its causes.

python -m experiments.cost_of_nodes.measure --out OUT --folder OUT
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

from experiments.cost_of_nodes.measure import by_size, runs_of
from experiments.plots import fill, markdown
from experiments.projection import published
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

EARLIER = HERE.parent / "cost_of_nodes" / "results.csv"
"""The 32 points that were measured before, on another machine; their rows are not kept."""


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


def earlier(frame: pd.DataFrame) -> str:
    """Return shared error and spread of the points that were measured before."""
    rows = [["temperature", "batch", "shared error", "spread of methods", "largest error"]]
    for (temperature, batch), cell in frame.groupby(["temperature", "batch"]):
        logs = np.log(cell["predicted_over_measured"])
        largest = _largest(cell["predicted_over_measured"] - 1)
        shared, spread = percent(np.expm1(logs.mean())), f"{100 * logs.std():.1f} %"
        rows.append([f"{temperature}", f"{batch}", shared, spread, percent(largest)])
    return markdown(rows)


def points(frame: pd.DataFrame) -> str:
    """Return the table of all points."""
    rows = [["temperature", "batch", "method", "measured speed-up", "error step by step", "error of the projection"]]
    for row in frame.to_dict("records"):
        rows.append([
            f"{row['temperature']}", f"{row['batch']}", row["method"], f"{row['measured']:.2f}",
            percent(row["error"]), percent(row["projected_error"]),
        ])  # fmt: skip
    said = []
    for name, what in ERRORS.items():
        within = (frame[name].abs() <= 0.10).sum()
        median, largest = (
            percent(value).lstrip("+") for value in (frame[name].abs().median(), frame[name].abs().max())
        )
        said.append(f"{what}: {within} of {len(frame)} within 10 %, half within {median}, all within {largest}")
    return markdown(rows) + "\n\n" + ".\n".join(sentence[0].upper() + sentence[1:] for sentence in said) + "."


ERRORS = {
    "error": "step by step",
    "raw_error": "before the correction",
    "projected_error": "by the projection's formula",
}
"""The predictions that are compared, by column."""


def chains(table: pd.DataFrame) -> str:
    """Return the table of tau at other lengths."""
    rows = [["temperature", "batch", "length", "from chains of", "projected tau [95 %]", "measured tau"]]
    for row in table.to_dict("records"):
        projected = f"{row['projected']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        measured = f"{row['measured']:.2f}"
        head = (f"{row[name]}" for name in ("temperature", "batch", "length", "from_length"))
        rows.append([*head, projected, measured])
    return markdown(rows)


def _largest(errors: pd.Series) -> float:
    return float(errors.loc[errors.abs().idxmax()])


def draw(frame: pd.DataFrame, before: pd.DataFrame) -> Figure:
    """Plot the errors of all methods by run: those measured before, and the new ones."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    new = frame.assign(shown=100 * frame["error"])
    old = before.assign(shown=100 * (before["predicted_over_measured"] - 1))
    titles = ("earlier, on another machine", "now, with costs compared within repeats")
    for axes, title, errors in zip(panels, titles, (old, new), strict=True):
        axes.axhspan(-10, 10, color=GREY, alpha=0.15, lw=0)
        axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
        for x, ((_, _), rows) in enumerate(errors.groupby(["temperature", "batch"])):
            offsets = np.linspace(-0.2, 0.2, len(rows))
            axes.plot(x + offsets, rows["shown"], "o", color=COLOURS[x], markersize=4)
            axes.hlines(rows["shown"].mean(), x - 0.32, x + 0.32, color=COLOURS[x], linewidth=1.6)
        names = [f"T = {t}\nbatch {b}" for (t, b), _ in errors.groupby(["temperature", "batch"])]
        axes.set_xticks(range(len(names)), names, fontsize=8.5)
        axes.set_title(title)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("error of the predicted speed-up, %")
    figure.suptitle("A point is a method, a line the mean of its run", fontsize=9, x=0.01, ha="left")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Write results, figure and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("outputs/cost_of_nodes"), help="--out of the study")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of results, figure and README")
    chosen = parser.parse_args(arguments)
    frame, other, before = results(chosen.out), lengths(chosen.out), pd.read_csv(EARLIER)
    frame.to_csv(chosen.folder / "measured.csv", index=False, float_format="%.6g")
    other.to_csv(chosen.folder / "lengths.csv", index=False, float_format="%.6g")
    with rc_context(STYLE):
        draw(frame, before).savefig(chosen.folder / "measured.png", bbox_inches="tight")
    parts = {"runs": by_run(frame), "earlier": earlier(before), "points": points(frame), "lengths": chains(other)}
    for part, text in parts.items():
        fill(chosen.folder / "README.md", text, part)
    print(parts["runs"], parts["points"], parts["lengths"], sep="\n\n")


if __name__ == "__main__":
    main()
