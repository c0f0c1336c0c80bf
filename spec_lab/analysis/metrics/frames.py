"""One tidy table for each figure: what a chart draws, computed from rows; charts compute nothing.

Every number comes from the functions of ``spec_lab.analysis.metrics``, so a figure and a table cannot disagree. Arms
stand in the order of ``arms``. Where there is nothing to draw the table is empty, with its columns.

Of a run: ``throughput``, ``speedups``, ``by_depth``, ``tokens_per_step``, ``time_by_phase``, ``cost_of_nodes``,
``accepted_tree``, ``spans``. Of a sweep, from the table that ``spec_lab.results.sweep.collect`` makes: ``varied``,
``over_sweep``, ``worth``, ``numeric``, ``along``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.acceptance import conditional, decode_steps, depth_bands, survival, tau_pooled
from spec_lab.analysis.metrics.intervals import interval, ratio
from spec_lab.analysis.metrics.phases import PHASES, decode_seconds, overhead, phase_seconds
from spec_lab.analysis.metrics.speed import group_speeds, walltime_speedup_paired
from spec_lab.analysis.metrics.summary import arms
from spec_lab.results.writer import Tables

Ranks = tuple[int, ...]
"""A node of a draft tree, as the path of child ranks that leads to it."""


def throughput(tables: Tables, baseline: str = "baseline") -> pd.DataFrame:
    """Decode speed of each arm and group.

    Columns: arm, group, tokens_per_second, baseline (its tokens/s on the same prompts), speedup (of full groups; NaN
    of others and of the baseline itself). An arm whose every token came with the prefill is left out.
    """
    speeds = {arm: group_speeds(tables.requests, arm) for arm in arms(tables)}
    base = speeds.get(baseline, pd.Series(dtype=float))
    rows: list[dict[str, Any]] = []
    for arm, speed in speeds.items():
        if not speed.max() > 0:
            continue
        paired = {} if arm == baseline else walltime_speedup_paired(tables.requests, arm, baseline).to_dict()
        rows += [
            {
                "arm": arm,
                "group": int(group),
                "tokens_per_second": float(value),
                "baseline": float(base.get(group, np.nan)),
                "speedup": float(paired.get(group, np.nan)),
            }
            for group, value in speed.items()
        ]
    return pd.DataFrame(rows, columns=["arm", "group", "tokens_per_second", "baseline", "speedup"])


def speedups(tables: Tables, baseline: str = "baseline") -> pd.DataFrame:
    """Paired speed-up of each arm over the baseline: arm, mean, low, high (95 %), groups. Arms without one left out."""
    rows = []
    for arm in arms(tables):
        paired = walltime_speedup_paired(tables.requests, arm, baseline)
        if arm != baseline and len(paired):
            rows.append({"arm": arm, **interval(paired)._asdict(), "groups": len(paired)})
    return pd.DataFrame(rows, columns=["arm", "mean", "low", "high", "groups"])


def by_depth(tables: Tables) -> pd.DataFrame:
    """Acceptance by depth of every arm that drafts: arm, kind ('survival', 'conditional'), depth, value, low, high.

    The band is 95 %, groups of prompts drawn with replacement; NaN below two groups.
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
    """How many steps gave how many tokens: arm, tokens, steps, share, tau.

    Tokens are those of ``tau_pooled``: after cuts, forced ones left out. So an arm's sum of tokens x share is tau.
    """
    rows = []
    for arm in arms(tables):
        steps = decode_steps(tables.steps, arm)
        tau = tau_pooled(steps)
        count = (steps["emitted_kept"] - steps["forced_emitted_kept"]).value_counts().sort_index()
        rows += [(arm, int(tokens), int(times), ratio(times, len(steps)), tau) for tokens, times in count.items()]
    return pd.DataFrame(rows, columns=["arm", "tokens", "steps", "share", "tau"])


