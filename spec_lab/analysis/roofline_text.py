"""Shares of the roofline in words, the same in the terminal and on pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_lab.core.roofline import Roofline
from spec_lab.results.result import number


def share_in_words(arm: Mapping[str, Any], machine: str = "this machine's") -> str:
    """Return an arm's share of the roofline, such as "at 19 % of this machine's memory roofline".

    Args:
        arm: its ``roofline_share`` and ``memory_bound_steps``: the resource that bounds most steps is named. Summaries
            of older versions lack both.
        machine: whose.
    """
    share, memory = (arm.get("roofline_share") or {}).get("mean"), arm.get("memory_bound_steps")
    if not number(share) or not number(memory):
        return f"at an unknown share of {machine} roofline"
    return f"at {_percent(share)} of {machine} {'memory' if memory >= 0.5 else 'compute'} roofline"  # type: ignore[operator]


def baselines_in_words(shares: Sequence[float], memory: Sequence[float]) -> str:
    """Return how close the baselines of several runs come to the rooflines of their machines, as a sentence.

    Args:
        shares: their ``roofline_share``, of the runs where it is known.
        memory: their ``memory_bound_steps``.
    """
    if not len(shares):
        return "The baseline's share of its machine's roofline is unknown."
    low, high = f"{100 * min(shares):.2g}", f"{100 * max(shares):.2g}"
    kind = "memory " if min(memory) >= 0.5 else ""
    return f"The baseline is at {low if low == high else f'{low} to {high}'} % of its machine's {kind}roofline."


SLOW, FAST = 0.3, 0.6
"""Shares of the roofline below which a baseline is slow, and from which it is close to what the machine can do."""


def baseline_notes(arms: Mapping[str, Mapping[str, Any]], judged: Mapping[str, Any]) -> list[str]:
    """Return how close the baseline comes to the roofline and what that means for a speed-up; nothing without one.

    Args:
        arms: their figures, by name.
        judged: ``verdict`` on the times and ``verdict_reasons``; older summaries lack them. Where the times are not
            reliable, or the machine was busy, the share is stated without what it means.
    """
    if "baseline" not in arms:
        return []
    share = (arms["baseline"].get("roofline_share") or {}).get("mean")
    if share is None or not number(share):
        return ["The baseline's share of this machine's roofline is unknown."]
    busy = any(str(reason).startswith("other processes used") for reason in judged.get("verdict_reasons") or ())
    if busy or judged.get("verdict") == "not reliable":
        return [f"The baseline is {share_in_words(arms['baseline'])}, as far as its times are reliable."]
    means = "close to what this machine can do" if share >= FAST else "a faster engine may leave drafts less to gain"
    if share < SLOW:
        means = "far from what this machine can do, so a faster engine would leave drafts less to gain"
    return [f"The baseline is {share_in_words(arms['baseline'])}: {means}."]


def limits_in_words(facts: Mapping[str, Any] | None) -> str:
    """Return what bounds forwards on a machine (``Roofline.facts``)."""
    if facts is None:
        return "unknown"
    limits, weights = facts["limits"], facts["work"]["weight_bytes"]
    of_row = " of one row" if facts["work"].get("experts") else ""
    size = f"{limits['cache_bytes'] / 2**20:.3g} MiB" if limits["cache_bytes"] else ""
    cache = {
        True: f"they fit the last-level cache of {size}, whose bandwidth this is",
        False: f"they exceed the last-level cache of {size}",
        None: "the size of the last-level cache is unknown",
    }[limits["fits_cache"]]
    return (
        f"{limits['bandwidth'] / 1e9:.3g} GB/s of reading, {limits['peak'] / 1e9:.3g} GFLOP/s of matrix products in "
        f"{limits['peak_dtype']}; a forward{of_row} reads {weights / 1e6:.3g} MB of weights; {cache}"
    )


def roofline_notes(arms: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any] | None) -> list[str]:
    """Return how close each arm's forwards of the target come to this machine's roofline, and what that means.

    Args:
        arms: their figures, by name; those without forwards of this engine are left out.
        facts: what was measured (``Roofline.facts``); None of an older run, and where the runner does not state its
            work.
    """
    roofline = Roofline.of(facts)
    if roofline is None:
        return ["The baseline's share of this machine's roofline is unknown."]
    shares = []
    for name, arm in sorted(arms.items(), key=lambda item: item[0] != "baseline"):
        if number((arm.get("roofline_share") or {}).get("mean")):
            end_to_end = arm.get("roofline_share_end_to_end")
            more = f" ({_percent(end_to_end['mean'])} end to end)" if end_to_end else ""
            shares.append(f"{name} {share_in_words(arm)}{more}")
    lines = [f"{'; '.join(shares)}."] if shares else []
    lines += experts_in_words(arms, roofline)
    whole = "; end to end, over all decode time" if "end to end" in "".join(shares) else ""
    lines.append(
        "Roofline share: the least seconds of the target's forwards, max(bytes / bandwidth, FLOPs / peak), over the "
        f"measured ones{whole}. Limits: {limits_in_words(facts)}."
    )
    if roofline.limits.crowded:
        lines.append(
            f"Other processes used {roofline.limits.other_load:.1f} cores while the limits were measured: these may be "
            "too low, and the shares too high."
        )
    return lines


def experts_in_words(arms: Mapping[str, Mapping[str, Any]], roofline: Roofline) -> list[str]:
    """Return how many experts the forwards of each arm read, and which the roofline reads; nothing of a dense model.

    Args:
        arms: their figures, by name.
    """
    if roofline.work.experts is None:
        return []
    lines = [
        f"{name}: a forward of {number(experts['rows'], '.3g')} rows reads {number(experts['read'], '.3g')} of "
        f"{roofline.work.experts.experts} experts of a layer, {number(experts['rejected_only'], '.2g')} of them for "
        f"rejected rows alone; uniform choices would read {number(experts['expected'], '.3g')}"
        + (f", and as many among {among} experts" if (among := number(experts["effective"], ".3g")) else "")
        + "."
        for name, arm in arms.items() if (experts := arm.get("experts"))
    ]  # fmt: skip
    timed = [name for name, arm in arms.items() if number((arm.get("roofline_share") or {}).get("mean"))]
    if lines and (missing := [name for name in timed if not arms[name].get("experts")]):
        lines.append(f"Experts not counted: {', '.join(missing)} (steps continue a draft of the target's own layers).")
    rule = (
        "The roofline reads the experts that were counted (count_experts=true), else as many as uniform choices would."
    )
    return [*lines, rule]


def _percent(share: float | None) -> str:
    return f"{number(share and 100 * share, '.2g' if share and share < 0.995 else '.0f')} %"
