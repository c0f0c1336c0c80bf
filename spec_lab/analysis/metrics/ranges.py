"""Figures along the text: by position in the output, by context length, by turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.acceptance import SUMMANDS, Summands, decode_steps
from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.results.writer import Tables

FIGURES = ("tau_pooled", "expected_tau", "draft_token_rate")
"""Names of ``acceptance.SUMMANDS`` whose figures are given in each range."""

FIRST_RANGE = 16
"""Tokens of the first range; each further one is as long as all before it."""


def along_text(tables: Tables, arm: str) -> dict[str, list[dict[str, Any]]]:
    """Return tau and the acceptance rate of an arm's decode steps by where in the text they begin.

    Positions and contexts are in ranges of 1 to 16 tokens, 17 to 32, 33 to 64, and so on. In the last range of
    positions the output's end cuts steps off, which ``expected_tau`` does not count.

    Returns:
        ``by_position``, by tokens of the output before the step; ``by_context``, by tokens before the step, prompt
        included; ``by_turn``, by the model's answer in its conversation, from 1. Each is a list of ranges as of
        ``in_ranges`` with ``FIGURES``; empty of an arm that drafts nothing and, ``by_turn``, without conversations.
    """
    steps, requests = decode_steps(tables.steps, arm), tables.requests[tables.requests["arm"] == arm]
    along: dict[str, list[dict[str, Any]]] = {"by_position": [], "by_context": [], "by_turn": []}
    if not len(steps) or not steps["nodes"].any():
        return along
    known = ["prompt_tokens", *["turn"] * ("turn" in requests)]
    each = requests.set_index(["request", "sequence"])[known]
    text = each.reindex(pd.MultiIndex.from_frame(steps[["request", "sequence"]]))
    terms = {name: SUMMANDS[name](steps) for name in FIGURES}
    groups, context = steps["group"].to_numpy(), steps["context"].to_numpy(dtype=np.int64)
    position = context - text["prompt_tokens"].to_numpy(dtype=np.int64)
    for name, where in (("by_position", position), ("by_context", context)):
        along[name] = in_ranges(where, doubled(int(where.max())), terms, groups)
    if "turn" in text and text["turn"].notna().all():
        turn = text["turn"].to_numpy(dtype=np.int64)
        along["by_turn"] = in_ranges(turn, range(1, int(turn.max()) + 1), terms, groups)
    return along


def doubled(largest: int, also: Iterable[int] = ()) -> list[int]:
    """Return the ends of ranges up to the one that holds ``largest``, each twice the end before.

    Args:
        largest: largest position.
        also: further positions at which a range ends, where they are below the largest.
    """
    ends = [FIRST_RANGE]
    while ends[-1] < largest:
        ends.append(2 * ends[-1])
    return sorted({*ends, *(end for end in also if end < largest)})


def in_ranges(
    where: np.ndarray, ends: Sequence[int], terms: Mapping[str, Summands], clusters: Sequence[int] | np.ndarray
) -> list[dict[str, Any]]:
    """Return figures of the steps in each range that has some.

    Args:
        where: ``[N]`` position of each step; one below 1 belongs to the first range.
        ends: last position of each range, ascending; the first range begins at 1.
        terms: of each figure, a ratio of sums over steps.
        clusters: ``[N]`` over which intervals are.

    Returns:
        For each range ``first`` and ``last`` position, the number of ``steps``, and each figure with its interval.
    """
    number, clusters = np.searchsorted(ends, where), np.asarray(clusters)
    largest = int(where.max(initial=1))
    rows = []
    for index, (first, last) in enumerate(zip([1, *(end + 1 for end in ends)], ends, strict=False)):
        inside = number == index
        if inside.any():
            figures = {
                name: cluster_interval(top[inside], bottom[inside], clusters[inside])._asdict()
                for name, (top, bottom) in terms.items()
            }
            rows.append({"first": first, "last": min(last, largest), "steps": int(inside.sum()), **figures})
    return rows
