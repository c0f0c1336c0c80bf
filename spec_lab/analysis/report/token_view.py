"""The token view of a run's page: outputs as text, whose tokens lead to the steps that emitted them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.report.step_data import embedded, output_key, step_data
from spec_lab.analysis.report.step_tree import Verification
from spec_lab.core.request import FINISHES
from spec_lab.results.writer import load_token_texts

MAX_PROMPTS = 50
MAX_LETTERS = 600_000
"""Most letters of all outputs shown; browsers open larger pages slowly."""
MAX_PROMPT_LETTERS = 600
MAX_PROMPT_LINES = 12
MAX_WORD = 64
"""Letters after the limit in which a cut is moved to the next word; texts without spaces are cut at the limit."""

SPECIAL = re.compile(r"<[|｜][^<>|｜]*[|｜]>|</?\w+>|\[/?[A-Z_]+\]")
"""Special tokens as chat templates write them: ``<|im_start|>``, ``<s>``, ``<start_of_turn>``, ``[INST]``."""

WORD = re.compile(r"\s+|(?=<[|｜])")
"""Matches end before a word or a special token."""

MARKS = {"accepted": "a", "forced": "f"}
"""The CSS class of each kind of span that is shaded."""


@dataclass(frozen=True)
class TokenView:
    """Values that ``tokens.html.j2`` renders.

    Args:
        prompts: with the outputs of every arm.
        shown: a note on how many prompts are shown.
        steps: a note on which steps can be opened, and how trees are recorded.
        data: the JSON block of the steps, safe inside a script element.
        unknown_origins: whether accepted tokens of some step were partly forced, and it is not recorded which.
    """

    prompts: list[dict[str, Any]]
    shown: str
    steps: str
    data: Markup
    unknown_origins: bool = False


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
    if invalid := [arm for arm in arms if arm in how and how[arm].invalid_text]:
        shown += f" INVALID TEXT: {', '.join(invalid)}: drafted tokens are accepted whatever their probability."
    texts = load_token_texts(folder) if "draft_tokens" in tables.steps else {}
    data, note = step_data(tables, [prompt["request"] for prompt in prompts], arms, how, texts)
    return TokenView(prompts, shown, note, embedded(data), _unknown_origins(tables.steps))


def _unknown_origins(steps: pd.DataFrame) -> bool:
    """Return whether the accepted tokens of some step were partly forced, and its row does not hold which."""
    partly = steps[steps["forced_accepted_kept"].between(1, steps["accepted_kept"] - 1)]
    return len(partly) > 0 and ("emitted_origins" not in partly or bool(partly["emitted_origins"].isna().any()))


def verifications(
    manifest: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], temperature: float
) -> dict[str, Verification]:
    """Return how each arm verifies.

    Args:
        manifest: the run's; it names the verifier of a run that has not ended.
        states: the facts of each arm in ``summary.json``; empty of a run that has not ended.
    """
    outputs, baseline = {}, "baseline"
    for arm, state in states.items():
        parts = {} if arm == baseline else manifest.get("parts") or {}
        known = state if state.get("verifier") else parts
        lossless = known.get("lossless")
        lossless = True if arm == baseline else lossless if isinstance(lossless, bool) else None
        outputs[arm] = Verification(
            str(known.get("verifier") or ""), lossless, temperature, arm != baseline and bool(known.get("invalid_text"))
        )
    return outputs


def _prompts(tables: Tables, arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the first prompts with every arm's output in spans, and a note on how many are shown."""
    every = list(dict.fromkeys(tables.requests["request"]))
    shown: list[dict[str, Any]] = []
    letters = 0
    for request in every[:MAX_PROMPTS]:
        of_request = (rows[rows["request"] == request] for rows in (tables.steps, tables.requests))
        rows = Tables(tables.forwards, *of_request)
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
        of_arm = tables.steps[tables.steps["arm"] == arm]
        has = set(zip(of_arm["sequence"], of_arm["forward"], strict=True))
        parents = dict(zip(rows["sequence"], rows["parent_sequence"], strict=True))
        for row in rows.to_dict("records"):
            spans = frames.spans(tables, row["request"], arm, row["sequence"])
            outputs.append(
                {
                    "arm": number_of_arm,
                    "key": output_key(row["request"], arm, row["sequence"]),
                    "about": _about(row, steps, len(rows)),
                    "prompt": prompt_end(str(row["prompt"])),  # of a later turn it holds this arm's own answers
                    "spans": _marked(spans, partial(_owner, row["sequence"], parents, has)),
                }
            )
    about = ", ".join(str(first[name]) for name in ("workload", "source") if first[name])
    return {
        "request": int(first["request"]),
        "name": first["name"],
        "about": about,
        "outputs": outputs,
    }


def prompt_end(prompt: str) -> str:
    """Return the last lines of a prompt; a longer one is cut between words and beside special tokens, after an
    ellipsis.

    The tables hold no tokens of prompts, so special tokens are recognised by how they are written (``SPECIAL``). A
    special token across the limit is kept whole.
    """
    end = "\n".join(prompt.split("\n")[-MAX_PROMPT_LINES:])
    cut = len(end) - MAX_PROMPT_LETTERS
    if cut > 0:
        special = next((match.start() for match in SPECIAL.finditer(end) if match.start() < cut < match.end()), None)
        word = WORD.search(end, cut - 1, cut + MAX_WORD)
        end = end[special if special is not None else word.end() if word else cut :]
    return prompt if len(end) == len(prompt) else f"…\n{end}"


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
    """Return CSS class, text and step (sequence and forward) of each span, None without a step; the class of one that
    begins a step and is not shaded is 's'.
    """
    marked: list[tuple[str, str, tuple[int, int] | None]] = []
    last = -1
    for span in spans:
        begins = span.forward != last and span.forward > 0
        sequence = owner(span.forward)
        step = None if sequence is None else (sequence, span.forward)
        marked.append((MARKS.get(span.kind, "s" if begins else ""), span.text, step))
        last = span.forward
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
