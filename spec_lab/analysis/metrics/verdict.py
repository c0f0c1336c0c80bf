"""The verdict on a timed result: whether its times can be trusted, and why not.

It is computed from the result's own rows and the recorded machine: from a table for each arm (``units``).

What makes a result doubtful or not reliable is stated in ``docs/concepts/measuring.md``, with these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, ratio
from spec_lab.analysis.metrics.units import units_of_run
from spec_lab.results.writer import Tables

Word = Literal["reliable", "doubtful", "not reliable"]

TAKEN = (0.1, 0.25)
"""Share of the cores that a run needs and other processes used: doubtful and not reliable above."""

BESIDE = 0.25
"""Share of all cores that other processes used, although the run had enough: doubtful above. Caches, the bandwidth of
memory and the clock are shared."""

SLOW = 1.25
"""Least factor by which a unit is slower than the others of its arm to be an outlier,"""

DEVIATIONS = 8.0
"""and by how many standard deviations, estimated from the median absolute deviation."""

EFFECT = (0.01, 0.1)
"""Change of the result without the outliers: doubtful and not reliable above."""

OUTLIERS = (0.1, 0.25)
"""Share of units that are outliers in some arm: doubtful and not reliable above."""

DRIFT = (0.1, 0.5)
"""Change of the baseline's time from the first half of the units to the second, or of another arm's over the
baseline's: doubtful and not reliable above, if it exceeds ``DRIFT_ERRORS`` standard errors of medians. Each half must
have ``MIN_CLUSTERS`` units."""

DRIFT_ERRORS = 4.0

APART = 0.1
"""Difference of the logarithms of ratio of sums and geometric mean: doubtful above."""


@dataclass(frozen=True)
class TimingVerdict:
    """Whether times can be trusted.

    Args:
        word: the verdict.
        reasons: why not; of a reliable result, what could not be checked.
    """

    word: Word
    reasons: tuple[str, ...] = ()

    def summary(self) -> dict[str, str | list[str]]:
        """Return the entries of ``summary.json`` and ``manifest.json``."""
        return {"verdict": self.word, "verdict_reasons": list(self.reasons)}


def in_words(word: str, reasons: Sequence[str]) -> str:
    """Return a verdict as text, such as "doubtful: 4 groups, fewer than the 8 that an interval requires"."""
    return f"{word}: {'; '.join(reasons)}" if reasons else word


def timing_verdict(
    arms: Mapping[str, pd.DataFrame],
    threads: int,
    cores: int,
    baseline: str = "baseline",
    unit: str = "group",
    names: Mapping[str, str] | None = None,
    speed: str = "tokens/s",
) -> TimingVerdict:
    """Return the verdict on a result.

    Args:
        arms: the table of each arm (``units``).
        threads: of the CPU that a forward uses.
        cores: that the process may use.
        baseline: the arm that others are compared with; without it, speeds are judged.
        unit: what a row is, for the reasons.
        names: under which arms are shown.
        speed: what ``tokens`` per second are, for the reasons.
    """
    names = {arm: (names or {}).get(arm, arm) for arm in arms}
    arms = {arm: table for arm, table in arms.items() if len(table)}
    if not arms:
        return TimingVerdict("not reliable", (f"no {unit} has times in every arm",))
    findings = [
        *_few(arms, unit),
        *_load(arms, threads, cores),
        *_outliers(arms, baseline, unit, names, speed),
        *_drift(arms, baseline, unit, names),
        *_apart(arms, baseline, unit, names),
    ]
    words: tuple[Word, ...] = ("reliable", "doubtful", "not reliable")
    worst = max((severity for severity, _ in findings), default=0)
    reasons = [reason for severity, reason in sorted(findings, key=lambda finding: -finding[0])]
    return TimingVerdict(words[worst], tuple(reasons))


def disturbed(arms: Mapping[str, pd.DataFrame], threads: int, cores: int) -> list[int]:
    """Return the units that are outliers in some arm, or meanwhile lost more cores than a reliable result may."""
    found = {unit for slow in slow_units(arms).values() for unit in slow.index}
    for table in arms.values():
        taken = (table["other_cores"] - max(cores - threads, 0)) / threads
        found |= set(table.index[taken > TAKEN[1]])
    return sorted(found)


def slow_units(arms: Mapping[str, pd.DataFrame]) -> dict[str, pd.Series]:
    """Return of each arm the factor by which its outliers are slower than its median unit; none of a quiet one.

    Units of fewer tokens than the median one vary more, and are allowed to.
    """
    found = {}
    for arm, table in arms.items():
        excess = table["slowness"] - table["slowness"].median()
        deviation = 1.4826 * excess.abs().median()
        allowed = DEVIATIONS * deviation * np.sqrt((table["tokens"].median() / table["tokens"]).clip(lower=1.0))
        found[arm] = np.exp(excess[excess > np.maximum(allowed, np.log(SLOW))])
    return found


def run_verdict(tables: Tables, manifest: Mapping[str, Any], names: Mapping[str, str] | None = None) -> TimingVerdict:
    """Return the verdict on the finished groups of a benchmark, with the machine of its manifest.

    Args:
        tables: the run's rows.
        manifest: of the run.
        names: under which arms are shown.
    """
    return timing_verdict(units_of_run(tables), *threads_and_cores(manifest), names=names)


def threads_and_cores(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many cores a run needs, on a GPU one, and how many it could use."""
    limits = (manifest.get("roofline") or {}).get("limits") or {}
    threads = int(limits.get("threads") or manifest["threads"])
    cores = int(limits.get("cores") or manifest.get("machine", {}).get("cores") or threads)
    device = (manifest["config"].get("target") or {}).get("device")
    return 1 if str(device).startswith("cuda") else threads, cores


