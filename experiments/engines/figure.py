"""Results, figure and tables of the study: python -m experiments.engines.figure [RUNS]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments.engines.measure import ENGINES, LLAMA, OWN, SIZES
from experiments.plots import (
    NAMES,
    PROPOSERS,
    WORKLOADS,
    bounds,
    factor,
    forest,
    kept,
    markdown,
    no_gain,
    ordered,
    percent,
    row_where,
    shown,
    speed_over,
    study,
    swept,
)
from spec_lab.analysis import metrics
from spec_lab.tasks import cost as costs
from spec_lab.tasks.cost.summary import summarise

REFERENCE = f"{LLAMA}bf16"
"""The engine whose own loop all baselines are compared with."""

SPECULATIVE = {"lookup": "llama-cpp-python, prompt lookup", "assisted": "llama-cpp-python, draft model"}
"""llama-cpp-python's speculative decoding: arms, and their names in figures and tables."""

OURS = (*PROPOSERS, *SIZES)

NEEDED = (*PROPOSERS, "medusa_6", "ngram_chain_sure")
"""The arms of the table of what steps would have to cost; ``results.csv`` holds all."""

PAIRED = ("speed_over_baseline", "speed_over_loop", "speed_over_reference", "speed_over_best_own", "speed_over_default")
BREAK_EVEN = ("step_over_baseline", "draft_over_baseline", "highest_step", "highest_draft")

SIZED = {
    "medusa": "Medusa tree, calibrated",
    "medusa_6": "Medusa tree, 6 nodes",
    "medusa_24": "Medusa tree, 24 nodes",
    "draft_chain": "draft chain, 6",
    "draft_chain_2": "draft chain, 2",
    "draft_chain_sure": "draft chain, 6, confidence 0.9",
    "ngram_chain": "n-gram, 10",
    "ngram_chain_3": "n-gram, 3",
    "ngram_chain_sure": "n-gram, 10, matches of 4 to 8 tokens",
    "lookup": "llama-cpp-python, prompt lookup, 10",
    "lookup_3": "llama-cpp-python, prompt lookup, 3",
    "assisted": "llama-cpp-python, draft model, 6",
    "assisted_2": "llama-cpp-python, draft model, 2",
}
"""Arms of several sizes: their names with the most nodes of a step."""


# Results -----------------------------------------------------------------------------------------------------------


def results(runs: Path) -> pd.DataFrame:
    """Return the rows of all parts; ``part`` says which one a row is of.

    - proposers: one for each engine, text and arm, the baseline and the engine's own arms included.
    - cost: one for each engine, batch size and number of nodes, with the ``seconds`` of a step.

    Raises:
        ValueError: no engine has a part that is done.
    """
    engines = [engine for engine in ENGINES if (runs / engine / "proposers").is_dir()]
    if not engines:
        raise ValueError(f"{runs} has no folder of an engine; measure first: python -m experiments.engines.measure")
    each = pd.DataFrame([row for engine in engines for row in of_proposers(runs, engine)])
    more = ("tree_nodes", *PAIRED, *BREAK_EVEN, "best_own", "tokens_per_second")
    parts = [kept(each, "part", "engine", "prompts", more=more)]
    for engine in engines:
        if (runs / engine / "cost").is_dir():
            nodes = pd.DataFrame(summarise(costs.load(runs / engine / "cost"))["nodes"])
            first = nodes[nodes["nodes"] == 0].set_index("batch")["seconds"]
            ratio = nodes["seconds"] / nodes["batch"].map(first)
            parts.append(nodes.assign(part="cost", engine=engine, over_no_nodes=ratio))
    return pd.concat(parts, ignore_index=True)


