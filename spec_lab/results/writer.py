"""A run's rows: three tables, written group by group, so that a killed run keeps every finished group.

While a group is decoded, only its ``StepInfo`` objects are kept; rows are built after the clock has stopped. A group's
rows are one part of each table (see ``table_parts``). The requests are written last: a group is finished if and only if
its requests are on disk. At the end the parts are gathered into ``forwards.parquet``, ``steps.parquet`` and
``requests.parquet``. ``schema`` defines the columns. Metrics are computed from these rows only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from spec_lab.core.request import BROKEN, Request, without_name
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import StepInfo
from spec_lab.results import table_parts
from spec_lab.results.schema import METRICS, OPTIONAL, REPLAY, SCHEMAS, TOKENS
from spec_lab.results.table_parts import Rows, TableParts
from spec_lab.text.checkers import check
from spec_lab.text.prompts import Prompt


@dataclass(frozen=True)
class Tables:
    """A run's rows."""

    forwards: pd.DataFrame
    steps: pd.DataFrame
    requests: pd.DataFrame

    @staticmethod
    def empty() -> Tables:
        """Return tables without rows."""
        return Tables(**{name: schema(name).empty_table().to_pandas() for name in SCHEMAS})


def rows_of(infos: Seq[StepInfo], group: int, arm: str, turn: int = 1, first: int = 0) -> tuple[Rows, Rows]:
    """Return the rows of the tables ``forwards`` and ``steps``. On a GPU, call it only after ``clock.synchronise``.

    Args:
        infos: the steps of one turn, in order.
        group, arm, turn: see ``schema``.
        first: number of the first step among those of all turns of the group.
    """
    forwards, steps = [], []
    last = {}  # each sequence's latest row
    numbers = numbered([sequence for info in infos for sequence in info.sequences])
    for number, (info, start) in enumerate(zip(infos, starts(infos), strict=True), first):
        key = {"group": group, "arm": arm, "forward": number}
        forwards.append({"id": f"{group}/{arm}/{number}", **key, "turn": turn, "start": start, **info.row()})
        for sequence, row in zip(info.sequences, info.rows(), strict=True):
            sequence_number, parent = numbers[sequence]
            name = f"{sequence.request.id}/{arm}/{sequence_number}/{number}"
            last[sequence] = {"id": name, **key, "sequence": sequence_number, "parent_sequence": parent, **row}
            steps.append(last[sequence])
    for sequence, row in last.items():
        row["finish"] = sequence.finish or ""
        if sequence.finish in BROKEN:
            row["expected_kind"] = ""
    return forwards, steps


def starts(infos: Seq[StepInfo]) -> list[float]:
    """Return the seconds from the start of the first step to that of each one, without those of captures."""
    captured = [0.0, *accumulate(info.seconds()["capture"] for info in infos)]
    return [
        info.clock.seconds(infos[0].began, info.began) - before for info, before in zip(infos, captured, strict=False)
    ]


def replay_rows_of(
    infos: Seq[StepInfo], group: int, arm: str, vocabulary: int, first: int = 0, forward_is_position: bool = False
) -> Rows:
    """Return the rows of the table ``replay``.

    Args:
        infos: the steps of one turn, in order.
        group, arm: see ``schema``.
        vocabulary: tokens of the target.
        first: as in ``rows_of``.
        forward_is_position: whether a step is named by its position, as in a verifier study.
    """
    replayed: Rows = []
    numbers = numbered([sequence for info in infos for sequence in info.sequences])
    for number, info in enumerate(infos, first):
        for tree, rows in enumerate(info.replay_rows()):
            sequence = info.sequences[tree]
            sequence_number = numbers[sequence][0]
            step = info.context[tree] if forward_is_position else number
            key = {
                "group": group,
                "arm": arm,
                "sequence": sequence_number,
                "forward": step,
                "prefill": info.prefill[tree] and not forward_is_position,
                "vocabulary": vocabulary,
                "sampling": json.dumps(asdict(sequence.request.sampling)),
            }
            replayed += [
                {"id": f"{sequence.request.id}/{arm}/{sequence_number}/{step}/{row['row']}", **key, **row}
                for row in rows
            ]
    return replayed


def numbered(sequences: Iterable[SequenceState]) -> dict[SequenceState, tuple[int, int]]:
    """Return each sequence's number in its request and the number of its parent, -1 for none.

    Numbers follow the lineage, parents before their forks, so they do not depend on the order of decoding.
    """
    by_lineage = {(sequence.request.id, sequence.lineage): sequence for sequence in sequences}
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    count: dict[int, int] = {}
    for request, lineage in sorted(by_lineage):
        numbers[request, lineage] = count.get(request, 0)
        count[request] = numbers[request, lineage] + 1
    return {
        by_lineage[request, lineage]: (number, numbers.get((request, lineage[:-2]), -1) if lineage else -1)
        for (request, lineage), number in numbers.items()
    }


