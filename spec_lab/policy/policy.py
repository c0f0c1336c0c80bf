"""Interface of policies: limits for the next draft, from the outcomes of earlier ones.

Whatever a policy decides, verification stays exact: a limit follows from what was known before anything was drawn in
the step (the texts, earlier outcomes, measured costs), and a rule that stops drafts reads draft distributions and drawn
tokens without leaving out a drawn one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.protocols import FACTS, TEXT, TEXTS, Declared, Part, default
from spec_lab.core.request import Request
from spec_lab.decode.sequence import Batch


@dataclass(frozen=True)
class DraftOutcome:
    """Outcome of one sequence's draft in one step.

    Args:
        state: the policy's, of the sequence.
        limit: what the policy had decided.
        drafted: levels of its draft tree; ``nodes``: its nodes.
        accepted: accepted nodes that were kept.
        live: sequences of the step.
        context: tokens of the sequence before it.
        path: the accepted nodes that were kept, numbered within the sequence's tree from 0.
        ended: whether the sequence ended with this step, so that the path may have been cut.
    """

    state: Any
    limit: Limit
    drafted: int
    nodes: int
    accepted: int
    live: int
    context: int = 0
    path: Sequence[int] = ()
    ended: bool = False


def _is_rule(value: Any) -> bool:
    """Return whether a value is None or has what a ``StopRule`` has."""
    named = isinstance(getattr(value, "name", None), str)
    flags = (getattr(value, name, None) for name in ("before", "reads_path"))
    return value is None or (named and callable(value) and all(isinstance(flag, bool) for flag in flags))


DECLARED = {
    "name": TEXT,
    "stop": Declared("None or a StopRule (spec_lab.core.limit)", _is_rule),
    "measure": Declared("None or a function of draft probabilities", lambda value: value is None or callable(value)),
    "parts": TEXTS,
    "shared_store": TEXT,
    "facts": FACTS,
}
"""Required types of a policy's attributes."""


class Policy(Part):
    """Decides what may be drafted. Its decisions are recorded, and repeated by the policy ``recorded``.

    A policy states its ``name`` and decides in ``decide``; the other members have defaults.
    """

    @default
    def stop(self) -> StopRule | None:
        """The rule that stops drafts at ``Limit.threshold``; None: drafts end at their depth only."""
        return None

    @default
    def measure(self) -> Callable[[Tensor], Tensor] | None:
        """Feature of each row of a draft that ``admit`` reads (``Batch.measure``); None for nothing."""
        return None

    @default
    def parts(self) -> tuple[str, ...]:
        """The parts that it names in limits, of a proposer that chooses one of several; empty for none."""
        return ()

    @default
    def shared_store(self) -> str:
        """State that requests share, in a few words; empty for nothing. See ``Proposer.shared_store``."""
        return ""

    def forget(self) -> None:
        """Empty the store that requests share."""

    def init(self, request: Request) -> Any:
        """Return the state of a new sequence. Forks get deep copies."""

    @abstractmethod
    def decide(self, batch: Batch, states: Sequence[Any]) -> Sequence[Limit]:
        """Return a limit for each sequence ``[B]``, given the policy's states of them."""

    def admit(self, batch: Batch, states: Sequence[Any], draft: Draft) -> np.ndarray | None:
        """Return the rows ``[R]`` of a draft that the target verifies, roots included, as bool; None for all.

        Lossless only where it is known before a token is drawn whether its node is admitted: from earlier steps, and
        from rows above it or in other trees that are admitted before it. Deterministic nodes may be left out for any
        reason. Proposers of which no rows may be left out are refused (``Proposer.why_not_admitted``).

        Args:
            batch, states: as in ``decide``.
            draft: with ``Draft.measured`` where there is a ``measure``.
        """
        return None

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn what came of the last decisions; once for each step."""

    def toy(self) -> Policy:
        """Return the same policy for toys: it decides for each sequence from its own past only, so that it can be
        enumerated, with values that cut some drafts of the toys and leave others whole (``policy.toys``).
        """
        return self

    def toy_of_batch(self) -> Policy:
        """Return the same policy for several toy requests that are decoded together: it decides as in a run, where that
        depends on all of them.
        """
        return self.toy()
