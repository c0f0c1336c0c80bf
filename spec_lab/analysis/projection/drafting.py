"""What drafting costs, by the kind of proposer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from spec_lab.analysis.projection.acceptance import Acceptance
from spec_lab.analysis.projection.catalogue import ModelShape, Precision, work
from spec_lab.analysis.projection.costs import ForwardCost, FreeForward
from spec_lab.core.roofline import ForwardWork

DRAFT_MODELS = ("draft_chain", "draft_tree", "draft_best_first", "draft_reranked")
"""Proposers that compute a pass of a draft model for each level."""

FEATURES = ("eagle", "eagle3", "mtp")
"""Proposers that compute a pass of one layer for each level, on features of the target."""

LOOKUPS = ("ngram", "ngram_tree", "suffix", "sam", "rest", "recycling", "pld_plus")
"""Proposers that compute no model."""

KINDS = {
    **dict.fromkeys(DRAFT_MODELS, "draft model"),
    "pard": "parallel draft model",
    **dict.fromkeys(FEATURES, "feature drafter"),
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    **dict.fromkeys(LOOKUPS, "lookup"),
}
"""The kind of each proposer whose drafting is modelled."""

EAGLE3_VOCABULARY = 32_000
"""Tokens that EAGLE-3's published heads draft, where the target has more."""


First = Literal["committed", "last", "masks", "one"]

PASSES_OF: dict[str, tuple[bool, First]] = {
    "draft model": (True, "last"),
    "parallel draft model": (False, "masks"),
    "feature drafter": (True, "committed"),
    "Medusa heads": (False, "one"),
    "Hydra heads": (True, "one"),
}
"""``Drafting.sequential`` and ``Drafting.first`` of each kind that computes a model."""


@dataclass(frozen=True)
class Drafting:
    """How a proposer drafts.

    Args:
        forward: one pass of what drafts.
        sequential: whether each level takes a pass; else one pass drafts all.
        first: rows of the first pass: "committed", all tokens of the step before; "last", the last one, and the last
            drafted one where all were accepted; "masks", these and one row for each further level; "one".
        lookup: seconds of each step on the host.
    """

    forward: ForwardCost
    sequential: bool = True
    first: First = "last"
    lookup: float = 0.0

    def seconds(self, acceptance: Acceptance, length: int, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """Return the expected seconds of drafting in one step of a batch, ``[R]``.

        Sequences of a batch draft together, so level k takes a pass if any of B drafts that far: with probability
        1 - (1 - drafted_k)^B if they do so independently. The pass then has the expected number of sequences that do.

        Args:
            acceptance: of R draws.
            length: the longest draft.
            batch: number of sequences, one or ``[R]``.
            context: tokens of each.
        """
        count = np.broadcast_to(np.asarray(batch, dtype=float), (len(acceptance.drafted),))
        reached, total = acceptance.drafted[:, 0], np.full(count.shape, self.lookup)
        if isinstance(self.forward, FreeForward):
            return total
        for level in range(length):
            share = acceptance.drafted[:, level]
            any_of_them = 1.0 - (1.0 - np.minimum(share, 1.0)) ** count
            live = np.maximum(count * share / np.where(any_of_them > 0, any_of_them, 1.0), 1e-9)
            if level == 0:
                rows = self._first_rows(acceptance, length)
            else:  # this pass computes the nodes of the level above
                rows = np.maximum(acceptance.nodes[:, level - 1] / np.where(reached > 0, reached, 1.0), 1.0)
            total = total + any_of_them * self.forward.seconds(rows, np.maximum(live, 1.0), context)
            if not self.sequential:
                break
            reached = share
        return total

    def _first_rows(self, acceptance: Acceptance, length: int) -> np.ndarray:  # [R]
        """Return the rows of the first pass."""
        last = 1.0 + acceptance.survival[:, length - 1]
        return {
            "committed": acceptance.tau(length),
            "last": last,
            "masks": last + length - 1.0,
            "one": np.ones(len(last)),
        }[self.first]


def by_roofline(
    proposer: str,
    target: ModelShape,
    draft: ModelShape | None,
    made: Callable[[ForwardWork, float], ForwardCost],
    precision: Precision,
    levels: int,
    lookup: float = 0.0,
) -> Drafting:
    """Return how a proposer drafts for a target, by the roofline.

    - A draft model computes its own layers and LM head.
    - EAGLE and MTP compute one layer of the target's shape, the projection of what it reads (two inputs of the target's
      width; EAGLE-3: its attention reads two, and features of three layers are projected once), and an LM head. That of
      EAGLE-3 has at most ``EAGLE3_VOCABULARY`` tokens.
    - Medusa computes all heads at once: each a layer of H x H and an LM head (2401.10774).
    - Hydra computes a head for each level: a layer that reads the target's state and the embeddings of the drafted
      tokens, on average (levels + 3) / 2 inputs of width H, and an LM head (2402.05109).
    - Lookups compute nothing but take ``lookup`` seconds.

    Args:
        proposer: its name.
        target: the target's shape.
        draft: the draft model's shape; None where none was chosen.
        made: makes the forward of some work and number of layers.
        precision: of all weights.
        levels: of the recorded drafts; Medusa has a head for each.
        lookup: seconds of a lookup.

    Raises:
        ValueError: a proposer whose drafting is not modelled, or a draft model that was not chosen.
    """
    kind, hidden = kind_of(proposer), target.hidden
    if kind == "lookup":
        return Drafting(FreeForward(), lookup=lookup)
    if kind in ("draft model", "parallel draft model"):
        if draft is None:
            raise ValueError("the size of the draft model is required; choose it with --draft MODEL")
        forward = made(draft.work(precision), draft.layers)
    elif kind == "Medusa heads":
        forward = made(work(levels * hidden * hidden, levels * target.head_weights, (0, 0), precision), 1)
    elif kind == "Hydra heads":
        matrices = round(hidden * hidden * (levels + 3) / 2)
        forward = made(work(matrices, target.head_weights, (0, 0), precision), 1)
    else:
        head, extra = target.head_weights, 2 * hidden * hidden
        if proposer == "eagle3":
            head = hidden * min(target.vocabulary, EAGLE3_VOCABULARY)
            extra = hidden * target.head_dim * (target.heads + 2 * target.kv_heads)  # of two inputs
        forward = made(work(target.layer_weights + extra, head, target.attention(1), precision), 1)
    return Drafting(forward, *PASSES_OF[kind])


def by_table(proposer: str, tables: Mapping[str, ForwardCost], lookup: float = 0.0) -> Drafting:
    """Return how a proposer drafts, by measured forwards of what drafts: the rows of its own name, or of "draft".

    Raises:
        ValueError: its drafting is not modelled, or no rows measure it.
    """
    kind = kind_of(proposer)
    if kind == "lookup":
        return Drafting(FreeForward(), lookup=lookup)
    forward = tables.get(proposer, tables.get("draft"))
    if forward is None:
        raise ValueError(f"--costs has no rows whose model is {proposer} or draft; measure what drafts, too")
    return Drafting(forward, *PASSES_OF[kind])


def kind_of(proposer: str) -> str:
    """Return the kind of a proposer.

    Raises:
        ValueError: its drafting is not modelled.
    """
    if proposer not in KINDS:
        raise ValueError(f"the cost of drafting with {proposer} is not modelled")
    return KINDS[proposer]
