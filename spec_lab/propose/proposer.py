"""What every proposer offers the decode loop."""

from __future__ import annotations

from typing import Protocol

from spec_lab.batch import Batch, Sequence
from spec_lab.draft import Draft, Drawn


class Proposer(Protocol):
    """Drafts a tree below each live sequence. It never sees the verifier.

    It may offer more: ``facts``, a mapping of what a record should keep; ``sha256`` of its weights;
    ``check(sampling)``, which refuses by a ``ValueError``, at the door, what it cannot draft for; and
    ``toy(target, draft, tree)``, the same proposer for a toy target, drafting ``tree`` with the toy model ``draft`` if
    it needs one: what ``certify`` enumerates. Without it the proposer itself is tried on the toy.
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

    def close(self, sequence: Sequence) -> None:
        """The sequence has ended: give back what is held for it."""
        ...
