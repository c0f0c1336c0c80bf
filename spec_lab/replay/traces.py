"""Traces of other systems: what was drafted and accepted, step by step or counted, and what shorter chains would give.

A trace is JSON Lines. A line is one step of a chain,

    {"request": "a", "position": 120, "drafted": [11, 7, 9], "accepted": 2, "p": [0.9, 0.4, 0.1], "q": [0.8, 0.5, 0.3]}

or the counts of many steps,

    {"request": "a", "steps": 100, "accepted_tokens": 170, "at_least": [80, 55, 35]}

``request`` (a text or a whole number) names what is resampled for intervals; ``position`` (tokens before the step) and
``drafted`` (token ids, or their number) may be left out, or be null. ``accepted`` counts drafted tokens. ``p`` and
``q`` are the probabilities of the drafted tokens as they are verified, and may be left out or be null; ``q`` is where
tokens were not sampled. ``at_least[k]`` is the number of steps that accepted more than k tokens, for every k at which
there are any: it sums to ``accepted_tokens``. Without it only whole drafts can be evaluated.

``taus`` returns, for every depth, tau as it was observed, 1 + mean of min(accepted, depth): a chain verified from the
top, cut at a depth, accepts that many. With p and q it is also expected exactly given the drafts, for ``token``,
``match`` and ``lenient``. All are at the steps of the trace; a shorter chain's own steps begin elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.core.files import MAX_BYTES, Unreadable, open_regular
from spec_lab.core.options import brief, whole

Line = Mapping[str, Any]
Made = TypeVar("Made")

MAX_DRAFTED = 1000
"""Maximum number of drafted tokens of a step."""

MAX_STEPS = 10**12
"""Maximum number of steps of a line of counts."""

MAX_DIGITS = 1000
"""Whole numbers of more digits are read as infinite."""

CLUSTERS = 1000
"""Maximum number of clusters for intervals; more requests share clusters."""


# Reading -------------------------------------------------------------------------------------------------------------


def read_trace(file: Path) -> list[Line]:
    """Read a trace.

    Raises:
        ValueError: a line that is none; names the file and the line.
        OSError: the file cannot be read.
    """
    lines = list(read_lines(file, lambda _, value: checked(value)))
    if not lines:
        raise ValueError(f"{file} holds no line of a trace: write one JSON object a line, see docs/replay.md")
    return lines


def read_lines(file: Path, made: Callable[[int, Any], Made]) -> Iterator[Made]:
    """Yield what is made of each line's number and value, without blank lines; name the line in errors."""
    with open_regular(file) as stream:
        number = 0
        while data := stream.readline(MAX_BYTES + 1):
            number += 1
            try:
                if len(data) > MAX_BYTES:
                    raise ValueError(f"it is longer than {MAX_BYTES} bytes")
                if data.strip():
                    yield made(number, _value(data))
            except ValueError as error:
                raise Unreadable(f"{file}, line {number}: {error}") from None


def _value(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), parse_int=_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg}: character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("it is not a line of a trace: its lists or objects are nested too deeply") from None


