"""The loss of drafters whose draft positions are trained together, at every token of a text.

Column j may read the target's state after its final norm at position j, and the tokens up to t_{j+1}. At draft position
k it may also read t_{j+2} to t_{j+1+k}; it drafts t_{j+2+k}, and is compared with the target's distribution after
t_{j+1+k}. Only tokens that the target wrote are learned.

Letters: B texts, T tokens of the longest, n rows, H hidden size, V vocabulary, X width of what a drafter computes
before its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spec_lab.runners.attention import AttentionKind
from spec_lab.train.attention import full_precision
from spec_lab.train.objectives import (
    ChainLoss,
    Chains,
    ComparedRows,
    Loss,
    Measured,
    Truth,
    Weights,
    chain_loss,
    compare_states,
    mean_losses,
)
from spec_lab.train.recipe import TargetHead
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls, columns_of


class Drafts(Protocol):
    """The computation of a drafter in training."""

    def states(self, text: Texts, hidden: Tensor, embedded: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield for each draft position k, from 0, what the drafter computes, ``[B, n, X]``, and for which columns.

        Column j starts from the hidden state of position j; its logits are compared with the target's distribution
        after token j + 1 + k. The columns are ``[B, n]`` on the host, -1 where a text has fewer. Each column in which a
        token is learned (``text.counts(1)``) must be there; others are ignored.

        Args:
            hidden: ``[B, T, H]`` of the target after its final norm.
            embedded: ``[B, T, H]`` the target's embeddings of the tokens.
        """
        ...

    def logits(self, position: int, states: Tensor) -> Tensor:
        """Some of the states of a draft position ``[n, X]`` -> logits ``[n, V]``."""
        ...


@dataclass(frozen=True, eq=False)
class ChainObjective:
    """The loss of chains of draft positions (``objectives.chain_loss``).

    Args:
        network: in training; its dtype is that of the computation.
        drafts: what it computes.
        target: its embedding and LM head.
        dtype: of the target.
        decay: weight of a draft position's loss over that of the one before it.
        kind: of loss.
        scale: factor of the embeddings.
        deterministic: see ``compare``.
        ids: ``[W]`` the target's number of each token of the draft vocabulary; None: it has all tokens.
        final: H, where the texts' hidden states are more than the last one, after the final norm; None: all of them.
        weights: of the draft positions.
    """

    network: nn.Module
    drafts: Drafts
    target: TargetHead
    dtype: torch.dtype
    decay: float = 1.0
    kind: ChainLoss = "kl"
    scale: float = 1.0
    deterministic: bool = False
    ids: Tensor | None = None
    final: int | None = None
    weights: Weights = "decay"

    def __call__(self, text: Texts) -> tuple[Tensor, list[Measured]]:
        """The loss of texts whose last hidden state is that after the final norm."""
        assert text.hidden is not None
        dtype, device = next(self.network.parameters()).dtype, text.ids.device
        counts = text.counts(1)  # [B, T - 1]: whether the token after each is one to learn from
        number = (counts.flatten().cumsum(0) - 1).view(counts.shape)
        truth = truth_after(text, self.target, self.dtype, self.ids, self.final)
        with torch.no_grad():
            embedded = self.target.embed(text.ids).to(dtype) * self.scale
        learned_states, logits, rows, placed = [], [], [], []
        for position, (states, columns) in enumerate(self.drafts.states(text, text.hidden.to(dtype), embedded)):
            after = columns + 1 + position  # the last column's next token is not in the text
            learned = (columns >= 0) & (after < counts.shape[1])
            learned &= counts.gather(1, after.clamp(0, max(0, counts.shape[1] - 1)))
            row, column = learned.nonzero(as_tuple=True)
            rows.append(number[row, after[row, column]].to(device))
            learned_states.append(states[row.to(device), column.to(device)])
            logits.append(partial(self.drafts.logits, position))
            placed.append((row * counts.shape[1] + columns[row, column]).to(device))
        decay = [self.decay**position for position in range(len(rows))]
        if self.kind != "tau" and self.weights == "decay":  # the weights of rows do not depend on the draft
            loss, compared = mean_losses(
                learned_states, logits, list(self.network.parameters()), truth, rows, decay, self.kind,
                self.deterministic,
            )  # fmt: skip
        else:
            compared = [
                compare_states(*position, self.kind, self.deterministic)
                for position in zip(learned_states, logits, [truth] * len(rows), rows, strict=True)
            ]
            loss = chain_loss(_aligned(compared, placed, counts.numel()), self.kind, self.weights, decay)
        return loss, [compared_rows.measured() for compared_rows in compared]


