"""The parts that decode: a target, a proposer, a verifier, a constraint, and where random choices come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain import AppliedConstraint, StepConstraint
from spec_lab.constrain.protocol import DECLARED as constraint_declared
from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import probs_dtype
from spec_lab.core.protocols import check_declared
from spec_lab.core.randomness import Draws
from spec_lab.core.shape import Shape
from spec_lab.decode.capacity import check_requires, max_at_once, max_cells, max_rows
from spec_lab.decode.commit import Commit, commit
from spec_lab.decode.global_constraint import Conditional, conditioned
from spec_lab.decode.prefix_cache import PrefixCache, check_prefix_cache
from spec_lab.decode.proposer import DECLARED as proposer_declared
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.recording import Recording
from spec_lab.models.target import Target
from spec_lab.verify import Choice, Verdict, Verifier, check_pair, choose
from spec_lab.verify.verdict import DECLARED as verifier_declared

Choose = Callable[[Verdict, Shape, Tensor, Draws, Sequence[tuple[int, int, int]]], Choice]
"""Samples a verdict. See ``verify.choose``."""


@dataclass(eq=False)
class Memory:
    """Memory that is used again in every step. (Fresh megabytes cost more than the arithmetic.)

    Args:
        scratch: for target probabilities.
        outcomes: see ``certain``, by number of sequences.
    """

    scratch: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    outcomes: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def like(self, logits: Tensor) -> Tensor:
        """``[>= R, V]``, in the dtype of probabilities."""
        (rows, width), dtype, held = logits.shape, probs_dtype(logits.dtype), self.scratch
        if len(held) < rows or held.shape[1] != width or held.dtype != dtype or held.device != logits.device:
            self.scratch = torch.empty(rows, width, dtype=dtype, device=logits.device)
        return self.scratch

    def certain(self, roots: int) -> dict[str, np.ndarray]:
        """The outcome, except the token, of a step without randomness and without drafted nodes. Read-only.

        (Calls of NumPy cost more in a step than in a loop of their own: after a forward the CPU's caches are cold.)
        """
        if roots not in self.outcomes:
            self.outcomes[roots] = {
                "row": np.arange(roots), "empty": np.zeros(roots, dtype=bool),
                "expected": np.zeros(roots), "expected_emitted": np.ones(roots),
            }  # fmt: skip
        return self.outcomes[roots]


@dataclass(frozen=True, eq=False)
class Arm:
    """One way to decode, valid because it exists: parts that do not go together are refused when it is made.

    Studies replace parts with ``dataclasses.replace``, which checks them again.

    Args:
        target: its runner computes, its context bounds.
        proposer: drafts; the null proposer makes this autoregressive decoding.
        verifier: gives each step's distribution of outcomes.
        draws: where every random choice comes from.
        applied: the constraint; None for none.
        pieces: the bytes of each token, for requests with stop strings, and for listeners.
        record: what each step keeps of its probabilities (``StepInfo.recorded``, ``StepInfo.distributions``).
        prefix_cache: KV caches of earlier requests that begin with the same tokens; finished sequences are kept in it.
            None: every prompt is computed.
        choose: samples the verdict; studies that sample nothing replace it.
        commit: applies what was chosen; studies that follow a given text replace it.
        memory: for probabilities.

    Raises:
        Misfit: a verifier that does not support what the proposer draws.
        TypeError: a part with an attribute that is nearly called like a member of its kind.
        WrongValue: an attribute of a part is of another type than its kind declares.
        ValueError: a proposer that requires what the target does not return; a prefix cache that the target or the
            proposer does not support; a constraint or pieces for another vocabulary than the target's.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    draws: Draws
    applied: AppliedConstraint | None = None
    pieces: Sequence[bytes] | None = None
    record: Recording = Recording()
    prefix_cache: PrefixCache | None = None
    choose: Choose = choose
    commit: Commit = commit
    memory: Memory = field(default_factory=Memory)
    made: Counter[int] = field(default_factory=Counter, init=False)  # forks made so far, by the request's id

    def __post_init__(self) -> None:
        check_declared(self.proposer, proposer_declared)
        check_declared(self.verifier, verifier_declared)
        if self.applied is not None:
            check_declared(self.applied.constraint, constraint_declared)
        check_requires(self.proposer, self.target)
        check_pair(self.proposer.name, self.proposer.draws, self.verifier, self.proposer.branches)
        if self.applied is not None and self.applied.on_target and self.verifier.invalid_text:
            raise ValueError(
                f"verifier '{self.verifier.name}' accepts tokens that a constraint does not allow: set constraint=none"
            )
        if self.prefix_cache is not None:
            check_prefix_cache(self.proposer, self.target)
        if self.applied is not None and self.applied.constraint.vocabulary != self.target.vocabulary:
            raise ValueError(
                f"the constraint '{self.applied.constraint.name}' is over {self.applied.constraint.vocabulary} tokens, "
                f"the target has {self.target.vocabulary}: build it with the target's vocabulary"
            )

    def within(self, proposer: Proposer, draws: Draws, choose: Choose) -> Arm:
        """Return the same arm with a proposer that drafts alike, for some of its steps; nothing is checked again."""
        arm = copy(self)
        for name, part in (("proposer", proposer), ("draws", draws), ("choose", choose)):
            object.__setattr__(arm, name, part)
        return arm

    @cached_property
    def _conditioned(self) -> tuple[AppliedConstraint | None, Conditional | None]:
        return (None, None) if self.applied is None else conditioned(self.applied, self.target)

    @property
    def conditional(self) -> Conditional | None:
        """The constraint under which whole outputs have the model's distribution; None of another one, and of none."""
        return self._conditioned[1]

    @cached_property
    def constraint(self) -> StepConstraint | None:
        """The constraint as steps apply it; None for none."""
        in_steps = self._conditioned[0]
        return None if in_steps is None else StepConstraint(in_steps)

    @cached_property
    def max_rows(self) -> int:
        """How many rows the proposer adds below one root at most."""
        return max_rows(self.proposer, self._forces)

    @cached_property
    def max_cells(self) -> int:
        """How many cells are in use below one root at most, while the proposer drafts or the target verifies."""
        return max_cells(self.proposer, self._forces)

    @cached_property
    def max_at_once(self) -> int | None:
        """How many sequences one forward computes at most; None for no limit."""
        return max_at_once(self.proposer, self.target)

    @property
    def _forces(self) -> bool:
        """Whether a constraint that applies to the draft fast-forwards forced tokens."""
        return self.applied is not None and self.applied.on_draft and bool(self.applied.fast_forward)

    def follows_argmax(self, draft: Draft) -> bool:
        """Whether the verifier follows the arg max of each row down this draft at temperature 0."""
        return self.verifier.follows_argmax and (draft.one_hot or draft.ways == {"deterministic"})
