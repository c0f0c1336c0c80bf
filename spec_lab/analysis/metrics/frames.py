"""One tidy table for each figure of a run: what a figure draws, computed from rows; figures compute nothing.

Every number comes from the functions of ``spec_lab.analysis.metrics``, so figures and tables agree. Arms are in the
order of ``arms``. Where there is nothing to draw the table is empty, with its columns. Tables of a sweep are in
``sweeps``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.acceptance import conditional, decode_steps, depth_bands, survival, tau_pooled
from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.analysis.metrics.phases import PHASES, decode_seconds, overhead, phase_seconds
from spec_lab.analysis.metrics.spans import TextSpan as TextSpan
from spec_lab.analysis.metrics.spans import spans as spans
from spec_lab.analysis.metrics.speed import group_speeds, of_timed_groups, speedup, walltime_speedup_paired
from spec_lab.analysis.metrics.summary import arms
from spec_lab.results.writer import Tables

Ranks = tuple[int, ...]
"""A node of a draft tree, as the child ranks on the path to it; ``()`` is the root."""


def throughput(tables: Tables, baseline: str = "baseline") -> pd.DataFrame:
    """Return the decode speed of each arm and timed group.

    Columns: arm, group, tokens_per_second, baseline (its tokens/s on the same prompts), speedup (the ratio; NaN of the
    baseline itself). An arm whose every token came with the prefill is left out.
    """
    speeds = {arm: group_speeds(tables.requests, arm) for arm in arms(tables)}
    parts = []
    for arm, speed in speeds.items():
        if speed.max() > 0:
            columns = {"tokens_per_second": speed, "baseline": speeds.get(baseline, pd.Series(dtype=float))}
            if arm != baseline:
                columns["speedup"] = walltime_speedup_paired(tables.requests, arm, baseline)
            part = pd.DataFrame(columns, index=speed.index).rename_axis("group").reset_index()
            parts.append(part.assign(arm=arm))
    names = ["arm", "group", "tokens_per_second", "baseline", "speedup"]
    return pd.concat(parts, ignore_index=True).reindex(columns=names) if parts else pd.DataFrame(columns=names)


def speedups(tables: Tables, baseline: str = "baseline") -> pd.DataFrame:
    """Return the speed-up of each arm over the baseline: arm, mean (a ratio of sums), low, high (95 %), groups.

    Arms without a speed-up are left out.
    """
    rows = []
    for arm in arms(tables):
        groups = 0 if arm == baseline else len(walltime_speedup_paired(tables.requests, arm, baseline))
        if groups:
            rows.append({"arm": arm, **speedup(tables.requests, arm, baseline)._asdict(), "groups": groups})
    return pd.DataFrame(rows, columns=["arm", "mean", "low", "high", "groups"])


def by_depth(tables: Tables) -> pd.DataFrame:
    """Return acceptance by depth of every arm that drafts.

    Columns: arm, kind ('survival', 'conditional'), depth, value, low, high. The band is 95 % over groups of
    prompts; NaN below ``MIN_CLUSTERS`` groups.
    """
    rows = []
    for arm in arms(tables):
        steps = decode_steps(tables.steps, arm)
        if not steps["depth"].max() > 0:
            continue
        bands = depth_bands(steps)
        for kind, curve in (("survival", survival(steps)), ("conditional", conditional(steps))):
            for depth, (value, low, high) in enumerate(zip(curve, *bands[kind], strict=True), 1):
                rows.append((arm, kind, depth, float(value), float(low), float(high)))
    return pd.DataFrame(rows, columns=["arm", "kind", "depth", "value", "low", "high"])


def tokens_per_step(tables: Tables) -> pd.DataFrame:
    """Return how many steps emitted how many tokens: arm, tokens, steps, share, tau.

    Tokens are those of ``tau_pooled`` (after cuts, without forced ones), so an arm's sum of tokens x share is tau.
    """
    rows = []
    for arm in arms(tables):
        steps = decode_steps(tables.steps, arm)
        tau = tau_pooled(steps)
        count = (steps["emitted_kept"] - steps["forced_emitted_kept"]).value_counts().sort_index()
        rows += [(arm, int(tokens), int(times), ratio(times, len(steps)), tau) for tokens, times in count.items()]
    return pd.DataFrame(rows, columns=["arm", "tokens", "steps", "share", "tau"])


def time_by_phase(tables: Tables) -> pd.DataFrame:
    """Return decode time per emitted token: arm, phase, label, ms_per_token, share, overhead (of the arm).

    The milliseconds of an arm add up to its decode seconds over its decode tokens, of the ``timed_groups``.
    """
    tables = of_timed_groups(tables)
    tokens = tables.requests.groupby("arm")["decode_tokens"].sum()
    rows = []
    for arm in arms(tables):
        total = decode_seconds(tables.forwards, arm)
        if not (total > 0 and tokens[arm] > 0):
            continue
        outside = overhead(tables.forwards, arm)
        for phase, seconds in phase_seconds(tables.forwards, arm).items():
            per_token = ratio(1e3 * seconds, tokens[arm])
            rows.append((arm, phase, PHASES[phase], per_token, ratio(seconds, total), outside))
    return pd.DataFrame(rows, columns=["arm", "phase", "label", "ms_per_token", "share", "overhead"])


def cost_of_nodes(tables: Tables) -> pd.DataFrame:
    """Return the target's time per step of the batch: arm, live, nodes, ms (median), low, high (quartiles), forwards.

    ``live`` is the number of sequences, ``nodes`` the drafted nodes of each, rounded where they differ,
    ``forwards`` their number.
    Milliseconds are those of the phase ``target`` alone, packing and KV-cache bookkeeping included; prefills are left
    out. All contexts are pooled and nodes are as the arms drafted them, so steps with more nodes may also differ in
    context and arm. ``spec_lab.tasks.cost`` varies the number of nodes alone.
    """
    forwards = tables.forwards[~tables.forwards["prefill"] & (tables.forwards["live"] > 0)]
    nodes = np.rint(forwards["nodes"] / forwards["live"]).astype(int).rename("nodes")
    columns = ["arm", "live", "nodes", "ms", "low", "high", "forwards"]
    if not len(forwards):
        return pd.DataFrame(columns=columns)
    milliseconds = (1e3 * forwards["target"]).groupby([forwards["arm"], forwards["live"], nodes])
    frame = milliseconds.quantile([0.25, 0.5, 0.75]).unstack().set_axis(["low", "ms", "high"], axis=1)
    frame["forwards"] = milliseconds.size()
    frame = frame.reset_index()
    frame = frame.assign(order=frame["arm"].map(arms(tables).index)).sort_values(["order", "live", "nodes"])
    return frame[columns].reset_index(drop=True)


def accepted_tree(steps: pd.DataFrame, drafted: Collection[Ranks] = (), max_nodes: int = 64) -> pd.DataFrame:
    """Return which nodes of the draft tree were accepted, and how often.

    Args:
        steps: one arm's decode steps (``decode_steps``); paths before cuts, forced nodes included.
        drafted: the nodes of a static tree; those never accepted are listed as well. Empty: only accepted ones.
        max_nodes: at most this many nodes below the root: those accepted most often (no node comes before its parent).

    Returns:
        Columns: path, depth, accepted (steps whose accepted path contains the node), ended (steps in which it ends
        there), share (accepted / steps). Parents first, siblings by rank. The root, ``()``, is the first row: accepted
        by all steps. Empty without steps or without any node.
    """
    paths = Counter(tuple(int(rank) for rank in path) for path in steps["path"])
    accepted: Counter[Ranks] = Counter()
    for path, times in paths.items():
        for depth in range(len(path) + 1):
            accepted[path[:depth]] += times
    nodes = {(), *accepted, *drafted}
    frequent = sorted(nodes, key=lambda path: (-accepted[path], len(path), path))[: max_nodes + 1]
    rows = [
        (path, len(path), accepted[path], paths[path], ratio(accepted[path], len(steps)))
        for path in sorted(frequent, key=lambda path: (len(path), path))
    ]
    frame = pd.DataFrame(rows, columns=["path", "depth", "accepted", "ended", "share"])
    return frame if len(nodes) > 1 and len(steps) else frame.iloc[:0]
