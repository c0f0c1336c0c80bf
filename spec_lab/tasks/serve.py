"""``task=serve_trace``: a stream of requests with arrivals, served by continuous batching, for every arm.

The stream is cut into segments. Every arm serves every segment with an empty engine, and the arms alternate in going
first; a segment is the unit of pairing. Requests are added at their arrival time on the wall clock. Queue time and time
to first token count from the arrival. Times are read at the end of a step, when a server would stream the tokens.
Segments in which a request of any arm broke (NaN logits, a failed constraint) are left out of the figures of all arms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.metrics import cached_prompt_shares
from spec_lab.analysis.results import serving as results
from spec_lab.analysis.serving import drift_figures, serving_verdict, summarise
from spec_lab.core.device_memory import Peak
from spec_lab.core.machine import Usage, other_load
from spec_lab.core.options import Count, Number, Whole, checked
from spec_lab.core.progress import Progress
from spec_lab.core.request import BROKEN, Request
from spec_lab.core.roofline import Roofline
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import StepInfo
from spec_lab.results.manifest import write_json
from spec_lab.results.schema import OPTIONAL, REQUESTS
from spec_lab.results.table_parts import Rows, TableParts
from spec_lab.results.writer import computed_shares
from spec_lab.tasks.arrivals import arrival_times, check_waits
from spec_lab.tasks.drift import COUNTS, WORKLOAD, RequestStream, add_counts, change_at
from spec_lab.tasks.lab import Lab, Loop, Settings
from spec_lab.tasks.memory_check import check_memory
from spec_lab.tasks.shell import Done, Task
from spec_lab.text.prompts import Prompt

_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()

SERVED = {
    "id": (_TEXT, "request/arm"),
    "segment": (_WHOLE, "number of the segment of the stream, the unit of pairing"),
    "arm": (_TEXT, "who drafted"),
    "order": (_WHOLE, "the arm's place in its segment's order, from 0"),
    "request": (_WHOLE, "number of the request in the stream"),
    "prompt_tokens": (_WHOLE, "length of the prompt"),
    "tokens": (_WHOLE, "tokens emitted by all its sequences, as in the benchmark; those before a fork count once"),
    "finish": (_TEXT, "finish reason (engine.request.FINISHES) of its first broken, else its first kept sequence"),
    "error": (_TEXT, "why it broke; empty where it did not"),
    "arrival": (_REAL, "seconds from the start of the segment, as all times here"),
    "admitted": (_REAL, "start of the first step that computed a part of its prompt"),
    "first_token": (_REAL, "end of the step that emitted its first token"),
    "end": (_REAL, "end of its last step"),
    "steps": (_WHOLE, "steps that sampled for it; one that sampled for several of its sequences counts for each"),
    "prefill_compute_seconds": REQUESTS["prefill_compute_seconds"],
}
"""One row for each request and arm, whatever number of sequences its constraint forked it into."""

ROOFLINE = {
    "lower_bound_seconds": (
        _REAL,
        "least seconds of the target's forwards on this machine (core.roofline), of the steps that computed no part of "
        "a prompt, each multiplied by the share of its computed tokens that belong to this request",
    ),
    "read_seconds": (_REAL, "of lower_bound_seconds, those of steps that reading bounds; computing bounds the others"),
    "forward_seconds": (_REAL, "seconds inside the target's module calls of these steps, likewise"),
}
"""Optional columns: not in older runs, and not where the runner does not state its work."""

LATER = {
    "other_cores": OPTIONAL["requests"]["other_cores"],
    **WORKLOAD,
    **COUNTS,
}
"""Columns that older runs lack."""

CACHED = {"cached_tokens": OPTIONAL["requests"]["cached_tokens"]}
"""The optional column of runs with a prefix cache."""

NOTHING_YET = {"steps": 0, "prefill_compute_seconds": 0.0} | dict.fromkeys(COUNTS, 0)

MAX_RATE = 1e6
MAX_REQUESTS = 2**20

Positive = Annotated[float, Number(0, MAX_RATE, above=True)]


@checked
def serve(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    drift: Sequence[Prompt] | None = None,
    drift_at: Count | None = None,
    drift_at_seconds: Annotated[float, Number(0, above=True)] | None = None,
    drift_window: Count = 8,
    *,
    arrivals: Literal["all", "poisson", "file"] = "all",
    rate: Positive = 4.0,
    trace: str | None = None,
    requests: Annotated[int, Whole(1, MAX_REQUESTS)] | None = None,
    segment: Count = 32,
    max_prefill_tokens: Count | None = 512,
    max_kv_tokens: Count | None = None,
    ttft_bound: Positive = 1.0,
    tpot_bound: Positive = 0.1,
) -> int:
    """Serve the prompts as a stream with every arm; write a row for each request, and a summary.

    Args:
        lab: the parts; the proposers and the baseline are the arms.
        settings: the scalars; ``batch_size`` is the maximum number of requests decoded together.
        config: the configuration, for the manifest.
        console: prints the final table; default standard output.
        arrivals: all at once; poisson, with rate; file: times in trace.
        rate: requests per second, for poisson.
        trace: text file with one arrival time in seconds per line.
        requests: number of requests, prompts repeated as needed; None: each prompt once.
        drift: prompts of another workload, to which the stream changes: +prompts@task.drift=NAME; None: no change.
        drift_at: the request, from 0, with which they begin; None: after each prompt once, or with requests in the
            middle.
        drift_at_seconds: the arrival time, in seconds, from which on they are served, in place of drift_at; not with
            arrivals=all; None: see drift_at.
        drift_window: requests of a window, of which tau and acceptance are computed before and after the change.
        segment: requests of a segment, the unit of pairing.
        max_prefill_tokens: prompt tokens computed in one step; None: no limit.
        max_kv_tokens: tokens in the KV cache, drafts included; None: no limit.
        ttft_bound: seconds to the first token, for goodput.
        tpot_bound: seconds for each further token, for goodput.

    Returns:
        The exit code: 0, also where requests broke, or 130 after Ctrl-C.

    Raises:
        ValueError: an invalid option, incompatible parts, prompts that do not fit, or a directory that holds another
            run.
        OSError: the directory cannot be written, or the trace cannot be read.
    """
    console = console or standard_output()
    if lab.peers:
        raise ValueError(f"task=serve_trace does not support peers, which decode one prompt at a time: {[*lab.peers]}")
    limits = Limits(settings.batch_size, max_prefill_tokens, max_kv_tokens)
    count = len(lab.prompts) + len(drift or ()) if requests is None else requests
    times = arrival_times(arrivals, count, rate, trace, settings.seed)
    change = drift_at if drift_at_seconds is None else change_at(drift_at_seconds, times, drift, drift_at)
    stream = RequestStream.of(lab, settings, requests, drift, change)
    needed = check_memory(lab, settings, [len(request.tokens) for request in stream.requests])
    check_waits(times, segment, arrivals, rate, trace)
    arms = {name: arm for name, arm in lab.arms(settings).items() if isinstance(arm, Loop)}
    for arm in arms.values():
        check_requests(arm, stream.requests, limits)
    segments = segments_of(stream.requests, times, segment)
    roofline = lab.roofline()
    written = [*LATER, *({} if roofline is None else ROOFLINE), *({} if settings.prefix_cache is None else CACHED)]
    optional = {"served": LATER | ROOFLINE | CACHED}
    tables = TableParts(settings.output_dir, {"served": SERVED}, optional=optional, written=written)
    serving = _Serving(lab, settings, arms, stream, segments, limits, tables, (ttft_bound, tpot_bound), drift_window)
    about = {
        "kv_dtype": (config.get("target") or {}).get("kv_dtype"),
        "arrivals": arrivals,
        "rate": rate if arrivals == "poisson" else None,
    }
    more: dict[str, Any] = {"roofline": None if roofline is None else roofline.facts(), "memory": needed}
    if stream.change is not None:
        more["drift"] = {"at": stream.change, "prompts_sha256": stream.prompts_sha256}
    task = Task(lab, settings, config, arms, partial(serving.work, about), serving.left, tables, more)
    return task.run(console)


@dataclass(frozen=True)
class _Serving:
    """The segments of a stream, which every arm serves.

    Args:
        arms: by the name under which they are shown; "baseline" is the baseline.
        bounds: ``ttft_bound`` and ``tpot_bound`` of ``serve``.
        window: ``drift_window`` of ``serve``.
    """

    lab: Lab
    settings: Settings
    arms: Mapping[str, Loop]
    stream: RequestStream
    segments: Sequence[StreamSegment]
    limits: Limits
    tables: TableParts
    bounds: tuple[float, float]
    window: int

    def work(self, about: Mapping[str, Any], facts: dict[str, Any]) -> Done:
        """Serve the segments that are not on disk, and sum up.

        Args:
            about: entries of the summary.
        """
        lab, settings, arms = self.lab, self.settings, self.arms
        measured = Roofline.of(facts.get("roofline"))  # of a resumed run, from when it began
        before = self._finished()
        todo = [segment for segment in self.segments if segment.number not in before]
        emptied = self._emptied(facts, todo)
        peak = Peak.start(lab.target.lm.device)
        if todo and settings.warmup:
            first = [request for segment in self.segments for request in segment.requests][: settings.batch_size]
            warm_up(arms, first, settings.warmup, self.limits)
        total = sum(len(segment.requests) for segment in todo) * len(arms)
        with Progress(total=total, desc=settings.name, unit="request") as bar:
            for segment in todo:
                rows = serve_with_every_arm(arms, segment, self.limits, bar, measured)
                rows = [row | self.stream.columns(row["request"]) for row in rows]
                self.tables.write(f"{segment.number:06d}", {"served": rows})
        used = {**(facts.get("memory") or {}), **peak.facts(bool(todo))}
        frame = self.tables.gather()["served"]
        complete, baseline = unbroken(frame), "baseline" if settings.baseline else None
        summary = {
            "experiment": settings.name,
            "target": lab.target.name,
            "temperature": lab.sampling.temperature,
            **about,
            "max_batch_size": settings.batch_size,
            "segments": len(self.segments),
            "broken_segments": frame["segment"].nunique() - complete["segment"].nunique(),
            "roofline": facts.get("roofline"),
            "memory": used,
            **({} if settings.prefix_cache is None else {"cached_prompt_shares": cached_prompt_shares(complete)}),
            "arms": summarise(complete, list(arms), *self.bounds, baseline),
            **self._drift(complete, emptied),
            "errors": frame.loc[frame["error"] != "", "error"].tolist(),
            **serving_verdict(complete, facts, baseline or "").summary(),
        }
        return Done(summary, results.result)

    def _emptied(self, facts: dict[str, Any], todo: Sequence[StreamSegment]) -> list[int]:
        """Return the segments in which a stream with a change resumed with empty stores; the manifest keeps them.

        Args:
            todo: segments that are not on disk.
        """
        emptied: list[int] = facts.get("emptied_stores", [])
        stores = any(proposer.shared_store for proposer in self.lab.proposers().values())
        if todo and todo[0].number and stores and self.stream.change is not None:
            emptied = facts["emptied_stores"] = sorted({*emptied, todo[0].number})
            write_json(self.settings.output_dir / "manifest.json", facts)
        return emptied

    def _drift(self, frame: pd.DataFrame, emptied: Sequence[int]) -> dict[str, Any]:
        """Return the figures before and after the change of the workload, and the segments that began with empty
        stores; none without a change.
        """
        change = self.stream.change
        if change is None:
            return {}
        figures = drift_figures(frame, list(self.arms), change, self.window)
        return {"drift": {**figures, "emptied_stores": list(emptied)}}

    def left(self) -> tuple[int, str]:
        """Return the number of segments on disk, and a sentence that states it."""
        done = len(self._finished())
        return done, f"{done} of {len(self.segments)} segments are in {self.settings.output_dir}"

    def _finished(self) -> set[int]:
        return set(self.tables.load()["served"]["segment"])


def check_requests(arm: Loop, requests: Sequence[Request], limits: Limits) -> None:
    """Refuse requests that an arm cannot serve, before anything is served: an engine validates those that it queues.

    Raises:
        ValueError: see ``Engine.add``.
    """
    engine = Engine(arm, limits=limits)
    for request in requests:
        engine.add(request)
    engine.close()


@dataclass(frozen=True)
class StreamSegment:
    """A part of the stream, which every arm serves with an empty engine.

    Args:
        number: from 0.
        requests: in the order of their arrival.
        due: their arrival times, in seconds from the arrival of the first.
    """

    number: int
    requests: Sequence[Request]
    due: Sequence[float]


def segments_of(stream: Sequence[Request], times: Sequence[float], size: int) -> list[StreamSegment]:
    """Return the segments of a stream, of ``size`` requests each; the last one may have fewer."""
    return [
        StreamSegment(number, stream[at : at + size], [due - times[at] for due in times[at : at + size]])
        for number, at in enumerate(range(0, len(stream), size))
    ]


def warm_up(arms: Mapping[str, Loop], requests: Sequence[Request], tokens: int, limits: Limits) -> None:
    """Let every arm serve a few tokens of these requests together, so that memory for a batch is allocated.

    What proposers have learned from them is forgotten, since the same requests are measured.
    """
    short = [replace(request, max_new_tokens=min(tokens, request.max_new_tokens)) for request in requests]
    for arm in arms.values():
        serve_segment(arm, short, [0.0] * len(short), limits)
        arm.forget()


def serve_with_every_arm(
    arms: Mapping[str, Loop], segment: StreamSegment, limits: Limits, bar: Any, roofline: Roofline | None = None
) -> Rows:
    """Serve a segment with every arm; return the rows (``SERVED``). The arms alternate in going first.

    Args:
        bar: the progress bar; it counts requests, and prints why one broke.
        roofline: of the target; None leaves out the columns of ``ROOFLINE``.
    """
    names, shift = list(arms), segment.number % len(arms)
    rows: Rows = []
    for order, name in enumerate(names[shift:] + names[:shift]):
        began = Usage.now()
        served = serve_segment(arms[name], segment.requests, segment.due, limits, roofline)
        load = other_load(began, Usage.now())
        key = {"segment": segment.number, "arm": name, "order": order, "other_cores": load}
        rows += [{"id": f"{row['request']}/{name}", **key, **row} for row in served]
        for row in served:
            if row["error"]:
                bar.write(f"{name}: {row['error']}", file=sys.stderr)
        bar.update(len(served))
    return rows


def unbroken(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the segments in which no request of any arm broke."""
    return frame[~frame["segment"].isin(frame.loc[frame["finish"].isin(BROKEN), "segment"])]