def _int(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def checked(line: Any) -> Line:
    """Return a line if it is one.

    Raises:
        ValueError: it is not; says why.
    """
    if not isinstance(line, dict) or "request" not in line or ("accepted" in line) == ("steps" in line):
        what = "a line is an object with 'request' and either 'accepted', of a step, or 'steps', of counts"
        raise ValueError(f"{what} (got {brief(line)})")
    request = line["request"]
    if isinstance(request, bool) or not isinstance(request, str | int):
        raise ValueError(f"request must be a text or a whole number, not {brief(request)}")
    if "steps" in line:
        _check_counts(line)
    else:
        _check_step(line)
    return line


def _check_counts(line: Line) -> None:
    steps = whole("steps", line["steps"], maximum=MAX_STEPS)
    accepted = whole("accepted_tokens", line.get("accepted_tokens"), minimum=0, maximum=MAX_DRAFTED * steps)
    counts = line.get("at_least")
    if counts is None:
        return
    if not isinstance(counts, list) or len(counts) > MAX_DRAFTED:
        raise ValueError(f"at_least must be a list of at most {MAX_DRAFTED} counts, not {brief(counts)}")
    for index, count in enumerate(counts):
        whole(f"at_least[{index}]", count, minimum=0)
    for index, (above, below) in enumerate(pairwise([steps, *counts])):
        if below > above:
            name = f"at_least[{index - 1}]" if index else "steps"
            raise ValueError(
                f"at_least[{index}] must be at most {name}, {above}, not {brief(below)}: it counts the steps that "
                f"accepted more than {index} tokens"
            )
    if sum(counts) != accepted:
        raise ValueError(
            f"at_least must sum to accepted_tokens, {accepted}, not {sum(counts)}: give a count for every number of "
            "tokens that a step accepted at least, or leave at_least out"
        )


def _check_step(line: Line) -> None:
    if line.get("position") is not None:
        whole("position", line["position"], minimum=0)
    drafted = line.get("drafted")
    length: int | None = None  # of the draft; not known without drafted, p and q
    if isinstance(drafted, list):
        if len(drafted) > MAX_DRAFTED:
            raise ValueError(f"drafted must have at most {MAX_DRAFTED} token ids, not {len(drafted)}")
        for index, token in enumerate(drafted):
            whole(f"drafted[{index}]", token, minimum=0)
        length = len(drafted)
    elif drafted is not None:
        length = whole("drafted", drafted, 0, " or a list of token ids", MAX_DRAFTED)
    for name in ("p", "q"):
        values = line.get(name)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) > MAX_DRAFTED or length not in (None, len(values)):
            count = f"at most {MAX_DRAFTED}" if length is None else f"each of {length}"
            what = f"a list with a probability for {count} drafted tokens"
            raise ValueError(f"{name} must be {what}, not {brief(values)}")
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name}[{index}] must be a probability from 0 to 1, not {brief(value)}")
            if name == "q" and value == 0:
                raise ValueError(f"q[{index}] must be above 0: a token of draft probability 0 cannot have been drafted")
        length = len(values)
    limit = MAX_DRAFTED if length is None else length
    if whole("accepted", line["accepted"], minimum=0) > limit:
        raise ValueError(
            f"accepted must be at most the number of drafted tokens, {limit}, not {brief(line['accepted'])}"
        )


# Evaluation ----------------------------------------------------------------------------------------------------------


def taus(trace: Sequence[Line], depths: Sequence[int] = (), lenience: Sequence[float] = ()) -> pd.DataFrame:
    """Return tau by rule and depth, most tokens first and lossy rules last.

    Columns: rule, lossless (None of what was observed, whose verifier is not known), depth, tau, low, high, steps.

    Args:
        trace: its lines (``checked``).
        depths: of chains; all that were drafted if empty.
        lenience: of further rules, ``lenient``.

    Raises:
        ValueError: it has no line.
    """
    if not trace:
        raise ValueError("the trace has no line")
    steps = np.array([line.get("steps", 1) for line in trace], dtype=float)  # [N]
    accepted = [line["accepted_tokens"] if "steps" in line else line["accepted"] for line in trace]
    cluster = pd.factorize(np.array([str(line["request"]) for line in trace], dtype=object), sort=True)[0] % CLUSTERS
    names: list[tuple[str, str]] = []
    tops: list[np.ndarray] = []  # each [clusters]

    def add(rule: str, depth: str, more: np.ndarray) -> None:
        names.append((rule, depth))
        tops.append(np.bincount(cluster, steps + more))

    add("observed", "all", np.array(accepted, dtype=float))
    gains: dict[str, list[np.ndarray]] = {}
    if all("steps" not in line or line.get("at_least") is not None for line in trace):
        gains["observed"] = [_observed(line) for line in trace]
    if all("accepted" in line and line.get("p") is not None for line in trace):
        gains |= {"token": [_reached(line, 1.0) for line in trace], "match": [_reached(line, None) for line in trace]}
        gains |= {_lenient(factor): [_reached(line, factor) for line in trace] for factor in lenience}
    for rule, levels in gains.items():
        lengths = np.array([len(level) for level in levels])
        start, every = np.cumsum(lengths) - lengths, np.concatenate(levels)
        wanted = set(depths or range(1, int(lengths.max()) + 1))
        total = np.zeros(len(trace))
        for depth in range(1, max(wanted, default=0) + 1):
            here = np.flatnonzero(lengths >= depth)
            total[here] += every[start[here] + depth - 1]
            if depth in wanted:
                add(rule, str(depth), total)
    bottom = np.bincount(cluster, steps)
    lossless = {"token": True, "match": True, **{_lenient(factor): factor == 1 for factor in lenience}}
    rows = [
        {"rule": rule, "lossless": lossless.get(rule), "depth": depth, "tau": tau, "low": low, "high": high,
         "steps": float(steps.sum())}
        for (rule, depth), top in zip(names, tops, strict=True)
        for tau, low, high in [cluster_interval(top, bottom, np.arange(len(bottom)))]
    ]  # fmt: skip
    frame = pd.DataFrame(rows).sort_values("tau", ascending=False, kind="stable")
    return frame.sort_values("lossless", key=lambda column: column.isin([False]), kind="stable", ignore_index=True)


