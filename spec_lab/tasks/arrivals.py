"""When the requests of a stream arrive: all at once, as a Poisson process, or as listed in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spec_lab.core.files import Unreadable, read_text
from spec_lab.core.options import brief

MAX_WAIT = 24 * 3600.0
"""Most seconds between arrivals within segments, summed over the stream: an arm may wait as long while it is idle."""


def arrival_times(kind: str, count: int, rate: float, trace: str | None, seed: int) -> list[float]:
    """Return the arrival times of ``count`` requests, in seconds, ascending.

    Raises:
        ValueError: no trace is named, it has fewer lines than requests, or a line is not one finite number of at least
            0 and at least the line before; names the option and the line.
        OSError: the trace cannot be read.
    """
    if kind == "all":
        return [0.0] * count
    if kind == "poisson":
        with np.errstate(over="ignore"):  # infinite times are refused by check_waits
            return np.random.default_rng(seed).exponential(1.0 / rate, count).cumsum().tolist()
    if not isinstance(trace, str) or not trace:
        raise ValueError(
            "task.arrivals=file requires task.trace: a text file with one arrival time per line, in seconds "
            f"(task.trace is {trace!r})"
        )
    try:
        text = read_text(Path(trace))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"task.trace: {trace} does not exist; name a file of arrival times") from error
    except Unreadable as error:
        raise Unreadable(f"task.trace: {error}") from error
    lines = text.splitlines()[:count]
    times: list[float] = []
    for number, line in enumerate(lines, start=1):
        where = f"task.trace: line {number} of {trace}"
        try:
            time = float(line)
        except ValueError as error:
            raise Unreadable(f"{where} must be one number of seconds, not {brief(line)}") from error
        if not 0 <= time < float("inf"):
            raise ValueError(f"{where} must be a finite number of at least 0 (got {time:g})")
        if times and time < times[-1]:
            raise ValueError(f"{where} is {time:g}, less than the line before it ({times[-1]:g}): sort the times")
        times.append(time)
    if len(lines) < count:
        raise ValueError(
            f"task.trace: {trace} must have {count} lines, one for each request (it has {len(lines)}): add lines, or "
            "set fewer task.requests"
        )
    return times


def check_waits(times: Sequence[float], segment: int, kind: str, rate: float, trace: str | None) -> None:
    """Refuse arrivals that an idle arm would wait for longer than ``MAX_WAIT`` in all.

    Time between segments does not count: each begins with the arrival of its first request.

    Raises:
        ValueError: names the option, and the line of the trace with which the limit is passed.
    """
    waited = 0.0
    for index in range(1, len(times)):
        waited += times[index] - times[index - 1] if index % segment else 0.0
        if not waited <= MAX_WAIT:  # infinities make it NaN
            what, instead = f"task.rate is {rate:g}", "give a higher rate"
            if kind == "file":
                what, instead = f"task.trace: line {index + 1} of {trace} is {times[index]:g}", "name a denser trace"
            raise ValueError(
                f"{what}, so the arrivals of requests 0 to {index} take more than {MAX_WAIT:g} s, for which every arm "
                f"would wait: {instead}, or set fewer task.requests"
            )
