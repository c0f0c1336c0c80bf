"""FLy: token verification that forgives a rejection where the target is unsure and the draft agrees again after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import Number, Whole, check_fields
from spec_lab.verify.arrays import CHUNK, Array, Arrays, parts, view
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import EVERY_DRAW, TINY, Siblings
from spec_lab.verify.token import Token
from spec_lab.verify.verdict import Verdict, Verifier


@dataclass(frozen=True)
class FLy(Verifier):
    """Rejection sampling on a chain of K tokens; a rejected token x_i is accepted nevertheless, if

    1. the entropy -sum p log p of the three likeliest target tokens, not renormalised, is at least ``threshold``;
    2. p(x_i) > 0;
    3. the next W = min(``window``, K - 1) drafted tokens, at least one, exist and are all accepted by their own tests.

    Source: training-free loosely speculative decoding (2511.22972), in vLLM's form (``rejection_sample_method: fly``).
    With h_i = min(1, p(x_i) / q(x_i)) and independent tests, the path passes i by itself with h_i, and with
    (1 - h_i) h_{i+1} .. h_{i+W} it continues behind the window. A rejection that stays emits from norm((p - q)+).
    Lossy. At temperature 0 p is one-hot, its entropy 0, and this is greedy verification.

    Args:
        window: accepted tokens that must follow; a draft of K tokens has K - 1 at most.
        threshold: of the entropy, in nats.
    """

    window: Annotated[int, Whole(1, 1024)] = 6
    threshold: Annotated[float, Number(0, 10)] = 0.3

    name = "fly"
    accepts = EVERY_DRAW
    chains_only = True
    lossless = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q.
        """
        if not draft.shape.nodes:
            return walk(draft, p)
        siblings, shape = Siblings(draft, p), draft.shape
        arrays, parent, p_token = siblings.arrays, siblings.shape.parent, siblings.p_token()
        native = p_token
        if draft.ways != {"deterministic"}:
            native = arrays.at_most(p_token / arrays.at_least(siblings.q_token(), TINY), 1.0)
        gates = arrays.where(p_token > 0, self.unsure(siblings)[parent], 0.0)
        grid = siblings.shape.grid  # chains are numbered by depth; beyond their ends both are 0
        accept, gate = (siblings.padded(values, 0.0)[grid[:, 1:]] for values in (native, gates))
        stop, length = arrays.full(shape.rows, 0.0), shape.sizes - 1
        for count in np.unique(length).tolist():
            trees = arrays.index(np.flatnonzero(length == count))
            stop[grid[trees, : count + 1]] = self.stops(accept[trees], gate[trees], count, arrays)
        return Verdict(stop, Token()(draft, p).residual)

    def stops(self, accept: Array, gate: Array, count: int, arrays: Arrays) -> Array:
        """Where paths of n chains end, by depth: ``[n, count + 1]``.

        Args:
            accept, gate: ``[n, >= count]`` h, and 1 where a rejection can be forgiven.
            count: drafted tokens of each chain.
            arrays: of the numbers.
        """
        window, stop = max(1, min(self.window, count - 1)), arrays.full((len(accept), count + 1), 0.0)
        reach = arrays.full((len(accept), count + 1), 0.0)
        reach[:, 0] = 1.0
        for depth in range(count):
            rejected = reach[:, depth] * (1.0 - accept[:, depth])
            reach[:, depth + 1] += reach[:, depth] * accept[:, depth]
            if depth + window < count:
                forgiven = rejected * gate[:, depth] * accept[:, depth + 1 : depth + 1 + window].prod(1)
                reach[:, depth + 1 + window] += forgiven
                rejected = rejected - forgiven
            stop[:, depth] = rejected
        stop[:, count] = reach[:, count]
        return stop

    def unsure(self, siblings: Siblings) -> Array:
        """``[R]``: 1 at rows with children where the entropy of the three likeliest tokens reaches the threshold."""
        gate, p = siblings.arrays.full(siblings.shape.rows, 0.0), siblings.p
        for part in parts(len(siblings.shape.expanded), p, CHUNK):
            rows = siblings.shape.expanded[part]
            largest = view(p, rows).topk(min(3, p.shape[-1]), -1).values.double()
            gate[rows] = siblings.arrays.read((torch.special.entr(largest).sum(-1) >= self.threshold).double())
        return gate
