"""Recorder of one step: its distributions, its draft and its emitted tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from spec_lab.core.draft import Draft
from spec_lab.decode.arm import Arm
from spec_lab.decode.commit import Committed
from spec_lab.decode.expert_counts import ExpertCounts
from spec_lab.decode.masking import Masking
from spec_lab.decode.outcome import TargetDistribution
from spec_lab.decode.proposer import Observation
from spec_lab.decode.recording import Distributions, Recorded, expanded, feature_hash, recorded_numbers
from spec_lab.decode.rows import at_temperature_1, draft_probabilities
from spec_lab.decode.sequence import SequenceState, by_row
from spec_lab.runners.runner import Output
from spec_lab.verify.arrays import Array


class StepRecorder:
    """Records one step as ``Arm.record`` says.

    Args:
        sequences: ``[B]``.
    """

    def __init__(self, arm: Arm, draft: Draft, sequences: Sequence[SequenceState]) -> None:
        self.record, self.draft, self.sequences = arm.record, draft, sequences
        self.rows = np.empty(0, dtype=np.int64)  # whose distributions are recorded
        if self.record.top:
            chosen = self.record.chosen(arm.draws, [sequence.key for sequence in sequences])
            self.rows, self.roots = (
                np.flatnonzero(chosen[draft.shape.root]),
                [sequence.tokens[-1] for sequence in sequences],
            )

    def wanted(self, p: TargetDistribution, outcome: Mapping[str, Array], output: Output) -> dict[str, Array]:
        """Return what the host reads, given the outcome of the verification."""
        wanted: dict[str, Array] = {}
        if self.record.drafts:
            q = draft_probabilities(self.draft) if self.draft.shape.nodes else None
            wanted = p.recorded(outcome) if q is None else {"q": q} | p.recorded(outcome)
            if self.draft.predict is not None and self.draft.shape.nodes:
                wanted["predicted"] = self.draft.predict(self.draft)
            if self.draft.greedy_q is not None and self.draft.shape.nodes:
                wanted["greedy_q"] = self.draft.greedy_q
        if len(self.rows):
            rows, samplings = p.rows, by_row(p.rows.samplings, self.draft.shape.root)
            plain = at_temperature_1(rows.logits, self.rows, samplings, rows.history, rows.allowed)
            numbers = recorded_numbers(self.rows, self.draft, plain, self.record.top)
            wanted |= {f"recorded_{name}": number for name, number in numbers.items()}
        if self.record.experts and output.experts is not None:
            wanted["experts"] = output.experts.numbers
        return wanted

    def experts(
        self, host: Mapping[str, np.ndarray], output: Output, forest: Draft, committed: Sequence[Committed]
    ) -> ExpertCounts | None:
        """Return how many experts were read; None where that is not counted."""
        if output.experts is None or "experts" not in host:
            return None
        return ExpertCounts.of_step(output, host["experts"], output.experts.experts, forest, committed)

    def drafts(
        self, p: TargetDistribution, host: Mapping[str, np.ndarray], masking: Masking, broken: Collection[int]
    ) -> Recorded | None:
        """Return what was drafted and emitted; None where it is not recorded."""
        if not self.record.drafts:
            return None
        drafted = host["drafted"].tolist() if self.draft.shape.nodes else []
        return Recorded(
            drafted, host.get("p"), host.get("q"), host.get("stop"), host.get("argmax"), host["token"],
            host.get("last_p"), None if masking.on_target is None else masking.on_target.legal, p.forced, broken,
            host.get("predicted"), host.get("greedy_q"),
        )  # fmt: skip

    def distributions(self, host: Mapping[str, np.ndarray], observed: Sequence[Observation]) -> Distributions | None:
        """Return the recorded distributions; None where none is."""
        if not len(self.rows):
            return None
        ids, top_p, top_q, rest = (host[f"recorded_{name}"] for name in ("ids", "p", "q", "rest"))
        states = {seen.sequence: seen.hidden for seen in observed}
        features = [feature_hash(states.get(sequence)) for sequence in self.sequences]
        has_q = expanded(self.draft, self.rows)
        return Distributions(self.rows, ids, top_p, top_q, rest, has_q, self.roots, features)
