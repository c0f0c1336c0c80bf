"""A verifier: draw tokens from the target distribution, and descend the draft while it holds the drawn token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify import Verdict, Verifier


@dataclass(frozen=True)
class Agree(Verifier):
    """Lossless however the draft was made: every token is a sample of the target, the draft only saves forwards."""

    name = "agree"
    accepts = frozenset({"iid", "without_replacement", "deterministic"})
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of the walk: where it ends, and what is emitted there, for ``p`` ``[R, V]``."""
        shape = draft.shape
        left = p.clone()  # [R, V]: each row's p without its children's tokens
        reach = torch.ones_like(p[:, 0])  # [R]: the probability that the walk reaches a row; it starts at the roots
        edges = zip(shape.parent.tolist(), draft.token.tolist(), strict=True)
        for row, (parent, token) in enumerate(edges, start=shape.roots):  # parents come before their children
            reach[row] = reach[parent] * left[parent, token]
            left[parent, token] = 0.0  # so a later child with the same token is never reached
        stop = reach * left.sum(-1)
        return Verdict(stop.double().cpu().numpy(), lambda rows: left[torch.from_numpy(rows).to(p.device)])
