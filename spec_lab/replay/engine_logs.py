"""Logs of other engines as traces (``traces``): vLLM's counters, and responses of vLLM, SGLang and TensorRT-LLM.

Responses are JSON Lines, one response of the server a line. Each counts the steps of its request by the drafted tokens
that they accepted; vLLM's may list the steps instead.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from spec_lab.core.options import brief, whole
from spec_lab.replay.traces import MAX_DRAFTED, MAX_STEPS, Line, checked, read_lines

COUNTERS = ("num_drafts", "num_accepted_tokens", "num_accepted_tokens_per_pos")
"""Names of vLLM's counters, after ``vllm:spec_decode_``."""


def from_vllm(metrics: str) -> list[Line]:
    """Return the counts in the text of vLLM's ``/metrics``: one line for each engine that has verified drafts.

    They are the counters ``vllm:spec_decode_num_drafts``, ``..num_accepted_tokens`` and
    ``..num_accepted_tokens_per_pos``, summed since the server's start; Prometheus adds ``_total`` to their names.

    Raises:
        ValueError: the text has none of them, one is no whole number, or they contradict each other; names it.
    """
    pattern = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?\{(.*)\}\s+(\S+)", re.MULTILINE)
    values: dict[str, dict[str, int]] = defaultdict(dict)
    positions: dict[str, dict[str, int]] = defaultdict(dict)
    for name, labels, value in pattern.findall(metrics):
        if name not in COUNTERS:
            continue
        position = re.search(r'position="([^"]*)"', labels)
        engine = re.sub(r',?\s*position="[^"]*"', "", labels).strip(",")
        per_position = name == "num_accepted_tokens_per_pos"
        if per_position and position is None:
            raise ValueError(f"the counter vllm:spec_decode_{name} of {engine} has no label position")
        counters, key = (positions[engine], position[1]) if per_position and position else (values[engine], name)
        where = f"the counter vllm:spec_decode_{name} of {labels}"
        if key in counters:
            raise ValueError(f"{where} occurs twice: give the text of one request of /metrics")
        counters[key] = _counter(where, value)
    lines, idle = [], False
    for engine, counts in values.items():
        if "num_drafts" not in counts or "num_accepted_tokens" not in counts:
            continue
        if counts["num_drafts"] == 0:
            idle = True
            continue
        line: dict[str, Any] = {"request": engine, "steps": counts["num_drafts"]}
        line |= {"accepted_tokens": counts["num_accepted_tokens"]}
        accepted = positions[engine]
        if accepted:
            if missing := [number for number in map(str, range(len(accepted))) if number not in accepted]:
                raise ValueError(
                    f"vllm:spec_decode_num_accepted_tokens_per_pos of {engine} lacks position {missing[0]}"
                )
            line |= {"at_least": [accepted[str(number)] for number in range(len(accepted))]}
        try:
            lines.append(checked(line))
        except ValueError as error:
            raise ValueError(f"the counters vllm:spec_decode_* of {engine} are no counts of steps: {error}") from None
    if not lines and idle:
        raise ValueError("vllm:spec_decode_num_drafts is 0: send requests to the server, then read its counters again")
    if not lines:
        raise ValueError("the text has no counters vllm:spec_decode_num_drafts: is speculative decoding on?")
    return lines


def _counter(name: str, value: str) -> int:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (0 <= number <= MAX_DRAFTED * MAX_STEPS and number.is_integer()):
        raise ValueError(f"{name} must be a whole number of 0 or more, not {brief(value)}")
    return int(number)


# Responses -----------------------------------------------------------------------------------------------------------

Convert = Callable[[int, Any], list[Line]]
"""Number and contents of a response -> its lines of a trace; none of a response without steps."""


def read_responses(file: Path, convert: Convert) -> list[Line]:
    """Read a file with one response in each line.

    Raises:
        ValueError: a line that is none, or none that holds steps; names the file and the line.
        OSError: the file cannot be read.
    """
    lines = [line for lines in read_lines(file, convert) for line in lines]
    if not lines:
        raise ValueError(
            f"{file} holds no response with steps: write each response as one line, with speculative decoding on"
        )
    return lines


def from_responses(responses: Iterable[Any], convert: Convert) -> list[Line]:
    """Return the lines of responses in memory.

    Raises:
        ValueError: a response without counts of steps, a count that is none, or no response with steps.
    """
    lines: list[Line] = []
    for number, response in enumerate(responses):
        try:
            lines += convert(number, response)
        except ValueError as error:
            raise ValueError(f"response {number}: {error}") from None
    if not lines:
        raise ValueError("no response has a step: is speculative decoding on?")
    return lines


SGLANG_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
"""Names of SGLang's counts in ``meta_info``, today's first."""


