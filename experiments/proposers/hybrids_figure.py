"""Results, figure and table of the study: python -m experiments.proposers.hybrids_figure [RUNS]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    bounds,
    kept,
    markdown,
    ordered,
    row_where,
    shown,
    speed_over,
    speedups_by_place,
    study,
    swept,
    texts_and_temperatures,
)
from experiments.proposers.hybrids import ARMS, OF, PEERS
from spec_lab.analysis import metrics

KEYS = ("prompts", "temperature")
HYBRIDS = {
    "union": "union: suffix, Medusa",
    "union_ngram": "union: n-gram, Medusa",
    "union_eagle": "union: suffix, EAGLE-3",
    "best_of": "best of: suffix, Medusa",
    "best_of_eagle": "best of: suffix, EAGLE-3",
}
ARM_NAMES = NAMES | HYBRIDS | {"eagle": "EAGLE-3"}
PAIRED = ("speed_over_best_part", "speed_over_peer")
CLAIM = "Text lookup and Medusa heads together are faster than either part on repetitive prompts"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each text, temperature and arm.

    Hybrids are compared with their fastest part, and every proposer with transformers' fastest speculative mode, in the
    same run and paired over prompts.
    """
    table = swept(runs)
    rows = [row for run, rows in table.groupby("run", sort=False) for row in compared(runs / str(run), rows)]
    frame = pd.DataFrame(rows)
    named = frame[[*KEYS, "arm", "best_part", "peer"]]
    return kept(frame, *KEYS, more=PAIRED).merge(named, on=[*KEYS, "arm"])


def compared(run: Path, table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the run's rows of ``table``, each with the comparisons."""
    requests = metrics.load(run).requests
    speeds = {arm: speed_over(requests, arm, "baseline").mean for arm in requests["arm"].unique() if arm != "baseline"}
    peers = [peer for peer in PEERS if peer in speeds]
    fastest = max(peers, key=lambda peer: speeds[peer]) if peers else None
    for row in table.to_dict("records"):
        arm = row["recorded"]
        parts = [part for part in OF.get(arm, ()) if part in speeds]
        best = max(parts, key=lambda part: speeds[part]) if parts else None
        row |= {"best_part": best, "peer": None if arm in PEERS else fastest}
        for name, other in (("speed_over_best_part", best), ("speed_over_peer", row["peer"])):
            if other is not None:
                row |= bounds(name, speed_over(requests, arm, other))
        yield row


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed-up of every arm; a panel for each text and temperature."""
    arms = {arm: ARM_NAMES[arm] for arm in ordered(list(table["arm"]), (*ARMS, *PEERS))}
    return speedups_by_place(table, arms)


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau; hybrids over their best part."""
    places = texts_and_temperatures(table)
    titles = [title for title, _ in places]
    alone, over = [["arm", *titles]], [["over its best part", *titles]]
    for arm in ordered(list(table["arm"]), (*ARMS, *PEERS)):
        rows = [row_where(table[here], arm=arm) for _, here in places]
        taus = [f", {row['tau_pooled']:.2f}" if row and row["tau_pooled"] == row["tau_pooled"] else "" for row in rows]
        alone.append([ARM_NAMES[arm], *(f"{shown(row)}{tau}" for row, tau in zip(rows, taus, strict=True))])
        if arm in OF:
            over.append([ARM_NAMES[arm], *(_over_best_part(row) for row in rows)])
    return f"{markdown(alone)}\n\n{markdown(over)}"


def _over_best_part(row: dict[str, Any] | None) -> str:
    if row is None or not isinstance(row["best_part"], str):
        return "-"
    return f"{shown(row, 'speed_over_best_part')} ({ARM_NAMES[row['best_part']]})"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM, "hybrids")


if __name__ == "__main__":
    main()
