"""Does replay predict what a run of the same design measures? python -m experiments.projection.replay.

Texts of the target are recorded once, with the distributions of a draft model at every position, and one run with three
static trees is recorded as it decodes. From these, ``spec-lab replay`` predicts tau of designs that were not run. Then
every design is run on the same prompts with another seed, so with other texts. The same command resumes; it prints
``replay.csv``'s path and how many designs agree.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import runs
from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.acceptance import decode_steps
from spec_lab.analysis.metrics.intervals import Interval, cluster_interval
from spec_lab.replay.designs import Design, Estimate, Shares, evaluate
from spec_lab.replay.recorded_trees import RecordedTrees, read

POSITIONS, STEPS = "positions", "steps"
"""The two recordings: every position of texts, and the steps of a run."""

RECORDED: dict[str, runs.Arm] = {
    "chain": ("draft_chain", {"depth": 6, "drawn": "iid", "confidence": 0}),
    "iid": ("draft_tree", {"tree": "3x2x1", "drawn": "iid"}),
    "without_replacement": ("draft_tree", {"tree": "3x2x1", "drawn": "without_replacement"}),
}
"""The arms of the recorded run, verified by ``token``."""


@dataclass(frozen=True)
class Case:
    """A design, and how it is run.

    Args:
        name: of its arm.
        verifier: verifies.
        shape: as ``spec-lab replay --shapes`` and ``proposer.tree`` have it.
        recording: which recording predicts it, and its arm there.
        drawn: how it draws.
        temperature: of the drafter; None for the target's.
        confidence: below which its draft ends.
    """

    name: str
    verifier: str
    shape: str
    recording: tuple[str, str] = (POSITIONS, "draft_chain")
    drawn: str = "iid"
    temperature: float | None = None
    confidence: float = 0.0

    def arm(self) -> runs.Arm:
        """Return the arm that runs it."""
        options: dict[str, object] = {"tree": f"'{self.shape}'", "drawn": self.drawn, "confidence": self.confidence}
        return "draft_tree", options | ({} if self.temperature is None else {"temperature": self.temperature})

    def design(self) -> Design:
        """Return the design that replay evaluates."""
        followed = self.recording[0] == POSITIONS
        drawn, confidence = (self.drawn, self.confidence) if followed else (None, None)
        return Design(self.verifier, Shares.parse(self.shape), self.temperature, 0, confidence, drawn)


def chain(depth: int) -> str:
    """Return the shape of a chain."""
    return "x".join(["1"] * depth)


def cases() -> list[Case]:
    """Return all designs."""
    cases_ = [Case(f"chain_{depth}", "token", chain(depth)) for depth in (1, 2, 3, 4, 6)]
    cases_ += [Case(f"chain_4_at_{t}", "token", chain(4), temperature=t / 10) for t in (6, 8, 13)]
    cases_ += [Case(f"chain_6_sure_{c}", "token", chain(6), confidence=c / 10) for c in (3, 5, 7)]
    trees = ("2", "4", "2x2", "3x2x1", "2x2x1x1")
    for verifier in ("token", "kseq", "match"):
        cases_ += [Case(f"tree_{tree}", verifier, tree) for tree in trees]
    cases_ += [Case(f"match_chain_{depth}", "match", chain(depth)) for depth in (2, 4)]
    cases_ += [Case(f"point_{tree}", "match", tree, drawn="deterministic") for tree in ("1x1", "1x1x1x1", *trees)]
    at = (STEPS, "chain")
    cases_ += [Case(f"block_{depth}", "traversal", chain(depth), at) for depth in (2, 4, 6)]
    for tree in ("2", "2x2", "3x2x1"):
        cases_.append(Case(f"iid_{tree}", "traversal", tree, (STEPS, "iid")))
        cases_ += [
            Case(f"without_{tree}", verifier, tree, (STEPS, "without_replacement"), "without_replacement")
            for verifier in ("token", "traversal")
        ]
    return cases_


def run(out: Path, *options: str) -> None:
    """Run spec_lab's command line; a finished run is left as it is.

    Raises:
        CalledProcessError: the run failed; its message is on the terminal.
    """
    if not (out / "summary.json").exists():
        subprocess.run([sys.executable, "-m", "spec_lab", f"output_dir={out}", *options], check=True)


def commands(chosen: Any) -> list[tuple[Path, list[str]]]:
    """Return the folders and options of all runs."""
    usual = [
        "prompts=bundled", f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", "sampling=temperature_1",
        f"threads={chosen.threads}", "warmup=0",
    ]  # fmt: skip
    record = ["record=replay", f"record_top={chosen.top}"]
    every = ["task=verifier_study", "task.every=1", "task.repeats=1", "proposer=draft_chain", "proposer.depth=1"]
    every += ["proposer.confidence=0", "seed=0"]
    commands_ = [(chosen.out / POSITIONS, [*usual, *record, *every])]
    commands_.append(
        (chosen.out / STEPS, [*usual, *record, *arms(RECORDED), "verifier=token", "seed=0", "baseline=false"])
    )
    for verifier in dict.fromkeys(case.verifier for case in cases()):
        arms_of = {case.name: case.arm() for case in cases() if case.verifier == verifier}
        more = ["batch_size=10", "seed=1", "baseline=false"]  # tokens do not depend on the batch
        measured = [*usual, *arms(arms_of), f"verifier={verifier}", *more]
        commands_.append((chosen.out / f"measured_{verifier}", measured))
    return commands_


def arms(named: dict[str, runs.Arm]) -> list[str]:
    """Return the options of a run with these arms."""
    chosen = [f"+proposer@arms.{name}={proposer}" for name, (proposer, _) in named.items()]
    options = [runs.option(name, key, value) for name, (_, more) in named.items() for key, value in more.items()]
    return ["proposer=none", *chosen, *options]


def measured(folder: Path, arm: str) -> tuple[Interval, int]:
    """Return tau of an arm, with its bootstrap interval over prompts, and the number of prompts."""
    steps = decode_steps(metrics.load(folder).steps, arm)
    return cluster_interval(steps["emitted_kept"], np.ones(len(steps)), steps["request"]), steps["request"].nunique()


def predicted(trees: RecordedTrees, case: Case) -> Estimate:
    """Return replay's estimate: along the texts where every position is recorded, else at the recorded steps."""
    method = "along" if case.recording[0] == POSITIONS else "steps"
    estimates = [
        estimate for estimate in evaluate(trees, [case.design()]) if estimate.method == method or estimate.needs
    ]
    if not estimates or estimates[0].needs:
        raise ValueError(f"{case.name}: {estimates[0].needs if estimates else 'is not identified'}")
    return estimates[0]