def sglang(number: int, response: Any) -> list[Line]:
    """Return the counts of a response of SGLang, of ``/generate`` or of its OpenAI API, from ``meta_info``.

    ``SGLANG_HISTOGRAMS`` counts steps by accepted drafted tokens. A response without it has ``spec_verify_ct``, the
    number of steps, alone: accepted tokens are ``SGLANG_ACCEPTED`` where that is there, else ``completion_tokens`` -
    ``spec_verify_ct``, as in SGLang's own ``spec_accept_length``, which counts the token of the prefill to the first
    step.

    Raises:
        ValueError: it has no such counts, or they contradict each other.
    """
    lines: list[Line] = []
    for choice in _choices(response):
        meta = choice.get("meta_info")
        if not isinstance(meta, dict) or "spec_verify_ct" not in meta:
            raise ValueError("the response has no meta_info.spec_verify_ct: is speculative decoding on?")
        steps = whole("meta_info.spec_verify_ct", meta["spec_verify_ct"], minimum=0, maximum=MAX_STEPS)
        request, limit = meta.get("id", response.get("id", number)), MAX_DRAFTED * MAX_STEPS
        counted = next((name for name in SGLANG_HISTOGRAMS if meta.get(name)), None)
        total = next((name for name in SGLANG_ACCEPTED if meta.get(name) is not None), "completion_tokens")
        if not steps:  # its only token is the prefill's
            continue
        if counted is not None:
            lines += _counted(request, f"meta_info.{counted}", meta[counted], {"meta_info.spec_verify_ct": steps},
                              {f"meta_info.{name}": meta.get(name) for name in SGLANG_ACCEPTED})  # fmt: skip
            continue
        accepted = whole(f"meta_info.{total}", meta.get(total), minimum=0, maximum=limit)
        accepted = max(accepted - steps, 0) if total == "completion_tokens" else accepted
        lines.append(checked({"request": request, "steps": steps, "accepted_tokens": accepted}))
    return lines


def vllm_requests(number: int, response: Any) -> list[Line]:
    """Return the steps of a response of vLLM, from ``metrics.speculative_decoding``.

    A server that was started with ``--per-request-spec-decode-metrics detailed`` lists the drafted and the accepted
    tokens of each step; with ``summary`` it counts steps by accepted tokens. Of several samples the field is null.

    Raises:
        ValueError: it has no such field, or counts that contradict each other.
    """
    metrics, field = _object("a response", response).get("metrics"), "metrics.speculative_decoding"
    if not isinstance(metrics, dict) or "speculative_decoding" not in metrics:
        raise ValueError(
            f"the response has no {field}: start the server with --per-request-spec-decode-metrics summary or detailed"
        )
    if metrics["speculative_decoding"] is None:
        return []
    counts, request = _object(field, metrics["speculative_decoding"]), response.get("id", number)
    accepted, drafted = counts.get("per_step_accepted"), counts.get("per_step_drafted")
    if accepted is None or drafted is None:
        return _openai(request, field, counts, "num_accepted_draft_tokens")
    if not isinstance(accepted, list) or not isinstance(drafted, list) or len(accepted) != len(drafted):
        raise ValueError(f"{field}.per_step_accepted and per_step_drafted must be lists of one length")
    return [
        checked({"request": request, "drafted": length, "accepted": count})
        for length, count in zip(drafted, accepted, strict=True)
    ]


def trtllm(number: int, response: Any) -> list[Line]:
    """Return the counts of a response of TensorRT-LLM's OpenAI API, from ``speculative_decoding`` of its choices.

    A server whose ``--extra_llm_api_options`` file has ``per_request_spec_decode_stats: true`` counts steps by accepted
    tokens; a choice that drafted nothing lacks the field.

    Raises:
        ValueError: counts that contradict each other.
    """
    lines: list[Line] = []
    for choice in _choices(response):
        if choice.get("speculative_decoding") is None:
            continue
        field = "choices.speculative_decoding"
        counts = _object(field, choice["speculative_decoding"])
        lines += _openai(response.get("id", number), field, counts, "total_accepted_draft_tokens")
    return lines


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a JSON object, not {brief(value)}: write each response in its own line")
    return value


def _choices(response: Any) -> list[Mapping[str, Any]]:
    """Return the choices of a response of an OpenAI API; of another the response itself."""
    choices = _object("a response", response).get("choices", [response])
    if not isinstance(choices, list):
        raise ValueError(f"choices must be a list, not {brief(choices)}")
    return [_object("a choice", choice) for choice in choices]


def _openai(request: Any, field: str, counts: Mapping[str, Any], accepted: str) -> list[Line]:
    """Return the counts of the object ``field``; ``accepted`` is its name of the accepted tokens."""
    steps, total = ({f"{field}.{name}": counts.get(name)} for name in ("num_spec_steps", accepted))
    return _counted(request, f"{field}.acceptance_histogram", counts.get("acceptance_histogram"), steps, total)


def _counted(
    request: Any, name: str, histogram: Any, steps: Mapping[str, Any], accepted: Mapping[str, Any]
) -> list[Line]:
    """Return the counts of a histogram; none where it is empty.

    Args:
        name: of the histogram.
        histogram: of each number of accepted drafted tokens from 0, the steps that accepted it.
        steps, accepted: what the response states besides, by its name: number of steps, accepted tokens.
    """
    if not isinstance(histogram, list) or len(histogram) > MAX_DRAFTED + 1:
        raise ValueError(f"{name} must be a list of at most {MAX_DRAFTED + 1} counts, not {brief(histogram)}")
    counts = [whole(f"{name}[{index}]", count, minimum=0) for index, count in enumerate(histogram)]
    at_least = list(accumulate(reversed(counts)))[::-1]
    totals = (steps, sum(counts), "steps"), (accepted, sum(at_least[1:]), "accepted tokens")
    for stated, total, what in totals:
        for field, value in stated.items():
            if value is not None and value != total:
                raise ValueError(f"{name} counts {total} {what}, but {field} is {brief(value)}")
    if not sum(counts):
        return []
    return [
        checked({"request": request, "steps": sum(counts), "accepted_tokens": totals[1][1], "at_least": at_least[1:]})
    ]
