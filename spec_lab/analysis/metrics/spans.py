"""Output texts in spans, by the origin of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from spec_lab.results.writer import Tables


class TextSpan(NamedTuple):
    """A piece of output text whose tokens have the same origin.

    Args:
        text: the piece.
        kind: 'accepted' (drafted and accepted), 'bonus' (the bonus or recovered token of a step), 'forced' (its
            constraint allowed one token only, drafted or not),
            'prefill' (sampled by the prompt's own forward), 'unknown' (a peer, or tables without
            ``ends``).
        forward: the step that emitted it; -1: before any, or unknown.
    """

    text: str
    kind: str
    forward: int


def spans(tables: Tables, request: int, arm: str, sequence: int = 0) -> list[TextSpan]:
    """Return the output of one sequence in spans, in order; joined, they are its ``text``.

    Of accepted tokens that were partly forced, the column ``emitted_origins`` says which. Without it (``record=drafts``
    writes it) rows hold only how many: they are all 'accepted' unless all of a step were forced.

    Raises:
        ValueError: the arm has no such sequence.
    """
    rows = tables.requests[(tables.requests["request"] == request) & (tables.requests["arm"] == arm)]
    steps = tables.steps[(tables.steps["request"] == request) & (tables.steps["arm"] == arm)]
    row = rows[rows["sequence"] == sequence]
    if not len(row):
        raise ValueError(f"no sequence {sequence} of request {request} in arm '{arm}'")
    output = row.iloc[0]
    text, ends = str(output["text"]), output.get("ends")
    if not len(steps) or not isinstance(ends, np.ndarray | list) or len(ends) != len(output["tokens"]):
        return [TextSpan(text, "unknown", -1)] if text else []
    pieces: list[TextSpan] = []
    start = 0
    origins = _origins(rows.set_index("sequence"), steps, sequence, len(ends))
    for position, (end, (kind, number)) in enumerate(zip(ends, origins, strict=True)):
        end = len(text) if position == len(ends) - 1 else min(int(end), len(text))
        if end > start:
            piece = TextSpan(text[start:end], kind, number)
            if pieces and pieces[-1][1:] == piece[1:]:
                piece = piece._replace(text=pieces.pop().text + piece.text)
            pieces.append(piece)
            start = end
    return pieces


def _origins(rows: pd.DataFrame, steps: pd.DataFrame, sequence: int, count: int) -> list[tuple[str, int]]:
    """Return kind and step of each of the ``count`` tokens of a sequence.

    A step's ``context`` says where its tokens begin. Earlier tokens beyond it were taken back by backtracking; missing
    ones were appended by the constraint before the next step, or before the first.
    """
    origins: list[tuple[str, int]] = []
    parent = int(rows.loc[sequence, "parent_sequence"])
    if parent in rows.index:
        origins = _origins(rows, steps, parent, len(rows.loc[parent, "tokens"]))
    prompt = int(rows.loc[sequence, "prompt_tokens"])
    for step in steps[steps["sequence"] == sequence].sort_values("forward").to_dict("records"):
        _resize(origins, max(0, int(step["context"]) - prompt))
        others = step["emitted_kept"] - step["accepted_kept"]
        appended = step["forced_emitted_kept"] - step["forced_accepted_kept"]  # forced, after the accepted ones
        number, sampled = int(step["forward"]), "prefill" if step["prefill"] else "bonus"
        origins += [(kind, number) for kind in _accepted(step)]
        origins += [(sampled, number)] * (others - appended)
        if step["taken_back"]:  # before anything is appended
            del origins[max(0, len(origins) - step["taken_back"]) :]
        origins += [("forced", number)] * appended
    _resize(origins, count)
    return origins


def _accepted(step: Mapping[str, Any]) -> list[str]:
    """Return 'accepted' or 'forced' for each accepted token of a step that was kept."""
    count, recorded = int(step["accepted_kept"]), step.get("emitted_origins")
    if isinstance(recorded, np.ndarray | list) and len(recorded) >= count:
        return ["forced" if origin == "forced" else "accepted" for origin in recorded[:count]]
    return ["forced" if count == step["forced_accepted_kept"] else "accepted"] * count


def _resize(origins: list[tuple[str, int]], count: int) -> None:
    """Cut ``origins`` to ``count`` tokens, or fill up with forced ones."""
    del origins[count:]
    origins += [("forced", origins[-1][1] if origins else -1)] * (count - len(origins))
