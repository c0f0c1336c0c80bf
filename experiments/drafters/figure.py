"""Results, figure and table of the study: python -m experiments.drafters.figure [RUNS]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.drafters.measure import DRAFTERS
from experiments.plots import NAMES, WORKLOADS, colours, kept, line, markdown, ordered, row_where, shown, study, swept
from experiments.runs import TRAINING
from spec_lab.analysis import metrics

KEYS = ("prompts", "temperature")
LEARNED = ("parameters", "texts", "seconds")
ARM_NAMES = NAMES | {"medusa": "Medusa"}
CLAIM = "After the same training tokens an MTP module predicts best, and keeps its acceptance over four positions"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each workload, temperature, drafter and draft position (from 1).

    ``accepted`` is the share of the drafted tokens at this position that were accepted, of those whose predecessors
    were; ``step_cost`` the time of a step over that of the baseline.
    """
    table, learned = swept(runs), json.loads((runs / TRAINING).read_text())
    rows = [row for run, rows in table.groupby("run", sort=False) for row in by_position(runs / str(run), rows)]
    frame = pd.DataFrame(rows)
    frame["step_cost"] = frame["tau_pooled"] / frame["speedup"]
    for name in LEARNED:
        frame[name] = [learned[arm][name] for arm in frame["arm"]]
    columns = kept(frame, *KEYS, more=("position", "accepted", "step_cost", *LEARNED))
    return columns.sort_values([*KEYS, "arm", "position"], ignore_index=True)


def by_position(run: Path, table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the run's rows of ``table`` once for each draft position."""
    tables = metrics.load(run)
    for row in table.to_dict("records"):
        steps = metrics.decode_steps(tables.steps, row["recorded"])
        low, high = metrics.depth_bands(steps)["conditional"]
        for position, share in enumerate(metrics.conditional(steps)):
            shares = {"accepted": share, "accepted_low": low[position], "accepted_high": high[position]}
            yield row | {"position": position + 1} | shares


def draw(table: pd.DataFrame) -> Figure:
    """Plot acceptance by position at the lowest temperature; a panel for each workload, a line for each drafter."""
    table = table[table["temperature"] == table["temperature"].min()]
    workloads, colour = ordered(list(table["prompts"]), WORKLOADS), colours(list(DRAFTERS))
    figure = Figure(figsize=(3.2 * len(workloads) + 0.6, 3.7), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        here = table[table["prompts"] == workload]
        for arm in ordered(list(here["arm"]), tuple(DRAFTERS)):
            line(axes, here[here["arm"] == arm], "position", "accepted", colour[arm], ARM_NAMES[arm])
        axes.set_title(f"{workload}, T = {table['temperature'].min():g}")
        axes.set(ylim=(0, 1), xlabel="draft position")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("accepted share of the tokens reached,\n95 % bands over prompts")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=len(DRAFTERS))
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: what each drafter learned from; speed-up, tau and cost of a step."""
    arms = ordered(list(table["arm"]), tuple(DRAFTERS))
    learned = [["drafter", "parameters", "texts", "training"]]
    speed = [["text", "T", *(ARM_NAMES[arm] for arm in arms)]]
    for arm in arms:
        facts = dict(table[table["arm"] == arm].iloc[0])
        minutes = f"{facts['seconds'] / 60:.0f} min"
        learned.append([ARM_NAMES[arm], f"{facts['parameters'] / 1e6:.2f} M", f"{facts['texts']:.0f}", minutes])
    for workload in ordered(list(table["prompts"]), WORKLOADS):
        for temperature in sorted(table["temperature"].unique()):
            where = {"prompts": workload, "temperature": temperature, "position": 1}
            rows = [row_where(table, **where, arm=arm) for arm in arms]
            cells = [f"{shown(row)}, {row['tau_pooled']:.2f}, {row['step_cost']:.2f}" if row else "-" for row in rows]
            speed.append([workload, f"{temperature:g}", *cells])
    return f"{markdown(learned)}\n\n{markdown(speed)}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
