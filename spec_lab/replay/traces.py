"""Traces of other systems: what was drafted and accepted, step by step or counted, and what shorter chains would give.

A trace is JSON Lines. A line is one step of a chain,

    {"request": "a", "position": 120, "drafted": [11, 7, 9], "accepted": 2, "p": [0.9, 0.4, 0.1], "q": [0.8, 0.5, 0.3]}

or the counts of many steps,

    {"request": "a", "steps": 100, "accepted_tokens": 170, "at_least": [80, 55, 35]}

``request`` names what is resampled for intervals; ``position`` (tokens before the step) and ``drafted`` (token ids) may
be left out, of which ``drafted`` may be a number of tokens. ``accepted`` counts drafted tokens. ``p`` and ``q`` are the
probabilities of the drafted tokens as they are verified, and may be left out; ``q`` is null or left out where tokens
were not sampled. ``at_least[k]`` is the number of steps that accepted more than k tokens; without it only whole drafts
can be judged.

``judge`` returns, for every depth, tau as it was observed, 1 + mean of min(accepted, depth): a chain verified from the
top, cut at a depth, accepts that many. With p and q it is also expected exactly given the drafts, for ``token``,
``match`` and ``lenient``. All are at the steps of the trace; a shorter chain's own steps begin elsewhere.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.core.options import brief

Line = Mapping[str, Any]


def read_trace(file: Path) -> list[Line]:
    """Read a trace.

    Raises:
        ValueError: a line that is none; names it.
        OSError: the file cannot be read.
    """
    found: list[Line] = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if text.strip():
            try:
                found.append(checked(json.loads(text)))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{file} holds no line of a trace")
    return found


def checked(line: Any) -> Line:
    """Return a line if it is one.

    Raises:
        ValueError: it is not; says why.
    """
    if not isinstance(line, dict) or "request" not in line or ("accepted" in line) == ("steps" in line):
        what = "a line is an object with 'request' and either 'accepted', of a step, or 'steps', of counts"
        raise ValueError(f"{what} (got {brief(line)})")
    if "steps" in line:
        counts = [line["steps"], line.get("accepted_tokens"), *line.get("at_least", [])]
        if not all(_is_number(one) for one in counts):
            raise ValueError(f"steps, accepted_tokens and at_least are counts (got {brief(counts)})")
        return line
    drafted = line.get("drafted")
    length = drafted if isinstance(drafted, int) else len(drafted or ())
    if not _is_number(line["accepted"]) or line["accepted"] > length:
        raise ValueError(
            f"accepted is a number of drafted tokens, of which there are {length} (got {line['accepted']})"
        )
    for name in ("p", "q"):
        own = line.get(name)
        if own is not None and (len(own) != length or not all(_is_number(one) and one <= 1 for one in own)):
            raise ValueError(f"{name} has a probability for each of {length} drafted tokens (got {brief(own)})")
    return line


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def judge(trace: Sequence[Line], depths: Sequence[int] = (), lenience: Sequence[float] = ()) -> pd.DataFrame:
    """Return tau by rule and depth, most tokens first: rule, depth, tau, low, high, steps.

    Args:
        trace: its lines.
        depths: of chains; all that were drafted if empty.
        lenience: of further rules, ``lenient``.
    """
    single = [one for one in trace if "accepted" in one]
    counts = [one for one in trace if "steps" in one]
    deepest = max([*(_length(one) for one in single), *(len(one.get("at_least", ())) for one in counts)], default=0)
    rows = []

    def add(rule: str, depth: str, terms: list[tuple[float, float, Any]]) -> None:
        if terms:
            top, bottom, clusters = zip(*terms, strict=True)
            tau = cluster_interval(np.array(top), np.array(bottom), [str(one) for one in clusters])
            rows.append({"rule": rule, "depth": depth, **tau._asdict(), "steps": float(np.sum(bottom))})

    whole = [(1.0 + one["accepted"], 1.0, one["request"]) for one in single]
    add(
        "observed",
        "all",
        whole + [(one["steps"] + one["accepted_tokens"], one["steps"], one["request"]) for one in counts],
    )
    complete = all("at_least" in one for one in counts)
    known = bool(single) and all(one.get("p") is not None for one in single)
    rules: dict[str, Callable[[float, float | None], float]] = {}
    if known and not counts:
        rules = {"token": partial(_accepts, 1.0), "match": lambda p, _: p}
        rules |= {f"lenient:lenience={one:g}": partial(_accepts, one) for one in lenience}
    for depth in depths or range(1, deepest + 1):
        if complete:
            cut = [(1.0 + min(one["accepted"], depth), 1.0, one["request"]) for one in single]
            cut += [(one["steps"] + sum(one["at_least"][:depth]), one["steps"], one["request"]) for one in counts]
            add("observed", str(depth), cut)
        for rule, accept in rules.items():
            add(rule, str(depth), [(1.0 + _expected(one, depth, accept), 1.0, one["request"]) for one in single])
    frame = pd.DataFrame(rows, columns=["rule", "depth", "mean", "low", "high", "steps"]).rename(
        columns={"mean": "tau"}
    )
    return frame.sort_values("tau", ascending=False, kind="stable", ignore_index=True)


def _length(line: Line) -> int:
    drafted = line.get("drafted") or 0
    return drafted if isinstance(drafted, int) else len(drafted)


def _accepts(lenience: float, p: float, q: float | None) -> float:
    """The acceptance of a drafted token by recursive rejection; a point has q = 1."""
    own = lenience * (1.0 if q is None else q)
    return min(1.0, p / own) if own > 0 else 0.0


def _expected(line: Line, depth: int, accept: Callable[[float, float | None], float]) -> float:
    """The expected number of accepted tokens of a chain that is verified from the top."""
    total, reach = 0.0, 1.0
    q = line.get("q") or [None] * _length(line)
    for p, own in list(zip(line["p"], q, strict=True))[:depth]:
        reach *= accept(p, own)
        total += reach
    return total


# Converters ----------------------------------------------------------------------------------------------------------


def from_vllm(metrics: str) -> list[Line]:
    """Return the counts in the text of vLLM's ``/metrics``: one line for each engine.

    They are the counters ``vllm:spec_decode_num_drafts``, ``..num_accepted_tokens`` and
    ``..num_accepted_tokens_per_pos``, summed since the server's start; Prometheus adds ``_total`` to their names.

    Raises:
        ValueError: the text has none of them.
    """
    pattern = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?\{(.*)\}\s+(\S+)", re.MULTILINE)
    values: dict[str, dict[str, float]] = defaultdict(dict)
    positions: dict[str, dict[int, float]] = defaultdict(dict)
    for name, labels, value in pattern.findall(metrics):
        place = re.search(r'position="(\d+)"', labels)
        engine = re.sub(r',?\s*position="\d+"', "", labels).strip(",")
        if name == "num_accepted_tokens_per_pos" and place:
            positions[engine][int(place[1])] = float(value)
        else:
            values[engine][name] = float(value)
    found = [
        checked(
            {
                "request": engine, "steps": own["num_drafts"], "accepted_tokens": own["num_accepted_tokens"],
                "at_least": [positions[engine][place] for place in sorted(positions[engine])],
            }
        )
        for engine, own in values.items()
        if "num_drafts" in own and "num_accepted_tokens" in own
    ]  # fmt: skip
    if not found:
        raise ValueError("the text has no counters vllm:spec_decode_num_drafts: is speculative decoding on?")
    return found


def from_sglang(responses: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return the counts of responses of SGLang's ``/generate``: one line for each, from ``meta_info``.

    ``spec_verify_ct`` is the number of steps. Accepted tokens are ``spec_accept_token_num`` where it is there, else
    ``completion_tokens`` - ``spec_verify_ct``, as in SGLang's own ``spec_accept_length``, which counts the token of the
    prefill to the first step.

    Raises:
        ValueError: a response without ``spec_verify_ct``.
    """
    found = []
    for number, one in enumerate(responses):
        meta = one.get("meta_info") or {}
        if "spec_verify_ct" not in meta:
            raise ValueError(f"response {number} has no meta_info.spec_verify_ct: is speculative decoding on?")
        steps = meta["spec_verify_ct"]
        accepted = meta.get("spec_accept_token_num", meta.get("completion_tokens", 0) - steps)
        found.append(checked({"request": meta.get("id", number), "steps": steps, "accepted_tokens": max(accepted, 0)}))
    return found


