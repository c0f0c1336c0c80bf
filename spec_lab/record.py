"""The rows a run leaves behind: three tables, written group by group, so that a kill keeps every finished group.

While a group decodes, only its ``Round`` objects are kept; they become rows after the clock has stopped. Each group's
rows go to ``parts/`` as parquet files, renamed into place once whole, the requests last: a group is finished exactly if
its requests are on disk. At the end the parts are gathered into ``rounds.parquet``, ``steps.parquet`` and
``requests.parquet``. The schemas below say what every column means; metrics are computed from these rows and from
nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from spec_lab.batch import Request
from spec_lab.clock import Clock
from spec_lab.decode import Round
from spec_lab.draft import Draft
from spec_lab.text import Prompt

Rows = list[dict[str, Any]]

_TEXT, _WHOLE, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

ROUNDS = {
    "id": (_TEXT, "group/arm/round"),
    "group": (_WHOLE, "number of the group of prompts decoded together"),
    "arm": (_TEXT, "'speculative', 'baseline', or the name of what is measured beside them"),
    "round": (_WHOLE, "number of the forward in its group and arm, from 0"),
    "prefill": (_FLAG, "whether this forward computed the prompts; decode time and tau start after it"),
    "live": (_WHOLE, "sequences that took part"),
    "nodes": (_WHOLE, "drafted nodes of all trees"),
    "cells": (_WHOLE, "attended cells of all sequences"),
    "start": (_REAL, "seconds from the start of the arm's round 0 to the start of this one"),
    "propose": (_REAL, "seconds of drafting"),
    "propose_forward": (_REAL, "of these, seconds inside module calls of a draft model or heads"),
    "mask_busy": (_REAL, "seconds spent on constraint masks, wherever they ran"),
    "mask_wait": (_REAL, "of these, seconds the loop waited for them"),
    "target": (_REAL, "seconds of the target, packing and bookkeeping of cells included"),
    "target_forward": (_REAL, "of these, seconds inside its module calls"),
    "law": (_REAL, "seconds of turning logits into laws"),
    "verify": (_REAL, "seconds of verification and choice"),
    "commit": (_REAL, "seconds of committing"),
    "whole": (_REAL, "seconds of the whole round"),
}
"""One row for each forward of a batch."""

STEPS = {
    "id": (_TEXT, "request/arm/sequence/round"),
    "group": (_WHOLE, "as in rounds"),
    "arm": (_TEXT, "as in rounds"),
    "request": (_WHOLE, "number of the prompt in its run"),
    "sequence": (_WHOLE, "branch of the request; 0 is the first"),
    "parent_sequence": (_WHOLE, "the branch it was forked from; -1 for none"),
    "round": (_WHOLE, "as in rounds"),
    "prefill": (_FLAG, "as in rounds"),
    "pending": (_WHOLE, "tokens committed and not yet computed when the round began"),
    "forced": (_WHOLE, "of the drafted nodes, those forced by a constraint"),
    "nodes": (_WHOLE, "drafted nodes, forced ones included"),
    "depth": (_WHOLE, "drafted depth"),
    "path": (pa.list_(pa.int64()), "the accepted path as child ranks, before cuts"),
    "stop_had_children": (_FLAG, "whether the node where the path ended had children, all of them rejected"),
    "accepted": (_WHOLE, "drafted tokens accepted, before cuts, forced ones included"),
    "emitted": (_WHOLE, "tokens emitted, before cuts: accepted and the one after them"),
    "accepted_kept": (_WHOLE, "accepted tokens left after stop tokens and limits"),
    "emitted_kept": (_WHOLE, "emitted tokens left after stop tokens and limits"),
    "forced_accepted": (_WHOLE, "of accepted, tokens that were forced"),
    "forced_accepted_kept": (_WHOLE, "of accepted_kept, tokens that were forced"),
    "expected_accepted": (_REAL, "expected accepted tokens given the draft, before cuts, forced ones left out"),
    "expected_kind": (_TEXT, "'exact': given the draft; 'noise': given its noise as well; empty: a broken step"),
    "empty_residual": (_FLAG, "whether rounding left nothing of the residual, so that the token came from p itself"),
    "finish": (_TEXT, "why the sequence ended with this step: stop, length, context, nan; empty while it lives"),
    "context": (_WHOLE, "tokens of the sequence when the round began, prompt included"),
}
"""One row for each sequence in each round."""

REQUESTS = {
    "id": (_TEXT, "request/arm"),
    "group": (_WHOLE, "as in rounds"),
    "arm": (_TEXT, "as in rounds"),
    "request": (_WHOLE, "number of the prompt in its run; keys its randomness"),
    "name": (_TEXT, "the prompt's id"),
    "workload": (_TEXT, "the prompt's workload"),
    "source": (_TEXT, "where the prompt comes from"),
    "seed": (_WHOLE, "the run's seed"),
    "order": (_WHOLE, "the arm's place in its group's order, from 0"),
    "prompt": (_TEXT, "the prompt"),
    "prompt_tokens": (_WHOLE, "its length in tokens"),
    "text": (_TEXT, "the output as text, special tokens left out"),
    "tokens": (pa.list_(pa.int64()), "the output's token ids, after cuts"),
    "prefill_tokens": (_WHOLE, "of them, those emitted by the prefill's forward"),
    "decode_tokens": (_WHOLE, "of them, the others"),
    "prefill_seconds": (_REAL, "seconds of the prefill's round, shared by the group"),
    "decode_seconds": (_REAL, "seconds from the prefill's end to the end of the request's last round"),
    "finish": (_TEXT, "stop, length, context or nan"),
    "error": (_TEXT, "what broke the request; empty for nothing"),
}
"""One row for each request and arm."""

SCHEMAS = {"rounds": ROUNDS, "steps": STEPS, "requests": REQUESTS}


@dataclass(frozen=True)
class Tables:
    """A run's rows."""

    rounds: pd.DataFrame
    steps: pd.DataFrame
    requests: pd.DataFrame


