"""What every proposer offers the decode loop."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from spec_lab.core.draft import Draft, Drawn
from spec_lab.engine.batch import Batch, SequenceState


class Proposer(Protocol):
    """Drafts a tree below each live sequence. It never sees the verifier.

    It may offer more: ``facts``, a mapping of what a record should keep; ``sha256`` of its weights;
    ``check(sampling)``, which raises ``ValueError`` at start-up for unsupported sampling; whether its drafts
    branch (``Branching``); and ``toy(target, draft, tree)``, the same proposer for a toy target, drafting ``tree`` with
    the toy model ``draft`` if it needs one: what ``certify`` enumerates. Without it the proposer itself is tried on the
    toy, and only where it fails there the drafts of a reference that draws the same way are enumerated in their place.

    A draft must follow from the sequences, from stores that are declared, and from the random choices of the batch
    (``batch.draws``) only: the same text gets the same draft when it is replayed.
    """

    @property
    def name(self) -> str:
        """As in configs and records."""
        ...

    @property
    def drawn(self) -> Drawn:
        """How siblings are drawn; a verifier that cannot judge it is refused when the run is composed."""
        ...

    @property
    def nodes(self) -> int:
        """Most nodes drafted below one head."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """Whether the target must keep hidden states."""
        ...

    def propose(self, batch: Batch) -> Draft:
        """A draft with one tree per live sequence, in order; a tree may be empty."""
        ...

    def close(self, sequence: SequenceState) -> None:
        """The sequence has ended: give back what is held for it."""
        ...


@runtime_checkable
class Branching(Protocol):
    """What a proposer may declare beside what ``Proposer`` needs."""

    @property
    def branches(self) -> bool:
        """Whether its drafts may be trees; False: they are chains."""
        ...


def branches(proposer: Proposer) -> bool | None:
    """Whether the proposer's drafts may be trees; None where it does not declare it."""
    if isinstance(proposer, Branching):
        return proposer.branches
    return False if proposer.nodes <= 1 else None
