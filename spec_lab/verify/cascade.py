"""Cascade: token verification against a distribution between draft and target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import Share, check_fields
from spec_lab.verify.arrays import CHUNK, parts, view
from spec_lab.verify.siblings import Siblings, check_rows
from spec_lab.verify.token import Token
from spec_lab.verify.verdict import Verdict, Verifier


@dataclass(frozen=True)
class Cascade(Verifier):
    """Speculative cascade: aim at pi = p where the draft defers to the target, at pi = q where it does not.

    Source: 2405.19261 (algorithm 5, table 1). Deferral by rule:

        chow   max q < 1 - alpha
        diff   max q < max p - alpha
        opt    max q < max p - alpha TV(p, q)

    Lossy, and exact against pi (``aim``): the output has the distribution pi as that of ``token`` has p. Two things pi
    needs beyond the paper. A row where nothing was drawn, a leaf, has no q: there pi = p. And q is cut to the tokens
    that p allows, so that a constraint holds for the draft's part as well. Deterministic tokens have no q, so drafts
    with them are not accepted.

    Args:
        alpha: cost of deferring to the target; the larger, the more draft tokens are accepted.
        rule: where the draft defers: max q < 1 - alpha (chow), max p - alpha (diff), max p - alpha TV(p, q) (opt).
    """

    alpha: Share = 0.1
    rule: Literal["chow", "diff", "opt"] = "opt"

    name = "cascade"
    accepts = frozenset({"iid", "without_replacement"})
    accepts_mixed = True
    lossless = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        return Token()(draft, self.aim(draft, p))

    def aim(self, draft: Draft, p: Tensor) -> Tensor:
        """The distribution pi ``[R, V]`` that the output has; dead where ``p`` is.

        Raises:
            ValueError: ``p`` does not fit the forest.
        """
        check_rows(draft, p)
        if not draft.shape.nodes:
            return p
        assert draft.q is not None
        siblings, pi = Siblings(draft, p), p.clone()
        for part in parts(len(siblings.shape.expanded), p, CHUNK):
            rows = siblings.shape.expanded[part]
            p_rows, q_rows = view(p, rows), view(draft.q, siblings.q_row[rows]).to(p.dtype)
            mine = torch.where(self.defers(p_rows, q_rows), p_rows, allowed(q_rows, p_rows))
            pi.index_copy_(0, siblings.arrays.tensor(rows), mine)
        return pi

    def defers(self, p: Tensor, q: Tensor) -> Tensor:  # [n, V], [n, V] -> [n, 1]
        """Whether the draft defers to the target."""
        surest = q.amax(-1, keepdim=True)
        if self.rule == "chow":
            return surest < 1 - self.alpha
        cost: float | Tensor = self.alpha
        if self.rule == "opt":
            cost = self.alpha * (q - p).clamp_min_(0.0).sum(-1, keepdim=True)  # TV
        return surest < p.amax(-1, keepdim=True) - cost


def allowed(q: Tensor, p: Tensor) -> Tensor:
    """The tokens of q that p allows, renormalised, ``[n, V]``; p where none is left, q itself where all are."""
    cut = torch.where(p > 0, q, 0.0)
    mass = cut.sum(-1, keepdim=True)
    has_mass, every = mass > 0, (cut == q).all(-1, keepdim=True)  # dividing by a rounded 1 would reject a little
    return torch.where(has_mass, cut / torch.where(every | ~has_mass, 1.0, mass), p)
