"""Tables of how well a confidence is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.results.result import REAL, Cell, DataTable, cell

MEANING = (
    "ECE: the expected calibration error (1706.04599), in ten equal bins. Brier: the mean squared distance of "
    "confidence and outcome. AUROC: the probability that a token for which it holds has a larger confidence than one "
    "for which it does not; 0.5 tells nothing."
)


def shape(happened: str) -> dict[str, Any]:
    """Return the shape of what ``metrics.reliability`` returns, of which older files lack figures.

    Args:
        happened: key of what happened.
    """
    means = {"confidence": REAL, happened: REAL}
    return {"ece": REAL, "?brier": REAL, "?auroc": REAL, **means, "bins": [{**means, "tokens": int}]}


def calibrations(by_name: Mapping[str, Mapping[str, Any]], heading: str, happened: str, label: str) -> DataTable:
    """Return the calibration of each confidence.

    Args:
        by_name: as ``metrics.reliability`` returns it, NaN as None, by what the confidence is of.
        heading: of that.
        happened: key of what happened.
        label: of what happened.
    """
    figures = ("confidence", happened, "ece", "brier", "auroc")
    rows = [
        [Cell(name), cell(sum(entry["tokens"] for entry in facts["bins"]), ".0f"),
         *(cell(facts.get(figure), ".3f") for figure in figures)]
        for name, facts in by_name.items()
    ]  # fmt: skip
    headings = ("tokens", "mean confidence", label, "ECE", "Brier", "AUROC")
    return DataTable([(heading, False), *((name, True) for name in headings)], rows)
