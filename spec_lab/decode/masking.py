"""The masks of one step: of the draft while it grows, and of the whole forest before the target is verified."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from spec_lab.constrain import AppliedConstraint, StepConstraint
from spec_lab.constrain.applied import StepMasks
from spec_lab.constrain.protocol import Masks
from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft
from spec_lab.core.readback import Readback
from spec_lab.decode.sequence import SequenceState


class Masking:
    """Work of a constraint in one step; nothing without a constraint.

    Args:
        constraint: of the arm; None for none.
        sequences: ``[B]``.

    Attributes:
        supports_drafts: whether anything can be drafted.
        of_draft: the masks for a proposer; None where drafts are not masked.
        masks: of the forest, once they are there; None without a constraint.
        on_target: the same where the constraint applies to the target, else None.
        failed: the error of each tree whose constraint failed at the root.
    """

    masks: Masks | None = None
    on_target: Masks | None = None

    def __init__(self, constraint: StepConstraint | None, sequences: Sequence[SequenceState]) -> None:
        self.constraint, self.failed = constraint, dict[int, str]()
        self.supports_drafts = constraint is None or constraint.supports_drafts
        self.states = [] if constraint is None else [sequence.constraint for sequence in sequences]
        self.of_draft = None if constraint is None else constraint.draft_masks(self.states)
        self.draft_seconds = self.seconds = 0.0
        self._pending: StepMasks | Future[StepMasks] | None = None

    @property
    def applied(self) -> AppliedConstraint | None:
        """The constraint, and where it applies; None for none."""
        return None if self.constraint is None else self.constraint.applied

    def mask(self, draft: Draft, clock: Clock, read: Readback) -> Draft:
        """Begin to compute the masks of a draft; return it without nodes that cannot be accepted."""
        if self.constraint is None:
            return draft
        self.draft_seconds = 0.0 if self.of_draft is None else self.of_draft.seconds
        with clock.stage("mask"):
            draft, self._pending = self.constraint.masks(self.states, draft, self.of_draft, read)
        return draft

    def wait(self, clock: Clock) -> None:
        """Wait for masks that are computed during the target's forward."""
        if isinstance(self._pending, Future):
            with clock.stage("wait"):
                self._pending = self._pending.result()
        if self._pending is not None and self.constraint is not None:
            self.masks, self.failed, seconds = self._pending
            self.seconds = self.draft_seconds + seconds
            self.on_target = self.masks if self.constraint.applied.on_target else None