def of_proposers(runs: Path, engine: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each text and arm of an engine, compared with the baseline and the engine's own arms."""
    folder = runs / engine / "proposers"
    for run, table in swept(folder).groupby("run", sort=False):
        tables = metrics.load(folder / str(run))
        requests = tables.requests
        reference = reference_of(runs, table["prompts"].iloc[0])
        speeds = {arm: speed_over(requests, arm, "baseline").mean for arm in OWN if arm in set(table["arm"])}
        manifest = json.loads((folder / str(run) / "manifest.json").read_text())
        for row in [baseline_of(folder / str(run), table, requests), *table.to_dict("records")]:
            row |= {"part": "proposers", "engine": engine}
            arm = row["recorded"]
            if arm != "baseline":
                row |= bounds("speed_over_baseline", speed_over(requests, arm, "baseline"))
            if arm != "loop":
                row |= bounds("speed_over_loop", speed_over(requests, arm, "loop"))
            if reference is not None:
                row |= bounds("speed_over_reference", over_run(requests, arm, reference, "loop"))
            if speeds and arm not in OWN:
                row["best_own"] = max(speeds, key=lambda name: speeds[name])
                row |= bounds("speed_over_best_own", speed_over(requests, arm, row["best_own"]))
            if arm in SIZES:
                row |= bounds(
                    "speed_over_default", speed_over(requests, arm, default_of(arm.rpartition("_")[0], table))
                )
            if row["arm"] in OURS:
                row |= break_even(row) | {"tree_nodes": manifest["proposers"][arm].get("nodes", np.nan)}
            yield row


def default_of(arm: str, table: pd.DataFrame) -> str:
    """Return the name that a proposer's arm has in the run's rows."""
    return str(table.loc[table["arm"] == arm, "recorded"].iloc[0])


def reference_of(runs: Path, prompts: str) -> pd.DataFrame | None:
    """Return the requests of ``REFERENCE`` on the same text; None if it was not measured."""
    folder = runs / REFERENCE / "proposers"
    if not folder.is_dir():
        return None
    table = swept(folder)
    run_names = table.loc[table["prompts"] == prompts, "run"].unique()
    return metrics.load(folder / run_names[0]).requests if len(run_names) else None


def over_run(requests: pd.DataFrame, arm: str, others: pd.DataFrame, other: str) -> metrics.Interval:
    """Return an arm's tokens per second over those of an arm of another run, as ``speed_over`` does in one run."""
    ratios = metrics.group_speeds(requests, arm) / metrics.group_speeds(others, other)
    return factor(np.log(ratios.dropna()).to_numpy())


def baseline_of(run: Path, table: pd.DataFrame, requests: pd.DataFrame) -> dict[str, Any]:
    """Return the row of a run's baseline: the figures that the tables show."""
    same = ("prompts", "temperature", "groups", "baseline_repeated_8grams", "commit")
    arm_summary = json.loads((run / "summary.json").read_text())["arms"]["baseline"]
    return {
        **{name: table[name].iloc[0] for name in same},
        "arm": "baseline",
        "recorded": "baseline",
        **bounds("tokens_per_second", metrics.tokens_per_second_interval(requests, "baseline")),
        "roofline_share": (arm_summary.get("roofline_share") or {}).get("mean", np.nan),
        "tau_pooled": 1.0,
        "speedup": 1.0,
    }


def break_even(row: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of an arm's step over the baseline's, and the highest at which it is as fast as the baseline.

    The step is split in drafting (``draft_over_baseline``) and all the rest (``step_over_baseline``). The highest value
    of each is the one at the measured value of the other; a negative one means that no value suffices.
    """
    without = 1 / row["baseline_tokens_per_second"]
    draft = (row["phase_propose_forward"] + row["phase_propose_rest"]) / row["steps"] / without
    rest = row["decode_seconds"] / row["steps"] / without - draft
    tau = row["tau_pooled"]
    return dict(zip(BREAK_EVEN, (rest, draft, tau - draft, tau - rest), strict=True))


# Figure ------------------------------------------------------------------------------------------------------------


def draw(table: pd.DataFrame) -> Figure:
    """Plot tokens/s and speed-up of every arm by engine and text, and t(n) by engine."""
    part = table[(table["part"] == "proposers") & table["arm"].isin(["baseline", *PROPOSERS, *SPECULATIVE])].copy()
    part["place"] = [(ENGINES.index(e), ordered([*part["prompts"]], WORKLOADS).index(p)) for e, p in places(part)]
    part["text"] = [f"{title(engine)}\n{prompts}" for engine, prompts in places(part)]
    part["name"] = part["arm"].map({"baseline": "baseline"} | NAMES | SPECULATIVE)
    part = part.sort_values("place")
    names = [*(NAMES[arm] for arm in PROPOSERS), *SPECULATIVE.values(), "baseline"]
    figure = Figure(figsize=(15, 0.72 * part["text"].nunique() + 1.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.1, 1.1, 1])
    for axes, value, label in (
        (left, "speedup", "times the tokens/s of the same engine's baseline"),
        (middle, "tokens_per_second", "tokens/s"),
    ):
        forest(axes, part, value, "text", "name", names)
        axes.set_xlabel(label)
    no_gain(left, along="x")
    middle.tick_params(labelleft=False)
    figure.legend(*middle.get_legend_handles_labels(), fontsize=9, loc="outside lower left", ncols=len(names))
    left.set_title("Speed-up; bars: 95 % over prompts", fontsize=10)
    middle.set_title("Tokens/s; bars: 95 % over prompts", fontsize=10)
    steps = table[table["part"] == "cost"]
    shades = dict(zip(ENGINES, colormaps["viridis"](np.linspace(0, 0.9, len(ENGINES))), strict=True))
    for (engine, batch), rows in steps.groupby(["engine", "batch"], sort=False):
        rows = rows.sort_values("nodes")
        first = rows["seconds"].iloc[0]
        alone = batch == steps["batch"].min()
        look = {"color": shades[engine], "marker": "o", "markersize": 3.5, "linestyle": "-" if alone else "--"}
        right.plot(rows["nodes"] + 1, rows["over_no_nodes"], label=title(engine) if alone else None, **look)
        ends = rows["low"] / first, rows["high"] / first
        right.fill_between(rows["nodes"] + 1, *ends, color=shades[engine], alpha=0.2, lw=0)
    right.set(xscale="log", yscale="log", xlabel="rows per sequence, n + 1", ylabel="t(n) / t(0)")
    ticks = sorted(steps["nodes"].unique() + 1)
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    right.set_xticks([], minor=True)
    right.set_yticks([1, 2, 3, 5, 10, 20, 40], ["1", "2", "3", "5", "10", "20", "40"])
    right.set_yticks([], minor=True)
    no_gain(right)
    sizes = " and ".join(f"{size:g}" for size in sorted(steps["batch"].unique()))
    right.set_title(f"Seconds of a step, batch {sizes} (dashed);\nbands: quartiles of repeats", fontsize=10)
    right.legend(fontsize=8)
    return figure


def places(table: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Return engine and text of every row."""
    return zip(table["engine"], table["prompts"], strict=True)


def title(engine: str) -> str:
    """Return an engine's name in figures and tables."""
    name, _, dtype = engine.rpartition("-")
    return f"{name}, {dtype}"


# Tables ------------------------------------------------------------------------------------------------------------


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: baselines, speed-ups, the fastest arms, sizes, t(n), break-even."""
    rows = table[table["part"] == "proposers"]
    titled = {
        "Baselines": baselines(rows),
        "Speed-ups": speedups(rows),
        "The fastest arm": fastest(rows),
        "Sizes": sizes(rows),
        "Cost of nodes": of_nodes(table[table["part"] == "cost"]),
        "Break-even": needed(rows),
    }
    return "\n\n".join(f"### {name}\n\n{text}" for name, text in titled.items() if text)


def each_text(rows_of_part: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield engine, text and rows of every run."""
    for engine in ordered([*rows_of_part["engine"]], ENGINES):
        for prompts in ordered([*rows_of_part["prompts"]], WORKLOADS):
            rows = rows_of_part[(rows_of_part["engine"] == engine) & (rows_of_part["prompts"] == prompts)]
            if len(rows):
                yield engine, prompts, rows


def baselines(table: pd.DataFrame) -> str:
    """Return tokens/s of every baseline, its roofline share, and its speed over the loops."""
    lines = [["engine", "text", "tokens/s", "roofline share", "over its own loop", f"over {title(REFERENCE)}'s loop"]]
    for engine, prompts, rows in each_text(table):
        row = row_where(rows, arm="baseline")
        assert row is not None
        over = shown(row, "speed_over_reference") if "speed_over_reference" in row else "-"
        speed, share = f"{row['tokens_per_second']:.0f}", percent(row["roofline_share"])
        lines.append([title(engine), prompts, speed, share, shown(row, "speed_over_loop"), over])
    return markdown(lines)


def speedups(table: pd.DataFrame) -> str:
    """Return speed-up and tau of every proposer, and the speed-up of llama-cpp-python's arms."""
    lines = [["engine", "text", *(NAMES[arm] for arm in PROPOSERS), *SPECULATIVE.values()]]
    for engine, prompts, rows in each_text(table):
        cells = [row_where(rows, arm=arm) for arm in PROPOSERS]
        lines.append(
            [title(engine), prompts, *map(with_tau, cells), *(shown(row_where(rows, arm=arm)) for arm in SPECULATIVE)]
        )
    return markdown(lines)


def fastest(table: pd.DataFrame) -> str:
    """Return the fastest of our arms that drafts, and its speed over the engine's own loop and speculative modes."""
    compared = ["over the baseline", "over the engine's loop", "over llama-cpp-python's fastest"]
    lines = [["engine", "text", "fastest arm", *compared]]
    for engine, prompts, rows in each_text(table):
        ours = rows[rows["arm"].isin(OURS) & (rows["nodes_per_step"] > 0)]
        if ours.empty:
            continue
        row = dict(ours.loc[ours["speed_over_baseline"].idxmax()])
        best = row.get("best_own")
        over = f"{shown(row, 'speed_over_best_own')} ({SIZED[best]})" if isinstance(best, str) else "-"
        both = shown(row, "speed_over_baseline"), shown(row, "speed_over_loop")
        lines.append([title(engine), prompts, name_of(row["arm"]), *both, over])
    return markdown(lines)


def sizes(table: pd.DataFrame) -> str:
    """Return speed-up and tau of the arms of several sizes, and the nodes of the calibrated tree."""
    lines = [["engine", "text", "calibrated nodes", *SIZED.values()]]
    for engine, prompts, rows in each_text(table):
        rows_of = {arm: row_where(rows, arm=arm) for arm in SIZED}
        cells = [with_tau(row) for row in rows_of.values()]
        nodes = f"{rows_of['medusa']['tree_nodes']:.0f}" if rows_of["medusa"] else "-"
        lines.append([title(engine), prompts, nodes, *cells])
    return markdown(lines)


def with_tau(row: dict[str, Any] | None) -> str:
    """Return a speed-up, and tau where it is known."""
    return shown(row) + (f", {row['tau_pooled']:.2f}" if row and row["tau_pooled"] > 0 else "")


def of_nodes(table: pd.DataFrame) -> str:
    """Return t(n) in milliseconds, and over t(0)."""
    if table.empty:
        return ""
    nodes = sorted(table["nodes"].unique())
    lines = [["engine", "batch", *(f"n = {n:g}" for n in nodes)]]
    for engine in ordered([*table["engine"]], ENGINES):
        for batch in sorted(table["batch"].unique()):
            measured = [row_where(table, engine=engine, batch=batch, nodes=n) for n in nodes]
            cells = [f"{1e3 * row['seconds']:.1f} ({row['over_no_nodes']:.2f})" if row else "-" for row in measured]
            lines.append([title(engine), f"{batch:g}", *cells])
    return markdown(lines)


def needed(table: pd.DataFrame) -> str:
    """Return, of the arms whose speed-up is not shown to be above 1, what their steps would have to cost."""
    head = ["engine", "text", "arm", "speed-up", "tau", "step", "drafting", "highest step", "highest drafting"]
    lines = [head]
    for engine, prompts, rows in each_text(table):
        for arm in NEEDED:
            row = row_where(rows, arm=arm)
            if row and not row["speedup_low"] > 1 and row["steps"] and row["nodes_per_step"] > 0:
                cells = [f"{row[name]:.2f}" for name in ("tau_pooled", *BREAK_EVEN)]
                lines.append([title(engine), prompts, name_of(arm), shown(row), *cells])
    return markdown(lines) if len(lines) > 1 else "Every arm is faster than its baseline on every text."


def name_of(arm: str) -> str:
    """Return an arm's name in tables."""
    return SIZED.get(arm, NAMES.get(arm, arm))


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