# Reasons -----------------------------------------------------------------------------------------------------------

Finding = tuple[int, str]
"""How bad it is, 0 for what could not be checked, 1 for doubtful, 2 for not reliable; and the reason."""


def _severity(value: float, limits: tuple[float, float]) -> int:
    return sum(value > limit for limit in limits)


def _few(arms: Mapping[str, pd.DataFrame], unit: str) -> list[Finding]:
    count = min(map(len, arms.values()))
    if count >= MIN_CLUSTERS:
        return []
    return [(1, f"{count} {unit}{'s' * (count != 1)}, fewer than the {MIN_CLUSTERS} that an interval requires")]


def _load(arms: Mapping[str, pd.DataFrame], threads: int, cores: int) -> list[Finding]:
    """Judge the load by other processes, of the arm with the most."""
    loads = []
    for table in arms.values():
        known = table.dropna(subset="other_cores")
        loads.append(ratio((known["other_cores"] * known["seconds"]).sum(), known["seconds"].sum()))
    if np.isnan(loads).all():
        return [(0, "the CPU time of other processes was not recorded")]
    load = min(float(np.nanmax(loads)), float(cores))  # over moments as short as ticks it may seem to be more
    taken = _severity((load - max(cores - threads, 0)) / threads, TAKEN)
    severity = max(taken, int(load > BESIDE * cores))
    if not severity:
        return []
    own = f"{threads} thread{'s' * (threads != 1)}"
    return [(severity, f"other processes used {load:.1f} of {cores} cores meanwhile, this one has {own}")]


