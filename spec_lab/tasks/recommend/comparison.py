"""Groups of prompts that modes and the baseline decode in turn, to select a mode or to confirm it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.results.writer import load
from spec_lab.tasks.groups import BASELINE
from spec_lab.tasks.lab import Loop
from spec_lab.tasks.recommend.confirm import LEVEL, paired_speed
from spec_lab.tasks.recommend.judge import JudgedMode

if TYPE_CHECKING:
    from spec_lab.tasks.recommend.stages import Stages

REPEATS = 2
"""Times that a prompt selects at most, and that it confirms; it is recorded once."""


@dataclass
class ModeComparison:
    """One of the two comparisons after the recordings.

    Args:
        stages: the recommendation.
        title: of the progress.
        number: 0 selects, 1 confirms: numbers of groups and seeds of requests follow from it.
        groups: numbers of the prompts of each group; each is decoded ``REPEATS`` times at most.
        modes: by name.
        arms: loaded ones by name, shared by both comparisons; None: cannot run.
        cached: the run's number of finished groups, and ``requests`` then.
    """

    stages: Stages
    title: str
    number: int
    groups: Sequence[Sequence[int]]
    modes: Mapping[str, JudgedMode]
    arms: dict[str, Loop | None]
    cached: tuple[int, pd.DataFrame] = field(default_factory=lambda: (-1, pd.DataFrame()), init=False)

    @property
    def first(self) -> int:
        """Number of its first group in the run."""
        return self.stages.first + self.number * REPEATS * len(self.stages.groups)

    @property
    def requests(self) -> pd.DataFrame:
        """The rows of the requests of its groups, which are numbered from 0."""
        if self.cached[0] != len(self.stages.finished):
            rows = load(self.stages.settings.output_dir).requests
            rows = rows.assign(group=rows["group"] - self.first)
            rows = rows[(rows["group"] >= 0) & (rows["group"] < REPEATS * len(self.groups))]
            self.cached = len(self.stages.finished), rows
        return self.cached[1]

    def decode(self, group: int, names: Sequence[str]) -> list[str]:
        """Decode a group with modes and the baseline, if time and groups are left; return the modes that did."""
        stages, in_run = self.stages, self.first + group
        if in_run in stages.finished:
            decoded = set(self.requests.loc[self.requests["group"] == group, "arm"])
            return [name for name in names if name in decoded]
        if group >= REPEATS * len(self.groups) or stages.limit.left() < sum(map(stages.seconds, (BASELINE, *names))):
            return []
        for name in (BASELINE, *names):
            if name not in self.arms:
                stages.bar.set_postfix_str(f"loading {name}")
                mode = self.modes[name].mode if name in self.modes else None
                self.arms[name] = stages.arm(name, mode, replace(stages.settings, record="none"))
        loaded = {name: arm for name in (*names, BASELINE) if (arm := self.arms[name]) is not None}
        stages.bar.set_postfix_str(f"{self.title} {', '.join(names)}")
        repeat, place = divmod(group, len(self.groups))
        if len(loaded) > 1:
            turns = stages.turns(self.groups[place], 1 + REPEATS * self.number + repeat)
            stages.decode(in_run, turns, loaded, replace(stages.settings, record="none"))
        return [name for name in names if name in loaded]

    def speed(self, name: str, reference: str, level: float = LEVEL) -> Interval:
        """Return a mode's speed over another's, or the baseline's, so far."""
        return paired_speed(self.requests, name, reference, len(self.groups), level)

    def counted(self) -> dict[str, int]:
        """Return the groups that each mode has decoded."""
        groups = self.requests.groupby("arm")["group"].nunique()
        return {name: int(groups[name]) for name in self.modes if name in groups}
