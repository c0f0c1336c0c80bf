"""The rows a run leaves behind: three tables, written group by group, so that a kill keeps every finished group.

While a group decodes, only its ``StepInfo`` objects are kept; they become rows after the clock has stopped. A group's
rows are one part of three tables (see ``parts``), the requests written last: a group is finished exactly if its
requests are on disk. At the end the parts are gathered into ``rounds.parquet``, ``steps.parquet`` and
``requests.parquet``. ``schema`` says what every column means; metrics are computed from these rows and from nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from spec_lab.engine.request import BROKEN, Request, without_name
from spec_lab.engine.sequence import SequenceState
from spec_lab.engine.step import StepInfo
from spec_lab.results import parts
from spec_lab.results.parts import Rows, TableParts
from spec_lab.results.schema import SCHEMAS
from spec_lab.text.prompts import Prompt


@dataclass(frozen=True)
class Tables:
    """A run's rows."""

    rounds: pd.DataFrame
    steps: pd.DataFrame
    requests: pd.DataFrame


def rows_of(infos: Seq[StepInfo], group: int, arm: str) -> tuple[Rows, Rows]:
    """Rows of the tables ``rounds`` and ``steps``. On a GPU call it only when all work is done."""
    rounds, steps = [], []
    last = {}  # each sequence's latest row
    place = numbered([sequence for one in infos for sequence in one.sequences])
    for number, one in enumerate(infos):
        start = one.clock.seconds(infos[0].began, one.began)
        key = {"group": group, "arm": arm, "round": number}
        rounds.append({"id": f"{group}/{arm}/{number}", **key, "start": start, **one.row()})
        for sequence, row in zip(one.sequences, one.rows(), strict=True):
            own, parent = place[sequence]
            name = f"{sequence.request.id}/{arm}/{own}/{number}"
            last[sequence] = {"id": name, **key, "sequence": own, "parent_sequence": parent, **row}
            steps.append(last[sequence])
    for sequence, row in last.items():
        row["finish"] = sequence.finish or ""
        if sequence.finish in BROKEN:
            row["expected_kind"] = ""
    return rounds, steps


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


def outcomes(sequences: Seq[SequenceState], infos: Seq[StepInfo], errors: dict[str, str]) -> list[Outcome]:
    """The results of an engine's sequences, in order. On a GPU call it only when all work is done.

    Args:
        sequences: all there were, forks and those that never took part included.
        infos: of all steps.
        errors: by the request's name.
    """
    place, found = numbered(sequences), []
    admitted: dict[int, StepInfo] = {}  # by request: the step that began its prompt, and the one that ended it
    first: dict[int, StepInfo] = {}
    final: dict[SequenceState, StepInfo] = {}
    for one in infos:
        for sequence in [*one.sequences, *(sequence for sequence, _ in one.chunks)]:
            admitted.setdefault(sequence.request.id, one)
        for sequence in one.sequences:
            first.setdefault(sequence.request.id, one)
            final[sequence] = one
    for sequence in sequences:
        own, own_first = len(sequence.tokens) - sequence.born, 0
        number, parent = place[sequence]
        prompt_done, begun = first.get(sequence.request.id), admitted.get(sequence.request.id)
        prefill = decode = 0.0
        if prompt_done is not None and begun is not None:
            clock = prompt_done.clock
            prefill = clock.seconds(begun.began, prompt_done.ended)
            if sequence in final:
                decode = clock.seconds(prompt_done.ended, final[sequence].ended)
            if sequence in prompt_done.sequences:  # what was forced before it is computed by the prefill too
                at = prompt_done.sequences.index(sequence)
                before = prompt_done.context[at] - len(sequence.request.tokens)
                own_first = min(own, before + prompt_done.committed[at].count(kept=True))
        found.append(
            Outcome(
                request=sequence.request,
                tokens=sequence.emitted,
                finish=sequence.finish or "",
                prefill_tokens=own_first,
                decode_tokens=own - own_first,
                prefill_seconds=prefill,
                decode_seconds=decode,
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
        self.parts = TableParts(out, SCHEMAS, unit="group")

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
    """The rows of the finished groups of a run: running, killed or done. Errors as in ``TableParts.load``."""
    return Tables(**Recorder(Path(out)).parts.load())


def schema(name: str) -> pa.Schema:
    """The columns of one table, with their meanings as metadata."""
    return parts.schema(SCHEMAS[name])
