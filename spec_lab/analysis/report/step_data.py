"""Data shown at a click on a step of an output: one JSON block, of bounded size, that the page's script reads.

Every text in it has passed ``visible``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from spec_lab.analysis import figures
from spec_lab.analysis.figures.palette import on_dark
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.report.step_tree import StepTree, Verification, read_tree, reason
from spec_lab.core.request import BROKEN
from spec_lab.core.terminal import visible

MAX_DATA = 4_000_000
"""Most characters of the JSON block of steps."""
MAX_STEPS = 5_000
MAX_TOKEN_LETTERS = 64

SPACES = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})

PHASES = {
    "propose": ("draft", figures.PHASES["propose_forward"]),
    "mask_wait": ("wait for masks", figures.PHASES["mask_wait"]),
    "target": ("target", figures.PHASES["target_forward"]),
    "probabilities": ("probabilities", figures.PHASES["probabilities"]),
    "verify": ("verify", figures.PHASES["verify"]),
    "commit": ("commit", figures.PHASES["commit"]),
}
"""Columns of ``forwards`` that add up to a step, in its order: label and colour."""


def step_data(
    tables: Tables, requests: list[int], arms: list[str], how: Mapping[str, Verification], texts: Mapping[int, str]
) -> tuple[dict[str, Any], str]:
    """Return what the page's script reads of the steps of some requests, and a note on what is left out.

    Args:
        requests: the requests shown, in order.
        arms: in order.
        how: how each arm verifies.
        texts: of tokens.
    """
    outputs: dict[str, list[dict[str, Any]]] = {}
    used: set[int] = set()
    letters = count = left = trees = 0

    def text(token: int) -> str:
        return token_text(texts.get(token, f"token {token}"))

    for key, row, forward in _steps_in_order(tables, requests, arms):
        if left or count == MAX_STEPS:
            left += 1
            continue
        tree = read_tree(row)
        entry = _step(row, forward, tree, lambda token: f"“{text(token)}”", how.get(row["arm"], Verification()))
        fresh = set() if tree is None else {*tree.tokens, *tree.emitted} - used
        size = len(embedded(entry)) + len(embedded({str(token): text(token) for token in fresh}))
        if letters + size > MAX_DATA:
            left += 1
            continue
        letters, count, trees, used = letters + size, count + 1, trees + (tree is not None), used | fresh
        outputs.setdefault(key, []).append(entry)
    data = {
        "phases": [[label, colour, on_dark(colour)] for label, colour in PHASES.values()],
        "texts": {str(token): text(token) for token in sorted(used)},
        "outputs": outputs,
    }
    notes = ["Click a token to see its step; the arrow keys lead to the next one."] * (count > 0)
    notes += [f"{left} later steps cannot be opened here: steps.parquet has them."] * (left > 0)
    notes += ["To see draft trees, run with record=drafts."] * (count > 0 and not trees)
    return data, " ".join(notes)


def _steps_in_order(
    tables: Tables, requests: list[int], arms: list[str]
) -> Iterator[tuple[str, dict[str, Any], Mapping[str, Any]]]:
    """Yield the steps of requests, by request, arm and sequence: the output's key, the row, and that of its forward."""
    place_of = {request: number for number, request in enumerate(requests)}
    order = {arm: number for number, arm in enumerate(arms)}
    steps = tables.steps[tables.steps["request"].isin(place_of) & tables.steps["arm"].isin(order)]
    rows = tables.forwards[tables.forwards["group"].isin(set(steps["group"]))]
    forwards = {(row["group"], row["arm"], row["forward"]): row for row in rows.to_dict("records")}
    ordered = sorted(
        steps.to_dict("records"),
        key=lambda row: (place_of[row["request"]], order[row["arm"]], row["sequence"], row["forward"]),
    )
    for row in ordered:
        forward = forwards.get((row["group"], row["arm"], row["forward"]), {})
        yield output_key(row["request"], row["arm"], row["sequence"]), row, forward


def _step(
    row: Mapping[str, Any],
    forward: Mapping[str, Any],
    tree: StepTree | None,
    text: Callable[[int], str],
    how: Verification,
) -> dict[str, Any]:
    """Return one step for the page's script. The script's comments explain the keys."""
    facts = [
        f"{row['nodes']} drafted tokens, depth {row['depth']}" if row["nodes"] else "",
        _accepted(row) if row["nodes"] else "",
        f"{row['emitted']} emitted",
        f"one forward with {forward['live'] - 1} other sequences" if forward.get("live", 1) > 1 else "",
        "the prompt's own forward" if row["prefill"] else "",
    ]
    step: dict[str, Any] = {
        "forward": row["forward"],
        "why": "" if tree is None else reason(row, tree, text, how),
        "facts": ", ".join(fact for fact in facts if fact),
        "ms": [_milliseconds(forward[name]) for name in PHASES] if forward else [],
    }
    if tree is not None:
        step["tree"] = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            **{name: [_short(number) for number in getattr(tree, name)] for name in ("p", "q", "accept")},
            "illegal": tree.illegal,
            "forced": tree.forced,
            "path": tree.path,
            "emitted": tree.emitted,
            "origins": tree.origins,
            "kept": int(row["emitted_kept"]),
            "emitted_p": _short(tree.emitted_p),
            "noise": row["expected_kind"] == "noise",
            "failed": row["finish"] in BROKEN and not tree.emitted,
        }
    return step


def _accepted(row: Mapping[str, Any]) -> str:
    """How many drafted tokens were accepted, and how many were expected: these are without forced ones."""
    forced, expected = row["forced_accepted"], row["expected_accepted"]
    of_them = f", {forced} of them forced" if forced else ""
    others = " of the others" if row["forced"] else ""
    known = isfinite(expected) and row["expected_kind"] != "noise"  # given the noise it is what was accepted
    return f"{row['accepted']} accepted{of_them}" + (f" (expected{others} {expected:.2f})" if known else "")


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3) if isfinite(seconds) and seconds > 0 else 0.0


def _short(value: float | None) -> float | None:
    """A probability with four digits."""
    return None if value is None else float(f"{value:.4g}")


def embedded(data: Mapping[str, Any]) -> Markup:
    """Return data as JSON that cannot end the script element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def token_text(text: str) -> str:
    """Return a token's text as the page shows it: one line, in which every character can be seen."""
    return visible(text[:MAX_TOKEN_LETTERS]).translate(SPACES) or "(no text)"


def output_key(request: int, arm: str, sequence: int) -> str:
    """Return what names an output in a link: REQUEST/ARM/SEQUENCE."""
    return f"{request}/{quote(arm, safe='')}/{sequence}"
