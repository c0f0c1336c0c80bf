"""The page about a served stream of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from spec_lab.analysis import figures
from spec_lab.analysis.report.facts import ended_summary, page_of_run
from spec_lab.analysis.report.page import Cell, DataTable, Section, render, value_cell
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.serving import PERCENTILES, latencies, serving_verdict
from spec_lab.analysis.text import cache_notes, kv_notes, verdict_line
from spec_lab.core.files import Unreadable
from spec_lab.core.tables import read_table
from spec_lab.results.manifest import begun

REAL = (float, None)
TIMES = {"mean": REAL, **{f"p{one}": REAL for one in PERCENTILES}}
ARM = {
    "requests": int, "tokens": int, "tokens_per_second": REAL, "goodput": REAL,
    "speedup": {"mean": REAL, "low": REAL, "high": REAL}, "?memory_bound_share": REAL,
    "?roofline_share": {"mean": REAL, "low": REAL, "high": REAL}, "queue": TIMES, "prefill": TIMES, "ttft": TIMES,
    "tpot": TIMES,
}  # fmt: skip
SUMMARY = {
    "?verdict": str, "?verdict_reasons": [str],
    "arrivals": str, "temperature": float, "segments": int, "broken_segments": int, "arms": {str: ARM},
    "max_batch_size": int, "?errors": [str], "?kv_dtype": (str, None), "?cached_prompt_shares": {str: REAL},
}  # fmt: skip
"""What is read of ``summary.json``."""

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


def page(folder: Path) -> str:
    """Return the page's text; writes the figure to ``figures/`` as well.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = begun(folder) or {}, ended_summary(folder, SUMMARY)
    rows = _rows(folder)
    judged: Mapping[str, Any] = summary
    if "verdict" not in summary and manifest:  # an older run
        judged = serving_verdict(rows, manifest, "baseline" if "baseline" in summary["arms"] else "").summary()
    warnings = [f"In {summary['broken_segments']} of {summary['segments']} segments a request broke: they are left out "
                "of the figures of all arms."] * bool(summary["broken_segments"])  # fmt: skip
    content = page_of_run(
        folder,
        manifest,
        lead=f"Arrivals: {summary['arrivals']}, at most {summary['max_batch_size']} requests at once, temperature "
        f"{summary['temperature']:g}, {summary['segments']} segments",
        warnings=warnings + summary.get("errors", [])[:5],
        verdict=verdict_line(judged),
        drawn={"latency": figures.latency(latencies(rows))} if len(rows) else {},
    )
    shares = {
        name: {**own, "memory_bound_steps": own.get("memory_bound_share")} for name, own in summary["arms"].items()
    }
    notes = [
        *kv_notes(summary.get("kv_dtype")),
        *cache_notes(summary.get("cached_prompt_shares", {})),
        *roofline_notes(shares, manifest.get("roofline")),
    ]
    sections = [
        Section("Arms", ARMS, _arms(summary["arms"]), notes=notes),
        Section("Latencies", "Cumulative distributions over requests.", None, ["latency"],
                missing="No segment was served without a broken request."),
    ]  # fmt: skip
    return render("sections", content, folder, sections=sections)


def _rows(folder: Path) -> pd.DataFrame:
    """Return the rows of segments in which no request broke.

    Raises:
        Unreadable: the file is not the table of a served stream.
    """
    file = folder / "served.parquet"
    try:
        rows = read_table(file).to_pandas().astype(COLUMNS)
        broken = rows.loc[rows["error"] != "", "segment"].unique()
        return rows.loc[~rows["segment"].isin(broken), [*COLUMNS, *[OTHER] * (OTHER in rows)]]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{file} is not the table of a served stream ({error})") from error


def _arms(arms: Mapping[str, Mapping[str, Any]]) -> DataTable:
    rows = []
    for arm, own in arms.items():
        times = [value_cell(own[what][p], ".1f", 1e3) for what in ("ttft", "tpot") for p in ("p50", "p90", "p99")]
        rates = value_cell(own["tokens_per_second"], ".1f"), value_cell(own["speedup"]), value_cell(own["goodput"])
        rows.append([Cell(arm, colour=figures.colour(arm)), value_cell(own["requests"], ".0f"), *rates, *times])
    names = ["requests", "tokens/s", "speed-up [95 %]", "goodput/s"]
    names += [f"{what} {p} ms" for what in ("TTFT", "TPOT") for p in ("p50", "p90", "p99")]
    return DataTable([("arm", False), *((name, True) for name in names)], rows)