def serve_segment(
    arm: Loop,
    requests: Sequence[Request],
    due: Sequence[float],
    limits: Limits,
    roofline: Roofline | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Rows:
    """Serve requests that arrive ``due`` seconds after the start; return a row for each, in their order.

    A prefix cache is empty when the segment begins, so that its figures depend on no other segment's.

    With a ``roofline`` the rows have the columns of ``ROOFLINE``, computed after the last step.
    """
    engine = Engine(arm, limits=limits)
    if arm.prefix_cache is not None:
        arm.prefix_cache.clear()
    rows: dict[int, dict[str, Any]] = {
        request.id: {"request": request.id, "prompt_tokens": len(request.tokens), "arrival": at} | NOTHING_YET
        for request, at in zip(requests, due, strict=True)
    }
    decoded: list[StepInfo] = []
    coming, start = list(zip(due, requests, strict=True)), clock()
    try:
        while coming or engine.has_unfinished():
            now = clock() - start
            while coming and coming[0][0] <= now:
                engine.add(coming.pop(0)[1])
            if not engine.has_unfinished():
                sleep(coming[0][0] - now)
                continue
            began = clock() - start
            info = engine.step()
            arm.target.lm.clock.synchronise()
            end = clock() - start
            if info is None:
                continue
            decoded.append(info.slim())
            seconds = end - began - info.seconds()["capture"]
            for sequence, share in computed_shares(info).items():
                row = rows[sequence.request.id]
                row.setdefault("admitted", began)
                if "first_token" not in row:
                    row["prefill_compute_seconds"] += share * seconds
            for sequence in info.sequences:
                row = rows[sequence.request.id]
                row.setdefault("first_token", end)
                row["end"] = end
                row["steps"] += 1
    finally:
        engine.close()
    sequences: dict[int, list[SequenceState]] = {number: [] for number in rows}
    for sequence in engine.sequences:
        sequences[sequence.request.id].append(sequence)
    add_counts(rows, decoded)
    if roofline is not None:
        _add_roofline(rows, [info for info in decoded if not info.chunks and not any(info.prefill)], roofline)
    for number, row in rows.items():
        row |= outcome(sequences[number], engine.errors)
        if arm.prefix_cache is not None:
            row["cached_tokens"] = max((sequence.reused for sequence in sequences[number]), default=0)
        for name in ("admitted", "first_token", "end"):  # a constraint may end a request before its first step
            row.setdefault(name, row["arrival"])
    return list(rows.values())


def _add_roofline(rows: Mapping[int, dict[str, Any]], infos: Sequence[StepInfo], roofline: Roofline) -> None:
    """Set the columns of ``ROOFLINE`` from the steps that computed no part of a prompt."""
    for row in rows.values():
        row |= dict.fromkeys(ROOFLINE, 0.0)
    for info in infos:
        nodes = info.draft.acceptable_nodes + info.draft.computed_only_nodes
        chosen = None if info.experts is None else [np.mean(info.experts.read)]
        (read,), (compute,) = roofline.seconds(np.zeros(len(nodes)), info.context, info.pending, nodes, chosen)
        columns = {
            "lower_bound_seconds": max(read, compute),
            "read_seconds": read if read >= compute else 0.0,
            "forward_seconds": info.seconds()["target_forward"],
        }
        for sequence, share in computed_shares(info).items():
            for name, seconds in columns.items():
                rows[sequence.request.id][name] += float(share * seconds)


def outcome(sequences: Sequence[SequenceState], errors: Mapping[SequenceState, str]) -> dict[str, Any]:
    """Return the columns ``tokens``, ``finish`` and ``error`` of a finished request.

    A request is broken if any of its sequences is, even one that its constraint did not keep.

    Args:
        sequences: all of the request's.
        errors: of the sequences that have one.
    """
    ordered = sorted(sequences, key=lambda sequence: sequence.lineage)
    broken = [sequence for sequence in ordered if sequence.finish in BROKEN]
    kept = [sequence for sequence in ordered if sequence.kept]
    return {
        "tokens": sum(len(sequence.tokens) - sequence.born for sequence in sequences),
        "finish": [*broken, *kept, *ordered][0].finish or "",
        "error": next((errors[sequence] for sequence in ordered if sequence in errors), ""),
    }
