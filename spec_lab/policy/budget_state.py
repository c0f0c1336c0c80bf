"""State of a budget of verified rows (``policy.batch_budget``): what is shared, and what each sequence drafted last."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spec_lab.policy.confidence import OnlineConfidence

FIRST_WAIT, LONGEST_WAIT = 8, 256
"""Steps without drafts before they are tried again, where drafting nothing is best: the wait doubles each time."""


@dataclass(eq=False)
class BudgetState:
    """State that the sequences of one budget share.

    Args:
        model: acceptance by margin, as learned so far.
        survival: survivals of the nodes that some sequence drafted last; None before the first draft.
        rows: nodes admitted in this step over all sequences; None: all.
        waited: steps without drafts since the last draft.
        wait: steps without drafts until the next one.
    """

    model: OnlineConfidence
    survival: np.ndarray | None = None
    rows: int | None = None
    waited: int = 0
    wait: int = FIRST_WAIT


@dataclass(eq=False)
class SequenceDraft:
    """The last draft of a sequence. Arrays without a note have a value for each admitted row, the root first.

    Args:
        alone: a budget of the sequence's own, for ``scope`` "request".
        survival: survivals of all drafted nodes, admitted or not; None before the first draft.
        measured: the feature that confidences are told from.
        depth: 0 of the root.
        first: whether the row is the first child of its parent.
        expanded: whether any child was admitted.
    """

    alone: BudgetState
    survival: np.ndarray | None = None
    measured: np.ndarray = field(default_factory=lambda: np.empty(0))
    depth: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    first: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))
    expanded: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))
