"""A proposer that cannot run: it does not declare what it requires of the target's forwards."""

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target


class Unfinished:
    """Has every member of ``Proposer`` but ``requires``; ``Lifecycle`` would have a default for it."""

    name = "unfinished"
    drawn: Drawn = "point"
    nodes = 1

    @staticmethod
    def load(target: Target) -> "Unfinished":
        """What the config names."""
        return Unfinished()

    def init(self, request: object) -> None:
        """No state."""

    def propose(self, batch: Batch) -> Draft:
        """Nothing."""
        return empty(len(batch.sequences), batch.device)

    def observe(self, observed: object) -> None:
        """Nothing is learned."""

    def fork(self, state: None) -> None:
        """Nothing to copy."""

    def rewind(self, state: None, length: int) -> None:
        """Nothing to forget."""

    def close(self, state: None) -> None:
        """Nothing is held."""
