"""The rows a run leaves behind: three tables, written group by group, so that a kill keeps every finished group.

While a group decodes, only its ``StepInfo`` objects are kept; they become rows after the clock has stopped. A group's
rows go to ``parts/`` as parquet files, renamed into place once whole, the requests last: a group is finished exactly if
its requests are on disk. At the end the parts are gathered into ``rounds.parquet``, ``steps.parquet`` and
``requests.parquet``. ``columns`` says what every column means; metrics are computed from these rows and from
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from spec_lab.core.files import Unreadable, own_folder, refuse_link, replacing
from spec_lab.engine.request import BROKEN, Request, without_name
from spec_lab.engine.sequence import SequenceState
from spec_lab.engine.step import StepInfo
from spec_lab.results.schema import SCHEMAS
from spec_lab.text.prompts import Prompt

Rows = list[dict[str, Any]]


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
    """Writes a run's rows under ``out``, part by part."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def finished(self) -> set[int]:
        """Groups whose rows are on disk."""
        return set(load(self.out).requests["group"])

    def write(self, group: int, rounds: Rows, steps: Rows, requests: Rows) -> None:
        """Put one finished group's rows on disk."""
        folder = own_folder(self.out / "parts")
        for name, rows in (("rounds", rounds), ("steps", steps), ("requests", requests)):
            if rows:
                write_whole(pa.Table.from_pylist(rows, schema=schema(name)), folder / f"{name}-{group:06d}.parquet")

    def gather(self) -> Tables:
        """Put all parts together in one file a table, and remove them."""
        tables = load(self.out)
        for name in SCHEMAS:
            frame = getattr(tables, name)
            write_whole(
                pa.Table.from_pandas(frame, schema=schema(name), preserve_index=False), self.out / f"{name}.parquet"
            )
        for part in _parts(self.out, "*"):
            part.unlink()
        for name in (*(f".{name}.parquet.*.tmp" for name in SCHEMAS), "parts/.*.tmp"):  # of a write that was killed
            for half in self.out.glob(name):
                half.unlink()
        if (self.out / "parts").is_dir():
            (self.out / "parts").rmdir()
        return tables


def load(out: str | Path) -> Tables:
    """The rows of the finished groups of a run: running, killed or done. Duplicate ids are dropped, the last one stays.

    Raises:
        ValueError: a file of the run that is not a table, or has other columns; ``parts`` is a symlink.
    """
    out = Path(out)
    frames = {}
    refuse_link(out / "parts")
    for name in reversed(SCHEMAS):  # requests first: whatever group they finish has its other rows on disk
        frame = pa.concat_tables(_pieces(out, name)).to_pandas()
        frames[name] = frame.drop_duplicates("id", keep="last", ignore_index=True)
    finished = set(frames["requests"]["group"])
    for name in ("rounds", "steps"):
        frames[name] = frames[name][frames[name]["group"].isin(finished)].reset_index(drop=True)
    return Tables(**frames)


def schema(name: str) -> pa.Schema:
    """The columns of one table, with their meanings as metadata."""
    return columns(SCHEMAS[name])


def columns(meanings: Mapping[str, tuple[pa.DataType, str]]) -> pa.Schema:
    """Columns of these types, with their meanings as metadata."""
    return pa.schema([pa.field(column, kind, metadata={"is": what}) for column, (kind, what) in meanings.items()])


def _parts(out: Path, name: str) -> list[Path]:
    return sorted((out / "parts").glob(f"{name}-*.parquet"))


def _pieces(out: Path, name: str) -> list[pa.Table]:
    """What there is of a table, the older first; of a run that goes on as well."""
    parts = []
    for file in _parts(out, name):
        with suppress(FileNotFoundError):  # gathered meanwhile
            parts.append(_read(file))
    whole = out / f"{name}.parquet"  # read after the parts: it holds those that are gone
    return [_read(one) for one in [whole] if one.exists()] + parts or [schema(name).empty_table()]


def _read(file: Path) -> pa.Table:
    """One file of a table, its columns as in ``columns``."""
    name, _, group = file.stem.partition("-")
    try:
        return fitted(read_table(file), schema(name))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        known = f"all parts of group {int(group)} (parts/*-{group}.parquet)" if group.isdecimal() else "it"
        what = known if group else "the run's directory"
        why = " ".join(str(error).split())
        raise Unreadable(f"{file} is not a readable table ({why}); remove {what} and run again") from error


def read_table(file: Path, only: list[str] | None = None) -> pa.Table:
    """Read parquet from a regular file; ``only`` these columns.

    Raises:
        FileNotFoundError: there is none.
        pa.ArrowException, OSError, ValueError: it is no regular file, or no parquet.
    """
    if not S_ISREG(file.stat().st_mode):  # opening a pipe would wait for whoever writes into it
        raise ValueError("no regular file")
    return pq.read_table(file, columns=only, partitioning=None)


def fitted(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The wanted columns of the table, with their types.

    Raises:
        pa.ArrowException, ValueError: it lacks one, or has something else in it.
    """
    if missing := [name for name in wanted.names if name not in table.column_names]:
        raise ValueError(f"it has no column {', '.join(missing)}")
    table = table.select(wanted.names).cast(wanted)
    for field in wanted:
        pieces = table[field.name].chunks
        if pa.types.is_list(field.type):
            pieces = [*pieces, *(one.flatten() for one in pieces)]
        if not pa.types.is_floating(field.type) and any(one.null_count for one in pieces):
            raise ValueError(f"column {field.name} has rows without a value")
    table.validate(full=True)
    return table


def write_whole(table: pa.Table, file: Path) -> None:
    """Write parquet, renamed into place once whole; a part of a run never through a symlink.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    if file.parent.name == "parts":
        own_folder(file.parent)
    with replacing(file) as stream:
        pq.write_table(table, stream)
