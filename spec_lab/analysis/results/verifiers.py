"""The result of ``task=verifier_study``: what verifiers accept of the same drafts, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.results.bounds import BOUNDS, bounds_notes
from spec_lab.results.result import (
    INTERVAL,
    REAL,
    Cell,
    DataTable,
    Result,
    Section,
    cell,
    ended_run,
    interval,
    run_title,
)

VERIFIER = {
    "lossless": bool, "kind": str, "expected_accepted": INTERVAL, "difference": INTERVAL, "share_of_bound": INTERVAL,
    "verify_us": {"median": REAL, "low": REAL, "high": REAL}, "share_of_forward": REAL,
}  # fmt: skip
SUMMARY = {
    "requests": int, "tokens": int, "every": int, "temperature": float, "errors": [str], "?bounds": {str: BOUNDS},
    "left_out": [{"proposer": str, "drawn": str, "verifier": str}],
    "proposers": {str: {"name": str, "drawn": str, "drafts": int, "drafted_per_draft": REAL, "?bound": INTERVAL,
                        "?target_forward_us": REAL, "?probabilities_us": REAL,
                        "?compared_with": (str, None), "verifiers": {str: VERIFIER}}},
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

ACCEPTED = (
    "Every verifier verifies the same drafts along texts of the target. Expected accepted: tokens per "
    "draft, from the verifier's exact probabilities given the draft, mean over sampled drafts; minus: the difference "
    "from the verifier that is named, paired; bound: the largest probability that at least one token is accepted, by "
    "optimal transport; of the bound: the verifier's probability, as a share of it. Lossy verifiers may exceed the "
    "bound, lossless ones by the sampling error of the drafts only. 95 % intervals over prompts. *: means of sampled "
    "outcomes, where the draft's noise determines what is accepted, with a larger sampling error."
)
TIMES = (
    "Microseconds of verification and choice, median and quartiles, with p in the processor's cache, and their share "
    "of the target's forward."
)


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    proposers = {name: facts for name, facts in summary["proposers"].items() if facts["drafts"]}
    drawn = {name: partial(figures.verifier_panels, proposers, name) for name in ("accepted", "time")}
    together = _together(proposers)
    accepted = [Section(_title(name, facts), ACCEPTED * (name == [*proposers][-1]), _accepted(together, name))
                for name, facts in proposers.items()]  # fmt: skip
    left_out: dict[str, list[str]] = {}
    for pair in summary["left_out"]:
        left_out.setdefault(f"{pair['proposer']} (drawn {pair['drawn']})", []).append(pair["verifier"])
    pairs = "; ".join(f"{proposer} with {', '.join(each)}" for proposer, each in left_out.items())
    notes = [f"Left out, as the verifiers do not support such drafts: {pairs}."] * bool(pairs)
    times = [row for name, facts in proposers.items() for row in _times(name, facts)]
    columns = [("proposer", False), ("verifier", False), ("microseconds [quartiles]", True), ("of the forward", True)]
    return Result(
        run_title(manifest),
        f"{summary['requests']} prompts, {summary['tokens']} tokens of the target at temperature "
        f"{summary['temperature']:g}, a draft every {summary['every']} tokens",
        [
            *accepted,
            Section("Verifiers", "", together, {"accepted": drawn["accepted"]}, notes,
                    missing="No verifier verified a draft."),
            Section("Time", TIMES, DataTable(columns, times, len(times) > 8, ("proposer", "verifier")),
                    {"time": drawn["time"]}, bounds_notes(summary.get("bounds", {}))),
        ],
        warnings=summary["errors"][:5],
    )  # fmt: skip


def _title(name: str, facts: Mapping[str, Any]) -> str:
    kind, nodes = "" if name == facts["name"] else f"{facts['name']} ", cell(facts["drafted_per_draft"], ".3g").text
    bound = interval(facts.get("bound"))
    return f"{name}: {kind}drawn {facts['drawn']}, {nodes} nodes, {facts['drafts']} drafts" + f", bound {bound}" * bool(
        bound
    )


def _together(proposers: Mapping[str, Mapping[str, Any]]) -> DataTable:
    """Return what every verifier accepts of every proposer's drafts, in a table for a page, which filters its rows."""
    rows = []
    for name, facts in proposers.items():
        against = facts.get("compared_with") or ""
        for verifier, of in facts["verifiers"].items():
            badge = Cell("lossless", badge="good") if of["lossless"] else Cell("lossy", badge="warn")
            difference = Cell("", float("nan")) if verifier == against else cell(of["difference"], "+.3f")
            label = Cell(figures.verifier_label(verifier, of))
            shown = [cell(of["expected_accepted"]), difference, Cell(against * bool(difference.text)),
                     cell(of["share_of_bound"])]  # fmt: skip
            rows.append([Cell(name, colour=figures.colour(name)), Cell(facts["drawn"]), label, badge, *shown])
    columns = [(name, False) for name in ("proposer", "drawn", "verifier", "losslessness")]
    columns += [("expected accepted", True), ("difference", True), ("minus", False), ("of the bound", True)]
    filters = ("proposer", "drawn", "verifier", "losslessness")
    return DataTable(columns, rows, len(rows) > 8, filters, more=[name for name, _ in columns])


def _accepted(together: DataTable, proposer: str) -> DataTable:
    """Return the rows of a proposer, the verifier that others are compared with in a heading."""
    rows = [row for row in together.rows if row[0].text == proposer]
    against = next((row[6].text for row in rows if row[6].text), "")
    kept = (2, 3, 4, 5, 7)
    columns = [together.columns[number] if number != 5 else (f"minus {against}", True) for number in kept]
    return DataTable(columns, [[row[number] for number in kept] for row in rows], more=("losslessness",))


def _times(name: str, facts: Mapping[str, Any]) -> Iterator[list[Cell]]:
    """Yield the rows of a proposer's verifiers, the target's forward and its probabilities before them."""
    shown, forward = Cell(name, colour=figures.colour(name)), facts.get("target_forward_us")
    for what, spent in (("target", forward), ("probabilities", facts.get("probabilities_us"))):
        if spent and forward:
            yield [shown, Cell(what), cell(spent, ".0f"), cell(spent / forward, ".1%")]
    for verifier, of in facts["verifiers"].items():
        spent = of["verify_us"] | {"mean": of["verify_us"]["median"]}
        yield [shown, Cell(verifier), cell(spent, ".0f"), cell(of["share_of_forward"], ".1%")]
