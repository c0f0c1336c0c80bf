"""The recorded acceptance of designs: an arm of a run at each draft length that its steps determine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, resampled_sums
from spec_lab.propose import trees
from spec_lab.results import sweep
from spec_lab.results.manifest import begun
from spec_lab.results.old_names import read_summary

if TYPE_CHECKING:
    from spec_lab.analysis.projection.overlap import Overlap

TOP_DOWN = ("token", "match", "typical", "relaxed", "lenient", "kseq", "gumbel")
"""Verifiers that accept a token by what stands above and beside it: deeper tokens do not change whether it is accepted,
so that a recorded draft determines the acceptance of its first levels. Of other verifiers only the recorded length is
known."""


@dataclass(frozen=True)
class RecordedDesign:
    """Nodes that one arm drafted and accepted, counted within each request.

    Args:
        name: unique among the designs.
        proposer: name of its proposer.
        steps: ``[G]`` decode steps of each request.
        drafts: ``[J, K]`` draft nodes in level k, from 1, of every kind of draft that occurs.
        drafted: ``[G, J]`` steps with such a draft.
        accepted: ``[G, K]`` steps that accepted k tokens or more; forced ones do not count.
        any_length: whether shorter drafts than recorded are determined.
        why_not: where they are not, why.
        heads: of Medusa; else 0.
        arm: the name under which its arm is shown in its run.
        drafted_share: of the target's tokens, those that a trimmed LM head of the drafter has.
        layers: of P-EAGLE or a block drafter; 0 where they were not recorded.
        block_size: rows of a block; 0 of other proposers.
        hits: ``[G, K]`` steps whose outcome, of drafts of k levels, was foreseen by drafting that overlaps with
            verification: all drafted tokens are accepted, unless ``Overlap.of_design`` counts others. None of trees.
        accepting: ``[G, J]`` steps of each kind that accepted a token; None of trees.
        left_out: why it is not projected; empty if it is.
    """

    name: str
    proposer: str
    steps: np.ndarray
    drafts: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    any_length: bool = True
    why_not: str = ""
    heads: int = 0
    arm: str = ""
    drafted_share: float = 1.0
    layers: int = 0
    block_size: int = 0
    hits: np.ndarray | None = None
    accepting: np.ndarray | None = None
    left_out: str = ""

    @property
    def depth(self) -> int:
        """The longest draft."""
        return self.drafts.shape[1]

    @property
    def lengths(self) -> range:
        """The draft lengths whose acceptance the recording determines."""
        return range(1 if self.any_length else self.depth, self.depth + 1)

    def draws(self, resamples: int) -> Acceptance:
        """Return acceptance as recorded (draw 0) and in bootstrap resamples of whole requests.

        Designs with equally many requests share their draws, so that their differences are paired. Below
        ``MIN_CLUSTERS`` requests there are no resamples: their spread is not known well enough.
        """
        count = len(self.steps)
        parts = [self.drafted, self.accepted]
        if self.hits is not None and self.accepting is not None:
            parts += [self.hits, self.accepting]
        sums = np.hstack([*parts, self.steps[:, None]])
        totals = sums.sum(0, keepdims=True)
        if count >= MIN_CLUSTERS and resamples:
            totals = np.vstack([totals, resampled_sums(sums, resamples)])
        ends = np.cumsum([part.shape[1] for part in parts])[:-1]
        return Acceptance(self.drafts, *np.split(totals[:, :-1] / totals[:, -1:], ends, axis=1))


@dataclass(frozen=True)
class Acceptance:
    """Drafted and accepted tokens of steps, for R draws.

    Args:
        drafts: ``[J, K]`` draft nodes in level k of every kind of draft.
        share: ``[R, J]`` share of the steps with such a draft.
        survival: ``[R, K]`` share of the steps that accepted k tokens or more.
        hits, accepting: ``[R, K]`` and ``[R, J]`` shares of the steps, as in ``RecordedDesign``; None of trees.
    """

    drafts: np.ndarray
    share: np.ndarray
    survival: np.ndarray
    hits: np.ndarray | None = None
    accepting: np.ndarray | None = None

    def nodes(self, length: int) -> np.ndarray:  # [J]
        """Return the nodes of each kind of draft, cut to ``length`` levels."""
        return self.drafts[:, :length].sum(1)

    def tau(self, length: int) -> np.ndarray:  # [R]
        """Return tokens per step of drafts of at most ``length`` levels: 1 + the sum of survival."""
        return 1.0 + self.survival[:, :length].sum(1)

    def hit_rate(self, length: int) -> np.ndarray:  # [R]
        """Return the share of the steps with drafts of ``length`` tokens whose outcome was foreseen."""
        assert self.hits is not None
        return self.hits[:, length - 1]


def recorded(folders: Sequence[Path], overlap: Overlap | None = None) -> tuple[list[RecordedDesign], list[str]]:
    """Return the designs of runs and sweeps, every arm that drafted, and the names of proposers' arms that did not.

    Args:
        folders: directories of runs or sweeps; of a sweep the runs that are done are read.
        overlap: how drafting overlaps with verification; None: it does not.

    Raises:
        ValueError: no run, no steps, or no arm that drafted.
        OSError: a file cannot be read.
    """
    designs: list[RecordedDesign] = []
    idle: list[str] = []
    several = len(folders) > 1
    for folder in folders:
        if sweep.is_sweep(folder):
            done = [run for run in sweep.runs(folder) if run.state == "done"]
            labels = sweep.labels({run.folder.name: run.overrides for run in done})
            each = [(run.folder, labels[run.folder.name]) for run in done]
            if not each:
                raise ValueError(f"no run of {folder} is done; run the sweep to its end first")
        else:
            each = [(folder, folder.name if several else "")]
        for run, label in each:
            drafted, without = of_run(run, label, overlap)
            designs, idle = designs + drafted, idle + without
    if not designs:
        raise ValueError(f"no arm in {', '.join(map(str, folders))} drafted tokens; projection requires one that did")
    names = [design.name for design in designs]
    if len(set(names)) < len(names):
        raise ValueError(f"two designs are called {max(names, key=names.count)}: give each run or sweep once")
    return designs, idle


def of_run(folder: Path, label: str = "", overlap: Overlap | None = None) -> tuple[list[RecordedDesign], list[str]]:
    """Return as ``recorded`` for one run; designs are named by their arm and ``label``.

    Raises:
        ValueError: the folder holds no rows of a run.
    """
    manifest = begun(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds no run (no manifest.json)")
    tables = metrics.load(folder)
    if not len(tables.steps):
        raise ValueError(f"{folder} holds no steps of a run; projection requires a benchmark's rows")
    verifiers = _verifiers(folder)
    designs: list[RecordedDesign] = []
    idle: list[str] = []
    for arm in metrics.arms(tables):
        steps, facts = metrics.decode_steps(tables.steps, arm), manifest["proposers"].get(arm, {})
        name = ", ".join(text for text in (label, arm) if text)
        proposer = str(facts.get("name", arm))
        if len(steps) and steps["depth"].max() > 0:
            design = replace(of_steps(steps, name, proposer, verifiers.get(arm, ""), facts), arm=arm)
            designs.append(design if overlap is None else overlap.of_design(design, steps, folder))
        elif arm in manifest["proposers"] and proposer != "none":
            idle.append(name)
    return designs, idle


def of_steps(
    steps: pd.DataFrame, name: str, proposer: str, verifier: str, facts: Mapping[str, Any] | None = None
) -> RecordedDesign:
    """Return the design that an arm's decode steps recorded.

    Args:
        steps: of ``metrics.decode_steps``.
        verifier: name of the verifier; empty if it is not known.
        facts: of the proposer, from the manifest.
    """
    facts = facts or {}
    request, number = np.unique(steps["request"].to_numpy(), return_inverse=True)
    accepted = (steps["accepted"] - steps["forced_accepted"]).to_numpy()
    kinds, kind = np.unique(steps[["depth", "nodes"]].to_numpy(), axis=0, return_inverse=True)
    depth, nodes = kinds.T  # [J]
    levels = np.arange(1, int(depth.max()) + 1)
    drafts = (depth[:, None] >= levels).astype(float)
    chains, static = bool((depth == nodes).all()), _static(facts, len(levels))
    if static is not None and (nodes <= static.sum()).all() and not chains:
        drafts *= static
        # Of trees cut by the context, the nodes that are left.
        drafts *= (nodes / np.maximum(drafts.sum(1), 1))[:, None]
    elif not chains:
        drafts *= (nodes / np.maximum(depth, 1))[:, None]
    drafted, survived = np.zeros((len(request), len(kinds))), np.zeros((len(request), len(levels)))
    np.add.at(drafted, (number, kind.ravel()), 1.0)
    np.add.at(survived, number, accepted[:, None] >= levels)
    hits = accepting = None
    if chains:
        sampled = (steps["depth"] - steps["forced"]).to_numpy()
        hits, accepting = np.zeros_like(survived), np.zeros_like(drafted)
        whole = accepted[:, None] >= np.minimum(sampled[:, None], levels)
        np.add.at(hits, number, whole & (sampled[:, None] > 0))
        np.add.at(accepting, (number, kind.ravel()), accepted > 0)
    why = ""
    if verifier not in TOP_DOWN:
        why = f"whether a token is accepted may depend on deeper ones (verifier {verifier or 'not recorded'})"
    elif not chains and static is None:
        why = "which nodes a shorter tree keeps was not recorded (it is grown anew in each step)"
    return RecordedDesign(
        name=name,
        proposer=proposer,
        steps=drafted.sum(1),
        drafts=drafts,
        drafted=drafted,
        accepted=survived,
        any_length=not why,
        why_not=why,
        heads=int(facts.get("heads", 0) or 0),
        drafted_share=float(facts.get("drafted_share", 1.0)),
        layers=int(facts.get("layers", 0) or 0),
        block_size=int(facts.get("block_size", 0) or 0),
        hits=hits,
        accepting=accepting,
    )


def _static(facts: Mapping[str, Any], depth: int) -> np.ndarray | None:  # [K]
    """Return how many nodes each level of a fixed tree has; None where trees are not fixed."""
    text = facts.get("tree")
    if not isinstance(text, str) or not text or any(mark.isalpha() for mark in text):
        return None
    try:
        paths = trees.parse(text)
    except ValueError:
        return None
    count = np.bincount([len(path) for path in paths], minlength=depth + 1)[1:].astype(float)
    return count if len(count) == depth else None


def _verifiers(folder: Path) -> dict[str, str]:
    """Return the names of the arms' verifiers, from ``summary.json``; none of a run that has not ended."""
    summary = read_summary(folder / "summary.json") or {}
    return {arm: str(facts.get("verifier") or "") for arm, facts in summary.get("arms", {}).items()}
