"""The page about a sweep, from its summaries alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from spec_lab.analysis import figures
from spec_lab.analysis.metrics import frames
from spec_lab.analysis.report import charts
from spec_lab.analysis.report.page import Figure, number, placed, render
from spec_lab.results import sweep

MOST_UNFINISHED = 200

FIGURES = {
    "speedup": ("speed-up", ".2f"),
    "speedup_low": ("from", ".2f"),
    "speedup_high": ("to", ".2f"),
    "tau_pooled": ("tau", ".2f"),
    "expected_tau": ("expected tau", ".2f"),
    "tokens_per_second": ("tokens/s", ".1f"),
    "baseline_tokens_per_second": ("baseline's", ".1f"),
    "nodes_per_step": ("nodes a step", ".1f"),
    "draft_token_rate": ("accepted / drafted", ".1%"),
    "overhead": ("overhead", ".1%"),
    "repeated_8gram_share": ("loops", ".1%"),
    "requests": ("prompts", ".0f"),
}
"""Columns of the table: of ``collect``, as headed, as written."""


def page(folder: Path) -> str:
    """The text of the page; draws the figures for papers into ``figures/`` as well.

    Raises:
        ValueError: files that are not readable.
    """
    runs, table = sweep.runs(folder), sweep.collect(folder)
    keys = list(dict.fromkeys(sweep.key(one) for run in runs for one in run.overrides))
    if not len(table):
        table = pd.DataFrame(columns=["run", "arm"])
    keys = [key for key in keys if key in table]
    varied = frames.varied(table, keys)
    drawn = figures.draw_sweep(table, keys, folder / "figures")
    count = Counter(run.state for run in runs)
    left = [run for run in runs if run.state != "done"]
    heads, rows = _rows(folder, table, varied)
    what = ", ".join(varied) or "nothing"
    experiments = sorted(set(table["experiment"].dropna())) if "experiment" in table else []
    return render(
        "sweep",
        _figures(table, keys),
        drawn,
        title=f"Sweep: {folder.resolve().name}",
        lead=f"{len(runs)} runs{' of ' + ', '.join(experiments) if experiments else ''}; varied: {what}",
        warnings=_warnings(runs, table),
        states={state: count[state] for state in ("done", "running", "failed", "waiting") if count[state]},
        unfinished=[
            {"name": run.folder.name, "state": run.state, "error": run.error,
             "groups": f"{run.groups}/{'?' if run.of is None else run.of}"}
            for run in left[:MOST_UNFINISHED]
        ],
        unfinished_cut=f"The first {MOST_UNFINISHED} of {len(left)}." if len(left) > MOST_UNFINISHED else "",
        heads=heads,
        rows=rows,
        ran=_ran(table, keys, varied),
    )  # fmt: skip


def _figures(table: pd.DataFrame, keys: Sequence[str]) -> list[Figure]:
    rows = frames.over_sweep(table, keys)
    fast = rows[rows["speedup"].notna()] if "speedup" in rows else rows.iloc[:0]
    both, shades = frames.worth(table, keys)
    top = fast.head(figures.MOST_RUNS)
    none = "No run that is done was compared with a baseline, so there is no speed-up."
    colours = figures.colours(frames.compared_arms(table))
    cut = f" The {len(top)} fastest of {len(fast)} rows; the table has them all." if len(top) < len(fast) else ""
    several = (
        " Each interval is for its row alone, and the best of many look better than they are, as luck helped to put "
        "them first; spec-lab compare judges them with all together."
    )
    luck = several if len(fast) > 1 else ""
    made = [
        Figure(
            "Speed-ups",
            "Mean over groups of prompts of tokens/s over the baseline's in the same run, with its 95 % bootstrap "
            f"interval, the fastest first. Intervals right of the dashed line are faster than the baseline.{cut}{luck}",
            [("", charts.forest(top, colours))] if len(top) else [],
            why=none,
            files=["speedups"],
        ),
        Figure(
            "What acceptance is worth",
            "Each point is an arm of a run. Points of the same tau and different speed-ups differ in what their drafts "
            "cost. A click in the legend picks a colour.",
            [("", charts.scatter(both, shades))] if len(both) else [],
            why=none,
            files=[figures.worth_file(name) for name in shades],
        ),
    ]
    values = {"tau_pooled": "tau, tokens per step", "speedup": "times the baseline's tokens/s"}
    for key in frames.numeric(table, keys):
        every = frames.along(table, keys, key, list(values))
        names = list(dict.fromkeys(every["line"]))
        drawn = [
            (said, charts.lines(every[every["what"] == value], key, said, names, 1.0 if value == "speedup" else None))
            for value, said in values.items()
            if (every["what"] == value).any()
        ]
        made.append(
            Figure(
                f"Against {key}",
                "One line for each setting of the other options, the 8 best where there are more; bands are 95 % "
                "intervals. Runs that differ in the seed alone are one point, their mean, and the ends of its band are "
                "the means of their own bounds: they share their prompts, so several say no more about other prompts "
                "than one. Those without a number are left out.",
                drawn,
                why=f"No two runs with figures differ in {key} alone.",
                layout="columns-2",
                files=[figures.lines_file(key)],
            )
        )
    return made


def _rows(
    folder: Path, table: pd.DataFrame, varied: Sequence[str]
) -> tuple[list[tuple[str, bool]], list[list[dict[str, Any]]]]:
    """Heads, each with whether it is a number's, and the cells of every row."""
    every = frames.over_sweep(table, varied)
    others = table[~table["run"].isin(every["run"])]  # baselines alone, and tasks that have no arms
    parts = [one for one in (every, others) if len(one)]
    every = pd.concat(parts, ignore_index=True) if parts else table
    shown = {name: how for name, how in FIGURES.items() if name in every and every[name].notna().any()}
    law = "lossless" in every and bool(every["lossless"].notna().any())
    heads = [("arm", False), *((key, False) for key in varied), *([("law", False)] if law else [])]
    heads += [(head, True) for head, _ in shown.values()] + [("run", False)]
    with_report = {name for name in every["run"].unique() if os.path.isfile(folder / str(name) / "report.html")}
    rows = []
    for row in every.to_dict("records"):
        cells = [_cell(row["arm"]), *(_cell(row[key]) for key in varied)] + [_cell(_law(row))] * law
        cells += [_cell(number(row[name], form), value=row[name]) for name, (_, form) in shown.items()]
        link = f"{quote(str(row['run']))}/report.html" if row["run"] in with_report else ""
        rows.append([*cells, _cell(row["run"], link)])
    return heads, rows


