"""Bounds of recorded draft trees: how close verifiers come to the optimum, and where the other tokens are lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.results.result import INTERVAL, REAL, Cell, DataTable, cell

PARTS = ("verifier", "open", "tree", "draft")
"""Of what is lost."""

BOUNDS = {
    "?needs": str, "?kind": str, "?depth": REAL, "?optimum": INTERVAL,
    "?verifiers": {str: {"used": bool, "lossless": bool, "tau": INTERVAL, "share": INTERVAL, "share_first": INTERVAL,
                         "lost": {str: INTERVAL}}},
}  # fmt: skip
"""What is read of an arm's ``bounds`` in ``summary.json``."""

NOTE = (
    "Share of the optimum: of optimal transport where only the first level is drafted; of the most that any lossless "
    "verifier can accept of the trees (exact, or a bound that no verifier need reach). Lost tokens sum to depth + 1 - "
    "tau. Verifier: the best lossless one here accepts more; open: none here does, but the bound permits it; tree: "
    "another tree of as many nodes, an estimate; draft: the rest. 95 % intervals over requests. Lossy verifiers may "
    "exceed the optimum. See docs/bounds.md."
)


def bounds_table(bounds: Mapping[str, Mapping[str, Any]]) -> DataTable:
    """Return the shares of the optimum and the parts of what is lost, of every arm and verifier."""
    rows = []
    for arm, of_arm in bounds.items():
        for name, own in of_arm.get("verifiers", {}).items():
            label = f"{name}{'' if own['lossless'] else ', lossy'}{' (used)' * own['used']}"
            numbers = [cell(own["tau"], ".3f"), cell(of_arm.get("optimum"), ".3f"), Cell(of_arm["kind"])]
            shares = [cell(own[share], ".1%") for share in ("share_first", "share")]
            rows.append([Cell(arm), Cell(label), *numbers, *shares, *(cell(own["lost"].get(p), ".3f") for p in PARTS)])
    columns = [("arm", False), ("verifier", False), ("tau", True), ("optimal tau", True), ("which is", False)]
    columns += [(name, True) for name in ("share, first level", "share, tree", *(f"lost: {part}" for part in PARTS))]
    return DataTable(columns, rows, more=("optimal tau", "which is"))


def bounds_notes(bounds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why arms whose distributions were recorded have no bounds."""
    return [f"No bounds of {arm}: {of_arm['needs']}." for arm, of_arm in bounds.items() if of_arm.get("needs")]
