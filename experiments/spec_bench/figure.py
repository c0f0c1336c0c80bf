"""Results, figure and table of the study: python -m experiments.spec_bench.figure [RUN]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    PROPOSERS,
    bounds,
    forest,
    markdown,
    no_gain,
    ordered,
    percent,
    row_where,
    shown,
    speed_over,
    study,
)
from spec_lab.analysis import metrics
from spec_lab.analysis.names import names_in_manifest

TASKS = {
    "conversation": "conversation",
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented",
    "all": "all",
}
"""Spec-Bench's tasks."""

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that come from MT-Bench; Spec-Bench treats them as one task, conversation."""

TASK = {name: name for name in list(TASKS)[1:-1]} | dict.fromkeys(MT_BENCH, "conversation")
"""The task of each category."""

REFERENCE = "draft_chain"


def results(run: Path) -> pd.DataFrame:
    """Return one row for each proposer and task, and for all tasks together; intervals are over prompts.

    Raises:
        ValueError: the run has no rows; a group is not one prompt; a category is not Spec-Bench's.
    """
    tables = metrics.load(run)
    check(tables.requests)
    names = names_in_manifest(json.loads((run / "manifest.json").read_text()))
    task = tables.requests["workload"].map(TASK)
    rows: list[dict[str, Any]] = []
    for name in ordered(list(task), list(TASKS)) + ["all"]:
        groups = tables.requests.loc[task.eq(name) | (name == "all"), "group"]
        every = tables.forwards, tables.steps, tables.requests
        part = metrics.Tables(*(table[table["group"].isin(groups)] for table in every))
        rows += [{"task": name, **row} for row in of_task(part, names)]
    return pd.DataFrame(rows)


def check(requests: pd.DataFrame) -> None:
    """Check the rows of a run.

    Raises:
        ValueError: there are none; a group is not one prompt; a category is not Spec-Bench's.
    """
    if requests.empty:
        raise ValueError("the run has no finished prompt; run its command first")
    sizes = requests.groupby("group")["request"].nunique()
    if (sizes > 1).any():
        raise ValueError(f"group {sizes.idxmax()} holds {sizes.max()} prompts, but tasks are compared at batch_size=1")
    if unknown := sorted(set(requests["workload"]) - TASK.keys()):
        raise ValueError(f"categories {unknown} are not Spec-Bench's; known are {', '.join(TASK)}")


def of_task(tables: metrics.Tables, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield one row for each proposer."""
    prompts = tables.requests.drop_duplicates("request")
    repeated = metrics.repeated_8gram_share(tables.requests.loc[tables.requests["arm"] == "baseline", "tokens"])
    for arm in metrics.arms(tables):
        if arm == "baseline":
            continue
        figures = metrics.summarise(tables, arm)
        macro = figures["intervals"]["tau_macro"]
        row = {
            "arm": names[arm],
            "prompts": len(prompts),
            "decoded": len(metrics.walltime_speedup_paired(tables.requests, arm)),
            "prompt_tokens": float(prompts["prompt_tokens"].median()),
            "tau_pooled": figures["tau_pooled"],
            **bounds("tau_macro", metrics.Interval(**macro)),
            **bounds("speedup", metrics.Interval(**figures["speedup"])),
            **bounds("speedup_with_prefill", metrics.Interval(**figures["speedup_with_prefill"])),
            "nodes_per_step": figures["nodes_per_step"],
            "baseline_repeated_8grams": repeated,
        }
        if names[arm] != REFERENCE:
            row |= bounds(f"speed_over_{REFERENCE}", speed_over(tables.requests, arm, REFERENCE))
        yield row


def draw(table: pd.DataFrame) -> Figure:
    """Plot speed-up and tau; a row for each task, a colour for each proposer."""
    table = table.assign(text=[f"{TASKS[row.task]} ({decoded(table, row.task)})" for row in table.itertuples()])
    figure = Figure(figsize=(10.5, 0.75 * table["task"].nunique() + 1.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, value, label in (
        (panels[0], "speedup", "times the baseline's tokens/s on the same prompt"),
        (panels[1], "tau_macro", "tokens per step, mean over prompts"),
    ):
        forest(axes, table, value, "text", "arm", PROPOSERS)
        axes.set_xlabel(label)
    panels[0].set_ylabel("task of Spec-Bench (prompts decoded)")
    no_gain(panels[0], along="x")
    panels[1].legend(fontsize=8)
    figure.suptitle("95 % intervals over the prompts decoded", fontsize=10)
    return figure


def decoded(table: pd.DataFrame, task: str) -> str:
    """Return how many of the task's prompts have a decode time: "78 of 80", or "77-78 of 80" if arms differ."""
    rows = table[table["task"] == task]
    few, most = rows["decoded"].min(), rows["decoded"].max()
    return f"{few if few == most else f'{few}-{most}'} of {rows['prompts'].iloc[0]}"


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau of each proposer on each task; then speed over ``REFERENCE``'s."""
    arms = ordered(list(table["arm"]), PROPOSERS)
    others = [arm for arm in arms if arm != REFERENCE]
    alone = [["task", "prompts decoded", "median length", *(NAMES[arm] for arm in arms), "repeated 8-grams"]]
    paired = [[f"over the {NAMES[REFERENCE]}", *(NAMES[arm] for arm in others)]]
    for task in ordered(list(table["task"]), list(TASKS)):
        row_of = {arm: row_where(table, task=task, arm=arm) for arm in arms}
        known = next(row for row in row_of.values() if row)
        cells = [f"{shown(row)}, {row['tau_macro']:.2f}" if row else "-" for row in row_of.values()]
        facts = decoded(table, task), f"{known['prompt_tokens']:.0f}"
        alone.append([TASKS[task], *facts, *cells, percent(known["baseline_repeated_8grams"])])
        paired.append([TASKS[task], *(shown(row_of[arm], f"speed_over_{REFERENCE}") for arm in others)])
    return f"{markdown(alone)}\n\n{markdown(paired)}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