def results(out: Path) -> pd.DataFrame:
    """Return predicted and measured tau of every design."""
    recorded = {name: read(out / name) for name in (POSITIONS, STEPS)}
    rows = []
    for case in cases():
        which, arm = case.recording
        guess = predicted(recorded[which][arm], case)
        interval, prompts = measured(out / f"measured_{case.verifier}", case.name)
        both = np.hypot((guess.high - guess.low) / 2, (interval.high - interval.low) / 2)
        rows.append(
            {
                "design": case.name, "verifier": case.verifier, "method": guess.method, "predicted": guess.tau,
                "predicted_low": guess.low, "predicted_high": guess.high,
                "not_recorded": guess.bound_high - guess.bound_low,
                "measured": interval.mean, "measured_low": interval.low, "measured_high": interval.high,
                "prompts": prompts, "difference": guess.tau - interval.mean, "half_width": both,
                "agrees": abs(guess.tau - interval.mean) <= both, "inside": guess.low <= interval.mean <= guess.high,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, measure what is missing, and compare."""
    parser = runs.parser(__doc__, "outputs/replay", 60)
    parser.add_argument("--top", type=int, default=128, help="recorded tokens of each row (128)")
    parser.add_argument("--finished", action="store_true", help="run nothing: compare with the finished groups of runs")
    chosen = parser.parse_args(arguments)
    for out, options in () if chosen.finished else commands(chosen):
        run(out, *options)
    table = results(chosen.out)
    table.to_csv(chosen.out / "replay.csv", index=False)
    print(table.round(3).to_string())
    agree, inside, off = int(table["agrees"].sum()), int(table["inside"].sum()), table["difference"]
    print(f"{agree} of {len(table)} designs agree within both 95 % intervals; {inside} measured values lie inside the")
    print(f"predicted interval. Predicted - measured: mean {off.mean():+.3f}, mean size {off.abs().mean():.3f}.")
    print(chosen.out / "replay.csv")


if __name__ == "__main__":
    main()
