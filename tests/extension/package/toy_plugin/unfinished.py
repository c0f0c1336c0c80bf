"""A proposer that cannot run: it does not state how many nodes it drafts."""

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target


class Unfinished(Proposer):
    """Has no ``nodes``, for which there is no default."""

    name = "unfinished"
    drawn: Drawn = "deterministic"

    @staticmethod
    def load(target: Target) -> "Unfinished":
        """Return the proposer; the config names this function."""
        return Unfinished()

    def propose(self, batch: Batch) -> Draft:
        """Nothing."""
        return empty(len(batch.sequences), batch.device)
