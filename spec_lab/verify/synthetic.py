"""Synthetic: accepts drafted tokens at given rates, whatever they are. For times only: the text is invalid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import Share, WrongOption, brief, check_fields
from spec_lab.verify.arrays import Arrays, view
from spec_lab.verify.match import ANY_DRAW
from spec_lab.verify.siblings import check_rows
from spec_lab.verify.verdict import Verdict, Verifier


@dataclass(frozen=True)
class Synthetic(Verifier):
    """Accept the first i drafted tokens with probability r_i, independently of p and q; then emit from p.

    Source: vLLM's synthetic acceptance (``rejection_sample_method: synthetic``): depth i is accepted with r_i / r_{i-1}
    once depth i - 1 is. In a tree the path follows first children. So an engine's speed can be studied apart from a
    drafter's accuracy, and tau is 1 + r_1 + r_2 + .. of drafts that are deep enough. **The text is invalid**: tokens of
    any probability are accepted, also at temperature 0, and the first token's distribution is r_1 TV(p, q) from the
    target's. Runs are marked so, and constraints are refused.

    Args:
        rates: r_1, r_2, ..: the share of steps in which at least 1, 2, .. drafted tokens are accepted; they must not
            rise. Deeper tokens are not accepted.
    """

    rates: Sequence[Share] = (0.8, 0.6, 0.4, 0.3, 0.2)

    name = "synthetic"
    accepts = ANY_DRAW
    accepts_mixed = True
    lossless = False
    invalid_text = True

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))
        if any(later > earlier for earlier, later in zip(self.rates, self.rates[1:], strict=False)):
            raise WrongOption(
                f"rates must not rise, not {brief(list(self.rates))}: each is the share of steps that accept at least "
                "so many tokens"
            )

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step; of ``p`` ``[R, V]`` only the emitted token's row is read.

        Raises:
            ValueError: ``p`` has not one row per row of the forest.
        """
        check_rows(draft, p)
        shape, arrays = draft.shape, Arrays.like(p)
        later = np.concatenate([np.zeros(shape.roots, dtype=bool), shape.rank > 0, [False]])  # -1 is beyond the root
        first = ~later[shape.lineage].any(-1)  # rows whose path from the root has first children only
        reach = np.zeros(max(shape.deepest, len(self.rates)) + 2)
        reach[: len(self.rates) + 1] = (1.0, *self.rates)
        ends = np.where(shape.count > 0, reach[shape.depth + 1], 0.0)
        stop = np.where(first, reach[shape.depth] - ends, 0.0)
        return Verdict(arrays.index(stop), lambda rows: view(p, arrays.index(rows)))
