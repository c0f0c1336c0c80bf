"""The page about a certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.report.facts import page_of_run, read_summary
from spec_lab.analysis.report.page import Cell, DataTable, Section, render, value_cell
from spec_lab.results.manifest import begun

REAL = (float, None)
TEST = {"name": str, "samples": int, "p_value": REAL, "detectable": REAL}
CONTROL = {**TEST, "p_value": float}
PAIR = {
    "proposer": str, "drawn": str, "verifier": str, "declared_lossless": bool, "?certified": (str, None),
    "?result": str, "failed": (str, None), "sampled_tv": REAL, "sampled": [TEST],
    "exact": {"instances": int, "worst_tv": REAL, "worst_instance": (str, None), "own_target_tv": REAL,
              "failure": (str, None), "drafts": str, "missing": [str]},
}  # fmt: skip
CURVE = {"sizes": [int], "expected": [REAL], "control": [REAL],
         "pairs": [{"verifier": str, "lossless": bool, "distances": [REAL]}]}  # fmt: skip
SUMMARY = {
    "complete": bool, "certified": (bool, None), "failed": [str], "pairs": [PAIR], "left_out": [str], "alpha": float,
    "power": float, "?control": (None, CONTROL), "?convergence": CURVE,
    "?constraint": (None, {"?masks": (None, {
        "rows": int, "different": int, "texts": int, "refused_prompts": int, "refusal": (str, None),
        "failed": (str, None), "first": (None, {"text": str, "request": str})})}),
}  # fmt: skip
"""What is read of ``certificate.json``."""

JOINT_DISTRIBUTION = "joint distribution of four tokens"
"""The name of the test of sampled texts; all others are of the real target."""

BADGES = {"FAILS": "bad", "lossy": "warn", "no bias found": "plain", "masks are wrong": "bad"}

VERDICTS = (
    "Each pair of proposer and verifier is examined in three layers. Enumerated: every outcome of toy instances, in "
    "float64; the total variation from the target's distribution is exact. Sampled texts: the decode loop in float32 "
    "on a toy, tested by chi-square. Real target: tokens of the target's own model, tested against plain forwards. "
    "Own target: the distribution against which a lossy verifier declares to be exact."
)
DETECTABLE = (
    "The smallest total variation that each sampled test would have detected, with power {power:g} at level "
    "{alpha:g}, before Holm's correction over all tests; per text for texts of a toy, per token for the real target. "
    "A smaller bias can go unnoticed there; enumeration has no such limit."
)
CONVERGENCE = (
    "Total variation between sampled texts and the target's distribution. Of a lossless pair it falls as 1 / sqrt(n); "
    "of a biased one it stops at the bias. Dashed: declared lossy. The control is a wrong verifier, which every test "
    "must detect."
)


def page(folder: Path) -> str:
    """Return the page's text; writes the figures to ``figures/`` as well.

    Of a certificate that is not complete, finished pairs are shown.

    Raises:
        ValueError: files that are not readable; no pair is finished.
    """
    manifest, found = begun(folder) or {}, read_summary(folder, SUMMARY, "certificate.json")
    if not found:
        raise ValueError(f"{folder} has no certificate.json: no pair of proposer and verifier is finished yet")
    pairs = found["pairs"]
    content = page_of_run(
        folder, manifest,
        lead=_lead(found),
        warnings=[] if found["complete"] else [
            "This certificate is not complete: its pairs are those examined so far, unconfirmed and without a control."
        ],
        drawn=figures.certificate_figures(found),
    )  # fmt: skip
    masks = (found.get("constraint") or {}).get("masks")
    sections = [
        Section("Verdicts", VERDICTS, _verdicts(pairs, masks), notes=_notes(found), failures=found["failed"]),
        Section("Smallest detectable bias", DETECTABLE.format(**found), _tests(pairs), ["detectable"]),
        Section("Convergence", CONVERGENCE, None, ["convergence"],
                missing="certificate.json holds no convergence: it is incomplete, or of an older version."),
    ]  # fmt: skip
    if masks:
        sections.insert(1, _masks(masks))
    return render("sections", content, folder, sections=sections)


def _lead(found: Mapping[str, Any]) -> str:
    whole = {True: "every pair that is declared lossless is certified", False: "NOT every pair is certified"}
    count = len(found["pairs"])
    return f"{count} pair{'s' * (count != 1)} of proposer and verifier" + (
        f"; {whole[found['certified']]}" if found["certified"] is not None else ""
    )


def _verdicts(pairs: Sequence[Mapping[str, Any]], masks: Mapping[str, Any] | None) -> DataTable:
    rows = []
    for pair in pairs:
        exact = pair["exact"]
        texts: Mapping[str, Any] = next((test for test in pair["sampled"] if test["name"] == JOINT_DISTRIBUTION), {})
        scored = (test for test in pair["sampled"] if test["name"] != JOINT_DISTRIBUTION)
        wrong = masks and masks["failed"] and pair["declared_lossless"]
        word = "masks are wrong" if wrong else pair.get("result") or _word(pair)
        drafts = "" if exact["drafts"] == "proposer" else ", reference drafts"
        enumerated = f"{exact['instances']} instances{drafts}" if exact["instances"] else "not enumerated"
        least = min((test["p_value"] for test in scored if test["p_value"] is not None), default=None)
        rows.append(
            [
                Cell(pair["proposer"]),
                Cell(pair["drawn"]),
                Cell(pair["verifier"]),
                Cell("lossless" if pair["declared_lossless"] else "lossy"),
                Cell(word, badge=_badge(word), title=pair["failed"] or ""),
                Cell(enumerated, title=exact["worst_instance"] or ""),
                value_cell(exact["worst_tv"], ".2g"),
                value_cell(exact["own_target_tv"], ".2g"),
                value_cell(texts.get("p_value"), ".2g"),
                value_cell(least, ".2g"),
            ]
        )
    names = ("proposer", "drawn", "verifier", "declared", "result", "enumerated")
    numbers = ("largest TV", "TV from own target", "p, sampled texts", "smallest p, real target")
    columns = [*((name, False) for name in names), *((name, True) for name in numbers)]
    return DataTable(columns, rows, len(rows) > 8, ("proposer", "drawn", "verifier", "result"))


def _word(pair: Mapping[str, Any]) -> str:
    """Return the result in a word, of a certificate of an older version."""
    return "FAILS" if pair["failed"] else str(pair.get("certified") or "not certified")


def _badge(word: str) -> str:
    return next((badge for known, badge in BADGES.items() if word.startswith(known)), "good" if word else "")


def _tests(pairs: Sequence[Mapping[str, Any]]) -> DataTable:
    rows = [
        [Cell(figures.pair_name(pair)), Cell(test["name"]), value_cell(test["samples"], ".0f"),
         value_cell(test["p_value"], ".2g"), value_cell(test["detectable"], ".2%")]
        for pair in pairs for test in pair["sampled"]
    ]  # fmt: skip
    columns = [("pair", False), ("test", False), ("samples", True), ("p", True), ("detectable TV", True)]
    return DataTable(columns, rows, filters=("pair", "test"))


def _notes(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{figures.pair_name(pair)}: not enumerated: {why}" for pair in found["pairs"]
             for why in pair["exact"]["missing"]]  # fmt: skip
    if found["left_out"]:
        lines.append(f"Left out, as the verifier does not support such drafts: {'; '.join(found['left_out'])}.")
    if control := found.get("control"):
        lines.append(f"The control, a wrong verifier, has p = {control['p_value']:.1g} in the test of sampled texts.")
    return lines


def _masks(masks: Mapping[str, Any]) -> Section:
    lines = [
        f"{masks['rows']} masks of random drafts were compared with those of states that processed no draft, on "
        f"{masks['texts']} texts: {masks['different'] or 'none'} differ."
    ]
    if masks["refused_prompts"]:
        lines.append(f"The constraint refuses {masks['refused_prompts']} of the prompts: {masks['refusal']}")
    if first := masks["first"]:
        lines.append(f"The first text whose mask differs, of request {first['request']}: {first['text']}")
    how = "The run's own constraint and vocabulary. Where masks are wrong, no pair is lossless under this constraint."
    return Section("Masks of the constraint", how, notes=lines, failures=[masks["failed"]] if masks["failed"] else [])
