"""What a policy decided, and from which measured costs, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from spec_lab.analysis.metrics import decode_steps
from spec_lab.core.limit import Limit

MOST_SHOWN = 4
"""Most decisions of a policy that are shown, the most frequent ones."""


def policy_note(steps: pd.DataFrame, arm: str, facts: Mapping[str, Any]) -> str | None:
    """Return what an arm's policy decided, such as "goodput, depth 0 in 725 of 725 steps, since a step with one draft
    token costs 1.9 times one without"; None for an arm without a policy or without steps.

    Args:
        steps: the run's table ``steps``.
        arm: its name there.
        facts: of its proposer, as in the manifest.
    """
    policy = facts.get("policy")
    own = decode_steps(steps, arm)
    if not isinstance(policy, Mapping) or "policy" not in own or own["policy"].isna().all():
        return None
    limits = [Limit.parse(text) for text in own["policy"].dropna()]
    decided = _decided(limits, bool(policy.get("rule")))
    drafted = f"{own['nodes'].mean():.3g} draft tokens a step" if any(limit.depth != 0 for limit in limits) else ""
    chain = bool((own["nodes"] <= own["depth"]).all())
    said = ", ".join(part for part in (str(policy.get("name")), decided, drafted) if part)
    return f"{said}{_costs(policy, chain)}"


def _decided(limits: list[Limit], stops: bool) -> str:
    """Return how often which depth and part was chosen, and the thresholds at which drafts were stopped."""
    counts = Counter((limit.depth, limit.part) for limit in limits)
    shown: list[str] = []
    for (depth, part), count in counts.most_common(MOST_SHOWN):
        what = "the proposer's depth" if depth is None else f"depth {depth}"
        of = f" of {len(limits)} steps" if not shown else ""
        shown.append(f"{f'{part}, ' if part else ''}{what} in {count}{of}")
    if len(counts) > MOST_SHOWN:
        shown.append(f"{len(counts) - MOST_SHOWN} others in {len(limits) - sum(n for _, n in counts.most_common(4))}")
    if stops:
        low, high = min(limit.threshold for limit in limits), max(limit.threshold for limit in limits)
        shown.append(f"threshold {low:.3g}" if low == high else f"thresholds from {low:.3g} to {high:.3g}")
    return ", ".join(shown)


def _costs(policy: Mapping[str, Any], chain: bool) -> str:
    """Return what drafts cost, from the seconds that the policy measured; empty for one without costs."""
    seconds = policy.get("seconds")
    if not isinstance(seconds, Mapping):
        return ""
    by_part = seconds if any(not name.isdigit() for name in seconds) else {"": seconds}
    texts = []
    for part, by_batch in by_part.items():
        largest = max(by_batch, key=int)
        each = {int(depth): value for depth, value in by_batch[largest].items()}
        if not each.get(0) or 1 not in each:
            continue
        what = "one draft token" if chain else "one level of draft tokens"
        if policy.get("name") == "gain":
            what = "a whole draft"
        of = f" of {part}" if part not in ("", "costs") else ""
        batch = f" at batch size {largest}" if largest != "1" else ""
        texts.append(f"a step with {what}{of} costs {each[1] / each[0]:.2g} times one without{batch}")
    return f", since {' and '.join(texts)}" if texts else ""
