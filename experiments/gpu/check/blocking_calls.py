"""Calls of a step that wait for the GPU, as torch reports them, by the project's line that made them."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from experiments.gpu.check.part import Part, run
from experiments.gpu.check.proposers import PROPOSERS, WITHOUT_FIXED_SHAPES, small_target
from experiments.gpu.random_models import WAYS
from experiments.gpu.timing import Captures
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine
from spec_lab.verify import Token

ROOT = Path(__file__).resolve().parents[3]
HERE = (__file__, warnings.__file__)
WARM_UP = 4
"""Steps before the watched one: prompts, captures."""

MAX_WATCHED = 10
"""Most steps that are watched until one drafts; it is the one that is reported."""


def places() -> tuple[str, str]:
    """The innermost line of the project that is running, and the innermost one of all that lies below it, if any."""
    frame: FrameType | None = sys._getframe(1)
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in HERE:
            line = f"{frame.f_lineno} {frame.f_code.co_name}"
            if file.startswith(str(ROOT / "spec_lab")):
                return f"{Path(file).relative_to(ROOT)}:{line}", inner
            inner = inner or f"{'/'.join(Path(file).parts[-2:])}:{line}"
        frame = frame.f_back
    return "elsewhere", inner


@contextmanager
def watched(calls: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count the blocking calls that torch reports, by ``places``. On a CPU there are none."""

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            calls[places()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def one_step(part: Part, name: str, captured: bool, temperature: float) -> dict[str, Any]:
    """The blocking calls of one step of two sequences that drafts."""
    target = small_target(part.device, part.dtype, captured)
    proposer = PROPOSERS[name](target)
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)))
    captures = Captures.of(target.lm)
    for number in range(2):
        prompt = (*range(3 + number, 20), *range(3, 12), 5, 6, 5, 6, 5, 6)
        engine.add(Request(number, f"r{number}", prompt, Sampling(temperature), 64))
    with torch.inference_mode():
        for _ in range(WARM_UP):
            engine.step()
        for _ in range(MAX_WATCHED):
            target.lm.clock.synchronise()
            before, calls = captures.count, Counter[tuple[str, str]]()
            began = time.perf_counter()
            with watched(calls):
                info = engine.step()
            seconds = time.perf_counter() - began
            assert info is not None, "decoding ended before a step drafted"
            if info.draft.shape.nodes or name == "null":
                break
    target.lm.clock.synchronise()
    engine.close()
    return {
        "calls": sum(calls.values()),
        "places": [{"line": line, "within": inner, "calls": number} for (line, inner), number in calls.most_common()],
        "nodes": info.draft.shape.nodes,
        "readbacks": [info.copies_before, info.copies_after],
        "captures_in_step": captures.count - before,
        "seconds": seconds,
    }


def measure(part: Part) -> None:
    """Watch a step of every proposer, eagerly, then captured, greedy, then sampled; on a CPU only the first."""
    part.keep("sync_debug_mode", None if part.tiny else "warn")
    total: Counter[str] = Counter()
    steps, first_left_out = 0, ""
    for temperature in (0.0,) if part.tiny else (0.0, 1.0):
        for way in WAYS[:1] if part.tiny else WAYS:
            of_way: dict[str, Any] = {}
            sampled = "sampled" if temperature else "greedy"
            for name in PROPOSERS:
                if way == "captured" and name in WITHOUT_FIXED_SHAPES:
                    continue
                if part.left < 1:
                    first_left_out = first_left_out or f"no time was left from {name}, {way}, {sampled} on"
                    break
                with part.attempt(f"{name}, {way}, {sampled}"):
                    step = one_step(part, name, way == "captured", temperature)
                    of_way[name] = step
                    steps += 1
                    for call in step["places"]:
                        total[call["line"]] += call["calls"]
                    part.keep(f"{way}, {sampled}", of_way)
            if of_way:
                part.say(f"{way}, {sampled}: " + ", ".join(f"{name} {step['calls']}" for name, step in of_way.items()))
    part.keep("lines", dict(total.most_common()))
    if part.tiny:
        part.say("a CPU reports no blocking calls; the steps ran")
    for line, number in total.most_common(12):
        part.say(f"{number} in {line}")
    if first_left_out:
        part.keep("left_out", first_left_out)
        part.say(first_left_out)
    part.say(f"{steps} steps watched")


if __name__ == "__main__":
    run(measure)
