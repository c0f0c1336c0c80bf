"""The token view of a run's page: outputs as text, and every step of them with its draft tree.

The texts are part of the page. What a click on a step shows is one JSON block, of bounded size, that the page's script
reads; every text in it has passed ``visible``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from spec_lab.analysis import metrics
from spec_lab.analysis.figures import style
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.report.step_tree import StepTree, Verification, read_tree, reason
from spec_lab.core.terminal import visible
from spec_lab.engine.request import FINISHES
from spec_lab.results.writer import load_token_texts

MAX_PROMPTS = 50
MAX_LETTERS = 600_000
"""Most letters of all outputs shown; browsers open larger pages slowly."""
MAX_PROMPT_LETTERS = 600
MAX_PROMPT_LINES = 12
MAX_DATA = 4_000_000
"""Most characters of the JSON block of steps."""
MAX_STEPS = 5_000
MAX_TOKEN_LETTERS = 64

MARKS = {"accepted": "a", "forced": "f"}
"""The CSS class of each kind of span that is shaded."""

SPACES = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})

PHASES = {
    "propose": ("draft", style.PHASES["propose_forward"]),
    "mask_wait": ("wait for masks", style.PHASES["mask_wait"]),
    "target": ("target", style.PHASES["target_forward"]),
    "probabilities": ("probabilities", style.PHASES["probabilities"]),
    "verify": ("verify", style.PHASES["verify"]),
    "commit": ("commit", style.PHASES["commit"]),
}
"""Columns of ``rounds`` that add up to a step, in its order: label and colour."""


@dataclass(frozen=True)
class TokenView:
    """What ``tokens.html.j2`` shows.

    Args:
        prompts: with the outputs of every arm.
        shown: a note on how many prompts are shown.
        steps: a note on which steps can be opened, and how trees are recorded.
        data: the JSON block of the steps, safe inside a script element.
    """

    prompts: list[dict[str, Any]]
    shown: str
    steps: str
    data: Markup


def token_view(folder: Path, tables: Tables, arms: list[str], how: Mapping[str, Verification]) -> TokenView:
    """Return the token view of a run.

    Args:
        folder: the run's directory; the texts of tokens are read from it.
        tables: its rows, arms by the names under which they are shown.
        arms: these names, in order.
        how: how each arm verifies.

    Raises:
        Unreadable: the table of tokens is not readable.
    """
    prompts, shown = _prompts(tables, arms)
    texts = load_token_texts(folder) if "draft_tokens" in tables.steps else {}
    data, note = step_data(tables, [one["request"] for one in prompts], arms, how, texts)
    return TokenView(prompts, shown, note, embedded(data))


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


# Steps ---------------------------------------------------------------------------------------------------------------


def step_data(
    tables: Tables, requests: list[int], arms: list[str], how: Mapping[str, Verification], texts: Mapping[int, str]
) -> tuple[dict[str, Any], str]:
    """Return what the page's script reads of the steps of some requests, and a note on what is left out.

    Args:
        tables: the rows.
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
        tree = read_tree(row)
        one = _step(row, forward, tree, lambda token: f"“{text(token)}”", how.get(row["arm"], Verification()))
        fresh = set() if tree is None else {*tree.tokens, *tree.emitted} - used
        size = len(json.dumps(one, separators=(",", ":"))) + sum(len(json.dumps(text(token))) + 10 for token in fresh)
        if left or letters + size > MAX_DATA or count == MAX_STEPS:
            left += 1
            continue
        letters, count, trees, used = letters + size, count + 1, trees + (tree is not None), used | fresh
        outputs.setdefault(key, []).append(one)
    data = {
        "phases": [list(one) for one in PHASES.values()],
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
    place = {request: number for number, request in enumerate(requests)}
    order = {arm: number for number, arm in enumerate(arms)}
    steps = tables.steps[tables.steps["request"].isin(place) & tables.steps["arm"].isin(order)]
    rounds = tables.rounds[tables.rounds["group"].isin(set(steps["group"]))]
    forwards = {(one["group"], one["arm"], one["round"]): one for one in rounds.to_dict("records")}
    ordered = sorted(
        steps.to_dict("records"),
        key=lambda row: (place[row["request"]], order[row["arm"]], row["sequence"], row["round"]),
    )
    for row in ordered:
        forward = forwards.get((row["group"], row["arm"], row["round"]), {})
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
        f"{row['accepted']} accepted (expected {row['expected_accepted']:.2f})" if row["nodes"] else "",
        f"{row['emitted']} emitted",
        f"one forward with {forward['live'] - 1} other sequences" if forward.get("live", 1) > 1 else "",
        "the prompt's own forward" if row["prefill"] else "",
    ]
    step: dict[str, Any] = {
        "round": row["round"],
        "why": "" if tree is None else reason(row, tree, text, how),
        "facts": ", ".join(one for one in facts if one),
        "ms": [round(1e3 * max(0.0, forward[name]), 3) for name in PHASES] if forward else [],
    }
    if tree is not None:
        step["tree"] = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            **{name: [_short(one) for one in getattr(tree, name)] for name in ("p", "q", "accept")},
            "illegal": tree.illegal,
            "forced": tree.forced,
            "path": tree.path,
            "emitted": tree.emitted,
            "origins": tree.origins,
            "kept": int(row["emitted_kept"]),
            "emitted_p": _short(tree.emitted_p),
        }
    return step


