"""Rules by which published code verifies drafts at a temperature above 0, as verifiers of this package.

They are written down after their papers' code, for measuring only: three of them do not sample from the target.
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
from spec_lab.verify import Match, Token, Traversal, Typical, Verdict, Verifier

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


@dataclass(frozen=True)
class HSD(Verifier):
    """Hierarchical speculative decoding on chains: walk back from the last drafted token to where the path ends.

    Source: 2601.05724 and ``utils.py`` of its repository, as read in November 2026. With r_i the product of p / q up to
    token i, a_i = r_i / max(1, r_1, .., r_i), and D+ and D- the sums of (a_i p - q)+ and (q - a_i p)+ after it, the
    path ends at i with probability D+ / max(D+, D-) unless it ended further down, and emits from norm((a_i p - q)+).
    The whole chain is accepted with min(1, r) as published. With a, its capped weight, the rule is block verification
    (2403.10444): D- = D+ + 1 - a_i, so D+ / D- is its S / (S + 1 - a_i).

    Args:
        capped: whether the whole chain is accepted with its capped weight: the repaired rule.
    """

    capped: bool = False
    name: ClassVar[str] = "hsd"
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid"})
    chains_only: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        """Whether it is: repaired only."""
        return self.capped

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return the distribution for ``p`` ``[R, V]``."""
        shape, stop, emit = draft.shape, np.zeros(draft.shape.rows), p.clone()
        if not shape.nodes or draft.q is None or draft.q_row is None:
            return Match()(draft, p)
        for rows in shape.trees:
            ratio, cap, weights = 1.0, 1.0, [1.0]
            for above, row in pairwise(rows.tolist()):
                token = draft.token[row - shape.roots]
                ratio *= float(p[above, token] / draft.q[draft.q_row[above], token])
                cap = max(cap, ratio)
                weights.append(ratio / cap)
            remaining = weights[-1] if self.capped else min(1.0, ratio)
            stop[rows[-1]], remaining = remaining, 1.0 - remaining
            for weight, row in reversed([*zip(weights, rows.tolist(), strict=True)][:-1]):
                difference = weight * p[row] - draft.q[draft.q_row[row]]
                emit[row] = difference.clamp_min(0.0)
                plus, minus = float(emit[row].sum()), float((-difference).clamp_min(0.0).sum())
                here = plus / max(plus, minus) if max(plus, minus) > 0 else 1.0
                stop[row], remaining = remaining * here, remaining * (1.0 - here)
        return Verdict(stop, lambda rows: emit[torch.as_tensor(rows)])


def rules_of_sampled_drafts() -> dict[str, Verifier]:
    """The rules that are compared on sampled chains, by their names in tables."""
    return {
        "token verification": Token(), "block verification": Traversal(), "HSD as published": HSD(),
        "HSD, capped at the end too": HSD(capped=True),
    }  # fmt: skip


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
