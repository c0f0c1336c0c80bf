"""The stages of a recommendation: costs of steps, recordings, judgements and paired runs, within a time limit.

Every decoded group is on disk before the next begins, and ``progress.json`` keeps the seconds that were spent, the
costs and the refusals, so that the same command resumes. What is tried next follows from these files alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS
from spec_lab.core.files import read_json, write_json
from spec_lab.core.progress import Progress
from spec_lab.policy.costs import DraftCosts
from spec_lab.propose import Null, Proposer
from spec_lab.propose.calibrate import CONTEXT
from spec_lab.replay.recorded_trees import of_rows
from spec_lab.results.writer import Recorder, load, load_replay
from spec_lab.tasks.groups import BASELINE, decode_group
from spec_lab.tasks.lab import Lab, Loop, Settings, Turn
from spec_lab.tasks.recommend.comparison import REPEATS, ModeComparison
from spec_lab.tasks.recommend.confirm import LEVEL, Confirmed, confirm, select
from spec_lab.tasks.recommend.judge import DraftingSeconds, JudgedMode, best_few, judge
from spec_lab.tasks.recommend.limits import TimeLimit, TooSlow, fixed_costs
from spec_lab.tasks.recommend.modes import ModeFamily, SpeculativeMode
from spec_lab.verify import Match

FILE = "progress.json"

COSTS, RECORDINGS = 0.3, 0.6
"""Shares of the time until which steps are timed and families are recorded; the rest selects and confirms."""

MAX_RECORDED = 12
"""Groups of prompts that each family is recorded on at most; half of all at most, so that others confirm."""

PROMISING = 0.8
"""Predicted speed-up below which a mode is not measured, unless it is the best."""

MAX_CONFIRMED = 5
"""Modes that are measured at most."""

FEWEST_TOKENS = 16
"""Tokens to which outputs are shortened at most, on a slow target."""

SLOWER = 1.5
"""Until it is measured, a group is taken to last so many times as long as its steps, and a mode as the baseline."""

POLICY_SECONDS = 180.0
"""Seconds that must be left for a policy to be measured, which times the drafts of its proposer when it is loaded."""

BATCHES = (1, 4, 8)
"""Batch sizes at which modes are judged, beside the run's own, as far as the time allows."""


