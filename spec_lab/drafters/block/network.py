"""The network of a block drafter: a few decoder layers that fill in a block of mask tokens by one forward.

Sources: DFlash (2602.06036), and DSpark (2607.05147), which adds a Markov head. Letters: H hidden size of the drafter,
H_t of the target, V its vocabulary, k taps (hidden states of the target that are read), b rows of a block, n rows.

With n computed positions, the block is the pending token and b - 1 mask tokens at positions n to n + b - 1. In every
layer its rows attend to each other, and to keys and values made from ``c = hidden_norm(fc([tap_1; ..; tap_k]))`` of all
computed positions. The logits of one row are those of one level, whatever is drafted above it: a product of
distributions. A Markov head adds ``W2 W1[x]`` to them, where x is the token one level above, so that q(x_k | x_{k-1})
is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from spec_lab.drafters.draft_layers import DrafterNetwork, DraftLayers, random_network, rms_norm, small_layer
from spec_lab.models.target import Target


@dataclass(frozen=True)
class BlockSettings:
    """The sizes and kind of a block drafter.

    Args:
        layer: config of the decoder layers, as transformers names its fields.
        hidden_size: H.
        target_hidden_size: H_t.
        vocab_size: V.
        taps: numbers of the hidden states that are read, as in ``runner.Capabilities``.
        block_size: b.
        mask_token: its number; below the size of the embedding.
        layers: number of decoder layers.
        predicts_next: whether row i predicts the token after its own position, as in DSpark, so that the pending
            token's row drafts the first level; False: the token at its position, as in DFlash, from row 1 on.
        markov_rank: of the Markov head; 0 for none.
        embedding: number of tokens of the drafter's own embedding; None: the target's is used.
        own_head: whether the drafter has an LM head of its own.
    """

    layer: Mapping[str, Any]
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    layers: int = 1
    predicts_next: bool = False
    markov_rank: int = 0
    embedding: int | None = None
    own_head: bool = False


class MarkovHead(nn.Module):
    """A bias for the logits that depends on the token before: ``W2 W1[x]``.

    Args:
        vocabulary: V.
        rank: r.
    """

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank, device="meta")
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False, device="meta")

    def forward(self, token: Tensor) -> Tensor:
        """Tokens ``[n]`` -> biases ``[n, V]``."""
        bias: Tensor = self.markov_w2(self.markov_w1(token))
        return bias


class BlockNetwork(DrafterNetwork):
    """The network, without weights until ``draft_layers.load_weights``."""

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings = settings
        h = settings.hidden_size
        self.hidden = settings.taps
        self.body = DraftLayers(settings.layer, settings.layers)
        self.fc = nn.Linear(len(settings.taps) * settings.target_hidden_size, h, bias=False, device="meta")
        self.hidden_norm, self.norm = rms_norm(h, self.body), rms_norm(h, self.body)
        self.embed_tokens: nn.Embedding | None = None
        if settings.embedding is not None:
            self.embed_tokens = nn.Embedding(settings.embedding, h, device="meta")
        self.lm_head: nn.Linear | None = None
        if settings.own_head:
            self.lm_head = nn.Linear(h, settings.vocab_size, bias=False, device="meta")
        self.markov_head = MarkovHead(settings.vocab_size, settings.markov_rank) if settings.markov_rank else None

    @property
    def levels(self) -> int:
        """Maximum number of levels that a block drafts."""
        return self.settings.block_size - (not self.settings.predicts_next)

    def features(self, hidden: Tensor) -> Tensor:
        """The taps ``[n, k * H_t]`` -> c ``[n, H]``."""
        normed: Tensor = self.hidden_norm(self.fc(hidden))
        return normed

    def block(self, token: Tensor) -> Tensor:
        """Pending tokens ``[B]`` -> the inputs of their blocks ``[B, b, H]``."""
        tokens = token.new_full((len(token), self.settings.block_size), self.settings.mask_token)
        tokens[:, 0] = token
        embedding = self.embed_tokens
        return self.services.embed(tokens) if embedding is None else embedding(tokens)

    def forward(self, x: Tensor, positions: Tensor, cache: Any, block: Tensor) -> Tensor:
        """See ``runners.block_lm.BlockLayers``. Rows of features have keys and values only."""
        rotation, hidden = self.body.rotate(x, positions), x[0].index_select(0, block)
        for layer in range(self.layers):
            normed = self.body.layers[layer].input_layernorm(hidden)
            # The layer's attention runs over all rows, whose outputs are used in the block only.
            attended = self.body.attend(layer, x.index_copy(1, block, normed[None]), rotation, cache)
            hidden = self.body.rest(layer, hidden, attended[0].index_select(0, block))
        return hidden

    def logits(self, outputs: Tensor, levels: int) -> Tensor:
        """Outputs of blocks ``[B, b, H]`` -> logits of the first levels ``[B, levels, V]``, without the Markov head."""
        first = int(not self.settings.predicts_next)
        normed = self.norm(outputs[:, first : first + levels])
        logits: Tensor = self.services.lm_head(normed) if self.lm_head is None else self.lm_head(normed)
        return logits

    def toy(self, target: Target, levels: int) -> BlockNetwork:
        """The same kind of network with random weights for a toy target; the last token is the mask token."""
        h, last, settings = target.services.hidden_size, target.lm.capabilities.hidden_layers, self.settings
        settings = replace(
            settings, layer=small_layer(h), hidden_size=h, target_hidden_size=h, vocab_size=target.vocabulary,
            taps=tuple(min(tap, last) for tap in range(len(settings.taps))), mask_token=target.vocabulary - 1,
            block_size=levels + (not settings.predicts_next), markov_rank=min(settings.markov_rank, 2), embedding=None,
            own_head=False,
        )  # fmt: skip
        return random_network(BlockNetwork(settings), target)
