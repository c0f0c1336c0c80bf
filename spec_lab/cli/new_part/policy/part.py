"""The policy ``my_policy``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from spec_lab.core.limit import Limit
from spec_lab.core.options import Whole
from spec_lab.core.request import Request
from spec_lab.decode.sequence import Batch
from spec_lab.policy.policy import DraftOutcome, Policy


@dataclass
class NextDepth:
    """The depth of a sequence's next draft."""

    value: int


class MyPolicy(Policy):
    """One level more after a draft that was wholly accepted, half as many after another.

    A policy that needs them names ``target`` and ``proposer`` among its arguments, and is given those of the run.

    Args:
        start: levels of the first draft.
    """

    name = "my_policy"

    def __init__(self, start: Annotated[int, Whole(1, 64)] = 4) -> None:
        self.start = start

    def init(self, request: Request) -> NextDepth:
        """Return the state of a new sequence."""
        return NextDepth(self.start)

    def decide(self, batch: Batch, states: Sequence[NextDepth]) -> list[Limit]:
        """Return a limit for each sequence."""
        return [Limit(state.value) for state in states]

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Change the depths by what came of the last drafts."""
        for outcome in outcomes:
            if outcome.drafted:
                whole = outcome.accepted >= outcome.drafted
                outcome.state.value = outcome.state.value + 1 if whole else max(1, outcome.state.value // 2)

    def toy(self) -> "MyPolicy":
        """Return the same policy with a depth that cuts some drafts of toys, whose trees have one to three levels."""
        return MyPolicy(start=1)
