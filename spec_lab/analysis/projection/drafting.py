"""Costs of drafting, by the kind of proposer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from spec_lab.analysis.projection.acceptance import Acceptance
from spec_lab.analysis.projection.costs import ConstantForward, ForwardCost, MeasuredForward, mean_seconds
from spec_lab.analysis.projection.model_shapes import ModelShape, Precision, work
from spec_lab.core.roofline import ForwardWork

DRAFT_MODELS = ("draft_chain", "draft_tree", "draft_best_first", "draft_reranked")
"""Proposers that compute a pass of a draft model for each level."""

FEATURES = ("eagle", "eagle3", "mtp")
"""Proposers that compute a pass of one layer for each level, on features of the target."""

LOOKUPS = ("ngram", "ngram_tree", "suffix", "sam", "rest", "recycling", "pld_plus")
"""Proposers that compute no model."""

TARGET_LAYERS = ("early_exit", "kangaroo", "skip", "sparse_kv")
"""Proposers that compute layers of the target for each level; their costs are not modelled."""

KINDS = {
    **dict.fromkeys(DRAFT_MODELS, "draft model"),
    "pard": "parallel draft model",
    **dict.fromkeys(FEATURES, "feature drafter"),
    "peagle": "parallel feature drafter",
    "block": "block drafter",
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    **dict.fromkeys(LOOKUPS, "lookup"),
}
"""The kind of each proposer whose drafting is modelled."""

EAGLE3_VOCABULARY = 32_000
"""Tokens that the published heads of EAGLE-3 and P-EAGLE draft, where the target has more."""

LAYERS = {"peagle": 4, "block": 5}
"""Layers of P-EAGLE's and DFlash's published drafters, where a run did not record them."""
TAPS = 5
"""Hidden states of the target that DFlash's published drafters read; EAGLE-3 and P-EAGLE read three."""


First = Literal["committed", "last", "masks", "committed and masks", "block", "one"]

