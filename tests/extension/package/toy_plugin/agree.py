"""A verifier: draw a token from the target's law, and go down the draft as long as it holds what was drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify import Verdict


@dataclass(frozen=True)
class Agree:
    """Lossless however the draft was made: every token is a sample of the target, the draft only saves forwards."""

    name = "agree"
    accepts = frozenset({"iid", "without", "point"})
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The walk as a law: where it ends with which probability, and what is emitted there, for ``p`` ``[R, V]``."""
        shape = draft.shape
        left = p.clone()  # [R, V]: of each row's law what none of its children holds
        reach = torch.ones_like(p[:, 0])  # [R]: how probably the walk comes by; heads are where it begins
        edges = zip(shape.parent.tolist(), draft.token.tolist(), strict=True)
        for row, (parent, token) in enumerate(edges, start=shape.roots):  # parents come before their children
            reach[row] = reach[parent] * left[parent, token]
            left[parent, token] = 0.0  # so a later child with the same token is never reached
        stop = reach * left.sum(-1)
        return Verdict(stop.double().cpu().numpy(), lambda rows: left[torch.from_numpy(rows).to(p.device)])