def _lenient(lenience: float) -> str:
    return f"lenient:lenience={lenience:g}"


def _observed(line: Line) -> np.ndarray:  # [n]
    """How many steps accepted the token of each level."""
    if "steps" in line:
        return np.array(line["at_least"], dtype=float)
    drafted, p = line.get("drafted"), line.get("p")
    drafted = p if drafted is None else drafted
    length = drafted if isinstance(drafted, int) else line["accepted"] if drafted is None else len(drafted)
    return (np.arange(length) < line["accepted"]).astype(float)


def _reached(line: Line, lenience: float | None) -> np.ndarray:  # [n]
    """The probability that each level of a chain is accepted, verified from the top.

    A token is accepted with min(1, p / (lenience q)), where a token that was not sampled has q = 1; ``match``
    (lenience None) accepts with p.
    """
    p = np.array(line["p"], dtype=float)
    if lenience is None:
        return np.cumprod(p)
    q = np.ones_like(p) if line.get("q") is None else np.array(line["q"], dtype=float)
    return np.cumprod(np.minimum(1.0, p / np.maximum(lenience * q, np.finfo(float).tiny)))


# Recording of transformers ------------------------------------------------------------------------------------------


class RecordedCandidates:
    """A candidate generator of transformers' assisted decoding that keeps a trace of what it drafts.

    Put it around the one that ``generate`` makes::

        made = model._get_candidate_generator
        trace = []
        model._get_candidate_generator = lambda **options: RecordedCandidates(made(**options), trace, "prompt 1")

    Args:
        generator: has ``get_candidates`` and ``update_candidate_strategy``.
        trace: lines are appended here: p where the target's logits are given, q where the drafter's are.
        request: named in each line.
        sampled: whether tokens are sampled: else neither p nor q is kept, since arg maxima are compared.
    """

    def __init__(self, generator: Any, trace: list[Line], request: str, sampled: bool = True) -> None:
        self.generator, self.trace, self.request, self.sampled = generator, trace, request, sampled
        self._drafted: list[int] = []
        self._position = 0
        self._q: list[float] | None = None

    @property
    def requires_model_outputs(self) -> Any:
        """See transformers' ``CandidateGenerator``."""
        return self.generator.requires_model_outputs

    def get_candidates(self, input_ids: Any, **options: Any) -> Any:
        """See transformers' ``CandidateGenerator``."""
        candidates, logits = self.generator.get_candidates(input_ids, **options)
        self._position = int(input_ids.shape[1])
        self._drafted = candidates[0, self._position :].tolist()
        self._q = None
        if self.sampled and logits is not None:
            self._q = _of_tokens(logits, self._drafted)
        return candidates, logits

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: Any) -> None:
        """See transformers' ``CandidateGenerator``."""
        line = {"request": self.request, "position": self._position, "drafted": self._drafted}
        line |= {"accepted": min(int(num_matches), len(self._drafted))}
        if self.sampled:
            line |= {"p": _of_tokens(scores, self._drafted), "q": self._q}
        self.trace.append(checked(line))
        self.generator.update_candidate_strategy(input_ids, scores, num_matches)


def _of_tokens(logits: Any, tokens: Sequence[int]) -> list[float]:
    """Probabilities of tokens by the first rows of logits ``[1, n, V]``."""
    chances = logits[0, : len(tokens)].float().softmax(-1)
    return [float(chances[index, token].clamp(max=1.0)) for index, token in enumerate(tokens)]
