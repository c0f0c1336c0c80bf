"""One tidy table for each figure of a sweep, from the table that ``spec_lab.results.sweep.collect`` makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import pandas as pd

from spec_lab.results import run_names, run_state, sweep

MAX_VERDICTS = 40
"""Largest number of runs whose verdicts are written out."""


def varied(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the options in ``keys`` that have more than one value; absence counts as a value."""
    return [key for key in keys if key in table and table[key].nunique(dropna=False) > 1]


def numeric(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the varied options with at least two numbers among their values, seeds left out."""
    return [key for key in varied(table, keys) if key != "seed" and _numbers(table[key]).nunique() > 1]


def compared_arms(table: pd.DataFrame) -> list[str]:
    """Return the arms without the baselines, in the order of ``table``."""
    return list(dict.fromkeys(_compared(table)["arm"]))


def over_sweep(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return the rows without the baselines, the fastest first, each with a ``label`` of its varied options."""
    frame = _compared(table)
    frame = frame.assign(label=labels(frame, varied(table, keys)))
    if "speedup" in frame:
        frame = frame.sort_values("speedup", ascending=False, na_position="last", kind="stable")
    return frame.reset_index(drop=True)


def tau_and_speedup(table: pd.DataFrame, keys: Sequence[str]) -> tuple[pd.DataFrame, dict[str, pd.Series]]:
    """Return the rows of ``over_sweep`` that have tau and speed-up, and the categories that colour them.

    Returns:
        The rows; and by name ("arm", where there are several that no option tells apart, and the ``keys`` that vary in
        them) a categorical series over the rows. Categories are words such as "depth=2", which no two names share, in
        the order of colours: arms as in ``compared_arms``, numbers by value, then words.
    """
    frame = over_sweep(table, keys)
    frame = frame.reindex(columns=dict.fromkeys([*frame, "tau_pooled", "speedup"]))
    frame = frame[frame["tau_pooled"].notna() & frame["speedup"].notna()]
    options, arms = varied(frame, keys), compared_arms(table)
    categories = {}
    if _arm_tells(frame, options) or not options:
        categories["arm"] = pd.Series(pd.Categorical(frame["arm"], arms), frame.index)
    for key in options:
        texts = ["" if pd.isna(value) else text(value) for value in frame[key]]
        names = {text: f"{key}={text}" if text else f"{key} not set" for text in sorted(set(texts), key=_natural)}
        values = pd.Categorical([names[text] for text in texts], list(names.values()))
        categories[key] = pd.Series(values, frame.index)
    return frame, categories


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return each option cut to its last part ("sampling.temperature" to "temperature") where that is unambiguous."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys}


def run_labels(runs: Sequence[run_state.RunState]) -> dict[str, str]:
    """Return the options of each run that not all runs share, by its folder's name; keys are cut as in ``short_names``.

    The folder's name where all are shared.
    """
    label = sweep.labels({run.folder.name: run.overrides for run in runs})
    short = short_names(list(dict.fromkeys(run_names.key(override) for run in runs for override in run.overrides)))
    given = {run.folder.name: dict.fromkeys(run.overrides) for run in runs}
    shortened = {}
    for name, text in label.items():
        shown = [override for override in given[name] if override in text.split(" ")]
        whole = " ".join(shown) == text
        cut = (f"{short[run_names.key(override)]}={override.partition('=')[2]}" for override in shown)
        shortened[name] = " ".join(cut) if whole else text
    return shortened


def labels(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return a name for each row from the values of ``keys`` and, where they do not tell several arms apart, its arm.

    Keys are cut as in ``short_names``.
    """
    short = short_names(keys)
    with_arm = _arm_tells(table, keys)
    names = []
    for row in table.to_dict("records"):
        parts = [f"{short[key]}={text(row[key])}" for key in keys if not pd.isna(row[key])]
        names.append(", ".join([str(row["arm"])] * with_arm + parts) or str(row.get("run", row["arm"])))
    return names


def by_option(
    table: pd.DataFrame,
    keys: Sequence[str],
    key: str,
    values: Sequence[str] = ("tau_pooled", "speedup"),
    max_lines: int = 8,
) -> pd.DataFrame:
    """Return ``values`` against a numeric ``key``: what (the value's name), arm, line, x, value, low, high, runs.

    One line for each combination of arm and the other varied options. Runs that differ only in the seed are one point,
    their mean, with the means of the runs' 95 % bounds (``<value>_low``, ``<value>_high``); NaN where a run has none.
    Seeds share their prompts, so their mean covers no more prompts than one of them; these bounds are rather too wide,
    because the mean of several estimates varies no more than they do on average. Differences between runs that their
    own intervals leave out, such as the machine's state, are left out here too.

    Lines of one point are left out; of more than ``max_lines`` lines those with the best mean of the last of ``values``
    are kept. Rows whose ``key`` is not a number are left out.
    """
    frame = _compared(table)
    others = [other for other in varied(table, keys) if other not in (key, "seed")]
    names = labels(frame, others) if others or frame["arm"].nunique() > 1 else "all runs"
    frame = frame.assign(line=names, x=_numbers(frame[key]))
    rows = []
    for what in (value for value in values if value in frame):
        for (arm, line, x), runs in frame[frame[what].notna()].groupby(["arm", "line", "x"]):
            means = runs.reindex(columns=[what, f"{what}_low", f"{what}_high"]).mean(skipna=False)
            rows.append((what, arm, line, float(x), *means.tolist(), len(runs)))
    lines = pd.DataFrame(rows, columns=["what", "arm", "line", "x", "value", "low", "high", "runs"])
    if len(lines):
        lines = lines[lines.groupby(["what", "line"])["x"].transform("size") > 1]
    mean = lines.groupby(["what", "line"])["value"].mean().reset_index()
    mean["priority"] = mean["what"].map(list(values)[::-1].index)
    best = mean.sort_values(["priority", "value"], ascending=[True, False])["line"].drop_duplicates().head(max_lines)
    return lines[lines["line"].isin(best)].reset_index(drop=True)


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are compared with a baseline."""
    return table[table["arm"].notna() & (table["arm"] != "baseline")]


def _arm_tells(table: pd.DataFrame, keys: Sequence[str]) -> bool:
    """Return whether the rows have several arms, and no option divides the rows as their arms do."""

    def codes(column: str) -> list[int]:
        return pd.factorize(table[column], use_na_sentinel=False)[0].tolist()

    return table["arm"].nunique() > 1 and codes("arm") not in [codes(key) for key in keys]


def _numbers(values: pd.Series) -> pd.Series:
    """Return the values that are numbers; NaN for others."""
    return pd.to_numeric(values, errors="coerce")


def text(value: Any) -> str:
    """Return the value of an option as text: 0.5 is "0.5", an absent one is empty."""
    if pd.isna(value):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def verdicts(table: pd.DataFrame, names: Mapping[str, str]) -> list[str]:
    """Return how many runs of a sweep have which verdict on their times, and why they are not reliable, run by run.

    Args:
        table: of ``results.sweep.collect``; runs of older versions and of tasks without times have no verdict.
        names: of the runs, by their folders' names.
    """
    if "verdict" not in table:
        return []
    judged = (
        table.reindex(columns=["run", "verdict", "verdict_reasons"]).drop_duplicates("run").dropna(subset="verdict")
    )
    count = judged["verdict"].value_counts()
    words = [word for word in ("reliable", "doubtful", "not reliable") if word in count]
    lines = [f"Verdicts: {', '.join(f'{count[word]} {word}' for word in words)}, of {len(judged)} runs."]
    bad = judged[judged["verdict"] != "reliable"]
    for run, word, reasons in bad.head(MAX_VERDICTS).itertuples(index=False):
        lines.append(f"{names.get(run, run)}: {word}: {text(reasons)}")
    more = len(bad) - MAX_VERDICTS
    return lines + [f"and {more} more; spec-lab collect writes all."] * (more > 0)


def with_bounds(row: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return a figure of a row of ``sweep.collect`` as an interval; NaN for what it lacks."""
    return {end: row.get(key, nan) for end, key in (("mean", name), ("low", f"{name}_low"), ("high", f"{name}_high"))}


def _natural(text: str) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by value, then words."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text