@dataclass
class Stages:
    """One recommendation.

    Args:
        lab: the parts, without a proposer.
        settings: the scalars.
        families: what is recorded.
        build: builds the proposer of a mode.
        groups: numbers of the prompts of each full group, in the order of recording.
        recorder: writes rows.
        limit: of the time.
        bar: shows the seconds.
        refused: why modes are not tried, by name; further ones are added.
        long_contexts: whether the contexts of the prompts add much to a step, which is judged with what they add.
    """

    lab: Lab
    settings: Settings
    families: Sequence[ModeFamily]
    build: Callable[[SpeculativeMode], Proposer]
    groups: Sequence[Sequence[int]]
    recorder: Recorder
    limit: TimeLimit
    bar: Progress
    refused: dict[str, str] = field(default_factory=dict)
    costs: dict[int, dict[int, float]] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    too_slow: str = ""
    took: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    long_contexts: bool = False

    def __post_init__(self) -> None:
        there = read_json(self.settings.output_dir / FILE) or {}
        self.limit.before = float(there.get("seconds", 0.0))
        self.refused |= there.get("refused", {})
        self.facts |= there.get("facts", {})
        self.costs = {int(b): {int(n): s for n, s in of.items()} for b, of in there.get("costs", {}).items()}
        self.spread = {int(batch): value for batch, value in there.get("spread", {}).items()}
        self.tokens = int(there.get("max_new_tokens", 0))
        self.recorded, self.policies = bool(there.get("recorded")), bool(there.get("policies"))
        self.count, self.leader = int(there.get("confirmed", 0)), str(there.get("leader", ""))
        self.finished = self.recorder.finished()

    def keep(self) -> None:
        """Write ``progress.json``."""
        write_json(self.settings.output_dir / FILE, {
            "seconds": self.limit.spent, "refused": self.refused, "costs": self.costs, "spread": self.spread,
            "max_new_tokens": self.tokens, "recorded": self.recorded, "confirmed": self.count,
            "policies": self.policies, "leader": self.leader, "facts": self.facts,
        })  # fmt: skip
        self.bar.update(min(self.limit.spent, self.limit.seconds) - self.bar.n)

    @property
    def batch(self) -> int:
        """Sequences decoded together."""
        return self.settings.batch_size

    @property
    def table(self) -> DraftCosts:
        """The measured seconds of a step, by batch size and nodes, at one context."""
        return DraftCosts({CONTEXT: self.costs})

    def at_prompts(self, forwards: pd.DataFrame) -> DraftCosts:
        """Return the table at the contexts of the prompts, where these are long.

        A step reads more keys and values there than where it was timed, for each sequence as many whatever it drafts.

        Args:
            forwards: rows of the baseline on the prompts.
        """
        decode = forwards[~forwards["prefill"] & (forwards["live"] == self.batch)]
        if not self.long_contexts or decode.empty:
            return self.table
        more = max(0.0, float(decode["whole"].median()) - self.costs[self.batch][0]) / self.batch
        return DraftCosts({CONTEXT: {
            batch: {nodes: seconds + batch * more for nodes, seconds in of_batch.items()}
            for batch, of_batch in self.costs.items()
        }})  # fmt: skip

    @property
    def first(self) -> int:
        """Number of the first group that selects modes."""
        return MAX_RECORDED * (len(self.families) + 1)

    @property
    def selecting(self) -> Sequence[Sequence[int]]:
        """Groups of prompts that select a mode: the first half, of which some were recorded."""
        return self.groups[: len(self.groups) // 2]

    @property
    def confirming(self) -> Sequence[Sequence[int]]:
        """Groups that confirm it: the others; all, where the others are too few for an interval."""
        others = self.groups[len(self.groups) // 2 :]
        return others if len(others) >= MIN_CLUSTERS else self.groups[::-1]

    def measure_costs(self) -> None:
        """Time steps without a draft and with trees; set the length of outputs that the time allows."""
        if self.costs or self.too_slow:
            return
        self.bar.set_postfix_str("measuring steps")
        batches = dict.fromkeys((self.batch, *BATCHES))
        try:
            measured = fixed_costs(self.lab.target, list(batches), max(self.limit.left(COSTS), 0.0), self.lab.sampling)
        except TooSlow as slow:
            self.too_slow = str(slow)
            return
        self.costs = {batch: dict(costs.seconds) for batch, costs in measured.items()}
        self.spread = {batch: costs.overall_spread for batch, costs in measured.items()}
        step = self.costs[self.batch][0]
        decoded = (1 + MAX_CONFIRMED) * len(self.selecting) + 2 * MIN_CLUSTERS
        fits = int(self.limit.left(1 - RECORDINGS) / (SLOWER * step * decoded))
        self.tokens = max(min(self.settings.max_new_tokens, fits), min(FEWEST_TOKENS, self.settings.max_new_tokens))
        self.keep()

    def record(self) -> None:
        """Record the families in turn, the baseline first, on the same prompts, while their share of the time lasts."""
        if self.recorded or self.too_slow:
            return
        arms: dict[str, Loop | None] = {}
        recording = replace(self.settings, record="replay")
        for turn in range(min(MAX_RECORDED, len(self.groups) // 2)):
            for number, family in enumerate((None, *self.families)):
                name = BASELINE if family is None else family.mode.name
                at = turn * (len(self.families) + 1) + number
                if name in self.refused or at in self.finished:
                    continue
                share = RECORDINGS if turn else (1 + RECORDINGS) / 2
                if self.limit.left(share) < self.seconds(name):
                    if turn == 0:
                        self.refused[name] = "the time ended before it was recorded"
                        continue
                    self.recorded = True
                    self.keep()
                    return
                self.bar.set_postfix_str(f"recording {name}")
                if name not in arms:
                    arms[name] = self.arm(name, None if family is None else family.mode, recording)
                if (arm := arms[name]) is not None:
                    self.decode(at, self.turns(self.groups[turn], 0), {name: arm}, recording)
        self.recorded = True
        self.keep()

    def seconds(self, name: str) -> float:
        """Return the seconds that a group of prompts is expected to take with an arm."""
        plain = self.took.get(BASELINE, SLOWER * self.tokens * self.costs[self.batch][0])
        return self.took.get(name, SLOWER * plain)

    def arm(self, name: str, mode: SpeculativeMode | None, settings: Settings) -> Loop | None:
        """Return the arm of a mode, warmed up; None where it cannot run, which is kept with the reason."""
        try:
            proposer = Null.load(self.lab.target) if mode is None else self.build(mode)
            arm = self.lab.arm(settings, proposer, Match() if mode is None else self.lab.verifier)
            short = [
                replace(turn.request, max_new_tokens=min(16, self.tokens)) for turn in self.turns(self.groups[0], 0)
            ]
            done = arm.decode(short)
            if error := next((outcome.error for outcome in done.outcomes if outcome.error), ""):
                raise ValueError(error)
            arm.forget()
        except (ValueError, OSError, ImportError) as error:
            if mode is None:
                raise
            self.refused[name] = str(error)
            self.keep()
            return None
        self.facts[name] = {"name": proposer.name, "drawn": proposer.drawn, **proposer.facts}
        return arm

    @cached_property
    def _repeated(self) -> Lab:
        """The lab with each prompt once for every time that it is decoded, which is a request of its own then."""
        return replace(self.lab, prompts=[*self.lab.prompts] * (1 + 2 * REPEATS))

    def turns(self, group: Sequence[int], time: int) -> list[Turn]:
        """Return the first turns of a group when it is decoded for the given time: 0 to be recorded."""
        first = time * len(self.lab.prompts)
        return [self._repeated.turn(self._shortened(self.settings), first + number) for number in group]

    def _shortened(self, settings: Settings) -> Settings:
        return replace(settings, max_new_tokens=self.tokens)

    def decode(self, number: int, group: Sequence[Turn], arms: Mapping[str, Loop], settings: Settings) -> None:
        """Decode a group with arms, and write its rows."""
        before = self.limit.spent
        with Progress(disable=True) as quiet:
            rows = decode_group(self._repeated, self._shortened(settings), arms, number, group, quiet)
        self.recorder.write(number, rows.forwards, rows.steps, rows.requests, rows.replay)
        self.finished.add(number)
        took = (self.limit.spent - before) / len(arms)
        for name in arms:
            self.took[name] = max(took, 0.7 * self.took.get(name, 0.0))
        self.keep()

    def judge(self) -> list[JudgedMode]:
        """Judge the modes of every recorded family; what cannot be judged is kept with the reason."""
        if not self.costs:
            return []
        frame, tables = load_replay(self.settings.output_dir), load(self.settings.output_dir)
        recorded = tables.forwards["group"] < self.first
        forwards, steps = tables.forwards[recorded], tables.steps[tables.steps["group"] < self.first]
        plain = forwards[forwards["arm"] == BASELINE]
        idle = DraftingSeconds.of(plain, steps[steps["arm"] == BASELINE], 0.0).step
        table = self.at_prompts(plain)
        judged: list[JudgedMode] = []
        for number, family in enumerate(self.families):
            name = family.mode.name
            rows = frame[frame["arm"] == name]
            if name in self.refused or rows.empty:
                self.refused.setdefault(name, "nothing was recorded")
                continue
            drafting = DraftingSeconds.of(forwards[forwards["arm"] == name], steps[steps["arm"] == name], idle)
            try:
                trees = of_rows(rows, name)
                judged += judge(trees, number, family, self.lab.verifier, table, drafting, self.batch)
            except ValueError as error:
                self.refused[name] = str(error)
        return judged

    def confirm(self, judged: Sequence[JudgedMode]) -> tuple[list[JudgedMode], Confirmed]:
        """Select the fastest of the best predicted modes and confirm it; return the measured ones with the result."""
        if judged and not self.count:
            self.policies = self.limit.left() >= POLICY_SECONDS
            best = best_few(judged, self.batch, MAX_CONFIRMED, self.policies)
            shares = np.array([1.0, *(1 / mode.at(self.batch) for mode in best)])
            together = np.cumsum(shares) * len(self.selecting) + shares[:2].sum() * MIN_CLUSTERS
            able = int((self.seconds(BASELINE) * together <= self.limit.left()).sum()) - 1
            promising = sum(mode.at(self.batch) >= PROMISING for mode in best)
            self.count = max(1, min(able, promising))
            self.keep()
        few = best_few(judged, self.batch, self.count, self.policies) if judged else []
        modes = {mode.mode.name: mode for mode in few}
        for name, mode in modes.items():
            self.took.setdefault(name, self.seconds(BASELINE) / mode.at(self.batch))
        arms: dict[str, Loop | None] = {}
        selection = ModeComparison(self, "selecting", 0, self.selecting, modes, arms)
        confirmation = ModeComparison(self, "confirming", 1, self.confirming, modes, arms)

        def fits(number: int, count: int, names: Sequence[str]) -> bool:
            later = min(map(self.seconds, names)) + self.seconds(BASELINE)
            seconds = count * sum(map(self.seconds, (BASELINE, *names))) + MIN_CLUSTERS * later
            return selection.first + number in self.finished or seconds <= self.limit.left()

        if self.leader not in modes:
            ranked = select(list(modes), selection.decode, selection.speed, fits) if len(modes) > 1 else list(modes)
            self.leader = next((name for name in ranked if name not in self.refused), "")
            self.keep()
        leader = self.leader
        if not leader:
            return few, Confirmed("", {}, {}, LEVEL, "time")
        known, groups, level, ended = confirm(
            lambda number: bool(confirmation.decode(number, [leader])),
            lambda level: confirmation.speed(leader, BASELINE, level),
            sorted({MIN_CLUSTERS, len(self.confirming), REPEATS * len(self.confirming)}),
        )
        counted = selection.counted()
        counted.pop(leader, None)  # what selected it says too much of its speed
        speedups = {name: selection.speed(name, BASELINE) for name in counted}
        if groups:
            speedups[leader], counted[leader] = known, groups
        return few, Confirmed(leader, speedups, counted, level, ended)
