"""The result of ``+experiment=certify``: which pairs of proposer and verifier are lossless, and how this is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.results.result import REAL, Cell, DataTable, Result, Section, cell, number, read_run, run_title

TEST = {"name": str, "samples": int, "p_value": REAL, "detectable": REAL}
CONTROL = {**TEST, "p_value": float}
PAIR = {
    "proposer": str, "drawn": str, "verifier": str, "declared_lossless": bool, "?certified": (str, None),
    "?result": str, "failed": (str, None), "sampled_tv": REAL, "sampled": [TEST], "?chains_only": bool,
    "exact": {"instances": int, "worst_tv": REAL, "worst_instance": (str, None), "own_target_tv": REAL,
              "failure": (str, None), "drafts": str, "missing": [str]},
}  # fmt: skip
CURVE = {"sizes": [int], "expected": [REAL], "control": [REAL],
         "pairs": [{"verifier": str, "lossless": bool, "distances": [REAL]}]}  # fmt: skip
SUMMARY = {
    "complete": bool, "certified": (bool, None), "failed": [str], "pairs": [PAIR], "left_out": [str], "alpha": float,
    "power": float, "?control": (None, CONTROL), "?convergence": CURVE,
    "?constraint": (None, {"?masks": (None, {
        "rows": int, "different": int, "texts": int, "?steps": int, "?longest": int, "refused_prompts": int,
        "refusal": (str, None), "failed": (str, None), "first": (None, {"text": str, "request": str})})}),
}  # fmt: skip
"""Fields that are read of ``certificate.json``."""

JOINT_DISTRIBUTION = "joint distribution of four tokens"
"""The name of the test of sampled texts; all others are of the real target."""

BADGES = {"FAILS": "bad", "lossy": "warn", "no bias found": "plain", "masks are wrong": "bad"}

VERDICTS = (
    "TV: enumerated, not sampled: every outcome of {instances} toy instances, trees to depth 3, in float64; the "
    "largest total variation between the distributions of the output and of the target, exact up to 1e-12 (*: of "
    "sampled texts, as Gumbel noise cannot be enumerated; r: a reference drafts in place of the proposer). p, texts: "
    "sampled. Chi-square of {samples} texts of four toy tokens from the decode loop in float32, with the proposer's "
    "own tree. p, model: sampled. Smallest p-value of the score tests of the real target's tokens against plain "
    "forwards."
)
MEANINGS = {
    "TV from own target": "TV from own target: from the distribution against which a lossy verifier declares to be "
    "exact."
}
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
Pairs = Sequence[Mapping[str, Any]]


def result(folder: Path) -> Result:
    """Return the result in a run's directory. Of a certificate that is not complete, finished pairs are shown.

    Raises:
        ValueError: files that are not readable; no pair is finished.
    """
    manifest, certificate = read_run(folder, SUMMARY, "certificate.json")
    if not certificate:
        raise ValueError(f"{folder} has no certificate.json: no pair of proposer and verifier is finished yet")
    pairs, masks, control = (
        certificate["pairs"],
        (certificate.get("constraint") or {}).get("masks"),
        certificate.get("control"),
    )
    count, known = len(pairs), {True: "; every pair that is declared lossless is certified", None: ""}
    samples = max((test["samples"] for pair in pairs for test in pair["sampled"][:1]), default=0)
    counts = [pair["exact"]["instances"] for pair in pairs if pair["exact"]["instances"]] or [0]
    how = VERDICTS.format(samples=samples, instances=" to ".join(map(str, sorted({min(counts), max(counts)}))))
    curves = certificate.get("convergence")
    drawn = {"convergence": partial(figures.convergence, curves)} if curves else {}
    verdicts = Section(
        "Certificates", how, _verdicts(pairs, masks), notes=_notes(certificate), failures=certificate["failed"]
    )
    sections = [
        verdicts,
        *([_masks(masks)] if masks else []),
        Section("Smallest detectable bias", DETECTABLE.format(**certificate), _tests(pairs),
                {"detectable": partial(figures.detectable, pairs)}),
        Section("Convergence", CONVERGENCE, None, drawn,
                missing="certificate.json holds no convergence: it is incomplete, or of an older version."),
    ]  # fmt: skip
    warnings = []
    if not certificate["complete"]:
        warnings = [
            "This certificate is not complete: its pairs are those examined so far, unconfirmed and without a control."
        ]
    elif control and control["p_value"] >= certificate["alpha"]:
        warnings = ["The control was not detected: too few samples. Raise task.samples."]
    lead = f"{count} pair{'s' * (count != 1)} of proposer and verifier"
    lead += known.get(certificate["certified"], "; NOT every pair is certified")
    return Result(run_title(manifest), lead, sections, warnings=warnings)


def _verdicts(pairs: Pairs, masks: Mapping[str, Any] | None) -> DataTable:
    rows = []
    for pair in pairs:
        exact = pair["exact"]
        texts: Mapping[str, Any] = next((test for test in pair["sampled"] if test["name"] == JOINT_DISTRIBUTION), {})
        scored = (test["p_value"] for test in pair["sampled"] if test["name"] != JOINT_DISTRIBUTION)
        least = min((value for value in scored if value is not None), default=None)
        wrong = masks and masks["failed"] and pair["declared_lossless"]
        older = "FAILS" if pair["failed"] else str(pair.get("certified") or "not certified")
        word = "masks are wrong" if wrong else pair.get("result") or older
        badge = next((badge for known, badge in BADGES.items() if word.startswith(known)), "good" if word else "")
        reference = exact["drafts"] != "proposer"
        tv = cell(exact["worst_tv"], ".2g")
        if tv.text and reference:
            tv = Cell(f"{tv.text} r", tv.value)
        elif not tv.text and not pair["declared_lossless"] and pair["sampled_tv"] is not None:
            tv = Cell(f"{pair['sampled_tv']:.2g} *", pair["sampled_tv"])
        drafts = ", reference drafts" * reference
        enumerated = f"{exact['instances']} instances{drafts}" if exact["instances"] else "not enumerated"
        rows.append(
            [
                *(Cell(pair[name]) for name in ("proposer", "drawn", "verifier")),
                Cell("lossless" if pair["declared_lossless"] else "lossy"),
                Cell(word, badge=badge, title=pair["failed"] or ""),
                Cell(enumerated, title=exact["worst_instance"] or ""),
                tv,
                *(cell(value, ".2g") for value in (exact["own_target_tv"], texts.get("p_value"), least)),
            ]
        )
    names = ("proposer", "drawn", "verifier", "declared", "result", "enumerated")
    columns = [*((name, False) for name in names)]
    columns += [(name, True) for name in ("TV", "TV from own target", "p, texts", "p, model")]
    more = ("declared", "enumerated", "TV from own target")
    return DataTable(columns, rows, len(rows) > 8, ("proposer", "drawn", "verifier", "result"), more, MEANINGS)


def _tests(pairs: Pairs) -> DataTable:
    rows = [
        [Cell(figures.pair_name(pair)), Cell(test["name"]), cell(test["samples"], ".0f"),
         cell(test["p_value"], ".2g"), cell(test["detectable"], ".2%")]
        for pair in pairs for test in pair["sampled"]
    ]  # fmt: skip
    columns = [("pair", False), ("test", False), ("samples", True), ("p", True), ("detectable TV", True)]
    return DataTable(columns, rows, filters=("pair", "test"), more=[name for name, _ in columns])


def _notes(certificate: Mapping[str, Any]) -> list[str]:
    tests: dict[str, list[Mapping[str, Any]]] = {}
    for pair in certificate["pairs"]:
        for test in pair["sampled"]:
            tests.setdefault(test["name"], []).append(test)
    each = [
        f"{name} {number(max(test['detectable'] or 0 for test in sampled), '.1%')} "
        f"({min(test['samples'] for test in sampled)} {'texts' if name == JOINT_DISTRIBUTION else 'tokens'} or more)"
        for name, sampled in tests.items()
    ]
    power = f"with power {certificate['power']:g} at level {certificate['alpha']:g}"
    known = f"Sampled tests detect a TV of: {', '.join(each)}, {power}, before Holm's correction over all tests."
    lines = [known] * bool(each)
    if control := certificate.get("control"):
        lines.append(f"The control, a wrong verifier, has p = {control['p_value']:.1g} in the test of sampled texts.")
    if certificate["left_out"]:
        lines.append(f"Left out, as the verifier does not support such drafts: {'; '.join(certificate['left_out'])}.")
    for pair in certificate["pairs"]:
        name = figures.pair_name(pair)
        lines += [f"{name}: chains only, as the verifier declares."] * pair.get("chains_only", False)
        lines += [f"{name}: not enumerated: {why}" for why in pair["exact"]["missing"]]
    return lines


def _masks(masks: Mapping[str, Any]) -> Section:
    size = f" ({masks['steps']} steps, texts of up to {masks['longest']} tokens)" if "steps" in masks else ""
    lines = [
        f"{masks['rows']} masks of random drafts were compared with those of states that processed no draft, on "
        f"{masks['texts']} texts{size}: {masks['different'] or 'none'} differ."
    ]
    if not masks["rows"]:
        lines = ["No masks were compared, as the constraint refuses every prompt."]
    if masks["refused_prompts"]:
        lines.append(f"The constraint refuses {masks['refused_prompts']} of the prompts: {masks['refusal']}")
    if first := masks["first"]:
        lines.append(f"The first text whose mask differs, of request {first['request']}: {first['text']}")
    how = "The run's own constraint and vocabulary. Where masks are wrong, no pair is lossless under this constraint."
    return Section("Masks of the constraint", how, notes=lines, failures=[masks["failed"]] if masks["failed"] else [])
