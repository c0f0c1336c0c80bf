"""Repeats what the policy of another run decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.core.limit import Limit, StopRule
from spec_lab.engine.proposer import Proposer
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy.policy import Outcome, Policy


@dataclass(frozen=True, eq=False)
class Recorded:
    """What another run decided, for the same requests step by step.

    Args:
        limits: by request, of its steps in order.
        stop: the rule that stopped the drafts; None for none.
        source: the run, for records.
    """

    limits: Mapping[int, Sequence[Limit]]
    stop: StopRule | None = None
    source: str = ""
    name: str = "recorded"
    parts: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        return {"source": self.source, "requests": len(self.limits)}

    def init(self, request: Request) -> None:
        """Nothing is learned."""

    def decide(self, batch: Batch, states: Sequence[Any]) -> list[Limit]:
        """See ``Policy``.

        Raises:
            ValueError: a request or step that the run has not decoded, or a fork.
        """
        return [self._limit(*sequence.key) for sequence in batch.sequences]

    def _limit(self, request: int, branch: int, step: int) -> Limit:
        of_request = self.limits.get(request, ())
        if branch or step >= len(of_request):
            what = "a fork" if branch else f"step {step}"
            raise ValueError(
                f"{self.source} holds no decision for {what} of request {request}: repeat the run with its proposer, "
                "prompts, seed and constraint"
            )
        return of_request[step]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing is learned."""

    def alone(self) -> Policy:
        """See ``Policy``."""
        return self