def _outliers(
    arms: Mapping[str, pd.DataFrame], baseline: str, unit: str, names: Mapping[str, str], speed: str
) -> list[Finding]:
    """Judge units that are slower than the others of their arm, by what they change."""
    slow = slow_units(arms)
    units = sorted({number for each in slow.values() for number in each.index})
    if not units:
        return []
    total = max(map(len, arms.values()))
    severity, changes = _severity(len(units) / total, OUTLIERS), []
    figure = "speed-up" if baseline in arms and len(arms) > 1 else speed
    for arm in arms:
        if arm == baseline and len(arms) > 1:
            continue
        every = _result(arms, arm, baseline)
        rest = _result({name: one.drop(units, errors="ignore") for name, one in arms.items()}, arm, baseline)
        severity = max(severity, _severity(abs(np.log(rest / every)) if rest > 0 else np.inf, EFFECT))
        changes.append(f"{names[arm]} {rest:.2f} instead of {every:.2f}" if rest > 0 else f"{names[arm]} none")
    if not severity:
        return []
    worst = sorted(((factor, number, arm) for arm, each in slow.items() for number, factor in each.items()))[::-1]
    listed = [f"{unit} {number} of {names[arm]} {factor:.3g} times" for factor, number, arm in worst[:2]]
    more = ", ..." if len(worst) > len(listed) else ""
    return [
        (
            severity,
            f"{len(units)} of {total} {unit}s {'was' if len(units) == 1 else 'were'} slower than the same forwards "
            f"usually are ({', '.join(listed)}{more}); without, the {figure} is {', '.join(changes)}",
        )
    ]


def _result(arms: Mapping[str, pd.DataFrame], arm: str, baseline: str) -> float:
    """Return the arm's speed-up over the baseline on common units; its tokens per second without a baseline."""
    own = arms[arm]
    if baseline not in arms or arm == baseline:
        return ratio(own["tokens"].sum(), own["seconds"].sum())
    both = own.join(arms[baseline].add_suffix("_base"), how="inner").sum()
    return ratio(both["tokens"] * both["seconds_base"], both["seconds"] * both["tokens_base"])


def _drift(arms: Mapping[str, pd.DataFrame], baseline: str, unit: str, names: Mapping[str, str]) -> list[Finding]:
    """Judge a change of the machine's speed between the first and the second half of the units."""
    first = baseline if baseline in arms else next(iter(arms))
    base = arms[first]["slowness"]
    series = {f"{names[first]}": base}
    for arm, table in arms.items():
        if arm != first:
            series[f"{names[arm]}, against {names[first]},"] = (table["slowness"] - base).dropna()
    findings = []
    for who, each in series.items():
        half = len(each) // 2
        if half < MIN_CLUSTERS:
            continue
        halves = each.iloc[:half], each.iloc[half:]
        change = float(halves[1].median() - halves[0].median())
        rest = pd.concat([part - part.median() for part in halves])
        error = 1.2533 * 1.4826 * float(rest.abs().median()) * np.sqrt(1 / half + 1 / (len(each) - half))
        severity = _severity(abs(change), tuple(np.log1p(DRIFT)))
        if severity and abs(change) > DRIFT_ERRORS * error:
            kind = "slower" if change > 0 else "faster"
            percent = 100 * np.expm1(abs(change))
            findings.append((severity, f"{who} became {percent:.0f} % {kind} from the first half of the {unit}s to the "
                             "second"))  # fmt: skip
    return findings


def _apart(arms: Mapping[str, pd.DataFrame], baseline: str, unit: str, names: Mapping[str, str]) -> list[Finding]:
    """Judge how far the ratio of sums and the geometric mean are apart."""
    findings = []
    for arm, own in arms.items():
        if baseline not in arms or arm == baseline:
            continue
        both = own.join(arms[baseline].add_suffix("_base"), how="inner")
        each = both["tokens"] / both["seconds"] * both["seconds_base"] / both["tokens_base"]
        sums, mean = _result(arms, arm, baseline), float(np.exp(np.log(each).mean()))
        if abs(np.log(sums / mean)) > np.log1p(APART):
            findings.append((1, f"the speed-up of {names[arm]} is {sums:.2f} as a ratio of sums and {mean:.2f} as a "
                             f"geometric mean: it depends on how {unit}s are weighted"))  # fmt: skip
    return findings
