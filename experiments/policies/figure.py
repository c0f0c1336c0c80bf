"""Results, figure and table of the study: python -m experiments.policies.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    arms_by_place,
    bounds,
    kept,
    markdown,
    ordered,
    row_where,
    shown,
    speed_over,
    study,
    swept,
)
from experiments.policies.measure import FIXED, POLICIES, PUBLISHED
from spec_lab.analysis import metrics

KEYS = ("prompts", "temperature", "batch_size")
NAMES = {f"fixed_{n}": f"fixed {n}" for n in FIXED} | {name: name for name in POLICIES} | {
    "draft_and_verify": "Draft&Verify", "adaedl": "AdaEDL", "svip": "SVIP", "ucb": "UCB", "thompson": "Thompson",
    "goodput_svip": "goodput, SVIP",
}  # fmt: skip
OVER = "speed_over_best_fixed"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each text, temperature, batch size and arm, compared with the run's fastest fixed depth.

    Args:
        runs: the folder of all sweeps.
    """
    rows = []
    for sweep in sorted(path for path in runs.iterdir() if (path / "sweep.json").is_file()):
        for run, run_rows in swept(sweep).groupby("run", sort=False):
            rows += compared(sweep / str(run), run_rows)
    frame = pd.DataFrame(rows)
    named = frame[[*KEYS, "arm", "best_fixed"]]
    return kept(frame, *KEYS, more=(OVER,)).merge(named, on=[*KEYS, "arm"])


def compared(run: Path, table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the run's rows of ``table``; each is compared with the fastest fixed depth, chosen in hindsight."""
    requests = metrics.load(run).requests
    fixed = [arm for arm in table["recorded"] if arm.startswith("fixed_")]
    best = max(fixed, key=lambda arm: speed_over(requests, arm, "baseline").mean)
    for row in table.to_dict("records"):
        row["best_fixed"] = best
        if row["recorded"] != best:
            row |= bounds(OVER, speed_over(requests, row["recorded"], best))
        yield row


def places(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Return the title of each workload, and which rows are its own: texts, then batches of all texts mixed."""
    found_places = []
    for temperature in sorted(table["temperature"].unique()):
        for text in ("code", "json", "prose", "bundled"):
            for size in sorted(table["batch_size"].unique()):
                here = (
                    (table["prompts"] == text) & (table["batch_size"] == size) & (table["temperature"] == temperature)
                )
                if here.any():
                    batch = f", batch {size:g}" if text == "bundled" else ""
                    found_places.append((f"{'mixed' if text == 'bundled' else text}{batch}, T = {temperature:g}", here))
    return found_places


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed of every policy over the best fixed depth's; a panel for each workload."""
    arms = {name: NAMES[name] for name in POLICIES}
    figure = arms_by_place(table, OVER, "", places(table), arms)
    label = "tokens/s over the fastest fixed depth, chosen in hindsight; 95 % intervals over groups"
    figure.supxlabel(label, fontsize=9)
    return figure


def claim(table: pd.DataFrame) -> str:
    """Return the figure's finding: which policies are faster than the best fixed depth with their whole interval."""
    policies = table[table["arm"].isin(POLICIES)]
    faster = policies[policies[f"{OVER}_low"] > 1]
    if faster.empty:
        return f"No policy is shown to be faster than the best fixed depth on any of {len(places(table))} workloads"
    names = ", ".join(NAMES[arm] for arm in ordered(list(faster["arm"]), [*POLICIES]))
    return f"Faster than the best fixed depth in {len(faster)} of {len(policies)} comparisons: {names}"


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-ups of fixed depths; of policies, over the best fixed depth as well."""
    all_places = places(table)
    titles = [title for title, _ in all_places]
    fixed, policies = [["depth", *titles]], [["policy", *titles]]
    for arm, name in NAMES.items():
        rows = [row_where(table[here], arm=arm) for _, here in all_places]
        if arm not in POLICIES:
            fixed.append([name.removeprefix("fixed "), *map(shown, rows)])
        else:
            policies.append([name, *(f"{shown(row, OVER)}" for row in rows)])
    best = [row_where(table[here], arm=PUBLISHED[0]) for _, here in all_places]
    policies.append(["best fixed depth", *(row["best_fixed"].removeprefix("fixed_") if row else "-" for row in best)])
    return f"{markdown(fixed)}\n\n{markdown(policies)}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, claim)


if __name__ == "__main__":
    main()