def time_by_phase(tables: Tables) -> pd.DataFrame:
    """Decode time per emitted token: arm, phase, what (in words), ms_per_token, share, overhead (of the arm).

    The milliseconds of an arm add up to its decode seconds over its decode tokens.
    """
    tokens = tables.requests.groupby("arm")["decode_tokens"].sum()
    rows = []
    for arm in arms(tables):
        whole = decode_seconds(tables.rounds, arm)
        if not (whole > 0 and tokens[arm] > 0):
            continue
        own = overhead(tables.rounds, arm)
        for phase, seconds in phase_seconds(tables.rounds, arm).items():
            each = ratio(1e3 * seconds, tokens[arm])
            rows.append((arm, phase, PHASES[phase], each, ratio(seconds, whole), own))
    return pd.DataFrame(rows, columns=["arm", "phase", "what", "ms_per_token", "share", "overhead"])


def cost_of_nodes(tables: Tables) -> pd.DataFrame:
    """Time of the target in a round: arm, live, nodes, ms (median), low, high (quartiles), rounds.

    ``live`` is the number of sequences in the round, ``nodes`` the drafted nodes of each, rounded where they differ.
    Milliseconds are those of the phase ``target`` alone, packing and bookkeeping of cells included; prefills left out.
    All contexts are pooled, and nodes are as the arms came to draft them: rounds of more nodes may differ from others
    in their context and in their arm too. ``spec_lab.tasks.cost`` varies nodes alone.
    """
    rounds = tables.rounds[~tables.rounds["prefill"] & (tables.rounds["live"] > 0)]
    nodes = np.rint(rounds["nodes"] / rounds["live"]).astype(int).rename("nodes")
    columns = ["arm", "live", "nodes", "ms", "low", "high", "rounds"]
    if not len(rounds):
        return pd.DataFrame(columns=columns)
    each = (1e3 * rounds["target"]).groupby([rounds["arm"], rounds["live"], nodes])
    frame = each.quantile([0.25, 0.5, 0.75]).unstack().set_axis(["low", "ms", "high"], axis=1)
    frame["rounds"] = each.size()
    frame = frame.reset_index()
    place = {arm: number for number, arm in enumerate(arms(tables))}
    return frame.sort_values(["arm", "live", "nodes"], key=lambda one: one.map(place) if one.name == "arm" else one)[
        columns
    ].reset_index(drop=True)


def accepted_tree(steps: pd.DataFrame, drafted: Collection[Ranks] = (), most: int = 64) -> pd.DataFrame:
    """Which nodes of the draft tree were accepted, and how often.

    Args:
        steps: one arm's decode steps (``decode_steps``); paths before cuts, forced nodes included.
        drafted: the nodes of a static tree; those never accepted are listed as well. Empty: only what was accepted.
        most: list at most so many nodes: those accepted most often (a node comes never before its parent).

    Returns:
        Columns: path, depth, accepted (steps whose accepted path goes through the node), ended (steps in which it ends
        there), share (accepted / steps). Parents first, siblings by rank. The root, ``()``, is the first row: accepted
        by all steps. Empty without steps or without any node.
    """
    paths = Counter(tuple(int(rank) for rank in path) for path in steps["path"])
    through: Counter[Ranks] = Counter()
    for path, times in paths.items():
        for depth in range(len(path) + 1):
            through[path[:depth]] += times
    nodes = {(), *through, *drafted}
    likeliest = sorted(nodes, key=lambda path: (-through[path], len(path), path))[: most + 1]
    rows = [
        (path, len(path), through[path], paths[path], ratio(through[path], len(steps)))
        for path in sorted(likeliest, key=lambda path: (len(path), path))
    ]
    frame = pd.DataFrame(rows, columns=["path", "depth", "accepted", "ended", "share"])
    return frame if len(nodes) > 1 and len(steps) else frame.iloc[:0]


class Span(NamedTuple):
    """A piece of output text that came the same way.

    Args:
        text: the piece.
        kind: 'accepted' (drafted and accepted), 'bonus' (chosen after the accepted ones), 'forced' (its constraint left
            no other; accepted drafts are 'accepted' unless all of the step were forced), 'prefill' (chosen by the
            prompt's own forward), 'unknown' (rows do not tell: a peer, or tables without ``ends``).
        round: the forward it came with; -1: before any, or unknown.
    """

    text: str
    kind: str
    round: int


