"""The verifier ``my_verifier``."""

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify import Verdict, Verifier


class MyVerifier(Verifier):
    """Draws each token from the target, and follows the draft while it holds the drawn token."""

    name = "my_verifier"
    accepts = frozenset({"iid", "without_replacement", "deterministic"})  # the ways of drawing for which it is correct
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return where the accepted path ends, and what is emitted there, for target probabilities ``p`` ``[R, V]``."""
        shape, left = draft.shape, p.clone()  # [R, V] each row's p without the tokens of its children
        reach = torch.ones_like(p[:, 0])  # [R] the probability that the path reaches a row; it starts at the roots
        edges = zip(shape.parent.tolist(), draft.token.tolist(), strict=True)
        for row, (parent, token) in enumerate(edges, start=shape.roots):  # parents come before their children
            reach[row] = reach[parent] * left[parent, token]
            left[parent, token] = 0.0
        stop = reach * left.sum(-1)
        return Verdict(stop.double().cpu().numpy(), lambda rows: left[torch.from_numpy(rows).to(p.device)])