def slim(done: Round) -> Round:
    """The round without its draft's laws, which would fill the memory (V numbers for every node)."""
    return done if done.draft.q is None else replace(done, draft=Draft(done.draft.shape, done.draft.token))


def round_rows(rounds: Sequence[Round], clock: Clock, group: int, arm: str) -> Rows:
    """Rows of ``rounds``. On a GPU call it only when all work is done."""
    rows = []
    for number, one in enumerate(rounds):
        seconds = {"mask_busy": 0.0, "mask_wait": 0.0} | one.seconds(clock)
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
                **seconds,
            }
        )
    return rows


def step_rows(rounds: Sequence[Round], group: int, arm: str) -> Rows:
    """Rows of every sequence's part in ``rounds``."""
    rows: Rows = []
    last = {}  # each sequence's latest row
    for number, one in enumerate(rounds):
        shape = one.draft.shape
        for head, (sequence, got) in enumerate(zip(one.sequences, one.committed, strict=True)):
            tree, stop = shape.trees[head], got.path[-1] if got.path else head
            last[sequence] = {
                "id": f"{sequence.request.id}/{arm}/{sequence.branch}/{number}",
                "group": group,
                "arm": arm,
                "request": sequence.request.id,
                "sequence": sequence.branch,
                "parent_sequence": -1,
                "round": number,
                "prefill": one.prefill[head],
                "pending": one.pending[head],
                "forced": 0,
                "nodes": len(tree) - 1,
                "depth": int(shape.depth[tree].max()),
                "path": list(shape.ranks(stop)),
                "stop_had_children": len(shape.children[stop]) > 0,
                "accepted": got.accepted,
                "emitted": got.emitted,
                "accepted_kept": got.accepted_kept,
                "emitted_kept": got.emitted_kept,
                "forced_accepted": 0,
                "forced_accepted_kept": 0,
                "expected_accepted": float(one.expected[head]),
                "expected_kind": "exact" if one.given == "draft" else one.given,
                "empty_residual": bool(one.empty[head]),
                "finish": "",
                "context": one.context[head],
            }
            rows.append(last[sequence])
    for sequence, row in last.items():
        row["finish"] = sequence.finish or ""
        if sequence.finish == "nan":
            row["expected_kind"] = ""
    return rows


