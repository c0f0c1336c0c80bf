"""The summary of a run on Weights & Biases: one number for each name, from ``summary.json``, without wandb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_lab.core.terminal import short_path

NAMES = {
    "tau_pooled": "tau",
    "draft_token_rate": "acceptance_rate",
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
}
"""Common names of figures of ``summary.json``; every other figure keeps its own. ``ttft`` and ``tpot`` are seconds."""

EVAL = {"accepted": "acceptance_rate", "agreed": "agreement"}
"""Names of what training measures at each draft position, after ``train/`` or ``eval/``."""

LEFT_OUT = (
    "schema_version", "arms", "intervals", "experiment", "errors", "roofline", "sampling", "learning", "certificate",
    "phase_seconds", "own_metrics",
)  # fmt: skip
"""Entries of ``summary.json`` that are shown elsewhere."""

MAX_ITEMS = 16
"""Most numbers of a list, such as the acceptance at each depth."""

MAX_FIGURES = 1000
MAX_LETTERS = 500

Figure = float | int | bool | str


def figures(summary: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures of a run by name.

    Those of the main arm have no prefix: ``speedup``, ``tokens_per_second``, ``acceptance_rate``, ``tau``,
    ``expected_tau``, ``ttft``, ``tpot``, ...; those of another arm that of its key: ``baseline/tokens_per_second``.
    An interval adds ``NAME/low`` and ``NAME/high``; a list adds ``NAME/1``, ``NAME/2``, ...; nested entries are joined
    with slashes. A training has ``eval/tau``,
    ``eval/expected_tau`` and ``eval/acceptance_rate/1``, ...: of the drafter on held-out prompts.

    Args:
        summary: the contents of ``summary.json``, or of another task's summary file.
    """
    shown: dict[str, Figure] = {}
    arms = summary.get("arms")
    arms = arms if isinstance(arms, Mapping) else {}
    if reasons := summary.get("verdict_reasons"):
        summary = {**summary, "verdict_reasons": "; ".join(map(str, reasons))}
    if "learning" in summary:
        summary = _training(summary)
    main = next(iter(arms), "")
    others = [(f"{arm}/", entries) for arm, entries in arms.items() if arm == "baseline" or arm != main]
    for prefix, entries in [("", summary), *others]:
        if not isinstance(entries, Mapping):
            continue
        copied = ("baseline_",) if "baseline" in arms else ()  # copies of the baseline's own figures
        kept = {
            name: entry for name, entry in entries.items() if name not in LEFT_OUT and not str(name).startswith(copied)
        }
        intervals = entries.get("intervals")
        for name, value in (*kept.items(), *(intervals.items() if isinstance(intervals, Mapping) else ())):
            for key, figure in _flat(f"{prefix}{NAMES.get(name, name)}", value):
                if len(shown) < MAX_FIGURES:
                    shown[key] = figure
    return shown


def _training(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's summary with the names of its measurements on held-out prompts."""
    named = {f"eval/{EVAL[name]}" if name in EVAL else name: value for name, value in summary.items()}
    for name, key in (("measured_length", "eval/tau"), ("estimated_length", "eval/expected_tau")):
        if isinstance(length := named.pop(name, None), int | float):
            named[key] = 1 + length  # the bonus or recovered token
    return named


def training(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of a learning curve (``train.fit``) by name.

    ``train/loss`` is the mean over the draft positions, ``train/loss/1`` that of the first. ``train/tau`` is the
    expected tau of a chain from the acceptance at each position.
    """
    shown = dict(_flat("train/loss", line["loss"]))
    shown["train/loss"] = sum(line["loss"]) / len(line["loss"])
    for name, key in EVAL.items():
        shown |= dict(_flat(f"train/{key}", line[name]))
    shown |= {"train/tau": 1 + line["length_at_1"], "train/tau_greedy": 1 + line["length_greedy"]}
    shown |= {"train/texts": line["texts"], "train/seconds": line["seconds"]}
    return {name: float(value) for name, value in shown.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Figure]]:
    """Yield the numbers, flags and texts of a value, with their names."""
    if isinstance(value, Mapping):
        if "mean" in value and {"low", "high"} & value.keys():
            yield from _flat(name, value["mean"])
            value = {end: bound for end, bound in value.items() if end != "mean"}
        for inner, entry in value.items():
            yield from _flat(f"{name}/{inner}", entry)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, int | float | None) for item in value):
            for number, item in enumerate(value[:MAX_ITEMS], start=1):
                yield from _flat(f"{name}/{number}", item)
    elif isinstance(value, str):
        yield name, short_path(value)[:MAX_LETTERS]
    elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        yield name, value
