"""The rows a run leaves behind: three tables, written group by group, so that a kill keeps every finished group.

While a group decodes, only its ``Round`` objects are kept; they become rows after the clock has stopped. Each group's
rows are one part of three tables (see ``parts``), the requests written last: a group is finished exactly if its
requests are on disk. At the end the parts are gathered into ``rounds.parquet``, ``steps.parquet`` and
``requests.parquet``. ``schema`` says what every column means; metrics are computed from these rows and from nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft
from spec_lab.engine.batch import BROKEN, Request, SequenceState, without_name
from spec_lab.engine.step import Round
from spec_lab.results import parts
from spec_lab.results.parts import Parts, Rows
from spec_lab.results.schema import SCHEMAS
from spec_lab.text.prompts import Prompt


@dataclass(frozen=True)
class Tables:
    """A run's rows."""

    rounds: pd.DataFrame
    steps: pd.DataFrame
    requests: pd.DataFrame


def slim(done: Round) -> Round:
    """The round without its draft's laws, which would fill the memory (V numbers for every node)."""
    return done if done.draft.q is None else replace(done, draft=Draft(done.draft.shape, done.draft.token))


def round_rows(rounds: Seq[Round], clock: Clock, group: int, arm: str) -> Rows:
    """Rows of ``rounds``. On a GPU call it only when all work is done."""
    rows = []
    for number, one in enumerate(rounds):
        rows.append(
            {
                "id": f"{group}/{arm}/{number}",
                "group": group,
                "arm": arm,
                "round": number,
                "prefill": all(one.prefill),
                "live": len(one.sequences),
                "nodes": one.draft.shape.nodes,
                "cells": one.attended,
                "start": clock.seconds(rounds[0].marks[0], one.marks[0]),
                **one.seconds(clock),
            }
        )
    return rows


def step_rows(rounds: Seq[Round], group: int, arm: str) -> Rows:
    """Rows of every sequence's part in ``rounds``."""
    rows: Rows = []
    last = {}  # each sequence's latest row
    place = numbered([sequence for one in rounds for sequence in one.sequences])
    for number, one in enumerate(rounds):
        shape = one.draft.shape
        for head, (sequence, got) in enumerate(zip(one.sequences, one.committed, strict=True)):
            tree, stop = shape.trees[head], got.path[-1] if got.path else head
            last[sequence] = {
                "id": f"{sequence.request.id}/{arm}/{place[sequence][0]}/{number}",
                "group": group,
                "arm": arm,
                "request": sequence.request.id,
                "sequence": place[sequence][0],
                "parent_sequence": place[sequence][1],
                "round": number,
                "prefill": one.prefill[head],
                "pending": one.pending[head],
                "forced": got.forced,
                "nodes": len(tree) - 1,
                "legal": got.legal,
                "depth": int(shape.depth[tree].max()),
                "path": list(shape.ranks(stop)),
                "stop_had_children": len(shape.children[stop]) > 0,
                "accepted": got.accepted,
                "emitted": got.emitted,
                "accepted_kept": got.accepted_kept,
                "emitted_kept": got.emitted_kept,
                "forced_accepted": got.forced_accepted,
                "forced_accepted_kept": got.forced_accepted_kept,
                "forced_emitted": got.forced_emitted,
                "forced_emitted_kept": got.forced_emitted_kept,
                "taken_back": got.taken_back,
                "forks": len(got.children),
                "expected_accepted": float(one.expected[head]),
                "expected_emitted": float(one.expected_emitted[head]),
                "expected_kind": "exact" if one.given == "draft" else one.given,
                "empty_residual": bool(one.empty[head]),
                "finish": "",
                "context": one.context[head],
            }
            rows.append(last[sequence])
    for sequence, row in last.items():
        row["finish"] = sequence.finish or ""
        if sequence.finish in BROKEN:
            row["expected_kind"] = ""
    return rows