@dataclass(frozen=True)
class Outcome:
    """The output of one arm for one sequence of a request.

    Args:
        tokens: the emitted tokens, after truncation.
        prefill_tokens: number of tokens emitted by the step that ended the prefill.
        decode_tokens: number of tokens emitted later by this sequence itself, not before a fork.
        prefill_seconds: seconds from the admission to the end of the step that ended the prefill.
        decode_seconds: seconds from then to the sequence's end.
        prefill_compute_seconds: seconds of the steps until the end of the prefill, multiplied by the sequence's shares
            of their tokens (``computed_shares``).
        error: why it failed; else empty.
        sequence: its number in the request.
        parent: the number of the sequence that it was forked from; -1 for none.
        violated, kept, queue_seconds: see ``schema.REQUESTS``; ``cached``: "cached_tokens" of ``schema.OPTIONAL``.
    """

    request: Request
    tokens: list[int]
    finish: str
    prefill_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    prefill_compute_seconds: float
    error: str = ""
    sequence: int = 0
    parent: int = -1
    violated: int = -1
    kept: bool = True
    queue_seconds: float = 0.0
    cached: int = 0


def computed_shares(info: StepInfo) -> dict[SequenceState, float]:
    """Return each sequence's share of the tokens that a step computed: pending and drafted ones, chunks of prompts.

    Sequences that compute their prompt and others that decode share one forward; this is how its seconds are divided.
    """
    drafted = (info.draft.acceptable_nodes + info.draft.computed_only_nodes).tolist()
    trees = zip(info.sequences, info.pending, drafted, strict=True)
    computed = {sequence: pending + nodes for sequence, pending, nodes in trees} | dict(info.chunks)
    total = sum(computed.values())
    return {sequence: tokens / total for sequence, tokens in computed.items()}


def outcomes(sequences: Seq[SequenceState], infos: Seq[StepInfo], errors: dict[SequenceState, str]) -> list[Outcome]:
    """Return the outcome of each sequence of a fixed group. On a GPU, call it only after ``clock.synchronise``.

    Args:
        sequences: all of the group's, including forks and those that took part in no step.
        errors: of the sequences that have one.
    """
    numbers, rows = numbered(sequences), []
    admitted: dict[int, StepInfo] = {}  # by request: the first step that computed a part of its prompt
    first: dict[int, StepInfo] = {}  # by request: the step that emitted its first token
    final: dict[SequenceState, StepInfo] = {}
    computing: dict[SequenceState, float] = {}  # ``prefill_compute_seconds``
    began, ended = dict(zip(infos, starts(infos), strict=True)), dict[StepInfo, float]()  # without captures
    for info in infos:
        seconds = info.seconds()["whole"]
        ended[info] = began[info] + seconds
        for sequence, share in computed_shares(info).items():
            admitted.setdefault(sequence.request.id, info)
            if sequence.request.id not in first:
                computing[sequence] = computing.get(sequence, 0.0) + share * seconds
        for sequence in info.sequences:
            first.setdefault(sequence.request.id, info)
            final[sequence] = info
    for sequence in sequences:
        emitted, own_first = len(sequence.tokens) - sequence.born, 0
        number, parent = numbers[sequence]
        prompt_done, admission = first.get(sequence.request.id), admitted.get(sequence.request.id)
        prefill = decode = 0.0
        if prompt_done is not None and admission is not None:
            prefill = ended[prompt_done] - began[admission]
            if sequence in final:
                decode = ended[final[sequence]] - ended[prompt_done]
            if sequence in prompt_done.sequences:  # tokens forced before the first step are computed by the prefill too
                at = prompt_done.sequences.index(sequence)
                before = prompt_done.context[at] - len(sequence.request.tokens)
                own_first = min(emitted, before + prompt_done.committed[at].count(kept=True))
        rows.append(
            Outcome(
                request=sequence.request,
                tokens=sequence.emitted,
                finish=sequence.finish or "",
                prefill_tokens=own_first,
                decode_tokens=emitted - own_first,
                prefill_seconds=prefill,
                decode_seconds=decode,
                prefill_compute_seconds=computing.get(sequence, 0.0),
                error=errors.get(sequence) or unwatched(sequence),
                sequence=number,
                parent=parent,
                violated=-1 if sequence.violated is None else sequence.violated,
                kept=sequence.kept,
                cached=sequence.reused,
            )
        )
    return rows


def unwatched(sequence: SequenceState) -> str:
    """Return a message that an observing constraint failed; empty where it did not."""
    if not sequence.unwatched:
        return ""
    why = without_name(sequence.request, sequence.unwatched)
    return f"request '{sequence.request.name}' continued without its observing constraint, which failed: {why}"


