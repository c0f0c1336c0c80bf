"""The table of measured distances, written prompt by prompt, so that a stopped run keeps every finished prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from spec_lab.core.files import Unreadable, expect
from spec_lab.results.table_parts import Rows, TableParts

DISTANCES = {
    "id": (pa.string(), "number of the prompt in its run"),
    "request": (pa.int64(), "the same as a number"),
    "prompt": (pa.string(), "the prompt's id"),
    "method": (pa.string(), "exact, sampled, or none where no distance exists"),
    "entry": (pa.string(), "the prompt's entry of summary.json as JSON; NaN and infinities are kept"),
}
"""One row for each finished prompt."""

MEAN = {"mean": float, "low": float, "high": float}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "exact": {
        **dict.fromkeys(("z", "log_z", "local_invalid", "tv", "kl", "kl_local"), float),
        "outputs": int,
        "probabilities": [{"tokens": [int], "local": float, "global": float, "text": str}],
    },
    "sampled": {
        **dict.fromkeys(("local_invalid", "z_lower", "z_upper"), float),
        **dict.fromkeys(("local_samples", "global_samples", "attempts"), int),
        **{
            "sampler": str,
            "exact_samples": bool,
            "stopped_by_attempts": bool,
            "z": MEAN,
            "tv": MEAN,
            "?tv_global": MEAN,
            "?kl": MEAN,
        },
    },
    "none": {"error": str},
}
"""The entries by method, in addition to ``prompt`` and ``method``."""


GUARANTEES = {
    "exact": "every valid output enumerated; exact up to the rounding of the target's probabilities",
    "rejection": "global outputs are independent exact samples, unless task.attempts ended the sampling (then their "
    "number depends on them, and estimates can be biased); distances are estimates with 95 % bootstrap intervals",
    "expected_futures": "global outputs are exact only in the limit of many samples; distances are approximations",
}
"""Statements of what is exact and what is not, by method or sampler."""


def parts(out: Path) -> TableParts:
    """Return the table of a run in its directory."""
    return TableParts(out, {"distances": DISTANCES})


def row(number: int, entry: Mapping[str, Any]) -> Rows:
    """Return the row of a finished prompt.

    Args:
        entry: its entry of ``summary.json``.
    """
    facts = {"prompt": entry["prompt"], "method": entry["method"], "entry": json.dumps(entry)}
    return [{"id": str(number), "request": number, **facts}]


def entries(tables: TableParts) -> dict[int, dict[str, Any]]:
    """Return the entries of all finished prompts by the number of their request.

    Raises:
        Unreadable: a file is not a table, or an entry has other contents.
    """
    by_number: dict[int, dict[str, Any]] = {}
    for number, text in tables.load()["distances"][["request", "entry"]].itertuples(index=False, name=None):
        try:
            entry = json.loads(text)
            expect(entry, {"prompt": str, "method": set(SHAPES)}, "")
            expect(entry, dict(SHAPES[entry["method"]]), "")
        except (ValueError, RecursionError) as error:
            raise Unreadable(
                f"{tables.out}: the distances of prompt {number} are not readable ({error}); remove the run's "
                "directory and run again"
            ) from error
        by_number[int(number)] = entry
    return by_number
