"""Judge many modes on few recordings: expected tokens of a step by replay, its seconds by measured costs.

The predicted speed-up of a mode is

    tau x t(0) / (mean over steps of t(its nodes of the step) + drafting)

with t(n) the seconds of a step with n draft nodes for each sequence (Sequoia, 2402.12374, section 4.3). tau is the
exact expectation at the recorded steps (``replay.recorded_steps``), nodes are those that the mode keeps of each
recorded tree, and drafting is what the recorded mode was measured to take, in proportion to its passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import jackknife
from spec_lab.analysis.projection.drafting import passes
from spec_lab.policy.costs import DraftCosts
from spec_lab.replay import recorded_steps
from spec_lab.replay.designs import limits
from spec_lab.replay.recorded_trees import NeedsModel, RecordedTrees
from spec_lab.replay.subtrees import UNLIMITED, Subtree
from spec_lab.tasks.recommend.modes import ModeFamily, SpeculativeMode
from spec_lab.verify import Verifier

SAME = 0.01
"""Predicted speed-ups that differ by less count as equal: of these modes the one with the fewest nodes is taken."""

ADAPTIVE, ADAPTS = "goodput", 1.03
"""The policy that is tried, and the gain over the best fixed depth that the best depth of each request must promise."""


@dataclass(frozen=True)
class JudgedMode:
    """A mode with its prediction.

    Args:
        mode: the mode.
        family: number of its family.
        tau: expected tokens of a step.
        nodes: draft nodes of a step and sequence, a mean.
        speedup: predicted, by batch size.
        low, high: its 95 % interval over requests at the batch size that was recorded; NaN with few requests.
        free: predicted speed-up at that batch size if further rows cost nothing.
    """

    mode: SpeculativeMode
    family: int
    tau: float
    nodes: float
    speedup: Mapping[int, float]
    low: float = float("nan")
    high: float = float("nan")
    free: float = float("nan")

    def at(self, batch: int) -> float:
        """Return the predicted speed-up at a batch size."""
        return self.speedup[batch]


@dataclass(frozen=True)
class DraftingSeconds:
    """Seconds and rows that a recorded mode was measured to take besides the rows of the target's forward.

    Args:
        step: seconds of drafting and verification of a step, beyond those of the baseline.
        extra_rows: rows of a sequence that are computed only, a mean.
        depth: levels of its drafts, a mean over steps that drafted.
    """

    step: float
    extra_rows: float
    depth: float

    @staticmethod
    def of(forwards: pd.DataFrame, steps: pd.DataFrame, idle: float) -> DraftingSeconds:
        """Return the medians over an arm's decode rows.

        Args:
            forwards, steps: rows of the arm.
            idle: seconds of the same phases in the baseline.
        """
        decode, rows = forwards[~forwards["prefill"]], steps[~steps["prefill"]]
        seconds = float((decode["propose"] + decode["verify"]).median()) if len(decode) else 0.0
        extra = float((decode["computed_only"] / decode["live"]).mean()) if len(decode) else 0.0
        drafted = rows[rows["depth"] > 0]
        return DraftingSeconds(max(seconds - idle, 0.0), extra, float(drafted["depth"].mean()) if len(drafted) else 0.0)


def judge(
    trees: RecordedTrees,
    number: int,
    family: ModeFamily,
    verifier: Verifier,
    costs: DraftCosts,
    drafting: DraftingSeconds,
    batch: int,
) -> list[JudgedMode]:
    """Judge every mode of a family.

    Args:
        trees: what was recorded of it.
        number: of the family.
        family: the family.
        verifier: verifies.
        costs: seconds of a step by batch size and nodes.
        drafting: of the recorded mode.
        batch: sequences decoded together when it was recorded.

    Raises:
        ValueError: replay does not identify even the recorded mode; no step after the prefill was recorded.
    """
    if not trees.decode.any():
        raise ValueError("its recordings have no step after the prefill: set a larger max_new_tokens")
    cuts = dict.fromkeys(effective(subtree, trees) for subtree in limits(trees))
    modes = {subtree: mode for subtree in cuts if (mode := family.limited(subtree)) is not None}
    first = next(iter(modes))
    judged: dict[str, JudgedMode] = {}
    by_depth: list[tuple[np.ndarray, np.ndarray]] = []
    for subtree, sums in zip(modes, recorded_steps.evaluate(trees, verifier, list(modes)), strict=True):
        if isinstance(sums, NeedsModel):
            if subtree is first:
                raise sums
            continue
        rows = kept_rows(trees, subtree)
        share = passes(family.mode.proposer, min(subtree.depth, drafting.depth)) / passes(
            family.mode.proposer, max(drafting.depth, 1.0)
        )
        per_step = {
            size: _seconds(rows, costs, size, drafting.extra_rows) + drafting.step * share for size in costs.batches
        }
        tokens, steps, seconds = sums.tokens.mean(0), sums.steps.mean(0), _by_request(trees, per_step[batch])
        plain = {size: costs.of(0, size) for size in costs.batches}
        tau = float(tokens.sum() / steps.sum())
        speedup = {size: tau * plain[size] / float(per_step[size].mean()) for size in per_step}
        interval = jackknife(np.stack([tokens * plain[batch], seconds], axis=1), _ratio, relative=True)
        free = tau * plain[batch] / (plain[batch] + drafting.step * share)
        mode = modes[subtree]
        made = JudgedMode(mode, number, tau, float(rows.mean()), speedup, interval.low, interval.high, free)
        judged.setdefault(mode.name, made)
        if UNLIMITED == subtree.children == subtree.nodes:
            by_depth.append((tokens, seconds))
    modes_judged = list(judged.values())
    return modes_judged + _adaptive(modes_judged, by_depth, costs.of(0, batch), batch)


def effective(subtree: Subtree, trees: RecordedTrees) -> Subtree:
    """Return a subtree without limits that no recorded tree exceeds."""
    shape = trees.shape
    depth = subtree.depth if subtree.depth < shape.deepest else UNLIMITED
    children = subtree.children if subtree.children < shape.count.max(initial=0) else UNLIMITED
    return replace(subtree, depth=depth, children=children)


def kept_rows(trees: RecordedTrees, subtree: Subtree) -> np.ndarray:  # [steps]
    """Return the draft nodes that a subtree keeps of each recorded tree after the prefill."""
    shape = trees.shape
    keep = subtree.keeps(shape)
    return np.bincount(shape.root[shape.roots :][keep], minlength=shape.roots)[trees.decode]


def _ratio(totals: np.ndarray) -> np.ndarray:  # [R, 2] -> [R]
    return np.asarray(totals[:, 0] / totals[:, 1])


def _seconds(rows: np.ndarray, costs: DraftCosts, batch: int, extra: float) -> np.ndarray:
    """Return t(nodes) of each step."""
    counts, number = np.unique(rows, return_inverse=True)
    return np.array([costs.of(float(count) + extra, batch) for count in counts])[number]


def _by_request(trees: RecordedTrees, values: np.ndarray) -> np.ndarray:
    """Return the sums of a value of each step over the steps of each request, in the order of ``Sums.clusters``."""
    _, cluster = np.unique(trees.steps["request"].to_numpy()[trees.decode], return_inverse=True)
    return np.bincount(cluster, values)


def _adaptive(
    judged: Sequence[JudgedMode], by_depth: Sequence[tuple[np.ndarray, np.ndarray]], plain: float, batch: int
) -> list[JudgedMode]:
    """Return ``policy=goodput`` over the recorded mode where the best depth of each request promises much more than the
    best of all: what it would gain if it knew that depth, so an upper bound. It may also draft nothing.
    """
    if len(by_depth) < 2 or judged[0].mode.policy != "none" or len(by_depth[0][0]) < 2:
        return []
    rates = np.array([tokens / seconds for tokens, seconds in by_depth] + [np.full(len(by_depth[0][0]), 1 / plain)])
    emitted = by_depth[0][0]  # every design emits the same texts
    fixed = emitted.sum() / (emitted / rates).sum(1).min() * plain
    best = float(emitted.sum() / (emitted / rates.max(0)).sum() * plain)
    if best < ADAPTS * max(fixed, 1.0):
        return []
    whole = judged[0]
    policy = replace(whole.mode, policy=ADAPTIVE, policy_options={"scope": "request"})
    return [replace(whole, mode=policy, speedup={batch: best}, low=float("nan"), high=float("nan"))]


def best_few(judged: Sequence[JudgedMode], batch: int, count: int, policies: bool = False) -> list[JudgedMode]:
    """Return the modes that are worth measuring, best first: the best one of each family, and at most one policy.

    Of a family's modes whose predictions are ``SAME`` the one with the fewest nodes is its best.

    Args:
        judged: all modes.
        batch: at this batch size.
        count: most of them.
        policies: whether a policy is worth its seconds.
    """
    ranked = sorted((mode for mode in judged if batch in mode.speedup), key=lambda mode: -mode.at(batch))
    firsts: dict[Any, JudgedMode] = {}
    tops: dict[Any, float] = {}
    for mode in ranked:
        adapts = mode.mode.policy == ADAPTIVE
        if adapts and not policies:
            continue
        of_kind = ADAPTIVE if adapts else mode.family
        best, top = firsts.setdefault(of_kind, mode), tops.setdefault(of_kind, mode.at(batch))
        if mode.at(batch) > top * (1 - SAME) and mode.nodes < best.nodes:
            firsts[of_kind] = mode
    return sorted(firsts.values(), key=lambda mode: -mode.at(batch))[:count]
