"""Results, figure and tables of the study: python -m experiments.engines.figure [RUNS]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.measure import ENGINES, LLAMA, OWN, SIZES
from experiments.plots import (
    NAMES,
    PROPOSERS,
    WORKLOADS,
    bounds,
    colours,
    factor,
    forest,
    kept,
    markdown,
    no_gain,
    ordered,
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

OURS = (*PROPOSERS, *SIZES)
CLAIM = "Most speed-ups over transformers do not survive on llama.cpp, whose plain decoding is faster (two cores, AVX2)"

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
    """Plot the speed-up of every proposer over the same engine's baseline; a panel for each text, engines downwards."""
    part = table[(table["part"] == "proposers") & table["arm"].isin(PROPOSERS)]
    part = part.assign(engine=pd.Categorical(part["engine"], ENGINES)).sort_values("engine")
    part["name"] = [title(engine) for engine in part["engine"]]
    texts, colour = ordered(list(part["prompts"]), WORKLOADS), colours(PROPOSERS)
    figure = Figure(figsize=(3 * len(texts) + 1.9, 0.62 * part["name"].nunique() + 1.6), layout="constrained")
    panels = figure.subplots(1, len(texts), squeeze=False, sharey=True)[0]
    for axes, text in zip(panels, texts, strict=True):
        forest(axes, part[part["prompts"] == text], "speedup", "name", "arm", colour)
        no_gain(axes, along="x")
        axes.set_title(text)
    panels[len(panels) // 2].set_xlabel("speed-up over the same engine's baseline; 95 % intervals over prompts")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=len(colour))
    return figure


def title(engine: str) -> str:
    """Return an engine's name in figures and tables."""
    name, _, dtype = engine.rpartition("-")
    return f"{name}, {dtype}"


# Tables ------------------------------------------------------------------------------------------------------------


def written(table: pd.DataFrame) -> str:
    """Return the README's table: the fastest of our arms that drafts, beside the engine's own modes."""
    return fastest(table[table["part"] == "proposers"])


def each_text(rows_of_part: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield engine, text and rows of every run."""
    for engine in ordered([*rows_of_part["engine"]], ENGINES):
        for prompts in ordered([*rows_of_part["prompts"]], WORKLOADS):
            rows = rows_of_part[(rows_of_part["engine"] == engine) & (rows_of_part["prompts"] == prompts)]
            if len(rows):
                yield engine, prompts, rows


def fastest(table: pd.DataFrame) -> str:
    """Return the fastest of our arms that drafts, and its speed over the engine's own loop and speculative modes."""
    compared = ["baseline, tokens/s", "over the baseline", "over the engine's loop", "over llama-cpp-python's fastest"]
    lines = [["engine", "text", "fastest arm", *compared]]
    for engine, prompts, rows in each_text(table):
        ours = rows[rows["arm"].isin(OURS) & (rows["nodes_per_step"] > 0)]
        baseline = row_where(rows, arm="baseline")
        if ours.empty or baseline is None:
            continue
        row = dict(ours.loc[ours["speed_over_baseline"].idxmax()])
        best = row.get("best_own")
        over = shown(row, "speed_over_best_own") if isinstance(best, str) else "-"
        both = shown(row, "speed_over_baseline"), shown(row, "speed_over_loop")
        speed = f"{baseline['tokens_per_second']:.0f}"
        lines.append([title(engine), prompts, name_of(row["arm"]), speed, *both, over])
    return markdown(lines)


def name_of(arm: str) -> str:
    """Return an arm's name in tables."""
    return SIZED.get(arm, NAMES.get(arm, arm))


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
