"""The target's distribution after each row of a forest, how it is verified, and the outcome that the host reads.

``target_distribution`` chooses: ``Certain`` where the arg max of each row settles the step (greedy decoding), and
``Probabilities`` elsewhere. Nothing here reads from a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from spec_lab.constrain.applied import open_mask
from spec_lab.constrain.protocol import Masks
from spec_lab.core.draft import Draft
from spec_lab.core.faults import attributed
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, argmax_of_finite, finite_
from spec_lab.decode.arm import Arm
from spec_lab.decode.rows import (
    constrained_probs,
    expected_counts,
    logprobs_of,
    probability_of,
    target_probabilities,
    without_token_,
)
from spec_lab.decode.sequence import SequenceState, by_row, text_histories
from spec_lab.runners.runner import Output
from spec_lab.verify import Choice, Verdict, choose, greedy_path
from spec_lab.verify.arrays import Array


class StepLogits(NamedTuple):
    """The target's logits of the rows of a draft, and how each of them is sampled.

    Args:
        logits: ``[R, V]`` as the target computed them.
        array: the same memory as an array, where it is the host's; else None.
        history: of the rows, for penalties, biases and banned words; None where no request has any.
        masks: of a constraint on the target; None for none.
        allowed: ``[R, V]`` the tokens that they allow; None for none.
        logprobs: whether a request asks for log-probabilities.
    """

    logits: Tensor
    array: np.ndarray | None
    samplings: Sequence[Sampling]
    history: History | None
    masks: Masks | None
    allowed: Tensor | None
    logprobs: bool

    @staticmethod
    def of(sequences: Sequence[SequenceState], draft: Draft, output: Output, masks: Masks | None) -> StepLogits:
        """Return those of a forward; rows that are computed only are left out."""
        rows = draft.shape.rows
        raw = output.logits if draft.computed_only is None else output.logits[:rows]
        samplings = [sequence.request.sampling for sequence in sequences]
        histories = text_histories(sequences, samplings, raw.shape[-1], raw.device)
        return StepLogits(
            raw, None if output.array is None else output.array[:rows], samplings,
            None if histories is None else histories.before(draft.shape, draft.token, np.arange(rows)),
            masks, None if masks is None else open_mask(masks, raw.shape[-1], raw.device),
            any(sequence.request.logprobs for sequence in sequences),
        )  # fmt: skip


class TargetDistribution(ABC):
    """The target's distribution after each row of a draft.

    Args:
        rows: logits of its rows.
        keys: ``[B]`` of the sequences' random choices.

    Attributes:
        given: as in ``Verdict``.
        forced: ``[R]`` whether one token only is allowed after each row; None without a constraint on the target.
    """

    given = "draft"
    forced: np.ndarray | None = None
    undefined: Array | None

    def __init__(self, arm: Arm, draft: Draft, rows: StepLogits, keys: Sequence[tuple[int, int, int]]) -> None:
        self.arm, self.draft, self.rows, self.keys = arm, draft, rows, keys

    def verify(self) -> dict[str, Array]:
        """Verify the draft, and return what the host reads of the outcome: where each path ends, what it emits, ...

        Raises:
            PartError: the verifier raised an error; names it.
        """
        outcome, draft, rows = self._verified(), self.draft, self.rows
        if self.undefined is not None:
            outcome["undefined"] = self.undefined
        if draft.late is not None:
            outcome["undrafted"] = draft.late.broken
        if draft.shape.nodes:
            outcome["drafted"] = draft.token if draft.array is None else draft.array[: draft.shape.nodes]
        if rows.logprobs:
            outcome["logprobs"], outcome["last_logprob"] = logprobs_of(
                rows.logits, rows.allowed, draft, outcome["row"], outcome["token"]
            )
        return outcome

    @abstractmethod
    def _verified(self) -> dict[str, Array]:
        """Return the outcome itself, in a dict of its own."""

    @abstractmethod
    def recorded(self, outcome: Mapping[str, Array]) -> dict[str, Array]:
        """Return the probabilities that are recorded: of drafted tokens, stops, and of emitted tokens."""

    @abstractmethod
    def settle(self, host: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Complete the outcome on the host: ``row``, ``token`` (-1 for none), ``expected``, ...

        Raises:
            PartError: the verifier's distribution cannot be sampled.
        """