def spans(tables: Tables, request: int, arm: str, sequence: int = 0) -> list[Span]:
    """The output of one sequence in pieces, in order; together they are its ``text``.

    Where tokens of an accepted path were partly forced, rows say how many and not which: the piece is 'accepted'.

    Raises:
        ValueError: no such sequence in this arm.
    """
    rows = tables.requests[(tables.requests["request"] == request) & (tables.requests["arm"] == arm)]
    steps = tables.steps[(tables.steps["request"] == request) & (tables.steps["arm"] == arm)]
    row = rows[rows["sequence"] == sequence]
    if not len(row):
        raise ValueError(f"no sequence {sequence} of request {request} in arm '{arm}'")
    one = row.iloc[0]
    text, ends = str(one["text"]), one.get("ends")
    if not len(steps) or not isinstance(ends, np.ndarray | list) or len(ends) != len(one["tokens"]):
        return [Span(text, "unknown", -1)] if text else []
    origins = _origins(rows.set_index("sequence"), steps, sequence, len(ends))
    pieces: list[Span] = []
    start = 0
    for place, (end, (kind, number)) in enumerate(zip(ends, origins, strict=True)):
        end = len(text) if place == len(ends) - 1 else min(int(end), len(text))
        if end > start:
            if pieces and pieces[-1][1:] == (kind, number):
                pieces[-1] = Span(pieces[-1].text + text[start:end], kind, number)
            else:
                pieces.append(Span(text[start:end], kind, number))
            start = end
    return pieces


def _origins(rows: pd.DataFrame, steps: pd.DataFrame, sequence: int, count: int) -> list[tuple[str, int]]:
    """Kind and round of each of the ``count`` tokens of a sequence.

    A step's ``context`` says where its tokens begin. What stood there before was taken back; what the steps leave
    unsaid was put there by the constraint before the next step, or before the first.
    """
    origins: list[tuple[str, int]] = []
    parent = int(rows.loc[sequence, "parent_sequence"])
    if parent in rows.index:
        origins = _origins(rows, steps, parent, len(rows.loc[parent, "tokens"]))
    prompt = int(rows.loc[sequence, "prompt_tokens"])
    for step in steps[steps["sequence"] == sequence].sort_values("round").to_dict("records"):
        _settle(origins, max(0, int(step["context"]) - prompt))
        accepted, after = step["accepted_kept"], step["emitted_kept"] - step["accepted_kept"]
        appended = step["forced_emitted_kept"] - step["forced_accepted_kept"]  # those after the accepted ones
        own, chosen = int(step["round"]), "prefill" if step["prefill"] else "bonus"
        all_forced = 0 < accepted == step["forced_accepted_kept"]
        origins += [("forced" if all_forced else "accepted", own)] * accepted + [(chosen, own)] * (after - appended)
        if step["taken_back"]:  # before anything is appended
            del origins[max(0, len(origins) - step["taken_back"]) :]
        origins += [("forced", own)] * appended
    _settle(origins, count)
    return origins


def _settle(origins: list[tuple[str, int]], count: int) -> None:
    """Make ``origins`` so many tokens long."""
    del origins[count:]
    origins += [("forced", origins[-1][1] if origins else -1)] * (count - len(origins))


