"""Rules by which published code verifies deterministic drafts at a temperature above 0, as verifiers of this package.

They are written down after their papers' code, for measuring only: two of them do not sample from the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.shape import Shape
from spec_lab.verify import Match, Token, Typical, Verdict, Verifier

DETERMINISTIC: frozenset[Drawn] = frozenset({"deterministic"})


@dataclass(frozen=True)
class SampledPaths(Verifier):
    """Draw a token at every node of every path, and accept the longest beginning of a path that equals its draws.

    Source: nucleus sampling in the code of Medusa, and after it in REST's (``get_nucleus_posterior_mask``, then the
    next step's first token). A node that several paths share is drawn once for each of them, and the token after the
    accepted nodes is drawn again in place of the one that differed: both favour drafted tokens. (Paths shorter than the
    longest are padded with token 0 there, which is left out here.)
    """

    name: ClassVar[str] = "sampled_paths"
    accepts: ClassVar[frozenset[Drawn]] = DETERMINISTIC
    lossless: ClassVar[bool] = False

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return the distribution for ``p`` ``[R, V]``."""
        shape, stop = draft.shape, np.zeros(draft.shape.rows)
        token = draft.token.tolist()
        for root in range(shape.roots):
            rows = [row for row in range(shape.rows) if shape.root[row] == root]
            paths = [[root, *map(int, shape.path(row))] for row in rows if not len(shape.children[row])]
            # ends[l][k]: probability that k nodes of path l equal its draws, and not k + 1
            ends = []
            for path in paths:
                right = [float(p[above, token[row - shape.roots]]) for above, row in pairwise(path)]
                reach = np.cumprod([1.0, *right])
                ends.append(reach - np.append(reach[1:], 0.0))
            for number, path in enumerate(paths):
                for length, row in enumerate(path):  # the first of the longest is taken
                    before = np.prod([end[:length].sum() for end in ends[:number]])
                    after = np.prod([end[: length + 1].sum() for end in ends[number + 1 :]])
                    stop[row] += ends[number][length] * before * after
        return Verdict(stop, lambda rows: p[torch.as_tensor(rows)])


@dataclass(frozen=True)
class PlainBonus(Verifier):
    """Rejection sampling with q = 1, as is correct, but the token after a fully accepted path follows the raw logits.

    Source: ``evaluate_posterior`` in the code of EAGLE and SWIFT, without the temperature where no token of the last
    row was rejected.

    Args:
        temperature: of p, above 0; there must be no other change of the logits.
    """

    temperature: float = 1.0
    name: ClassVar[str] = "plain_bonus"
    accepts: ClassVar[frozenset[Drawn]] = DETERMINISTIC
    lossless: ClassVar[bool] = False

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return the distribution for ``p`` ``[R, V]``."""
        inner = Match()(draft, p)
        bonus = np.array([not len(children) for children in draft.shape.children])

        def residual(rows: np.ndarray) -> Tensor:
            raw = p[torch.as_tensor(rows)] ** self.temperature
            whole = raw / raw.sum(-1, keepdim=True)
            return torch.where(torch.from_numpy(bonus[rows])[:, None], whole, inner.residual(rows))

        return Verdict(inner.stop, residual)


def next_tokens(verdict: Verdict, shape: Shape, token: Sequence[int], root: int, vocabulary: int) -> np.ndarray:  # [V]
    """The distribution of the first token that a step emits below a root."""
    next_p = np.zeros(vocabulary)
    for row in range(shape.rows):
        if row != root and shape.root[row] == root:
            next_p[token[shape.path(row)[0] - shape.roots]] += verdict.stop[row]
    residual = verdict.residual(np.array([root]))[0].double().numpy()
    return next_p + verdict.stop[root] * (residual / residual.sum() if residual.sum() > 0 else residual)


def last_tokens(verdict: Verdict, row: int) -> np.ndarray:  # [V]
    """The distribution of the token that is emitted when the accepted path ends at a row."""
    residual = verdict.residual(np.array([row]))[0].double().numpy()
    return np.asarray(residual / residual.sum())


def rules(temperature: float) -> dict[str, Verifier]:
    """The rules that are compared, by their names in tables."""
    return {
        "token verification": Token(), "sample and match": Match(), "typical acceptance": Typical(),
        "paths drawn apart": SampledPaths(), "bonus from raw logits": PlainBonus(temperature),
    }  # fmt: skip
