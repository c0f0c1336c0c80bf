"""Bounds of recorded draft trees: how close verifiers come to the optimum, and where the other tokens are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spec_lab.results.result import INTERVAL, REAL, Cell, DataTable, cell

PARTS = ("verifier", "open", "tree", "draft")
"""Parts of the loss."""

BOUNDS = {
    "?needs": str, "?kind": str, "?depth": REAL, "?optimum": INTERVAL, "?spechub": INTERVAL, "?spechub_kind": str,
    "?verifiers": {str: {"used": bool, "lossless": bool, "tau": INTERVAL, "share": INTERVAL, "share_first": INTERVAL,
                         "lost": {str: INTERVAL}}},
}  # fmt: skip
"""Fields that are read of an arm's ``bounds`` in ``summary.json``."""

NOTE = (
    "Share of the optimum: of optimal transport where only the first level is drafted; of the most that any lossless "
    "verifier can accept of the trees (exact, or a bound that no verifier need reach). Lost tokens sum to depth + 1 - "
    "tau. Verifier: the best lossless one here accepts more; open: none here does, but the bound permits it; tree: "
    "another tree of as many nodes, an estimate; draft: the rest. 95 % intervals over requests. Lossy verifiers may "
    "exceed the optimum. SpecHub: two drafts of its own, over the optimum of the first "
    "level. *: the run's verifier. See docs/bounds.md."
)


def named(verifier: str, lossless: bool) -> str:
    """Return the name of a verifier, marked if it is lossy."""
    return verifier if lossless else f"{verifier}, lossy"


def bounds_table(
    bounds: Mapping[str, Mapping[str, Any]], form: str = ".3f", label: Callable[[str, bool], str] = named
) -> DataTable:
    """Return the shares of the optimum and the parts of what is lost, of every arm and verifier; the run's own has *.

    Args:
        bounds: of each arm, as in ``summary.json``.
        form: of numbers of tokens.
        label: returns the name of a verifier, from its name and whether it is lossless.
    """
    hubs = {arm: of_arm.get("spechub") for arm, of_arm in bounds.items()}
    known = any(share is not None and share["mean"] is not None for share in hubs.values())
    rows = []
    for arm, of_arm in bounds.items():
        for name, bound in of_arm.get("verifiers", {}).items():
            verifier = label(name, bound["lossless"]) + " *" * bound["used"]
            numbers = [cell(bound["tau"], form), cell(of_arm.get("optimum"), form), Cell(of_arm["kind"])]
            shares = [cell(bound[share], ".1%") for share in ("share_first", "share")]
            shares += [cell(hubs[arm], ".1%"), Cell(of_arm.get("spechub_kind", ""))] * known
            lost = [cell(bound["lost"].get(part), form) for part in PARTS]
            rows.append([Cell(arm), Cell(verifier), *numbers, *shares, *lost])
    columns = [("arm", False), ("verifier", False), ("tau", True), ("optimal tau", True), ("which is", False)]
    columns += [("share, first level", True), ("share, tree", True)]
    columns += [("SpecHub, first level", True), ("SpecHub is", False)] * known
    columns += [(f"lost: {part}", True) for part in PARTS]
    return DataTable(columns, rows, more=("optimal tau", "which is", "SpecHub is"))


def bounds_notes(bounds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why arms whose distributions were recorded have no bounds."""
    return [f"No bounds of {arm}: {of_arm['needs']}." for arm, of_arm in bounds.items() if of_arm.get("needs")]
