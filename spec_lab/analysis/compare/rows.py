"""The rows of a run that is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.compare.selection import SelectedRun, manifest_of
from spec_lab.analysis.metrics import TimingVerdict
from spec_lab.analysis.roofline_text import share_in_words
from spec_lab.analysis.text import BADGES, losslessness
from spec_lab.core.roofline import Roofline
from spec_lab.results.manifest import without_groups
from spec_lab.results.run_figures import read_shaped
from spec_lab.results.writer import load_metrics


class ArmParts(NamedTuple):
    """Parts of an arm, in words; empty where it is not recorded."""

    proposer: str
    verifier: str
    prompts: str


@dataclass(frozen=True)
class RunRows:
    """A run's rows; ``broken`` are the groups in which a request broke, ``metric_rows`` those of its own metrics."""

    selected: SelectedRun
    manifest: Mapping[str, Any]
    tables: metrics.Tables
    broken: frozenset[int]
    metric_rows: pd.DataFrame

    @staticmethod
    def read(selected: SelectedRun) -> RunRows:
        """Read the finished groups.

        Raises:
            ValueError: the task has no groups, no group is finished, or a request broke in each.
        """
        folder = selected.folder
        manifest, tables = manifest_of(folder), metrics.load(folder)
        if tables.requests.empty:
            raise ValueError(without_groups(folder, manifest))
        run = RunRows(
            selected, manifest, tables, frozenset(metrics.broken_groups(tables.requests)), load_metrics(folder)
        )
        if run.requests.empty:
            raise ValueError(f"in every group of {folder} a request broke; see 'errors' in its summary.json")
        return run

    @property
    def requests(self) -> pd.DataFrame:
        """The requests of groups that did not break."""
        return self.tables.requests[~self.tables.requests["group"].isin(self.broken)]

    @property
    def steps(self) -> pd.DataFrame:
        """The steps of groups that did not break."""
        return self.tables.steps[~self.tables.steps["group"].isin(self.broken)]

    def own_metrics(self, arm: str) -> dict[str, pd.Series]:
        """Return the values of the run's own metrics by name, indexed by request, of groups that did not break."""
        whole = self.metric_rows["request"] == metrics.WHOLE
        unbroken = self.metric_rows["request"].isin(self.requests["request"])
        rows = self.metric_rows[(self.metric_rows["arm"] == arm) & (whole | unbroken)]
        return {str(name): values.set_index("request")["value"] for name, values in rows.groupby("metric", sort=False)}

    @property
    def arms(self) -> list[str]:
        """The arms with step rows, the main one first, without the baseline."""
        with_forwards = set(self.tables.forwards["arm"]) - {"baseline"}
        return [arm for arm in metrics.arms(self.tables) if arm in with_forwards]

    def parts(self, arm: str) -> ArmParts:
        """Return proposer, verifier and prompts of an arm."""
        proposer = self.manifest["proposers"].get(arm, {}).get("name") or arm
        verifier = (self.manifest.get("parts") or {}).get("verifier") or ""
        return ArmParts(str(proposer), str(verifier), ", ".join(sorted(set(self.requests["workload"]))))

    def baseline_share(self) -> str:
        """Return how close the baseline's forwards come to the roofline of the run's machine, in words."""
        roofline, timed = Roofline.of(self.manifest.get("roofline")), metrics.of_timed_groups(self.tables)
        figures = metrics.roofline_figures(timed, "baseline", roofline)
        return share_in_words(figures, "its machine's")

    def verdict(self) -> TimingVerdict:
        """Return whether the run's times can be trusted."""
        return metrics.run_verdict(self.tables, self.manifest)

    def lossy_arms(self) -> list[str]:
        """Return which arms do not preserve the target distribution, and why; nothing before the run has ended.

        Raises:
            Unreadable: ``summary.json`` is not readable.
        """
        summary = read_shaped(self.selected.folder / "summary.json", {"?arms": {str: {}}}) or {}
        states = {name: losslessness(arm) for name, arm in summary.get("arms", {}).items()}
        return [f"{word}: {name}; {why}" for name, (word, why) in states.items() if BADGES.get(word) in ("warn", "bad")]

    def described(self) -> str:
        """Return proposer, size and state of the run, in words."""
        groups, of = self.tables.requests["group"].nunique(), self.manifest.get("groups")
        proposer = self.manifest["proposers"].get(self.arms[0] if self.arms else "", {}).get("name")
        words = [str(proposer)] if proposer else []
        words.append(f"{self.tables.requests['request'].nunique()} prompts in {groups} groups")
        if of is not None and groups < of:
            words.append(f"UNFINISHED: {groups} of {of} groups")
        elif of is None and not (self.selected.folder / "summary.json").is_file():
            words.append("UNFINISHED")
        if "baseline" in set(self.tables.forwards["arm"]):
            words.append(f"baseline {self.baseline_share()}")
        if self.broken:
            words.append(f"{len(self.broken)} of {groups} groups left out: a request broke")
        return ", ".join(words)
