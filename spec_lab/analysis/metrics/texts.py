"""Figures of the output texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import pandas as pd

from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.analysis.metrics.speed import broken_groups
from spec_lab.core.options import Whole
from spec_lab.results.writer import Tables


def repeated_8gram_share(outputs: Iterable[Sequence[int]], n: int = 8) -> float:
    """Return the share of the outputs' 8-grams of tokens that occurred before in the same output, pooled.

    Repeating text is easy to draft, so a large share flatters every proposer.
    """
    repeated = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return ratio(repeated, total)


def distinct(tables: Tables, arm: str, n: Annotated[int, Whole(1, 64)] = 2) -> dict[str, pd.Series]:
    """Return the share of distinct n-grams of tokens in each output, below 1 where an output repeats itself.

    Distinct-n of Li et al. (1510.03055), within each output. A lossy verifier that favours likely tokens lowers it.
    Outputs of fewer than n tokens have no value; of a request that was forked, all outputs count.

    Args:
        tables: the run's rows.
        arm: key of the arm.
        n: tokens of an n-gram.
    """
    rows = tables.requests[tables.requests["arm"] == arm]
    grams = [[tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)] for tokens in rows["tokens"]]
    counts = pd.DataFrame({"distinct": [len(set(each)) for each in grams], "all": list(map(len, grams))}, dtype=float)
    totals = counts.groupby(rows["request"].to_numpy()).sum()
    return {f"distinct_{n}": (totals["distinct"] / totals["all"])[totals["all"] > 0]}


class FirstDifference(NamedTuple):
    """Where an output first differs from the baseline's: the tokens before, then one token of each."""

    request: int
    before: list[int]
    token: int
    expected: int


def cut_answers(requests: pd.DataFrame) -> dict[str, int]:
    """Count the answers of conversations that the limit of new tokens ended.

    Args:
        requests: rows of the table ``requests`` of one arm, with the columns ``conversation`` and ``turn``.

    Returns:
        "answers", their number; "cut", those that the limit ended; "continued", those of them that a later turn
        continues.
    """
    cut = requests["finish"] == "length"
    last = requests.groupby("conversation")["turn"].transform("max")
    return {"answers": len(requests), "cut": int(cut.sum()), "continued": int((cut & (requests["turn"] < last)).sum())}


def identical_outputs(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> float:
    """Return the share of sequences whose tokens equal the baseline's, of those after the same prompt: a later turn of
    a conversation has another one where an earlier answer differs.

    At temperature 0 a share below 1 means a lossy verifier, rounding (near ties in half precision) or an error.
    """
    pairs = _pairs(requests, arm, baseline)
    return ratio(sum(tokens == expected for _, tokens, expected in pairs), len(pairs))


def first_differences(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> list[FirstDifference]:
    """Return where each output of an arm first differs from the baseline's; without outputs of which one continues."""
    positions = []
    for request, tokens, expected in _pairs(requests, arm, baseline):
        position = next((n for n, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
        if position is not None:
            positions.append(FirstDifference(request, tokens[:position], tokens[position], expected[position]))
    return positions


def cached_prompt_shares(requests: pd.DataFrame) -> dict[str, float]:
    """Return, for each arm, the share of the prompts' tokens whose KV cache came from the prefix cache.

    Args:
        requests: rows of the table ``requests``, or of a served stream; without the column ``cached_tokens`` the result
            is empty. Forks count once.
    """
    if "cached_tokens" not in requests:
        return {}
    first = requests.drop_duplicates(["arm", "request"])
    return {
        str(arm): ratio(rows["cached_tokens"].sum(), rows["prompt_tokens"].sum())
        for arm, rows in first.groupby("arm", sort=False)
    }


def _pairs(requests: pd.DataFrame, arm: str, baseline: str) -> list[tuple[int, list[int], list[int]]]:
    """Return the number of the prompt and both outputs, of each sequence that both arms have after the same prompt."""
    complete = requests[~requests["group"].isin(broken_groups(requests))]
    both = [complete[complete["arm"] == name].set_index(["request", "sequence"]) for name in (arm, baseline)]
    tokens, expected = (rows["tokens"] for rows in both)
    shared = tokens.index.intersection(expected.index)
    if "turn" in complete:
        shared = shared[(both[0].loc[shared, "prompt"] == both[1].loc[shared, "prompt"]).to_numpy()]
    return [(int(key[0]), list(map(int, tokens[key])), list(map(int, expected[key]))) for key in shared]