class Certain(TargetDistribution):
    """The arg max of each row, one-hot: all that following it down the draft reads. See ``TargetDistribution``."""

    def __init__(self, arm: Arm, draft: Draft, rows: StepLogits, keys: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(arm, draft, rows, keys)
        self.token, self.undefined = argmax_of_finite(rows.logits if rows.array is None else rows.array)

    def _verified(self) -> dict[str, Array]:
        token: dict[str, Array] = {"token": self.token}
        return token if self.draft.shape.nodes else token | self.arm.memory.certain(self.draft.shape.roots)

    def recorded(self, outcome: Mapping[str, Array]) -> dict[str, Array]:
        """Nothing: they follow from the arg max."""
        return {}

    def settle(self, host: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Follow the arg max ``[R]`` down the draft."""
        host["argmax"], shape = host["token"], self.draft.shape
        if not shape.nodes:
            return host
        row = greedy_path(shape, host["drafted"], host["token"])
        accepted = shape.depth[row]
        followed = {"row": row, "token": host["token"][row], "expected": accepted, "expected_emitted": accepted + 1}
        return host | self.arm.memory.certain(shape.roots) | followed


class Probabilities(TargetDistribution):
    """The probabilities p of every token. See ``TargetDistribution``."""

    verdict: Verdict

    def __init__(self, arm: Arm, draft: Draft, rows: StepLogits, keys: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(arm, draft, rows, keys)
        memory, masks = arm.memory.like(rows.logits), rows.masks
        logits = memory[: len(rows.logits)].copy_(rows.logits)
        self.undefined = finite_(logits)
        potential = None if masks is None else masks.potential
        samplings = by_row(rows.samplings, draft.shape.root)
        self.p = constrained_probs(logits, samplings, rows.history, rows.allowed, potential, memory)
        self.no_token = None if masks is None else without_token_(self.p, draft, masks)

    def _verified(self) -> dict[str, Array]:
        arm, shape, masks = self.arm, self.draft.shape, self.rows.masks
        with attributed("verifier", arm.verifier):
            self.verdict = arm.verifier(self.draft, self.p)
            row, token, empty = arm.choose(self.verdict, shape, self.p, arm.draws, self.keys)
        self.given, self.forced = self.verdict.given, None if masks is None else masks.forced
        expected, emitted = expected_counts(self.verdict, shape, self.forced, self.no_token)
        outcome = {"row": row, "token": token, "empty": empty, "expected": expected, "expected_emitted": emitted}
        return outcome if self.no_token is None else outcome | {"no_token": self.no_token}

    def recorded(self, outcome: Mapping[str, Array]) -> dict[str, Array]:
        """See ``TargetDistribution``."""
        last = probability_of(self.p, outcome["row"], outcome["token"])
        return {"p": target_probabilities(self.draft, self.p), "stop": self.verdict.stop, "last_p": last}

    def settle(self, host: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Check the choices; nothing is emitted where no token has any probability."""
        if self.arm.choose is choose:
            with attributed("verifier", self.arm.verifier):
                Choice.check(host["token"])
        if self.no_token is not None:
            host["token"] = np.where(host["no_token"][host["row"]], -1, host["token"])
        return host


def target_distribution(
    arm: Arm, sequences: Sequence[SequenceState], draft: Draft, output: Output, masks: Masks | None
) -> TargetDistribution:
    """Return the target's distribution after each row of a draft.

    Args:
        sequences: ``[B]``.
        masks: of a constraint on the target; None for none.
    """
    rows = StepLogits.of(sequences, draft, output, masks)
    plain = masks is None and rows.history is None and arm.choose is choose
    follows = not draft.shape.nodes or (arm.follows_argmax(draft) and not rows.logprobs)
    certain = plain and follows and all(sampling.temperature == 0 for sampling in rows.samplings)
    return (Certain if certain else Probabilities)(arm, draft, rows, [sequence.key for sequence in sequences])
