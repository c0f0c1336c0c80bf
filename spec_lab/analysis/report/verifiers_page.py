"""The page about a verifier study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.names import arm_names, renamed
from spec_lab.analysis.report.facts import ended_summary, page_of_run
from spec_lab.analysis.report.page import Cell, DataTable, Section, render, value_cell
from spec_lab.results.manifest import begun

REAL = (float, None)
VALUE = {"mean": REAL, "low": REAL, "high": REAL}
VERIFIER = {
    "lossless": bool, "kind": str, "expected_accepted": VALUE, "difference": VALUE, "share_of_bound": VALUE,
    "verify_us": {"median": REAL, "low": REAL, "high": REAL}, "share_of_forward": REAL,
}  # fmt: skip
SUMMARY = {
    "requests": int, "tokens": int, "every": int, "temperature": float, "errors": [str],
    "left_out": [{"proposer": str, "drawn": str, "verifier": str}],
    "proposers": {str: {"name": str, "drawn": str, "drafts": int, "drafted_per_draft": REAL, "?bound": VALUE,
                        "?compared_with": (str, None), "verifiers": {str: VERIFIER}}},
}  # fmt: skip
"""What is read of ``summary.json``."""

ACCEPTED = (
    "Every verifier verifies the same drafts along texts of the target. Expected accepted: tokens per "
    "draft, from the verifier's exact probabilities given the draft, mean over sampled drafts; minus: the difference "
    "from the verifier that is named, paired; of the bound: its probability to accept at least one token, as a share "
    "of the largest possible (optimal transport). Lossy verifiers may exceed the bound, lossless ones by the sampling "
    "error of the drafts only. 95 % intervals over prompts. *: means of sampled outcomes, where the draft's noise "
    "determines what is accepted. Times are medians, with p in the processor's cache."
)


def page(folder: Path) -> str:
    """Return the page's text; writes the figures to ``figures/`` as well.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = begun(folder) or {}, ended_summary(folder, SUMMARY)
    names = arm_names({arm: one["name"] for arm, one in summary["proposers"].items()})
    proposers = {name: one for name, one in renamed(summary["proposers"], names).items() if one["drafts"]}
    content = page_of_run(
        folder,
        manifest,
        lead=f"{summary['requests']} prompts, {summary['tokens']} tokens of the target at temperature "
        f"{summary['temperature']:g}, a draft every {summary['every']} tokens",
        warnings=summary["errors"][:5],
        drawn=figures.verifier_figures(proposers),
    )
    sections = [
        Section("Verifiers", ACCEPTED, _table(proposers), ["accepted", "time"], _notes(summary, names),
                missing="No verifier verified a draft."),
    ]  # fmt: skip
    return render("sections", content, folder, sections=sections)


def _table(proposers: Mapping[str, Mapping[str, Any]]) -> DataTable:
    rows = []
    for name, proposer in proposers.items():
        for verifier, one in proposer["verifiers"].items():
            against = proposer.get("compared_with")
            kind = Cell("lossless", badge="good") if one["lossless"] else Cell("lossy", badge="warn")
            time = {
                "mean": one["verify_us"]["median"],
                "low": one["verify_us"]["low"],
                "high": one["verify_us"]["high"],
            }
            rows.append(
                [
                    Cell(name, colour=figures.colour(name)),
                    Cell(proposer["drawn"]),
                    Cell(figures.verifier_label(verifier, one).replace(" (lossy)", "")),
                    kind,
                    value_cell(one["expected_accepted"]),
                    value_cell(None if verifier == against else one["difference"], "+.3f"),
                    Cell("" if verifier == against else against or ""),
                    value_cell(one["share_of_bound"]),
                    value_cell(time, ".0f"),
                    value_cell(one["share_of_forward"], ".1%"),
                ]
            )
    columns = [(name, False) for name in ("proposer", "drawn", "verifier", "losslessness")]
    columns += [("expected accepted [95 %]", True), ("difference [95 %]", True), ("minus", False)]
    columns += [("of the bound [95 %]", True), ("microseconds [quartiles]", True), ("of the forward", True)]
    return DataTable(columns, rows, len(rows) > 8, ("proposer", "drawn", "verifier", "losslessness"))


def _notes(summary: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    pairs = [f"{names.get(one['proposer'], one['proposer'])} (drawn {one['drawn']}) with {one['verifier']}"
             for one in summary["left_out"]]  # fmt: skip
    return [f"Left out, as the verifiers do not support such drafts: {'; '.join(pairs)}."] if pairs else []
