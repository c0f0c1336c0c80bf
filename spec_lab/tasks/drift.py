"""Requests of a served stream, whose workload may change in the middle."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from spec_lab.core.options import WrongOption
from spec_lab.core.request import Request
from spec_lab.decode.step import StepInfo
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.text.prompts import Prompt, check_one_turn, digest

COUNTS = {
    "decode_steps": (pa.int64(), "of steps, those after the prefill"),
    "drafted": (pa.int64(), "draft nodes of these steps, forced ones left out"),
    "accepted": (pa.int64(), "of them, those that were accepted, before truncation"),
    "emitted": (
        pa.int64(),
        "tokens of these steps that truncation left, forced ones left out: emitted / decode_steps is tau",
    ),
}
"""Columns of ``serve.SERVED`` by which tau and acceptance along the stream are computed."""

WORKLOAD = {
    "workload": (pa.string(), "the prompt's workload"),
    "drifted": (pa.bool_(), "whether the request comes after the change of the workload (the option drift)"),
}
"""Columns of ``RequestStream.columns``."""


@dataclass(frozen=True)
class RequestStream:
    """Requests of a stream.

    Args:
        requests: numbered in the order of their arrival.
        workloads: of each request.
        change: number of the first request of another workload; None: the workload does not change.
        prompts_sha256: of the prompts after the change; empty without one.
    """

    requests: Sequence[Request]
    workloads: Sequence[str]
    change: int | None = None
    prompts_sha256: str = ""

    @staticmethod
    def of(
        lab: Lab,
        settings: Settings,
        count: int | None,
        drift: Sequence[Prompt] | None,
        change: int | None,
        task: str = "task=serve_trace",
    ) -> RequestStream:
        """Return the stream of the lab's prompts and, from a request on, of others.

        Args:
            count: of requests; None: each prompt once.
            drift: the prompts after the change; None: there is none.
            change: number of its first request; None: after each prompt once, or with a ``count`` in the middle.
            task: what serves it, for messages.

        Raises:
            ValueError: a ``change`` without prompts, or not within the stream; prompts of several turns, or that do
                not fit.
        """
        if drift is None and change is not None:
            raise WrongOption("drift_at requires prompts after the change: add +prompts@task.drift=NAME")
        labs = [lab] if drift is None else [lab, replace(lab, prompts=drift)]
        for part in labs:
            check_one_turn(part.prompts, task)
        known = [part.requests(settings) for part in labs]
        total = sum(map(len, known)) if count is None else count
        sizes = [total]
        if drift is not None:
            if total < 2:
                raise WrongOption(
                    f"requests must be at least 2 with drift, one before the change and one after it (got {total})"
                )
            change = (len(known[0]) if count is None else count // 2) if change is None else change
            if not 0 < change < total:
                raise WrongOption(
                    f"drift_at must be a request of the stream after the first, from 1 to {total - 1} (got {change})"
                )
            sizes = [change, total - change]
        requests: list[Request] = []
        workloads: list[str] = []
        for part, each, size in zip(labs, known, sizes, strict=True):
            for index in range(size):
                number = len(requests)
                requests.append(replace(each[index % len(each)], id=number, name=f"request {number}"))
                workloads.append(part.prompts[index % len(each)].workload)
        return RequestStream(requests, workloads, change, "" if drift is None else digest(drift))

    def columns(self, request: int) -> dict[str, Any]:
        """Return the columns ``WORKLOAD`` of a request."""
        return {
            "workload": self.workloads[request],
            "drifted": self.change is not None and request >= self.change,
        }


def change_at(seconds: float, times: Sequence[float], drift: Sequence[Prompt] | None, drift_at: int | None) -> int:
    """Return the number of the first request that arrives at a time or later.

    Args:
        seconds: the time, in seconds of the stream.
        times: of the arrivals of all requests, ascending.
        drift, drift_at: of ``serve``.

    Raises:
        WrongOption: no prompts after the change; a request is given as well; no request arrives before the time, or
            none after it.
    """
    if drift is None:
        raise WrongOption("drift_at_seconds requires prompts after the change: add +prompts@task.drift=NAME")
    if drift_at is not None:
        raise WrongOption(
            f"drift_at_seconds={seconds:g} and drift_at={drift_at} both say where the stream changes: set one of them "
            "to null"
        )
    if not times[0] < seconds <= times[-1]:
        raise WrongOption(
            f"drift_at_seconds must be after the first arrival, at {times[0]:g} s, and not after the last one, at "
            f"{times[-1]:g} s (got {seconds:g}); with arrivals=all every request arrives at 0: set poisson or file"
        )
    return bisect_left(times, seconds)


def add_counts(rows: Mapping[int, dict[str, Any]], infos: Sequence[StepInfo]) -> None:
    """Add the steps after the prefill to the columns ``COUNTS`` of their requests.

    Args:
        rows: by request; the columns are set.
    """
    for info in infos:
        for sequence, step in zip(info.sequences, replace(info, recorded=None).rows(), strict=True):
            if step["prefill"]:
                continue
            row = rows[sequence.request.id]
            row["decode_steps"] += 1
            row["drafted"] += step["nodes"] - step["forced"]
            row["accepted"] += step["accepted"] - step["forced_accepted"]
            row["emitted"] += step["emitted_kept"] - step["forced_emitted_kept"]
