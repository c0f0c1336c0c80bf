"""Decisions of a policy, and the measured costs that they follow from, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from spec_lab.analysis.metrics import decode_steps
from spec_lab.core.limit import Limit

MAX_SHOWN = 4
"""Most decisions of a policy that are shown, the most frequent ones."""


def policy_note(steps: pd.DataFrame, arm: str, facts: Mapping[str, Any]) -> str | None:
    """Return what an arm's policy decided, such as "goodput, depth 0 in 725 of 725 steps, since a step with one draft
    token costs 1.9 times one without drafts"; None for an arm without a policy or without steps.

    The costs are those of the most frequent decision. They are given as its reason only where it drafts nothing.

    Args:
        steps: the run's table ``steps``.
        facts: of its proposer, as in the manifest.
    """
    policy = facts.get("policy")
    decided = decode_steps(steps, arm)
    if not isinstance(policy, Mapping) or "policy" not in decided or decided["policy"].isna().all():
        return None
    limits = [Limit.parse(text) for text in decided["policy"].dropna()]
    counts = Counter((limit.depth, limit.part) for limit in limits)
    shown = _decided(limits, counts, bool(policy.get("rule")))
    drafted = f"{decided['nodes'].mean():.3g} draft tokens a step" if any(limit.depth != 0 for limit in limits) else ""
    chain = bool((decided["nodes"] <= decided["depth"]).all())
    [((depth, part), _)] = counts.most_common(1)
    return ", ".join(
        text for text in (str(policy.get("name")), shown, drafted, _costs(policy, depth, part, chain)) if text
    )


def _decided(limits: list[Limit], counts: Counter[tuple[int | None, str]], stops: bool) -> str:
    """Return how often which depth and part was chosen, and the thresholds at which drafts were stopped."""
    shown: list[str] = []
    most_frequent = counts.most_common(MAX_SHOWN)
    for (depth, part), count in most_frequent:
        what = "the proposer's depth" if depth is None else f"depth {depth}"
        of = f" of {len(limits)} steps" if not shown else ""
        shown.append(f"{f'{part}, ' if part else ''}{what} in {count}{of}")
    if len(counts) > MAX_SHOWN:
        shown.append(f"{len(counts) - MAX_SHOWN} others in {len(limits) - sum(count for _, count in most_frequent)}")
    if stops:
        low, high = min(limit.threshold for limit in limits), max(limit.threshold for limit in limits)
        shown.append(f"threshold {low:.3g}" if low == high else f"thresholds from {low:.3g} to {high:.3g}")
    return ", ".join(shown)


def _costs(policy: Mapping[str, Any], depth: int | None, chosen: str, chain: bool) -> str:
    """Return what a decision's drafts cost, from the seconds that the policy measured; empty where it measured none.

    Args:
        depth: the depth decided; None for the proposer's.
        chosen: the part decided; empty for a policy that decides none.
        chain: whether a level has one draft token.
    """
    seconds = policy.get("seconds")
    if not isinstance(seconds, Mapping):
        return ""
    by_part = seconds if any(not name.isdigit() for name in seconds) else {"": seconds}
    whole_draft = policy.get("name") == "gain"  # it measures no depth but 0 and the whole draft, which it calls 1
    texts = []
    for part, by_batch in by_part.items():
        if depth and chosen and part != chosen:
            continue
        by_batch = _shortest_context(by_batch)
        largest = max(by_batch, key=int)
        costs = {int(level): value for level, value in by_batch[largest].items()}
        level = 1 if whole_draft or depth == 0 else depth
        if not costs.get(0) or level not in costs:
            continue
        if whole_draft:
            what = "with a whole draft"
        elif depth:
            what = f"of depth {depth}"
        else:
            what = "with one draft token" if chain else "with one level of draft tokens"
        of = f" of {part}" if part not in ("", "costs") else ""
        batch = f" at batch size {largest}" if largest != "1" else ""
        texts.append(f"a step {what}{of} costs {costs[level] / costs[0]:.2g} times one without drafts{batch}")
    reason = "since " if depth == 0 else ""
    return f"{reason}{' and '.join(texts)}" if texts else ""


def _shortest_context(seconds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the seconds by batch and level at the shortest measured context; runs of before have one context only."""
    first = seconds[min(seconds, key=int)]
    nested = any(isinstance(value, Mapping) for value in first.values())
    return first if nested else seconds
