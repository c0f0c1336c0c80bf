"""Drafting while the target verifies: a step takes the maximum of both times in place of their sum.

What is drafted meanwhile continues outcomes of the step that are foreseen. Where the outcome is one of them (a hit) the
next draft is there at once; its share of the recorded steps is the hit rate.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.projection.acceptance import Acceptance, RecordedDesign
from spec_lab.analysis.projection.costs import ForwardCost, mean_seconds
from spec_lab.analysis.projection.drafting import KINDS, Drafting
from spec_lab.decode.recording import unpack_ids
from spec_lab.results.writer import load_replay

AHEAD = ("draft model", "parallel draft model", "lookup")
"""Kinds of proposers that can draft while the target verifies; others read hidden states of that forward."""

READS = {"pld_plus": "hidden states", "recycling": "the likeliest tokens"}
"""Lookups that cannot, and what they read of that forward."""

KEY = ["request", "sequence", "forward"]


@dataclass(frozen=True)
class Overlap:
    """A way to overlap drafting with verification, on devices that do not slow each other down.

    Args:
        outcomes: 0: PEARL (2408.11850). Else SSD (2603.03251) with so many foreseen tokens after each row of a draft.
    """

    outcomes: int = 0

    @staticmethod
    def parse(text: str) -> Overlap:
        """Return what ``--overlap`` names.

        Raises:
            ValueError: it is neither ``pearl`` nor ``ssd:N``.
        """
        if text == "pearl":
            return Overlap()
        if match := re.fullmatch(r"ssd:([1-9]\d{0,3})", text, re.ASCII):
            return Overlap(int(match[1]))
        raise ValueError(
            f"--overlap must be pearl, or ssd:N with N foreseen tokens after each row, such as ssd:4 (got {text})"
        )

    def tokens(self, acceptance: Acceptance, length: int) -> np.ndarray:  # [R]
        """Return the tokens of a step with drafts of ``length`` tokens.

        A draft that PEARL accepts whole has no bonus token: the first token of the next draft stands in its place.
        """
        tau = acceptance.tau(length)
        return tau if self.outcomes else tau - acceptance.hit_rate(length)

    def seconds(
        self,
        acceptance: Acceptance,
        length: int,
        target: ForwardCost,
        drafting: Drafting,
        batch: np.ndarray,
        context: float,
    ) -> np.ndarray:  # [R]
        """Return the mean seconds of a step, or of PEARL's draft; arguments as in ``project.speedup``.

        With h the hit rate, t the target's seconds, d those of drafting, n the length, and B sequences in step:

        - PEARL drafts the next tokens in every forward of the target. A draft's first token is verified by the forward
          beside which it is drafted, so that a draft takes a forward of its own, over its n tokens, only if that token
          is accepted (a_1); and a forward of one row is spent after each draft that is not accepted whole:
          a_1 max(t(n), d) + (1 - h) max(t(1), d).
        - SSD drafts after each foreseen outcome, of N (n + 1), while the target verifies; if the outcome of any
          sequence is another, it is drafted from there: max(t(1 + n), d') + (1 - h^B) d.
        """
        hit, rows = acceptance.hit_rate(length), acceptance.nodes(length)
        if not self.outcomes:
            assert acceptance.accepting is not None
            beside = _Beside(target, drafting.seconds(acceptance, length, batch, context))
            share = np.hstack([1.0 - hit[:, None], acceptance.accepting])
            return mean_seconds(beside, np.append(1.0, np.maximum(rows, 1.0)), share, batch, context)
        ahead = drafting.ahead(length, self.outcomes * (length + 1), batch, context)
        verified = mean_seconds(_Beside(target, ahead), 1.0 + rows, acceptance.share, batch, context)
        any_missed = 1.0 - hit**batch
        missed = np.clip(batch * (1.0 - hit) / np.where(any_missed > 0, any_missed, 1.0), 1.0, batch)
        return verified + any_missed * drafting.seconds(acceptance, length, missed, context)

    def of_design(self, design: RecordedDesign, steps: pd.DataFrame, folder: Path) -> RecordedDesign:
        """Return a design with the hit rate of its recorded steps; ``left_out`` says why one cannot overlap.

        Raises:
            ValueError: a damaged table of recorded distributions.
            OSError: it cannot be read.
        """
        ahead = KINDS.get(design.proposer, AHEAD[0]) in AHEAD
        if reads := READS.get(design.proposer, "" if ahead else "hidden states"):
            why = f"{design.proposer} drafts from {reads} of the forward that it would overlap with"
            return replace(design, left_out=why)
        if design.hits is None:
            return replace(design, left_out="overlapped drafting is modelled of chains, and these are trees")
        if not self.outcomes:
            return design
        if not design.any_length or design.depth < 2:
            why = design.why_not or "drafts have one token, and what follows the last one was not recorded"
            return replace(design, left_out=f"--overlap ssd cuts drafts by one token: {why}")
        rows = load_replay(folder)
        rows = rows[(rows["arm"] == design.arm) & ~rows["prefill"].astype(bool)]
        if not rows["q"].map(len).any() or "emitted_tokens" not in steps:
            why = "--overlap ssd reads draft probabilities, and none were recorded: run with record=replay"
            return replace(design, left_out=f"{why}, and proposer.drawn=iid if drafts are not sampled")
        hits = foreseen(steps, rows, self.outcomes, design.depth - 1)
        requests, number = np.unique(steps["request"].to_numpy(), return_inverse=True)
        summed = np.zeros((len(requests), hits.shape[1]))
        np.add.at(summed, number, hits)
        return replace(design, drafts=design.drafts[:, :-1], accepted=design.accepted[:, :-1], hits=summed)


def foreseen(steps: pd.DataFrame, rows: pd.DataFrame, outcomes: int, levels: int) -> np.ndarray:  # [N, K] bool
    """Return whether the outcome of each step of chains, cut to 1 .. K tokens, is among the foreseen ones.

    After the accepted tokens these are the ``outcomes`` tokens of the largest draft probabilities, without the drafted
    token that was rejected. Where a chain has ended before its cut, the probabilities after its last token were not
    recorded, and nothing counts as foreseen.

    Args:
        steps: N decode steps with their emitted tokens.
        rows: of the table ``replay``, of the same arm.
        outcomes: foreseen tokens after each row.
        levels: K.

    Raises:
        ValueError: a step whose distributions were not recorded.
    """
    known: dict[Hashable, pd.DataFrame] = {key: rows_of.set_index("row") for key, rows_of in rows.groupby(KEY)}
    hits = np.zeros((len(steps), levels), dtype=bool)
    for number, step in enumerate(steps.itertuples()):
        if not step.depth:
            continue
        recorded = known.get((step.request, step.sequence, step.forward))
        if recorded is None:
            raise ValueError("--overlap ssd requires the distributions of every step: run with record_share=1")
        emitted, accepted = np.asarray(step.emitted_tokens), int(step.accepted)
        for level in range(1, levels + 1):
            last = min(accepted, level)
            if last < len(emitted):
                rejected = accepted < min(level, int(step.depth))
                token = recorded["token"].loc[last + 1] if rejected else -1
                hits[number, level - 1] = _rank(recorded.loc[last], int(emitted[last]), int(token)) < outcomes
    return hits


def _rank(row: Any, token: int, without: int) -> float:
    """Return how many tokens are foreseen before a token: those of a larger q, and of an equal one with a smaller id.

    One token is left out. It is infinite where the token's q is not known, or no larger than that of a token that was
    not recorded.
    """
    q = np.frombuffer(row["q"], dtype="<f4")
    ids = (unpack_ids(row["ids"]) if len(row["ids"]) else np.arange(len(q)))[: len(q)]
    mine = q[ids == token]
    if not len(mine) or mine[0] <= 0 or row["q_most"] >= mine[0]:
        return float("inf")
    before = (q > mine[0]) | ((q == mine[0]) & (ids < token))
    return float((before & (ids != without)).sum())


@dataclass(frozen=True)
class _Beside:
    """A forward beside which something else is computed: it takes the longer of both times.

    Args:
        other: ``[R]`` seconds.
    """

    forward: ForwardCost
    other: np.ndarray

    def seconds(self, rows: Any, batch: Any, context: Any) -> np.ndarray:
        """See ``ForwardCost``."""
        return np.maximum(self.forward.seconds(rows, batch, context), self.other[:, None])
