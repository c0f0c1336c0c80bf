"""Token verification against a distribution between draft and target."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify.arrays import CHUNK, parts, view
from spec_lab.verify.siblings import Siblings, check_rows
from spec_lab.verify.token import Token
from spec_lab.verify.verdict import Verdict, Verifier


class Aimed(Verifier):
    """Exact against pi (``aim``), a mixture of p and q: the output has the distribution pi as that of ``token`` has p.

    A row where nothing was drawn, a leaf, has no q: there pi = p. And q is cut to the tokens that p allows, so that
    constraints, top-k, top-p and min-p hold for the draft's part as well (at temperature 0 nothing but p is left).
    Deterministic tokens have no q, so drafts with them are not accepted.
    """

    accepts = frozenset({"iid", "without_replacement"})
    accepts_mixed = True

    @abstractmethod
    def mix(self, p: Tensor, q: Tensor) -> Tensor:
        """Return pi of rows with children, given p and q, all ``[n, V]``."""

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
            mine = self.mix(view(p, rows), view(draft.q, siblings.q_row[rows]).to(p.dtype))
            pi.index_copy_(0, siblings.arrays.tensor(rows), mine)
        return pi


def allowed(q: Tensor, p: Tensor) -> Tensor:
    """The tokens of q that p allows, renormalised, ``[n, V]``; p where none is left, q itself where all are."""
    cut = torch.where(p > 0, q, 0.0)
    mass = cut.sum(-1, keepdim=True)
    has_mass, every = mass > 0, (cut == q).all(-1, keepdim=True)  # dividing by a rounded 1 would reject a little
    return torch.where(has_mass, cut / torch.where(every | ~has_mass, 1.0, mass), p)