@torch.no_grad()
def truth_after(
    text: Texts, target: TargetHead, dtype: torch.dtype, ids: Tensor | None = None, final: int | None = None
) -> Truth:
    """Return the target's distribution after each token before one to learn from. See ``ChainObjective``."""
    assert text.hidden is not None
    row, column = (index.to(text.ids.device) for index in text.counts(1).nonzero(as_tuple=True))
    hidden = text.hidden[row, column, -(final or 0) :].to(dtype)
    with full_precision(hidden):
        return Truth.of(hidden, target.lm_head, text.ids[row, column + 1], ids)


def _aligned(compared: Sequence[ComparedRows], placed: Sequence[Tensor], columns: int) -> Chains:
    """The rows of each draft position, with those of one column in one chain.

    Args:
        compared: the rows of each position.
        placed: the number of each row's column.
        columns: in all.
    """

    def filled(name: str) -> Tensor:
        given = [getattr(rows, name) for rows in compared]
        return torch.stack(
            [values.new_zeros(columns).index_put((at,), values) for values, at in zip(given, placed, strict=True)], 1
        )

    present = torch.stack([torch.zeros(columns, device=at.device).index_fill(0, at, 1) for at in placed], 1)
    return Chains(filled("loss"), filled("alpha"), filled("true"), filled("learned"), present)


@dataclass(frozen=True, eq=False)
class Unrolled:
    """See ``Drafts``: what an unroll of a recurrent network returns stands in for the target's states in the next one.

    Args:
        network: called with inputs, positions and KV cache. See ``unroll`` for attention and positions.
        mix: embeddings and the states before them -> inputs.
        lm_head: what the network returns -> logits.
        unrolls: how many tokens are drafted.
        features: the target's states -> those that the first unroll reads.
        kinds: of attention, by layer; layers left out are FULL.
        kept: to which columns of texts each unroll is limited (``unroll.columns_of``).
    """

    network: Callable[[Tensor, Tensor, Any], Tensor]
    mix: Callable[[Tensor, Tensor], Tensor]
    lm_head: Callable[[Tensor], Tensor]
    unrolls: int
    features: Callable[[Tensor], Tensor] = lambda hidden: hidden
    kinds: Mapping[int, AttentionKind] = field(default_factory=dict)
    kept: Callable[[Texts], Sequence[Tensor]] = lambda text: ()

    def states(self, text: Texts, hidden: Tensor, embedded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what each unroll returns, ``[B, n, X]``, and its columns."""
        cache, feature = Unrolls(self.kinds), self.features(hidden[:, :-1])
        for unroll, columns in enumerate(columns_of(text.counts(1), self.unrolls, self.kept(text))):
            (feature,) = cache.narrowed(columns, feature)
            if columns.numel():
                after = (columns.clamp_min(0) + unroll).to(feature.device)
                tokens = embedded.gather(1, (after + 1)[..., None].expand(-1, -1, embedded.shape[-1]))
                feature = self.network(self.mix(tokens, feature), after, cache)
            yield feature, columns

    def logits(self, position: int, states: Tensor) -> Tensor:
        """``[n, X] -> [n, V]``."""
        return self.lm_head(states)


@dataclass(frozen=True, eq=False)
class AlikeObjective:
    """The loss after each token before one that the target wrote. It is the same at all draft positions.

    Args:
        network: in training.
        states: what it computes of texts, ``[B, T - 1, X]``.
        logits: ``[n, X] -> [n, V]``.
        target: its LM head.
        dtype: of the target.
        depth: draft positions.
        kind: of loss.
        final: H, where the texts' hidden states are more than the last one, after the final norm; None: all of them.
    """

    network: nn.Module
    states: Callable[[Texts], Tensor]
    logits: Callable[[Tensor], Tensor]
    target: TargetHead
    dtype: torch.dtype
    depth: int
    kind: Loss = "kl"
    final: int | None = None

    def __call__(self, text: Texts) -> tuple[Tensor, list[Measured]]:
        """The loss of texts, and what ``depth`` draft positions achieve that are all alike."""
        truth = truth_after(text, self.target, self.dtype, final=self.final)
        row, column = (index.to(text.ids.device) for index in text.counts(1).nonzero(as_tuple=True))
        rows = torch.arange(len(row), device=text.ids.device)
        loss, (compared,) = mean_losses(
            [self.states(text)[row, column]], [self.logits], list(self.network.parameters()), truth, [rows], [1.0],
            self.kind,
        )  # fmt: skip
        return loss, [compared.measured()] * self.depth
