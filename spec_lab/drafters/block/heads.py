"""Heads that correct the logits of one level of a block by the tokens drafted above it.

A block gives every level a distribution of its own, whatever is drafted above: a product of distributions. With a head
the distribution q(x_k | x_1 .. x_{k-1}) of a level follows from its own path and is known, so a tree drafted with it is
sampled and verified exactly.

Letters: H hidden size of the drafter, V vocabulary, W tokens that are drafted, r rank, S width of the state that a head
carries along a path, n rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class HeadSettings:
    """The sizes and kind of a head.

    Args:
        kind: "vanilla", "gated" or "rnn", the Markov heads of DSpark; "domino"; or "selector", that of DFlash2.
        rank: r.
        state_size: S of Domino's.
        uncorrected: number of levels that Domino's leaves as they are.
        candidates: number of tokens among which the selector chooses.
    """

    kind: MarkovKind | Literal["domino", "selector"]
    rank: int
    state_size: int = 0
    uncorrected: int = 0
    candidates: int = 0

    def toy(self) -> HeadSettings:
        """The same kind of head for a toy."""
        return replace(self, rank=2, state_size=min(self.state_size, 2), candidates=min(self.candidates, 3))


class Above(NamedTuple):
    """Inputs of a head: the path above the children of each row.

    Args:
        token: ``[n]`` of the row, one level above its children.
        embedded: ``[n, H]`` the same token as the layers read it; None of a head that does not read it.
        state: ``[n, S]`` of the row's parent; zeros above the pending token.
        level: ``[n]`` of the row: 0 for the pending token.
    """

    token: Tensor
    embedded: Tensor | None
    state: Tensor
    level: Tensor


class LevelHead(nn.Module, ABC):
    """A head. It has no weights until they are read."""

    state_size = 0
    """S."""
    reads_embedding = False
    """Whether it reads the embeddings of tokens."""
    reads_anchor = False
    """Whether its state passes the pending token's row also where that row drafts no level."""
    token_layers: tuple[str, ...] = ()
    """Names of its layers with a row for each of the W tokens."""

    @abstractmethod
    def forward(self, logits: Tensor, hidden: Tensor, above: Above) -> tuple[Tensor, Tensor]:
        """Logits ``[n, W]`` and normed outputs ``[n, H]`` of rows of the block -> corrected logits, states ``[n, S]``.

        Args:
            logits: of the layers alone; not written to.
            hidden: that these follow from.
            above: the row of the tree whose children are drawn from the logits.
        """


class MarkovHead(LevelHead):
    """Adds a bias that depends on the token before (DSpark 2607.05147): ``W2 f``, where e = W1[token] and f is

    - "vanilla": e;
    - "gated": ``sigmoid(G [h; e]) * e``;
    - "rnn": ``tanh(o)``, where ``[g; c; o] = J [s; e; h]``, and the next s is
      ``sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``.

    Args:
        vocab_size: V.
        draft_vocab_size: W.
        hidden_size: H.
    """

    token_layers = ("markov_w2",)

    def __init__(self, settings: HeadSettings, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        rank, self.kind = settings.rank, settings.kind
        self.reads_anchor = settings.kind == "rnn"
        self.state_size = rank if self.reads_anchor else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank, device="meta")
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False, device="meta")
        if settings.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank, device="meta")
        if settings.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank, device="meta")

    def forward(self, logits: Tensor, hidden: Tensor, above: Above) -> tuple[Tensor, Tensor]:
        """See ``LevelHead``."""
        latent, state = self.markov_w1(above.token), above.state
        if self.kind == "gated":
            latent = latent * self.gate_proj(torch.cat([hidden, latent], -1)).sigmoid()
        elif self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, latent, hidden], -1)).chunk(3, -1)
            gate, latent = gate.sigmoid(), output.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return logits + self.markov_w2(latent), state


class DominoHead(LevelHead):
    """Adds a correction that depends on all tokens above (Domino 2605.29707): ``E2 silu(E1 [h; s])``.

    The state s is that of a GRU without biases, which reads the embeddings of the pending token and of all tokens
    drafted after it. Arguments as in ``MarkovHead``.
    """

    reads_embedding = True
    token_layers = ("widen",)

    def __init__(self, settings: HeadSettings, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        size, self.uncorrected = settings.state_size, settings.uncorrected
        self.state_size = size
        self.gru_input = nn.Linear(hidden_size, 3 * size, bias=False, device="meta")
        self.gru_state = nn.Linear(size, 3 * size, bias=False, device="meta")
        self.narrow = nn.Linear(hidden_size + size, settings.rank, bias=False, device="meta")
        self.widen = nn.Linear(settings.rank, draft_vocab_size, bias=False, device="meta")

    def forward(self, logits: Tensor, hidden: Tensor, above: Above) -> tuple[Tensor, Tensor]:
        """See ``LevelHead``."""
        assert above.embedded is not None
        read, kept = self.gru_input(above.embedded).chunk(3, -1), self.gru_state(above.state).chunk(3, -1)
        reset, update = (read[0] + kept[0]).sigmoid(), (read[1] + kept[1]).sigmoid()
        state = update * above.state + (1 - update) * (read[2] + reset * kept[2]).tanh()
        correction = self.widen(silu(self.narrow(torch.cat([hidden, state], -1))))
        return torch.where((above.level >= self.uncorrected)[:, None], logits + correction, logits), state


class SelectorHead(LevelHead):
    """Leaves the likeliest tokens, and scores each by the token before (DFlash2): ``x_c + <P[token] * W h, Q[c]>``.

    The logits x of all other tokens become -inf. Arguments as in ``MarkovHead``.
    """

    token_layers = ("successor",)

    def __init__(self, settings: HeadSettings, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.candidates = settings.candidates
        self.predecessor = nn.Embedding(vocab_size, settings.rank, device="meta")
        self.successor = nn.Embedding(draft_vocab_size, settings.rank, device="meta")
        self.hidden_projection = nn.Linear(hidden_size, settings.rank, bias=False, device="meta")

    def forward(self, logits: Tensor, hidden: Tensor, above: Above) -> tuple[Tensor, Tensor]:
        """See ``LevelHead``."""
        tokens = logits.topk(min(self.candidates, logits.shape[-1]), -1).indices
        scores = self.scores(logits, hidden, above.token, tokens)
        none = torch.full_like(logits, -torch.inf, dtype=scores.dtype)
        return none.scatter(-1, tokens, scores), above.state

    def scores(self, logits: Tensor, hidden: Tensor, above: Tensor, tokens: Tensor) -> Tensor:
        """The scores ``[n, c]`` of candidates ``[n, c]`` below the tokens ``above`` ``[n]``."""
        read = self.predecessor(above) * self.hidden_projection(hidden)
        return logits.gather(-1, tokens) + (self.successor(tokens) * read[:, None]).sum(-1)


def head_of(settings: HeadSettings, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> LevelHead:
    """The head of these settings, without weights. Arguments as in ``MarkovHead``."""
    kinds: dict[str, type[MarkovHead | DominoHead | SelectorHead]] = {"domino": DominoHead, "selector": SelectorHead}
    return kinds.get(settings.kind, MarkovHead)(settings, vocab_size, draft_vocab_size, hidden_size)
