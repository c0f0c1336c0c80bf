"""The verdict on a timed result: whether its times can be trusted, and why not.

It is computed from the result's own rows and the recorded machine: from a table for each arm (``units``).

What makes a result doubtful or not reliable is stated in ``docs/concepts/measuring.md``, with these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
"""An outlier takes at least so many times the usual time of its arm."""

DEVIATIONS = 8.0
"""An outlier exceeds the median slowness by at least so many standard deviations, estimated from the median absolute
deviation."""

LONG = 0.2
"""Seconds of the shortest unit whose own load by other processes is judged: processor time is counted in ticks."""

SPREAD = 0.2
"""Standard deviation of the logarithm of the time of the same forwards, outliers left out: doubtful above. It is
estimated from the 10 % and the 90 % quantile, so a machine that is slow for most of the units is seen as well."""

EFFECT = (0.01, 0.1)
"""Change of the result without the outliers: doubtful and not reliable above."""

OUTLIERS = (0.1, 0.25)
"""Share of units that are outliers in some arm: doubtful and not reliable above."""

DRIFT = (0.15, 0.5)
"""Change of the baseline's time from the first half of the units to the second, or of another arm's over the
baseline's: doubtful and not reliable above, if it exceeds ``DRIFT_ERRORS`` standard errors of medians. Each half must
have ``MIN_CLUSTERS`` units."""

DRIFT_ERRORS = 4.0

APART = 0.1
"""Difference of the logarithms of ratio of sums and geometric mean: doubtful above."""


Kind = Literal["none", "few", "load", "outliers", "drift", "spread", "means", "unchecked"]


class TimingReason(NamedTuple):
    """Something that a verdict is based on.

    Args:
        kind: "none", no unit has times; "few" units; "load" by other processes; "outliers"; "drift"; "spread" of the
            time of the same forwards; "means" that are apart; "unchecked", what could not be judged.
        severity: 0 for what could not be checked, 1 for doubtful, 2 for not reliable.
        reason: as text.
    """

    kind: Kind
    severity: int
    reason: str


@dataclass(frozen=True)
class TimingVerdict:
    """Whether times can be trusted.

    Args:
        word: the verdict.
        findings: why not; of a reliable result, what could not be checked. The worst first.
    """

    word: Word
    findings: tuple[TimingReason, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings as texts."""
        return tuple(finding.reason for finding in self.findings)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the findings."""
        return tuple(finding.kind for finding in self.findings)

    def summary(self) -> dict[str, str | list[str]]:
        """Return the entries of ``summary.json`` and ``manifest.json``."""
        return {"verdict": self.word, "verdict_reasons": list(self.reasons)}


@dataclass(frozen=True)
class Resources:
    """Hardware and software of a run.

    Args:
        threads: of the CPU that a forward uses; on a GPU, the one that starts its kernels.
        cores: that the process may use.
        gpu: whether forwards run on a GPU.
        ranks: number of processes that compute together.
    """

    threads: int
    cores: int
    gpu: bool = False
    ranks: int = 1

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Resources:
        """Return those of a run. Manifests of older runs lack the device; there the configured one counts."""
        limits = (manifest.get("roofline") or {}).get("limits") or {}
        threads = int(limits.get("threads") or manifest["threads"])
        cores = int(limits.get("cores") or manifest.get("machine", {}).get("cores") or threads)
        device = manifest.get("device") or (manifest["config"].get("target") or {}).get("device") or "cpu"
        gpu = not str(device).startswith("cpu")
        return Resources(1 if gpu else threads, cores, gpu, int(manifest.get("ranks") or 1))


def timing_verdict(
    arms: Mapping[str, pd.DataFrame],
    resources: Resources,
    baseline: str = "baseline",
    unit: str = "group",
    speed: str = "tokens/s",
) -> TimingVerdict:
    """Return the verdict on a result.

    Args:
        arms: the table of each arm (``units``).
        resources: what the run computes with.
        baseline: the arm that others are compared with; without it, speeds are judged.
        unit: what a row is, for the reasons.
        speed: what ``tokens`` per second are, for the reasons.
    """
    arms = {arm: table for arm, table in arms.items() if len(table)}
    if not arms:
        return TimingVerdict("not reliable", (TimingReason("none", 2, f"no {unit} has times in every arm"),))
    findings = [
        *_few(arms, unit),
        *_load(arms, resources),
        *_outliers(arms, baseline, unit, speed),
        *_drift(arms, baseline, unit),
        *_spread(arms),
        *_apart(arms, baseline, unit),
    ]
    words: tuple[Word, ...] = ("reliable", "doubtful", "not reliable")
    findings.sort(key=lambda finding: -finding.severity)
    return TimingVerdict(words[findings[0].severity if findings else 0], tuple(findings))


def disturbed(arms: Mapping[str, pd.DataFrame], resources: Resources) -> list[int]:
    """Return the units that are outliers in some arm, or meanwhile lost more cores than a reliable result may.

    The load is not judged of units shorter than ``LONG`` seconds, nor where several ranks compute.
    """
    units = {unit for slow in slow_units(arms).values() for unit in slow.index}
    if resources.ranks == 1:
        for table in arms.values():
            taken = _taken(table["other_cores"], resources)
            units |= set(table.index[(taken > TAKEN[1]) & (table["seconds"] >= LONG)])
    return sorted(units)


def slow_units(arms: Mapping[str, pd.DataFrame]) -> dict[str, pd.Series]:
    """Return of each arm the factor by which its outliers are slower than its median unit; none of a quiet one.

    Units of fewer tokens than the median one vary more, and are allowed to.
    """
    factors = {}
    for arm, table in arms.items():
        excess = table["slowness"] - table["slowness"].median()
        deviation = 1.4826 * excess.abs().median()
        allowed = DEVIATIONS * deviation * np.sqrt((table["tokens"].median() / table["tokens"]).clip(lower=1.0))
        factors[arm] = np.exp(excess[excess > np.maximum(allowed, np.log(SLOW))])
    return factors


def run_verdict(tables: Tables, manifest: Mapping[str, Any]) -> TimingVerdict:
    """Return the verdict on the finished groups of a benchmark, with the machine of its manifest."""
    return timing_verdict(units_of_run(tables), Resources.of(manifest))


# Reasons -----------------------------------------------------------------------------------------------------------


def _severity(value: float, limits: tuple[float, float]) -> int:
    return sum(value > limit for limit in limits)


def _few(arms: Mapping[str, pd.DataFrame], unit: str) -> list[TimingReason]:
    count = min(map(len, arms.values()))
    if count >= MIN_CLUSTERS:
        return []
    reason = f"{count} {unit}{'s' * (count != 1)}, fewer than the {MIN_CLUSTERS} that an interval requires"
    return [TimingReason("few", 1, reason)]


def _taken(load: Any, resources: Resources) -> Any:
    """Return the share of the needed cores that others took; negative where cores are left."""
    return (load - max(resources.cores - resources.threads, 0)) / resources.threads


def _load(arms: Mapping[str, pd.DataFrame], resources: Resources) -> list[TimingReason]:
    """Judge the load by other processes, of the arm with the most; name what is not known."""
    findings, cores, threads = [], resources.cores, resources.threads
    if resources.gpu:
        findings.append(TimingReason("unchecked", 0, "whether other processes used the GPU was not checked"))
    if resources.ranks > 1:
        reason = "the CPU time of other processes is not told apart from that of the other ranks"
        return [*findings, TimingReason("unchecked", 0, reason)]
    loads = []
    for table in arms.values():
        known = table.dropna(subset="other_cores")
        loads.append(ratio((known["other_cores"] * known["seconds"]).sum(), known["seconds"].sum()))
    if np.isnan(loads).all():
        return [*findings, TimingReason("unchecked", 0, "the CPU time of other processes was not recorded")]
    # Of moments as short as ticks, each value may be below 0 or above the number of cores.
    load = min(max(float(np.nanmax(loads)), 0.0), float(cores))
    severity = max(_severity(_taken(load, resources), TAKEN), int(load > BESIDE * cores))
    if severity:
        needed = f"{threads} thread{'s' * (threads != 1)}"
        reason = f"other processes used {load:.1f} of {cores} cores meanwhile, this one has {needed}"
        findings.append(TimingReason("load", severity, reason))
    return findings


def _spread(arms: Mapping[str, pd.DataFrame]) -> list[TimingReason]:
    """Judge how much the time of the same forwards varies between units."""
    findings, slow = [], slow_units(arms)
    for arm, table in arms.items():
        rest = table[table["same_forwards"]].drop(slow[arm].index, errors="ignore")["slowness"].dropna()
        if len(rest) < MIN_CLUSTERS:
            continue
        low, high = rest.quantile([0.1, 0.9])
        deviation = (high - low) / 2.563  # of a normal distribution the quantiles are so many deviations apart
        if deviation > SPREAD:
            reason = f"the time of the same forwards of {arm} varies by {100 * deviation:.0f} % between units"
            findings.append(TimingReason("spread", 1, reason))
    return findings


def _outliers(arms: Mapping[str, pd.DataFrame], baseline: str, unit: str, speed: str) -> list[TimingReason]:
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
        rest = _result({name: table.drop(units, errors="ignore") for name, table in arms.items()}, arm, baseline)
        severity = max(severity, _severity(abs(np.log(rest / every)) if rest > 0 else np.inf, EFFECT))
        changes.append(f"{arm} {rest:.2f} instead of {every:.2f}" if rest > 0 else f"{arm} none")
    if not severity:
        return []
    worst = sorted(((factor, number, arm) for arm, each in slow.items() for number, factor in each.items()))[::-1]
    listed = [f"{unit} {number} of {arm} {factor:.3g} times" for factor, number, arm in worst[:2]]
    more = ", ..." if len(worst) > len(listed) else ""
    return [
        TimingReason(
            "outliers",
            severity,
            f"{len(units)} of {total} {unit}s {'was' if len(units) == 1 else 'were'} slower than the same forwards "
            f"usually are ({', '.join(listed)}{more}); without, the {figure} is {', '.join(changes)}",
        )
    ]


def _result(arms: Mapping[str, pd.DataFrame], arm: str, baseline: str) -> float:
    """Return the arm's speed-up over the baseline on common units; its tokens per second without a baseline."""
    table = arms[arm]
    if baseline not in arms or arm == baseline:
        return ratio(table["tokens"].sum(), table["seconds"].sum())
    both = (
        table[["tokens", "seconds"]].join(arms[baseline][["tokens", "seconds"]].add_suffix("_base"), how="inner").sum()
    )
    return ratio(both["tokens"] * both["seconds_base"], both["seconds"] * both["tokens_base"])