def numbered(sequences: Iterable[SequenceState]) -> dict[SequenceState, tuple[int, int]]:
    """Each sequence's number in its request, forks after what they were forked from, and that one's number or -1.

    The numbers follow from the lineage: how fast anything was decoded does not matter.
    """
    found = {(one.request.id, one.lineage): one for one in sequences}
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    count: dict[int, int] = {}
    for request, lineage in sorted(found):
        numbers[request, lineage] = count.get(request, 0)
        count[request] = numbers[request, lineage] + 1
    return {one: (number, numbers.get((one.request.id, one.lineage[:-2]), -1) if one.lineage else -1)
            for one, number in ((found[key], number) for key, number in numbers.items())}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one arm made of one request, or of a fork of it.

    Args:
        request: the request.
        tokens: what was emitted, after cuts.
        finish: why it ended.
        prefill_tokens: of the tokens, those emitted by the prefill's forward.
        decode_tokens: of the tokens, those that came later and are no other sequence's.
        prefill_seconds: seconds until then.
        decode_seconds: seconds from then to the request's end.
        error: what broke it; empty for nothing.
        sequence: its number in the request.
        parent: the number of the sequence it was forked from; -1 for none.
        violated, kept: see ``columns.REQUESTS``.
    """

    request: Request
    tokens: list[int]
    finish: str
    prefill_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    error: str = ""
    sequence: int = 0
    parent: int = -1
    violated: int = -1
    kept: bool = True


def outcomes(sequences: Seq[SequenceState], rounds: Seq[Round], clock: Clock, errors: dict[str, str]) -> list[Outcome]:
    """What came of each sequence of a group, in order. On a GPU call it only when all work is done.

    Args:
        sequences: all there were, forks and those that never took part included.
        rounds: all there were.
        clock: of the target's model.
        errors: by the request's name.
    """
    place, found = numbered(sequences), []
    prefill = clock.seconds(rounds[0].marks[0], rounds[0].marks[-1]) if rounds else 0.0
    for sequence in sequences:
        own = len(sequence.tokens) - sequence.born
        final = next((one for one in reversed(rounds) if sequence in one.sequences), None)
        first = 0
        if rounds and sequence in rounds[0].sequences:  # what was forced before it is computed by the prefill too
            head = rounds[0].sequences.index(sequence)
            before = rounds[0].context[head] - len(sequence.request.tokens)
            first = min(own, before + rounds[0].committed[head].emitted_kept)
        number, parent = place[sequence]
        found.append(
            Outcome(
                request=sequence.request,
                tokens=sequence.emitted,
                finish=sequence.finish or "",
                prefill_tokens=first,
                decode_tokens=own - first,
                prefill_seconds=prefill,
                decode_seconds=clock.seconds(rounds[0].marks[-1], final.marks[-1]) if final is not None else 0.0,
                error=errors.get(sequence.request.name, "") if sequence.finish in BROKEN else unwatched(sequence),
                sequence=number,
                parent=parent,
                violated=-1 if sequence.violated is None else sequence.violated,
                kept=sequence.kept,
            )
        )
    return found


def unwatched(sequence: SequenceState) -> str:
    """That an observing constraint gave up, in words; empty where it did not."""
    if not sequence.unwatched:
        return ""
    why = without_name(sequence.request, sequence.unwatched)
    return f"request '{sequence.request.name}' went on without the constraint that observed it: {why}"


def request_row(
    outcome: Outcome, prompt: Prompt, shown: str, ends: Seq[int], seed: int, group: int, arm: str, order: int
) -> dict[str, Any]:
    """The row of one outcome; ``shown`` is its text, of which so many characters are settled after each token."""
    number = outcome.request.id
    return {
        "id": f"{number}/{arm}/{outcome.sequence}",
        "group": group,
        "arm": arm,
        "request": number,
        "sequence": outcome.sequence,
        "parent_sequence": outcome.parent,
        "name": prompt.name,
        "workload": prompt.workload,
        "source": prompt.source,
        "seed": seed,
        "order": order,
        "prompt": prompt.text,
        "prompt_tokens": len(outcome.request.tokens),
        "text": shown,
        "tokens": outcome.tokens,
        "ends": list(ends),
        "prefill_tokens": outcome.prefill_tokens,
        "decode_tokens": outcome.decode_tokens,
        "prefill_seconds": outcome.prefill_seconds,
        "decode_seconds": outcome.decode_seconds,
        "finish": outcome.finish,
        "kept": outcome.kept,
        "violated": outcome.violated,
        "error": outcome.error,
    }


class Recorder:
    """Writes a run's rows under ``out``, group by group."""

    def __init__(self, out: Path) -> None:
        self.parts = Parts(out, SCHEMAS, unit="group")

    def finished(self) -> set[int]:
        """Groups whose rows are on disk."""
        return set(self.parts.load()["requests"]["group"])

    def write(self, group: int, rounds: Rows, steps: Rows, requests: Rows) -> None:
        """Put one finished group's rows on disk."""
        self.parts.write(f"{group:06d}", {"rounds": rounds, "steps": steps, "requests": requests})

    def gather(self) -> Tables:
        """Put all parts together in one file a table, and remove them."""
        return Tables(**self.parts.gather())


def load(out: str | Path) -> Tables:
    """The rows of the finished groups of a run: running, killed or done. Errors as in ``Parts.load``."""
    return Tables(**Recorder(Path(out)).parts.load())


def schema(name: str) -> pa.Schema:
    """The columns of one table, with their meanings as metadata."""
    return parts.schema(SCHEMAS[name])