def request_row(
    outcome: Outcome,
    prompt: Prompt,
    shown: str,
    ends: Seq[int],
    seed: int,
    group: int,
    arm: str,
    order: int,
    conversation: str = "",
    turn: int = 1,
    other_cores: float | None = None,
    attempt: int = 0,
) -> dict[str, Any]:
    """Return the row of one outcome.

    Args:
        prompt: the request's prompt, as it was decoded.
        shown: the output as text.
        ends: for each token, number of characters of the text that no later token changes.
        seed, group, arm, order: see ``schema.REQUESTS``.
        conversation, turn, other_cores, attempt: see ``schema.OPTIONAL``.
    """
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
        "cached_tokens": outcome.cached,
        "text": shown,
        "tokens": outcome.tokens,
        "ends": list(ends),
        "prefill_tokens": outcome.prefill_tokens,
        "decode_tokens": outcome.decode_tokens,
        "queue_seconds": outcome.queue_seconds,
        "prefill_seconds": outcome.prefill_seconds,
        "prefill_compute_seconds": outcome.prefill_compute_seconds,
        "decode_seconds": outcome.decode_seconds,
        "finish": outcome.finish,
        "kept": outcome.kept,
        "violated": outcome.violated,
        "error": outcome.error,
        "conversation": conversation or prompt.name,
        "turn": turn,
        "other_cores": other_cores,
        "attempt": attempt,
        "checker": prompt.checker,
        "correct": _correct(prompt, shown),
    }


def _correct(prompt: Prompt, shown: str) -> bool | None:
    """Return whether the checker finds an answer correct; None where it is not checked."""
    if not prompt.checker:
        return None
    return check(prompt.checker, shown, prompt.answer, prompt.text, completes=prompt.template is None)


RECORDED = {"replay": {"replay": REPLAY, "tokens": TOKENS}, "drafts": {"tokens": TOKENS}}
"""The further tables that a run writes, by its option ``record``."""


class Recorder:
    """Writes a run's rows, group by group.

    Args:
        optional: names of the optional columns (``schema.OPTIONAL``) that the rows of this run have.
        record: the run option: "drafts" adds the table of the tokens' texts, "replay" that of distributions too.
    """

    def __init__(self, out: Path, optional: Collection[str] = (), record: str = "") -> None:
        tables = {**RECORDED.get(record, {}), **SCHEMAS}
        self.parts = TableParts(out, tables, unit="group", optional=OPTIONAL, written=optional)

    def finished(self) -> set[int]:
        """Return the groups whose rows are on disk."""
        return set(load(self.parts.out).requests["group"])

    def write(
        self,
        group: int,
        forwards: Rows,
        steps: Rows,
        requests: Rows,
        replay: Rows | None = None,
        tokens: Rows | None = None,
    ) -> None:
        """Write the rows of a finished group."""
        rows = {
            "replay": replay or [],
            "tokens": tokens or [],
            "forwards": forwards,
            "steps": steps,
            "requests": requests,
        }
        self.parts.write(f"{group:06d}", rows)

    def discard(self, group: int) -> None:
        """Remove the rows of a finished group, which is to be decoded again; see ``TableParts.discard``."""
        self.parts.discard(group, f"{group:06d}")

    def gather(self) -> Tables:
        """Join the parts into one file per table and remove them; see ``TableParts.gather``."""
        frames = self.parts.gather()
        return Tables(**{name: frames[name] for name in SCHEMAS})


def load(out: str | Path) -> Tables:
    """Return the rows of the finished groups of a run that is running, was killed or is done.

    Raises:
        Unreadable: see ``TableParts.load``.
    """
    return Tables(**Recorder(Path(out)).parts.load())


def load_replay(out: str | Path) -> pd.DataFrame:
    """Return the rows of the table ``replay`` of the finished groups of a run.

    Raises:
        Unreadable: see ``TableParts.load``.
    """
    return Recorder(Path(out), record="replay").parts.load()["replay"]


def load_token_texts(out: str | Path) -> dict[int, str]:
    """Return the text of every token that the run recorded; empty without the table ``tokens``.

    Raises:
        Unreadable: see ``TableParts.load``.
    """
    tokens = TableParts(Path(out), {"tokens": TOKENS}).load()["tokens"]
    return dict(zip(tokens["token"].tolist(), tokens["text"].tolist(), strict=True))


def write_metrics(out: Path, rows: Rows) -> None:
    """Write the table ``metrics`` of a run in place of an earlier one; without rows only remove that.

    Args:
        rows: their columns are those of ``schema.METRICS`` without ``id``.
    """
    (out / "metrics.parquet").unlink(missing_ok=True)
    if rows:
        named = [{"id": f"{row['arm']}/{row['metric']}/{row['request']}", **row} for row in rows]
        parts = TableParts(out, {"metrics": METRICS})
        parts.write("all", {"metrics": named})
        parts.gather()


def load_metrics(out: str | Path) -> pd.DataFrame:
    """Return the rows of the table ``metrics`` of a run; none of a run without metrics, or that has not ended.

    Raises:
        Unreadable: see ``TableParts.load``.
    """
    return TableParts(Path(out), {"metrics": METRICS}).load()["metrics"]


def schema(name: str) -> pa.Schema:
    """Return the columns of one table, with their meanings as metadata."""
    return table_parts.schema(SCHEMAS[name])