def varied(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Of the override ``keys``, those that the sweep varied: with more than one value, absence counted as one."""
    return [key for key in keys if key in table and table[key].nunique(dropna=False) > 1]


def over_sweep(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The rows of ``collect`` without the baselines, the fastest first, each with a ``label`` of what sets it apart."""
    frame = _compared(table)
    frame = frame.assign(label=labels(frame, varied(table, keys)))
    if "speedup" in frame:
        frame = frame.sort_values("speedup", ascending=False, na_position="last", kind="stable")
    return frame.reset_index(drop=True)


def compared_arms(table: pd.DataFrame) -> list[str]:
    """The arms of ``collect`` without the baselines, in its order: whatever is drawn of them, their colours agree."""
    return list(dict.fromkeys(_compared(table)["arm"]))


def worth(table: pd.DataFrame, keys: Sequence[str]) -> tuple[pd.DataFrame, dict[str, pd.Series]]:
    """The rows of ``over_sweep`` that have both tau and speed-up, and by what they may be coloured.

    Returns:
        The rows; and by name ("arm", where there are several, and the varied ``keys``) a categorical series over them,
        of words such as "depth=2", which no two names share. Categories stand in the order of colours: arms as in
        ``compared_arms``, numbers by value, then words.
    """
    frame, found, arms = over_sweep(table, keys), varied(table, keys), compared_arms(table)
    frame = frame.reindex(columns=dict.fromkeys([*frame, "tau_pooled", "speedup"]))
    frame = frame[frame["tau_pooled"].notna() & frame["speedup"].notna()]
    words = {}
    if len(arms) > 1 or not found:
        words["arm"] = pd.Series(pd.Categorical(frame["arm"], arms), frame.index)
    for key in found:
        order = sorted({_word(one) for one in frame[key]}, key=_natural)
        said = {word: f"{key}={word}" if word else f"{key} not set" for word in order}
        own = [said[_word(one)] for one in frame[key]]
        words[key] = pd.Series(pd.Categorical(own, list(said.values())), frame.index)
    return frame, words


def labels(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """A name for each row from the values of ``keys`` and, where there are several, its arm.

    Keys are cut to their last part ("sampling.temperature" to "temperature") where that stays unambiguous.
    """
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys}
    with_arm = table["arm"].nunique() > 1
    names = []
    for row in table.to_dict("records"):
        parts = [f"{short[key]}={_plain(row[key])}" for key in keys if not _missing(row[key])]
        names.append(", ".join([str(row["arm"])] * with_arm + parts) or str(row.get("run", row["arm"])))
    return names


def numeric(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Of the varied keys, those with at least two numbers among their values: what a line may be drawn against."""
    return [key for key in varied(table, keys) if key != "seed" and _numbers(table[key]).nunique() > 1]


def along(
    table: pd.DataFrame,
    keys: Sequence[str],
    key: str,
    values: Sequence[str] = ("tau_pooled", "speedup"),
    most: int = 8,
) -> pd.DataFrame:
    """How ``values`` move with a numeric ``key``: what (the value's name), line, x, value, low, high, runs.

    One line for each combination of arm and the other varied keys, seeds apart: runs that differ in nothing but the
    seed are one point, their mean. Its ends are the means of the runs' own 95 % bounds (``<value>_low``,
    ``<value>_high``), NaN where a run has none. Seeds share their prompts, so their mean knows no more prompts than one
    of them does, and a bootstrap over a few runs would say less than they differ by chance. The mean of several
    estimates never varies more than they do on average, so these ends are rather too wide. What a run's own interval
    leaves out, such as the machine's state while it ran, they leave out too.

    Lines of one point are left out; of more than ``most`` lines those stay that have the best mean of the last of
    ``values``. Rows whose ``key`` is no number have no place on it and are left out.
    """
    frame = _compared(table)
    others = [other for other in varied(table, keys) if other not in (key, "seed")]
    named = labels(frame, others) if others or frame["arm"].nunique() > 1 else "all runs"
    frame = frame.assign(line=named, x=_numbers(frame[key]))
    rows = []
    for what in (value for value in values if value in frame):
        for (line, x), own in frame[frame[what].notna()].groupby(["line", "x"], sort=True):
            ends = own.reindex(columns=[what, f"{what}_low", f"{what}_high"]).mean(skipna=False)
            rows.append((what, line, float(x), *ends.tolist(), len(own)))
    lines = pd.DataFrame(rows, columns=["what", "line", "x", "value", "low", "high", "runs"])
    if len(lines):
        lines = lines[lines.groupby(["what", "line"])["x"].transform("size") > 1]
    means = lines.groupby(["what", "line"])["value"].mean()
    best: list[str] = []
    for what in reversed(values):
        own = means[means.index.get_level_values("what") == what].droplevel("what")
        best += [str(line) for line in own.sort_values(ascending=False).index if line not in best]
    return lines[lines["line"].isin(best[:most])].reset_index(drop=True)


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that are compared with a baseline."""
    return table[table["arm"].notna() & (table["arm"] != "baseline")]


def _numbers(values: pd.Series) -> pd.Series:
    """The values that are numbers; NaN for others."""
    return pd.to_numeric(values, errors="coerce")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _word(value: Any) -> str:
    """An option's value; nothing where it is not set."""
    return "" if _missing(value) else _plain(value)


def _natural(option: str) -> tuple[bool, float, str]:
    """Numbers by value, then words."""
    try:
        return False, float(option), option
    except ValueError:
        return True, 0.0, option


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))
