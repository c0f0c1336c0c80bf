"""A verifier for chains: its code reads one child below each row, as papers write the algorithm."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from spec_lab.core.draft import Draft
from spec_lab.verify import Verdict, Verifier


@dataclass(frozen=True)
class Straight(Verifier):
    """Accept a token x with probability min(1, p(x) / q(x)); after a rejection emit from (p - q)+, else from p."""

    name = "straight"
    accepts = frozenset({"iid", "without_replacement", "deterministic"})
    lossless = True
    chains_only = True  # a proposer that drafts trees is refused, and ``certify`` enumerates chains

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """From the root down, for ``p`` ``[R, V]``."""
        shape, left = draft.shape, p.clone()
        stop = torch.ones_like(p[:, 0])  # [R]: the probability that the path reaches a row, and then that it ends there
        for row, (parent, token) in enumerate(zip(shape.parent, draft.token, strict=True), start=shape.roots):
            q = one_hot(token, p.shape[-1]) if draft.q is None else draft.q[draft.q_row[parent]]
            accepted = (p[parent, token] / q[token]).clamp(max=1)
            stop[row], stop[parent] = stop[parent] * accepted, stop[parent] * (1 - accepted)
            left[parent] = (p[parent] - q).clamp(min=0)
        return Verdict(stop.double().cpu().numpy(), lambda rows: left[torch.from_numpy(rows).to(p.device)])