PASSES_OF: dict[str, tuple[bool, First]] = {
    "draft model": (True, "last"),
    "parallel draft model": (False, "masks"),
    "feature drafter": (True, "committed"),
    "parallel feature drafter": (False, "committed and masks"),
    "block drafter": (False, "block"),
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
            drafted one where all were accepted; "masks", these and one row for each further level; "committed and
            masks"; "block", ``rows``, or a row above each level and the pending token where that is more; "one".
        step: what every step takes besides, whatever it drafts: a lookup on the host. Its rows are those of the
            target's forward.
        assumed: what is taken of its costs without a measurement; empty for nothing.
        rows: of a block.
    """

    forward: ForwardCost = ConstantForward()
    sequential: bool = True
    first: First = "last"
    step: ForwardCost = ConstantForward()
    assumed: str = ""
    rows: int = 0

    def seconds(self, acceptance: Acceptance, length: int, batch: ArrayLike, context: float) -> np.ndarray:
        """Return the mean over steps of the seconds of drafting in a batch, ``[R]``.

        Sequences of a batch draft together, so level k takes a pass if any of B drafts that far: with probability
        1 - (1 - drafted_k)^B if they do so independently. The pass then has the expected number of sequences that do,
        and the rows of their steps (``mean_seconds``).

        Args:
            acceptance: of R draws.
            length: the longest draft.
            batch: number of sequences, one or ``[R]``.
            context: tokens of each.
        """
        count = np.broadcast_to(np.asarray(batch, dtype=float), (len(acceptance.share),))
        total = mean_seconds(self.step, 1.0 + acceptance.nodes(length), acceptance.share, count, context)
        for level in range(length if self.sequential else 1):
            share = acceptance.share * (acceptance.drafts[:, level] > 0)  # [R, J]
            drafted = np.minimum(share.sum(1), 1.0)
            any_of_them = 1.0 - (1.0 - drafted) ** count
            live = np.clip(count * drafted / np.where(any_of_them > 0, any_of_them, 1.0), 1.0, count)
            if level == 0:
                rows, share = self._first_rows(acceptance, length)
            else:  # this pass computes the nodes of the level above
                rows = np.maximum(acceptance.drafts[:, level - 1], 1.0)
                share = share / np.where(drafted > 0, drafted, 1.0)[:, None]
            total = total + any_of_them * mean_seconds(self.forward, rows, share, live, context)
        return total

    def ahead(self, length: int, outcomes: int, batch: np.ndarray, context: float) -> np.ndarray:  # [R]
        """Return the seconds of drafting ``length`` tokens after each of so many outcomes of a step.

        A pass of one row computes what may follow the last drafted token, further ones the drafts of all outcomes.

        Args:
            length: tokens of each draft.
            outcomes: of each sequence.
            batch: ``[R]`` number of sequences.
            context: tokens of each.
        """
        passes, rows = (length, outcomes) if self.sequential else (1, outcomes * length)
        first = self.forward.seconds(1.0, batch, context)
        drafts = passes * self.forward.seconds(float(rows), batch, context)
        return first + drafts + outcomes * self.step.seconds(1.0 + length, batch, context)

    def _first_rows(self, acceptance: Acceptance, length: int) -> tuple[np.ndarray, np.ndarray]:  # [J], [R, J]
        """Return the rows of the first pass after each kind of step, and the share of these steps."""
        survival = acceptance.survival[:, :length]
        ones = np.ones((len(survival), 1))
        if self.first == "one":
            return np.ones(1), ones
        if self.first == "block":
            return np.array([max(float(self.rows), length + 1.0)]), ones
        if self.first in ("committed", "committed and masks"):
            masks = length - 1.0 if self.first == "committed and masks" else 0.0
            return np.arange(1.0, length + 2) + masks, -np.diff(np.hstack([ones, survival, 0 * ones]), axis=1)
        least = float(length) if self.first == "masks" else 1.0
        return np.array([least, least + 1]), np.hstack([1 - survival[:, -1:], survival[:, -1:]])


def by_roofline(
    proposer: str,
    target: ModelShape,
    draft: ModelShape | None,
    made: Callable[[ForwardWork, float], ForwardCost],
    precision: Precision,
    levels: int,
    lookup: float = 0.0,
    drafted_share: float = 1.0,
    layers: int = 0,
    rows: int = 0,
) -> Drafting:
    """Return how a proposer drafts for a target, by the roofline.

    - A draft model computes its own layers and LM head.
    - EAGLE and MTP compute one layer of the target's shape (of a mixture of experts MTP one with experts, all others
      dense ones of ``intermediate_size``), the projection of what it reads (two inputs of the target's
      width; EAGLE-3: its attention reads two, and features of three layers are projected once), and an LM head. That of
      EAGLE-3 has at most ``EAGLE3_VOCABULARY`` tokens.
    - P-EAGLE computes ``layers`` layers of the target's shape by one pass, the first of which reads two inputs, over
      the tokens of the step before and a mask row for each further level, and an LM head as EAGLE-3's.
    - A block drafter computes ``layers`` layers of the target's shape over the rows of its block, the projection of
      what it reads, and an LM head. Its keys and values of the step before, and the small products of DSpark's,
      Domino's and DFlash2's heads, are left out.
    - Medusa computes all heads at once: each a layer of H x H and an LM head (2401.10774).
    - Hydra computes a head for each level: a layer that reads the target's state and the embeddings of the drafted
      tokens, on average (levels + 3) / 2 inputs of width H, and an LM head (2402.05109).
    - Lookups compute nothing but take ``lookup`` seconds.

    Args:
        draft: the draft model's shape; None where none was chosen.
        made: makes the forward of some work and number of layers.
        precision: of all weights.
        levels: of the recorded drafts; Medusa has a head for each.
        lookup: seconds of a lookup.
        drafted_share: of the rows of an LM head, those that the drafter computes (a trimmed vocabulary).
        layers: of P-EAGLE or a block drafter; 0: ``LAYERS``.
        rows: of a block; 0: one above each level.

    Raises:
        ValueError: a proposer whose drafting is not modelled, or a draft model that was not chosen.
    """
    kind, hidden, head = kind_of(proposer), target.hidden, round(target.head_weights * drafted_share)
    if kind == "lookup":
        return Drafting(step=ConstantForward(lookup))
    if kind in ("draft model", "parallel draft model"):
        if draft is None:
            raise ValueError("the size of the draft model is required; choose it with --draft MODEL")
        forward = made(draft.work(precision, drafted_share), draft.layers)
    elif kind == "Medusa heads":
        forward = made(work(levels * hidden * hidden, levels * head, (0, 0), precision), 1)
    elif kind == "Hydra heads":
        matrices = round(hidden * hidden * (levels + 3) / 2)
        forward = made(work(matrices, head, (0, 0), precision), 1)
    else:
        count, extra = layers or LAYERS.get(proposer, 1), 2 * hidden * hidden
        if proposer in ("eagle3", "peagle"):
            head = min(head, hidden * EAGLE3_VOCABULARY)
            extra = hidden * target.head_dim * (target.heads + 2 * target.kv_heads)  # of two inputs
        elif kind == "block drafter":
            extra = TAPS * hidden * hidden
        routed = proposer == "mtp" and target.mixture is not None
        experts = target.expert_work(count, precision) if routed else None
        matrices = count * (target.expert_layer_weights() if routed else target.layer_weights) + extra
        forward = made(work(matrices, head, target.attention(count), precision, experts), count)
    return Drafting(forward, *PASSES_OF[kind], rows=rows)


def by_table(
    arm: str, proposer: str, tables: Mapping[str, MeasuredForward], lookup: float = 0.0, rows: int = 0
) -> Drafting:
    """Return how a proposer drafts, by measured forwards: the rows of its arm, else of its name, else of "draft".

    Rows that name another proposer do not count.

    Args:
        tables: measured forwards: a pass of what drafts; of lookups, a step's.
        lookup: seconds of a lookup, in place of measured ones; 0 for these. Lookups that no row measures are taken as
            free, which ``Drafting.assumed`` says.
        rows: of a block.

    Raises:
        ValueError: its drafting is not modelled, or no rows measure it.
    """
    kind = kind_of(proposer)
    named = {model: tables[model] for model in (arm, proposer, "draft") if model in tables and model != "target"}
    fits = {model: forward for model, forward in named.items() if forward.proposer in ("", proposer)}
    wrong = [f"the rows of {model} measure {named[model].proposer}" for model in named if model not in fits]
    if kind == "lookup":
        fits.pop("draft", None)
        if lookup:
            return Drafting(step=ConstantForward(lookup))
        if not fits:
            why = "; ".join([f"no row of --costs measures those of {proposer}", *wrong])
            return Drafting(assumed=f"lookups are taken as free, since {why}; give --lookup-ms, or measure them")
        return Drafting(step=next(iter(fits.values())))
    if not fits:
        why = "; ".join([f"--costs has no rows whose model is {proposer} or draft", *wrong])
        raise ValueError(f"{why}; measure what drafts, too")
    return Drafting(next(iter(fits.values())), *PASSES_OF[kind], rows=rows)


def passes(proposer: str, depth: float) -> float:
    """Return the passes with which a proposer drafts ``depth`` levels; 1 of others whose drafting is not modelled."""
    sequential, _ = PASSES_OF.get(KINDS.get(proposer, ""), (proposer in TARGET_LAYERS, "one"))
    return depth if sequential else 1.0


def kind_of(proposer: str) -> str:
    """Return the kind of a proposer.

    Raises:
        ValueError: its drafting is not modelled.
    """
    if proposer not in KINDS:
        raise ValueError(f"the cost of drafting with {proposer} is not modelled")
    return KINDS[proposer]