def _short(value: float | None) -> float | None:
    """A probability with four digits."""
    return None if value is None else float(f"{value:.4g}")


# Texts ---------------------------------------------------------------------------------------------------------------


def _prompts(tables: Tables, arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the first prompts with every arm's output in spans, and a note on how many are shown."""
    every = list(dict.fromkeys(tables.requests["request"]))
    shown: list[dict[str, Any]] = []
    letters = 0
    for request in every[:MAX_PROMPTS]:
        of_request = (one[one["request"] == request] for one in (tables.steps, tables.requests))
        rows = Tables(tables.rounds, *of_request)
        letters += int(rows.requests["text"].str.len().sum())
        if shown and letters > MAX_LETTERS:
            break
        shown.append(_prompt(rows, arms))
    if len(shown) == len(every):
        return shown, f"All {len(every)} prompts."
    return shown, f"The first {len(shown)} of {len(every)} prompts; the others are in requests.parquet."


def _prompt(tables: Tables, arms: list[str]) -> dict[str, Any]:
    """Return one prompt with its outputs; ``tables`` holds the rows of its request."""
    first = tables.requests.iloc[0]
    outputs = []
    for number_of_arm, arm in enumerate(arms):
        rows = tables.requests[tables.requests["arm"] == arm].sort_values("sequence")
        steps = metrics.decode_steps(tables.steps, arm)
        own = tables.steps[tables.steps["arm"] == arm]
        has = set(zip(own["sequence"], own["round"], strict=True))
        parents = dict(zip(rows["sequence"], rows["parent_sequence"], strict=True))
        for row in rows.to_dict("records"):
            spans = frames.spans(tables, row["request"], arm, row["sequence"])
            outputs.append(
                {
                    "arm": number_of_arm,
                    "key": output_key(row["request"], arm, row["sequence"]),
                    "about": _about(row, steps, len(rows)),
                    "spans": _marked(spans, partial(_owner, row["sequence"], parents, has)),
                }
            )
    about = ", ".join(str(first[name]) for name in ("workload", "source") if first[name])
    prompt = str(first["prompt"])
    end = "\n".join(prompt.split("\n")[-MAX_PROMPT_LINES:])[-MAX_PROMPT_LETTERS:]
    return {
        "request": int(first["request"]),
        "name": first["name"],
        "about": about,
        "end": prompt if len(end) == len(prompt) else f"…\n{end}",
        "outputs": outputs,
    }


def _owner(sequence: int, parents: Mapping[int, int], has: set[tuple[int, int]], number: int) -> int | None:
    """Return which sequence took a step of an output: itself, or the one it was forked from; None for neither."""
    for _ in range(len(parents)):
        if (sequence, number) in has:
            return sequence
        sequence = parents.get(sequence, -1)
    return None


def _marked(
    spans: list[frames.TextSpan], owner: Callable[[int], int | None]
) -> list[tuple[str, str, tuple[int, int] | None]]:
    """Return CSS class, text and step (sequence and round) of each span, None without a step; the class of one that
    begins a step and is not shaded is 's'.
    """
    marked: list[tuple[str, str, tuple[int, int] | None]] = []
    last = -1
    for span in spans:
        begins = span.round != last and span.round > 0
        sequence = owner(span.round)
        step = None if sequence is None else (sequence, span.round)
        marked.append((MARKS.get(span.kind, "s" if begins else ""), span.text, step))
        last = span.round
    return marked


def _about(row: Mapping[str, Any], steps: Any, sequences: int) -> str:
    """Return the facts of one output."""
    steps = steps[steps["sequence"] == row["sequence"]]
    fork = f"Sequence {row['sequence']}{'' if row['kept'] else ', not kept'}: " if sequences > 1 else ""
    parts = [
        f"{fork}{len(row['tokens'])} tokens",
        f"{len(steps)} steps after the prefill, tau {metrics.tau_pooled(steps):.2f}" if len(steps) else "",
        f"finished: {FINISHES.get(row['finish'], row['finish'])}" if row["finish"] else "",
        f"violates its constraint after {row['violated']} tokens" if row["violated"] >= 0 else "",
        _checked(row),
        row["error"],
    ]
    return ", ".join(part for part in parts if part)


def _checked(row: Mapping[str, Any]) -> str:
    """Return what the checker found; empty for an answer that is not checked."""
    if not row.get("checker") or row.get("correct") not in (True, False):
        return ""
    return f"{'correct' if row['correct'] else 'not correct'} (checker {row['checker']})"