@dataclass(frozen=True)
class Outcome:
    """What one arm made of one request.

    Args:
        request: the request.
        tokens: what was emitted, after cuts.
        finish: why it ended.
        prefill_tokens: of the tokens, those emitted by the prefill's forward.
        prefill_seconds: seconds until then.
        decode_seconds: seconds from then to the request's end.
        error: what broke it; empty for nothing.
    """

    request: Request
    tokens: list[int]
    finish: str
    prefill_tokens: int
    prefill_seconds: float
    decode_seconds: float
    error: str = ""


def outcomes(rounds: Sequence[Round], clock: Clock, errors: dict[str, str]) -> list[Outcome]:
    """What came of each request of a group, in order. On a GPU call it only when all work is done."""
    first, found = rounds[0], []
    for head, sequence in enumerate(first.sequences):
        final = next(one for one in reversed(rounds) if sequence in one.sequences)
        found.append(
            Outcome(
                request=sequence.request,
                tokens=sequence.emitted,
                finish=sequence.finish or "",
                prefill_tokens=first.committed[head].emitted_kept,
                prefill_seconds=clock.seconds(first.marks[0], first.marks[-1]),
                decode_seconds=clock.seconds(first.marks[-1], final.marks[-1]),
                error=errors.get(sequence.request.name, ""),
            )
        )
    return found


def request_row(
    outcome: Outcome, prompt: Prompt, shown: str, seed: int, group: int, arm: str, order: int
) -> dict[str, Any]:
    """The row of one outcome; ``shown`` is its text."""
    number = outcome.request.id
    return {
        "id": f"{number}/{arm}",
        "group": group,
        "arm": arm,
        "request": number,
        "name": prompt.name,
        "workload": prompt.workload,
        "source": prompt.source,
        "seed": seed,
        "order": order,
        "prompt": prompt.text,
        "prompt_tokens": len(outcome.request.tokens),
        "text": shown,
        "tokens": outcome.tokens,
        "prefill_tokens": outcome.prefill_tokens,
        "decode_tokens": len(outcome.tokens) - outcome.prefill_tokens,
        "prefill_seconds": outcome.prefill_seconds,
        "decode_seconds": outcome.decode_seconds,
        "finish": outcome.finish,
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
        folder = self.out / "parts"
        folder.mkdir(parents=True, exist_ok=True)
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
        for half in (self.out / "parts").glob(".*.tmp"):  # of a write that was killed
            half.unlink()
        if (self.out / "parts").is_dir():
            (self.out / "parts").rmdir()
        return tables


def load(out: str | Path) -> Tables:
    """The rows of the finished groups of a run: running, killed or done. Duplicate ids are dropped, the last one stays.

    Raises:
        ValueError: a file of the run that is not a table.
    """
    out = Path(out)
    frames = {}
    for name in SCHEMAS:
        files = [file for file in (out / f"{name}.parquet", *_parts(out, name)) if file.is_file()]
        pieces = [_read(file) for file in files] or [schema(name).empty_table()]
        frame = pa.concat_tables(pieces).to_pandas()
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


def _read(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a readable table ({error}); remove it and run again") from error


def write_whole(table: pa.Table, file: Path) -> None:
    """Write parquet, renamed into place once whole."""
    part = file.with_name(f".{file.name}.tmp")
    pq.write_table(table, part)
    os.replace(part, file)