def _drift(arms: Mapping[str, pd.DataFrame], baseline: str, unit: str) -> list[TimingReason]:
    """Judge a change of the machine's speed between the first and the second half of the units."""
    first = baseline if baseline in arms else next(iter(arms))
    base = arms[first]["slowness"]
    series = {first: base}
    for arm, table in arms.items():
        if arm != first:
            series[f"{arm}, against {first},"] = (table["slowness"] - base).dropna()
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
            how = "slower" if change > 0 else "faster"
            percent = 100 * np.expm1(abs(change))
            reason = f"{who} became {percent:.0f} % {how} from the first half of the {unit}s to the second"
            findings.append(TimingReason("drift", severity, reason))
    return findings


def _apart(arms: Mapping[str, pd.DataFrame], baseline: str, unit: str) -> list[TimingReason]:
    """Judge how far the ratio of sums and the geometric mean are apart."""
    findings = []
    for arm, table in arms.items():
        if baseline not in arms or arm == baseline:
            continue
        both = table.join(arms[baseline].add_suffix("_base"), how="inner")
        each = both["tokens"] / both["seconds"] * both["seconds_base"] / both["tokens_base"]
        sums, mean = _result(arms, arm, baseline), float(np.exp(np.log(each).mean()))
        if abs(np.log(sums / mean)) > np.log1p(APART):
            reason = (
                f"the speed-up of {arm} is {sums:.2f} as a ratio of sums and {mean:.2f} as a geometric mean: "
                f"it depends on how {unit}s are weighted"
            )
            findings.append(TimingReason("means", 1, reason))
    return findings
