"""The result of ``task=serve_trace``: throughput, latencies and goodput of a served stream of requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from spec_lab.analysis import figures
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.serving import PERCENTILES, latencies, serving_verdict
from spec_lab.analysis.text import cache_notes, kv_notes, verdict_line
from spec_lab.core.files import Unreadable
from spec_lab.core.tables import read_table
from spec_lab.results.old_names import with_columns
from spec_lab.results.result import INTERVAL, REAL, Cell, DataTable, Result, Section, cell, ended_run, run_title

TIMES = {"mean": REAL, **{f"p{percent}": REAL for percent in PERCENTILES}}
ARM = {
    "requests": int, "tokens": int, "tokens_per_second": REAL, "goodput": REAL,
    "speedup": INTERVAL, "?memory_bound_share": REAL,
    "?roofline_share": INTERVAL, "queue": TIMES, "prefill": TIMES, "ttft": TIMES, "tpot": TIMES,
}  # fmt: skip
RANGE = {"first": int, "last": int, "tau_pooled": INTERVAL, "draft_token_rate": INTERVAL}
"""Figures of a part of a stream."""
SUMMARY = {
    "?verdict": str, "?verdict_reasons": [str],
    "arrivals": str, "temperature": float, "segments": int, "broken_segments": int, "arms": {str: ARM},
    "max_batch_size": int, "?errors": [str], "?kv_dtype": (str, None), "?cached_prompt_shares": {str: REAL},
    "?drift": {"at": int, "window": int, "arms": {str: [RANGE]}, "?emptied_stores": [int]},
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

COLUMNS = {
    "arm": str, "segment": "int64", "arrival": float, "admitted": float, "first_token": float, "end": float,
    "tokens": "int64",
}  # fmt: skip
"""Columns that are read of ``served.parquet``, and their types."""

OTHER = "other_cores"
"""A column that older files lack."""

ARMS = (
    "Continuous batching of the same requests by every arm. Speed-up: total tokens/s over the baseline's on the same "
    "segments, with its 95 % interval over segments. Goodput: requests per second within the bounds of both "
    "latencies. TTFT: time to the first token. TPOT: time per further token, of requests with more than one."
)

DRIFT = (
    "Before: the last window before the change; after: the first one after it; at the end: the last one of the stream. "
    "The figures show all of them. 95 % intervals over requests."
)


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    rows, arms = _rows(folder), summary["arms"]
    judged: Mapping[str, Any] = summary
    if "verdict" not in summary and manifest:  # an older run
        judged = serving_verdict(rows, manifest, "baseline" if "baseline" in arms else "").summary()
    warnings = [f"In {summary['broken_segments']} of {summary['segments']} segments a request broke: they are left out "
                "of the figures of all arms."] * bool(summary["broken_segments"])  # fmt: skip
    drift = summary.get("drift") or {}
    warnings += [f"The run was resumed with segment {segment} (from 0), and stores that requests share were empty: a "
                 "change of tau or acceptance there need not be the workload's. overwrite=true serves the stream anew."
                 for segment in drift.get("emptied_stores", [])]  # fmt: skip
    shares = {name: {**values, "memory_bound_steps": values.get("memory_bound_share")} for name, values in arms.items()}
    notes = [
        *kv_notes(summary.get("kv_dtype")),
        *cache_notes(summary.get("cached_prompt_shares", {})),
        *roofline_notes(shares, manifest.get("roofline")),
    ]
    requests = max((values["requests"] for values in arms.values()), default=0)
    drawn = {"latency": lambda: figures.latency(latencies(rows))} if len(rows) else {}
    return Result(
        run_title(manifest),
        f"{requests} requests, arrivals: {summary['arrivals']}, at most {summary['max_batch_size']} at once, "
        f"temperature {summary['temperature']:g}, {summary['segments']} segments",
        [
            Section("Arms", ARMS, _arms(arms), notes=notes),
            Section("Latencies", "Cumulative distributions over requests.", None, drawn,
                    missing="No segment was served without a broken request."),
            *([_drift(drift)] if drift else []),
        ],
        [verdict_line(judged)],
        [*warnings, *summary.get("errors", [])[:5]],
    )  # fmt: skip


def _drift(drift: Mapping[str, Any]) -> Section:
    """Return the section of a stream whose workload changes."""
    change, arms, rows = drift["at"], drift["arms"], []
    for arm, windows in arms.items():
        before, after = ([row for row in windows if (row["first"] < change) == early] for early in (True, False))
        chosen = [before[-1] if before else None, after[0] if after else None, after[-1] if after else None]
        taus = [cell(row and row["tau_pooled"]) for row in chosen]
        rates = [cell(row and row["draft_token_rate"], ".1f", 100) for row in chosen]
        rows.append([Cell(arm, colour=figures.colour(arm)), *taus, *rates])
    names = [f"{name} {when}" for name in ("tau", "acceptance rate %") for when in ("before", "after", "at the end")]
    drawn = along_stream({"request of the stream": arms}, "drift", marked_change(change), figures.colours(arms))
    table = DataTable([("arm", False), *((name, True) for name in names)], rows)
    how = f"Windows of {drift['window']} requests; the workload changes with request {change}. {DRIFT}"
    return Section("Change of the workload", how, table, drawn if arms else {})


def along_stream(
    panels: Mapping[str, Any], end: str, marked: tuple[float, str] | None, colours: Mapping[str, str] | None = None
) -> dict[str, partial[Any]]:
    """Return the figures of tau and of the acceptance rate along a stream; ``end`` is the end of their names.

    Args: as in ``figures.by_range``.
    """
    pair = ("tau", "tau_pooled", "tau"), ("acceptance", "draft_token_rate", "acceptance rate")
    return {
        f"{name}_{end}": partial(figures.by_range, panels, figure, label, {}, marked, colours)
        for name, figure, label in pair
    }


def marked_change(change: int) -> tuple[float, str]:
    """Return what a figure along the stream marks: where the workload changes, between two requests."""
    return change - 0.5, f"the workload changes, request {change}"


def _rows(folder: Path) -> pd.DataFrame:
    """Return the rows of segments in which no request broke."""
    file = folder / "served.parquet"
    try:
        rows = with_columns(read_table(file), folder).to_pandas().astype(COLUMNS)
        broken = rows.loc[rows["error"] != "", "segment"].unique()
        return rows.loc[~rows["segment"].isin(broken), [*COLUMNS, *[OTHER] * (OTHER in rows)]]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{file} is not the table of a served stream ({error})") from error


def _arms(arms: Mapping[str, Mapping[str, Any]]) -> DataTable:
    times = [(what, end) for what in ("ttft", "tpot") for end in ("p50", "p90", "p99")]
    times += [(what, end) for what in ("queue", "prefill") for end in ("mean", "p50", "p99")]
    times += [("ttft", "mean"), ("tpot", "mean")]
    names = {pair: f"{pair[0].upper() if pair[0][0] == 't' else pair[0]} {pair[1]} ms" for pair in times}
    rows = []
    for arm, summary in arms.items():
        rates = cell(summary["tokens_per_second"], ".1f"), cell(summary["speedup"]), cell(summary["goodput"])
        spent = (cell(summary[what][end], ".1f", 1e3) for what, end in times)
        rows.append([Cell(arm, colour=figures.colour(arm)), cell(summary["requests"], ".0f"), *rates, *spent])
    columns = ["requests", "tokens/s", "speed-up [95 %]", "goodput/s", *names.values()]
    kept = [names[what, end] for what in ("ttft", "tpot") for end in ("p50", "p99")]
    more = ["requests", *(name for name in names.values() if name not in kept)]
    return DataTable([("arm", False), *((name, True) for name in columns)], rows, more=more)
