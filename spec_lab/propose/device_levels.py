"""Trees of known shape, drafted without a look at a token: on a device nothing is copied to the host while they grow.

Everything that the host decides, the cells, masks and positions of all levels and the uniforms of all draws, is known
before the first token is, and is uploaded at once. Tokens stay on the device until the step reads them with the outcome
of their verification (``Draft.late``). The results are those of ``levels.LevelByLevel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Late
from spec_lab.core.probabilities import Sampling, finite, likeliest, logits_to_probs, one_hot_, probs_dtype
from spec_lab.core.randomness import CounterDraws, Key, Purpose, UploadedKeys
from spec_lab.core.shape import Shape
from spec_lab.decode.sequence import Batch, by_row

Compute = Callable[[int, Tensor, Tensor], Tensor]
"""Number of a level, tokens of its rows with children ``[n]``, and for each of them the number ``[n]`` of its parent
among such rows of the level above -> logits ``[n, V]`` of these rows."""


class DeviceLevels:
    """Draws a forest of known shape. Chains may be sampled; siblings are the likeliest tokens.

    Args:
        drawn: "iid", "without_replacement" or "deterministic".
        samplings: ``[B]`` how the drafter samples; without penalties, biases and banned words.

    Attributes:
        arrays: what ``grow`` reads on the device, to be uploaded with the drafter's own.
    """

    def __init__(self, drawn: Drawn, batch: Batch, shape: Shape, samplings: Sequence[Sampling]) -> None:
        self.drawn, self.batch, self.shape, self.samplings = drawn, batch, shape, samplings
        self.one_hot = drawn != "deterministic" and all(sampling.temperature == 0 for sampling in samplings)
        self.greedy = drawn == "deterministic" or self.one_hot
        self.q_row, drawing = np.full(shape.rows, -1, dtype=np.int64), shape.drawing
        if self.one_hot:  # each row has one child at most, of which its q is certain
            self.q_row[shape.parent] = np.arange(shape.nodes)
        elif not self.greedy:
            self.q_row[drawing.rows] = np.arange(len(drawing.rows))
        self.keys: list[list[Key]] = [] if self.greedy else [self._keys(level.ranks[0][0]) for level in shape.levels]
        uniforms = [batch.draws.uniforms(keys) for keys in self.keys] if isinstance(batch.draws, CounterDraws) else []
        self.arrays = [
            drawing.order, np.maximum(self.q_row, 0), shape.root[drawing.rows],
            *drawing.tokens, *drawing.above, *uniforms,
        ]  # fmt: skip

    @staticmethod
    def fits(drawn: Drawn, batch: Batch, branches: bool, samplings: Sequence[Sampling]) -> bool:
        """Whether nothing depends on a token: no constraint, no rule that stops drafts, no number of siblings."""
        chains = drawn == "deterministic" or (drawn in ("iid", "without_replacement") and not branches)
        plain = not any(sampling.penalized for sampling in samplings)
        return chains and plain and batch.draft_masks is None and isinstance(batch.draws, CounterDraws)

    def _keys(self, nodes: np.ndarray) -> list[Key]:
        """Return the keys of nodes: numbers within each one's own tree, whatever the batch holds."""
        of_tree, shape = [sequence.key for sequence in self.batch.sequences], self.shape
        roots: list[int] = shape.root[nodes].tolist()
        numbers = shape.places[nodes].tolist()
        return [Key(*of_tree[root], Purpose.DRAFT, number) for root, number in zip(roots, numbers, strict=True)]

    def grow(
        self, logits: Tensor, compute: Compute, given: Sequence[Tensor], finish: Callable[[np.ndarray], None] | None
    ) -> Draft:
        """Draw the whole forest.

        Args:
            logits: ``[n, V]`` at the roots that have nodes below them, in order.
            compute: computes the rows of further levels.
            given: ``arrays`` on the device.
            finish: see ``Late``.
        """
        shape, levels = self.shape, self.shape.levels
        order, q_row, root, *more = given
        below = len(levels) - 1
        sources, above, uniforms = more[:below], more[below : 2 * below], more[2 * below :]
        every, q, undefined, stated = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for number, level in enumerate(levels):
            if number:
                logits = compute(number, every[-1].index_select(0, sources[number - 1]), above[number - 1])
            scores, without = finite(logits.to(probs_dtype(logits.dtype)))
            undefined.append(torch.zeros_like(scores[:, 0], dtype=torch.bool) if without is None else without)
            if self.greedy:
                tokens = likeliest(scores, len(level.ranks))
                every.append(tokens.view(-1))
                if self.batch.recorded:
                    stated.append(scores.softmax(-1).gather(-1, tokens).view(-1))
                continue
            scores = scores.clone() if scores is logits else scores  # it is written to
            samplings = by_row(self.samplings, shape.root[level.parents])
            q.append(logits_to_probs(scores, samplings, scratch=scores))
            keys: Sequence[Key] = self.keys[number]
            if scores.device.type != "cpu":
                keys = UploadedKeys(keys, uniforms[number])
            every.append(self.batch.draws.pick(q[-1], keys))
        token = torch.cat(every).index_select(0, order)
        broken = torch.zeros(shape.roots, dtype=torch.long, device=token.device)
        late = Late(broken.index_add_(0, root, torch.cat(undefined).long()) > 0, q_row, finish)
        greedy_q = torch.cat(stated).index_select(0, order) if stated else None
        if self.drawn == "deterministic":
            return Draft(shape, token, late=late, greedy_q=greedy_q)
        if self.one_hot:
            one_hot = one_hot_(token, scores.new_empty(shape.nodes, scores.shape[1]))
            return Draft(shape, token, self.drawn, one_hot, self.q_row, one_hot=True, late=late, greedy_q=greedy_q)
        return Draft(shape, token, self.drawn, torch.cat(q), self.q_row, late=late)
