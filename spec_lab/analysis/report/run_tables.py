"""The tables of the page about one run."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.report.page import Cell, DataTable, figure_cell
from spec_lab.analysis.text import COLUMNS, losslessness, number

BADGES = {"lossless": "good", "lossy": "warn", "NOT lossless": "bad", "not certified": "plain"}
FIGURES = (
    "tokens_per_second", "speedup", "speedup_with_prefill", "speedup_mean_of_groups", "time_to_first_token",
    "time_per_output_token", "tau_pooled", "tau_pooled_raw", "expected_tau", "draft_token_rate", "nodes_per_step",
    "overhead", "roofline_share", "roofline_share_end_to_end", "memory_bound_steps",
    "repeated_8gram_share",
)  # fmt: skip
"""Columns of the table of arms."""

ACCURACY = ("correct", "correct_change")
"""Columns beside the speed, in runs with checked answers."""


def arms_table(
    summaries: Mapping[str, Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    manifest: Mapping[str, Any],
    temperature: float,
) -> DataTable:
    """Return the table of arms."""
    colours, rows = figures.colours(summaries), []
    checked = any(isfinite(one["correct"]["mean"]) for one in summaries.values())
    names = (*FIGURES[:2], *ACCURACY * checked, *FIGURES[2:])
    reduced = any(isfinite(one["calibration"]["variance_reduction"]) for one in summaries.values())
    for arm, one in summaries.items():
        facts, state, (word, why) = manifest["proposers"].get(arm, {}), states[arm], losslessness(states[arm])
        drawn = f" ({facts['drawn']})" if facts.get("drawn") and facts.get("name") != "none" else ""
        reduction, identical = one["calibration"]["variance_reduction"], one["identical_outputs"]
        rows.append(
            [
                Cell(arm, colour=colours[arm]),
                Cell(f"{state.get('proposer') or facts.get('name', '')}{drawn}"),
                Cell(state.get("verifier") or ""),
                Cell(word, badge=BADGES.get(word, ""), title=why),
                *(figure_cell(name, one[name]) for name in names),
                *[Cell(number(reduction, ".1f"), reduction)] * reduced,
                Cell(f"n/a (temperature {temperature:g})" * (arm != "baseline"))
                if temperature
                else figure_cell("identical_outputs", identical),
            ]
        )
    columns = [(name, False) for name in ("arm", "proposer", "verifier", "losslessness")]
    columns += [(COLUMNS[name].heading, True) for name in names]
    return DataTable(
        columns + [("variance reduction", True)] * reduced + [("identical outputs", not temperature)], rows
    )


def peers_table(tables: Tables) -> DataTable | None:
    """Return the speed-ups over peers; None without peers."""
    speedups = metrics.speedups_over_peers(tables)
    arms = list(next(iter(speedups.values()), ()))
    rows = [[Cell(arm), *(figure_cell("speedup", one[arm]) for one in speedups.values())] for arm in arms]
    return DataTable([("arm", False), *((peer, True) for peer in speedups)], rows) if rows else None


def bounds_table(bounds: Mapping[str, Mapping[str, Any]]) -> DataTable | None:
    """Return the shares of the optimum and the parts of what is lost; None without."""
    rows = []
    for arm, one in bounds.items():
        for name, own in one.get("verifiers", {}).items():
            label = f"{name}{'' if own['lossless'] else ', lossy'}{' (used)' * own['used']}"
            shares = [_bound(own[share], ".1%") for share in ("share_first", "share")]
            lost = [_bound(own["lost"].get(part), ".3f") for part in ("verifier", "open", "tree", "draft")]
            most = _bound(one.get("optimum"), ".3f")
            rows.append([Cell(arm), Cell(label), _bound(own["tau"], ".3f"), most, Cell(one["kind"]), *shares, *lost])
    columns = [("arm", False), ("verifier", False), ("tau", True), ("optimal tau", True), ("which is", False)]
    columns += [("share, first level", True), ("share, tree", True)]
    columns += [(f"lost: {part}", True) for part in ("verifier", "open", "tree", "draft")]
    return DataTable(columns, rows) if rows else None


def _bound(value: Mapping[str, float | None] | None, form: str) -> Cell:
    """Return the cell of a mean with its interval."""
    if value is None or value["mean"] is None:
        return Cell("", float("nan"))
    ends = "" if value["low"] is None else f" [{value['low']:{form}}, {value['high']:{form}}]"
    return Cell(f"{value['mean']:{form}}{ends}", value["mean"])
