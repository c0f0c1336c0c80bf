"""The figures of a run that is done, one row for each arm, and the facts that they depend on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.core.files import Unreadable, expect, read_json
from spec_lab.results.old_names import read_summary, target_dtype

BY_DEPTH = ("survival", "conditional", "eagle_alpha", "vllm_per_position_acceptance")
"""Figures that are lists, one value for each depth from 1."""

BEGUN = {
    "?groups": (int, None),
    "?overrides": (None, [str]),
    "?commit": (str, None),
    "?prompts_sha256": (str, None),
    "?weights_sha256": {str: str},
    "?threads": (int, None),
    "?machine": {"?processor": (str, None), "?gpus": [str]},
    "?code": {str: {}},
    "?files_sha256": {str: str},
}
"""The shape of the part of ``manifest.json`` that is read here."""


def read_shaped(file: Path, shape: Mapping[str, Any], what: str = "is not readable") -> dict[str, Any] | None:
    """Return the contents of a JSON file; None if there is no file.

    Raises:
        Unreadable: its contents have another shape; names the file, with ``what`` as the reason.
    """
    try:
        if (contents := read_json(file)) is not None:
            expect(contents, shape, "")
    except Unreadable:
        raise
    except OSError as error:
        raise Unreadable(f"{file} is not readable ({error.strerror})") from error
    except ValueError as error:
        raise Unreadable(f"{file} {what} ({error})") from error
    return contents


def read_begun(folder: Path) -> dict[str, Any]:
    """Return the part of the manifest that a sweep reads; empty if there is none.

    Raises:
        Unreadable: the file is not readable.
    """
    return read_shaped(folder / "manifest.json", BEGUN) or {}


def left_behind(folder: Path) -> dict[str, Any]:
    """Return the figures of a run: ``summary.json``, or ``certificate.json``; empty if there is neither.

    Raises:
        ValueError: it is not readable.
    """
    return read_summary(folder / "summary.json") or read_json(folder / "certificate.json") or {}


def figure_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of each arm of a run that is done, flattened.

    Raises:
        Unreadable: its files are not readable, or a figure is not a number.
    """
    name = "summary.json" if os.path.lexists(folder / "summary.json") else "certificate.json"
    try:
        rows = [figures | {"arm": arm} for arm, figures in _arms(left_behind(folder))]
        for row in rows:
            expect(row, dict.fromkeys(NUMBERS, (float, None)), "")
    except Unreadable:
        raise
    except OSError as error:
        raise Unreadable(f"{error.filename or folder / name} is not readable ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = error if isinstance(error, ValueError) else f"it is not nested as a run's: {error!r}"
        raise Unreadable(f"{folder / name} is not readable ({why})") from error
    return rows


NUMBERS = tuple(
    f"?{name}{end}"
    for name in (
        "speedup", "tau_pooled", "expected_tau", "tokens_per_second", "baseline_tokens_per_second", "nodes_per_step",
        "draft_token_rate", "overhead", "roofline_share", "baseline_roofline_share", "repeated_8gram_share", "requests",
        "correct", "correct_change", "correct_cut",
    )
    for end in ("", "_low", "_high")
)  # fmt: skip
"""Figures that are compared, plotted and sorted: they must be numbers if a run has them."""


PROVENANCE = ("commit", "prompts_sha256", "weights_sha256", "processor", "gpus", "threads", "dtype")
"""Columns on which a run's figures depend besides its options."""


def provenance(folder: Path) -> dict[str, Any]:
    """Return the facts ``PROVENANCE`` of a run; None for those that its manifest lacks."""
    begun = read_begun(folder)
    weights = sha256(json.dumps(begun.get("weights_sha256"), sort_keys=True).encode()).hexdigest()
    machine = begun.get("machine", {})
    known = begun | {"processor": machine.get("processor"), "gpus": ", ".join(machine.get("gpus", ()))}
    known |= {"weights_sha256": weights, "dtype": target_dtype(begun) if "config" in begun else None}
    return {name: known.get(name) for name in PROVENANCE}


def _arms(summary: Mapping[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each arm's figures with those that all arms share; of a summary without arms, the summary's own."""
    shared = {name: value for name, value in summary.items() if not isinstance(value, dict | list)}
    if reasons := summary.get("verdict_reasons"):
        shared["verdict_reasons"] = "; ".join(map(str, reasons))
    by_arm = summary.get("arms")  # a task without arms may use the name for a list
    arms: dict[str | None, dict[str, Any]] = by_arm if isinstance(by_arm, dict) and by_arm else {None: {}}
    for arm, figures in arms.items():
        both = shared | figures if arm else shared
        parts = ("proposer", "verifier", "constraint", "target")  # options too
        named = {f"{name}_name" if name in parts else name: value for name, value in both.items()}
        yield arm, dict(_flat(named))


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the figures without nesting."""
    for name, value in figures.items():
        if name == "intervals":
            for inner, bounds in value.items():
                yield from ((f"{inner}_{end}", bounds[end]) for end in ("low", "high"))
        elif isinstance(value, dict) and {"mean", "low", "high"} <= value.keys():
            for end, inner in value.items():
                yield str({"mean": name, "low": f"{name}_low", "high": f"{name}_high"}.get(end, end)), inner
        elif name == "metrics":
            yield from _flat({f"metrics.{inner}": figure for inner, figure in value.items()})
        elif name == "experts":
            yield from ((f"experts_{inner}", figure) for inner, figure in value.items())
        elif name == "certificate":
            if isinstance(value, dict) and value.get("failure"):
                yield "refuted", value["failure"]
        elif name == "phase_seconds":
            yield from ((f"phase_{phase}", seconds) for phase, seconds in value.items())
        elif name in BY_DEPTH:
            yield from ((f"{name}@{depth}", rate) for depth, rate in enumerate(value, start=1))
        elif not isinstance(value, dict | list):
            yield name, value