class RecordedCandidates:
    """A candidate generator of transformers' assisted decoding that keeps a trace of what it drafts.

    Put it around the one that ``generate`` makes::

        made = model._get_candidate_generator
        trace = []
        model._get_candidate_generator = lambda **options: RecordedCandidates(made(**options), trace, "prompt 1")

    Args:
        own: has ``get_candidates`` and ``update_candidate_strategy``.
        trace: lines are appended here: p where the target's logits are given, q where the drafter's are.
        request: named in each line.
        sampled: whether tokens are sampled: else neither p nor q is kept, since arg maxima are compared.
    """

    def __init__(self, own: Any, trace: list[Line], request: str, sampled: bool = True) -> None:
        self.own, self.trace, self.request, self.sampled = own, trace, request, sampled
        self._drafted: list[int] = []
        self._position = 0
        self._q: list[float] | None = None

    @property
    def requires_model_outputs(self) -> Any:
        """See transformers' ``CandidateGenerator``."""
        return self.own.requires_model_outputs

    def get_candidates(self, input_ids: Any, **options: Any) -> Any:
        """See transformers' ``CandidateGenerator``."""
        candidates, logits = self.own.get_candidates(input_ids, **options)
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
        self.own.update_candidate_strategy(input_ids, scores, num_matches)


def _of_tokens(logits: Any, tokens: Sequence[int]) -> list[float]:
    """Probabilities of tokens by the first rows of logits ``[1, n, V]``."""
    chances = logits[0, : len(tokens)].float().softmax(-1)
    return [float(chances[place, token].clamp(max=1.0)) for place, token in enumerate(tokens)]