def _cell(text: Any, link: str = "", value: Any = None) -> dict[str, Any]:
    missing = text is None or (isinstance(text, float) and pd.isna(text))
    plain = "" if missing else f"{text:g}" if isinstance(text, float) else str(text)
    return {"text": plain, "link": link, "value": "" if value is not None and pd.isna(value) else value}


def _law(row: dict[str, Any]) -> str:
    lossless, certified = row.get("lossless"), row.get("certified")
    if lossless is None or pd.isna(lossless):
        return ""
    if not lossless:
        return "lossy"
    return f"lossless ({certified})" if isinstance(certified, str) else "not certified"


def _warnings(found: Sequence[sweep.Run], table: pd.DataFrame) -> list[str]:
    said = [
        f"The runs differ in {name} ({', '.join(one[:16] for one in values)}): their figures may not go together."
        for name, values in sweep.mixed(found).items()
    ]
    if "code" in table and (table["code"].fillna(0) != 0).any():
        bad = table.loc[table["code"].fillna(0) != 0, "run"].nunique()
        said.append(f"{bad} runs ended with an exit code that is not 0.")
    return said


def _ran(table: pd.DataFrame, keys: Sequence[str], varied: Sequence[str]) -> dict[str, str]:
    """What all runs that are done share."""
    same = {key: f"{table[key].iloc[0]}" for key in keys if key not in varied and len(table)}
    for name in ("target_name", "constraint_name", "temperature", "batch_size", "commit"):
        if name in table and table[name].notna().all() and table[name].nunique() == 1 and name not in same:
            same[name] = f"{table[name].iloc[0]}"
    if "job_seconds" in table:
        seconds = table.drop_duplicates("run")["job_seconds"].sum()
        same["time of all runs"] = f"{seconds / 60:.1f} minutes"
    return {name: placed(value) for name, value in same.items()}
