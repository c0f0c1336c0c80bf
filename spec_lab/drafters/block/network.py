"""The network of a block drafter: a few decoder layers that fill in a block of mask tokens by one forward.

Sources: DFlash (2602.06036); DSpark (2607.05147), Domino (2605.29707) and DFlash2 (inco.ai/blog/dflash2), which add
heads. Letters: H hidden size of the drafter, H_t of the target, V its vocabulary, W tokens that are drafted, k taps
(hidden states of the target that are read), b rows of a block, n rows.

With n computed positions, the block is the pending token and b - 1 mask tokens at positions n to n + b - 1. In every
layer its rows attend to each other, and to keys and values made from ``c = hidden_norm(fc([tap_1; ..; tap_k]))`` of all
computed positions. The logits of one row are those of one level, whatever is drafted above it: a product of
distributions. A head (``block.heads``) corrects them by the tokens above, so that q(x_k | x_1 .. x_{k-1}) is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spec_lab.drafters.block.convolution import GroupedDynamicConvolution
from spec_lab.drafters.block.heads import Above, HeadSettings, LevelHead, MarkovHead, SelectorHead, head_of
from spec_lab.drafters.draft_layers import (
    DraftLayers,
    TapNetwork,
    random_network,
    rms_norm,
    small_layer,
)
from spec_lab.models.target import Target
from spec_lab.runners.attention import FULL, AttentionKind


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
        head: that corrects the logits of a level by the tokens above it; None: a product of distributions.
        confidence: width of what the confidence head reads: H, or H + r with the Markov head's embedding of the token
            above; 0: there is none.
        embedding: number of tokens of the drafter's own embedding; None: the target's is used.
        draft_vocab_size: W, of the drafter's own LM head; None: the target's is used.
        embedding_scale: factor of embeddings.
        logit_scale: factor of logits.
        conv_taps: k of the convolutions of each layer (``block.convolution``); 0: it has none.
        conv_group: number of channels that share a kernel.
        windows, anchored: of each layer (``DraftLayers``).
        positions: by how many rotary positions the first row of a block comes after the last computed position.
        causal: of each layer, whether the rows of a block attend to rows before them only; empty: none of them.
        logit_cap: c, logits x become ``c tanh(x / c)`` after that; 0: they do not.
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
    head: HeadSettings | None = None
    confidence: int = 0
    embedding: int | None = None
    draft_vocab_size: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    conv_taps: int = 0
    conv_group: int = 1
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    anchored: bool = False
    positions: int = 1


class BlockRows(NamedTuple):
    """Outputs of the layers for the levels of A blocks of L levels each, block by block.

    Args:
        hidden: ``[A * L, H]`` normed outputs of the rows that draft.
        logits: ``[A * L, W]`` that follow from them.
        state: ``[A, S]`` of the head above each pending token.
    """

    hidden: Tensor
    logits: Tensor
    state: Tensor


class BlockNetwork(TapNetwork):
    """The network, without weights until ``draft_layers.load_weights``."""

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings = settings
        h = settings.hidden_size
        self.hidden = settings.taps
        self.body = DraftLayers(settings.layer, settings.layers, windows=settings.windows, anchored=settings.anchored)
        self.fc = nn.Linear(len(settings.taps) * settings.target_hidden_size, h, bias=False, device="meta")
        self.hidden_norm, self.norm = rms_norm(h, self.body), rms_norm(h, self.body)
        self.embed_tokens: nn.Embedding | None = None
        if settings.embedding is not None:
            self.embed_tokens = nn.Embedding(settings.embedding, h, device="meta")
        if settings.draft_vocab_size is not None:
            self.lm_head = nn.Linear(h, settings.draft_vocab_size, bias=False, device="meta")
            self.ids = torch.arange(settings.draft_vocab_size)
        self.head: LevelHead | None = None
        if settings.head is not None:
            drafted = settings.draft_vocab_size or settings.vocab_size
            self.head = head_of(settings.head, settings.vocab_size, drafted, h)
        self.convolutions: nn.ModuleList | None = None
        if settings.conv_taps:
            sizes = h, settings.conv_taps, settings.conv_group
            names = ("attention_conv", "mlp_conv")
            self.convolutions = nn.ModuleList(
                nn.ModuleDict({name: GroupedDynamicConvolution(*sizes) for name in names}) for _ in range(self.layers)
            )
        self.confidence_head = nn.Linear(settings.confidence, 1, device="meta") if settings.confidence else None

    @property
    def levels(self) -> int:
        """Maximum number of levels that a block drafts."""
        return self.settings.block_size - (not self.settings.predicts_next)

    @property
    def tokens(self) -> int:
        """Maximum number of tokens that have a probability in a level."""
        drafted = super().tokens
        return min(self.head.candidates, drafted) if isinstance(self.head, SelectorHead) else drafted

    @property
    def token_layers(self) -> list[tuple[nn.Module, str]]:
        """See ``DrafterNetwork``."""
        return [] if self.head is None else [(self.head, name) for name in self.head.token_layers]

    @property
    def kinds(self) -> dict[int, AttentionKind]:
        """Kinds of attention, by layer, without layers in which blocks attend to all before them and to themselves."""
        causal = self.settings.causal or (False,) * self.layers
        anchored = self.body.anchored
        kinds = [
            AttentionKind(window, causal=flag, anchored=anchored and window is not None)
            for window, flag in zip(self.body.windows, causal, strict=True)
        ]
        return {layer: kind for layer, kind in enumerate(kinds) if kind != FULL}

    def features(self, hidden: Tensor) -> Tensor:
        """The taps ``[n, k * H_t]`` -> c ``[n, H]``."""
        normed: Tensor = self.hidden_norm(self.fc(hidden))
        return normed

    def embed(self, token: Tensor) -> Tensor:
        """Tokens ``[..]`` -> what the layers read of them ``[.., H]``."""
        embedding = self.embed_tokens
        embedded = self.services.embed(token) if embedding is None else embedding(token)
        scale = self.settings.embedding_scale
        scaled: Tensor = embedded if scale == 1 else embedded * scale
        return scaled

    def block(self, token: Tensor) -> Tensor:
        """Pending tokens ``[B]`` -> the inputs of their blocks ``[B, b, H]``."""
        tokens = token.new_full((len(token), self.settings.block_size), self.settings.mask_token)
        tokens[:, 0] = token
        return self.embed(tokens)

    def forward(self, x: Tensor, positions: Tensor, cache: Any, block: Tensor) -> Tensor:
        """See ``runners.block_lm.BlockLayers``. Rows of features have keys and values only."""
        rotation, hidden = self.body.rotate(x, positions), x[0].index_select(0, block)
        for layer in range(self.layers):
            attend = partial(self._attend, layer, x=x, rotation=rotation, cache=cache, block=block)
            decoder_layer, convolved = self.body.layers[layer], self._convolutions(layer)
            normed = decoder_layer.input_layernorm(hidden)
            if convolved is None or not len(block):
                hidden = self.body.rest(layer, hidden, attend(normed))
                continue
            size = (-1, self.settings.block_size)
            hidden = hidden + convolved["attention_conv"](normed.unflatten(0, size), attend).flatten(0, 1)
            normed = decoder_layer.post_attention_layernorm(hidden).unflatten(0, size)
            hidden = hidden + convolved["mlp_conv"](normed, decoder_layer.mlp).flatten(0, 1)
        return hidden

    def _attend(
        self, layer: int, rows: Tensor, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, block: Tensor
    ) -> Tensor:
        """Attention of the blocks' rows ``[.., H]``. It runs over all rows, whose outputs are used in blocks only."""
        whole = x.index_copy(1, block, rows.reshape(1, -1, rows.shape[-1]))
        return self.body.attend(layer, whole, rotation, cache)[0].index_select(0, block).view_as(rows)

    def _convolutions(self, layer: int) -> Any:
        return None if self.convolutions is None else self.convolutions[layer]

    def logits(self, normed: Tensor) -> Tensor:
        """Normed outputs ``[.., H]`` -> logits ``[.., W]`` of the layers alone."""
        logits = self.row_logits(normed)
        scale, cap = self.settings.logit_scale, self.settings.logit_cap
        if scale != 1:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    def rows(self, outputs: Tensor, pending: Tensor, levels: int) -> BlockRows:
        """Prepare what ``drafted`` reads.

        Args:
            outputs: ``[A, b, H]`` of the blocks.
            pending: ``[A]`` the token of each.
            levels: L, how many levels are drafted at most.
        """
        first, head = int(not self.settings.predicts_next), self.head
        hidden = self.norm(outputs[:, first : first + levels]).flatten(0, 1)
        state = outputs.new_zeros(len(outputs), 0 if head is None else head.state_size)
        if head is not None and head.reads_anchor and first:
            anchor = self.norm(outputs[:, 0])
            _, state = head(self.logits(anchor), anchor, self._above(pending, state, torch.zeros_like(pending)))
        return BlockRows(hidden, self.logits(hidden), state)

    def drafted(
        self, rows: BlockRows, number: Tensor, token: Tensor, level: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Correct the logits of some rows by the path above them.

        Args:
            rows: of the blocks.
            number: ``[n]`` of the row among ``rows``.
            token: ``[n]`` one level above; not read without a head, nor are the next two.
            level: ``[n]`` of that token: 0 for the pending token.
            state: ``[n, S]`` of the head above that token.

        Returns:
            Logits ``[n, V]``, and the states ``[n, S]`` below that token.
        """
        logits, state = self.corrected(rows, number, token, level, state)
        return self.token_logits(logits), state

    def corrected(
        self, rows: BlockRows, number: Tensor, token: Tensor, level: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``drafted``, but logits ``[n, W]``."""
        logits = rows.logits.index_select(0, number)
        if self.head is None:
            return logits, state
        corrected: tuple[Tensor, Tensor] = self.head(
            logits, rows.hidden.index_select(0, number), self._above(token, state, level)
        )
        return corrected

    def confidence(self, hidden: Tensor, token: Tensor) -> Tensor:
        """The predicted probability ``[n]`` that a level's token is accepted if all above it are (DSpark 2607.05147).

        Arguments as in ``confidence_logits``.
        """
        return self.confidence_logits(hidden, token).sigmoid()

    def confidence_logits(self, hidden: Tensor, token: Tensor) -> Tensor:
        """The logits ``[n]`` of ``confidence``.

        Args:
            hidden: ``[n, H]`` normed outputs of the rows that draft the level.
            token: ``[n]`` one level above.
        """
        assert self.confidence_head is not None, "the drafter has no confidence head"
        if self.confidence_head.in_features > hidden.shape[-1]:
            assert isinstance(self.head, MarkovHead)
            hidden = torch.cat([hidden, self.head.markov_w1(token)], -1)
        logits: Tensor = self.confidence_head(hidden)[:, 0]
        return logits

    def _above(self, token: Tensor, state: Tensor, level: Tensor) -> Above:
        assert self.head is not None
        return Above(token, self.embed(token).to(state.dtype) if self.head.reads_embedding else None, state, level)

    def toy(self, target: Target, levels: int) -> BlockNetwork:
        """The same kind of network with random weights for a toy target; the last token is the mask token."""
        h, last, settings = target.services.hidden_size, target.lm.capabilities.hidden_layers, self.settings
        settings = replace(
            settings, layer=small_layer(h), hidden_size=h, target_hidden_size=h, vocab_size=target.vocabulary,
            taps=tuple(min(tap, last) for tap in range(len(settings.taps))), mask_token=target.vocabulary - 1,
            block_size=levels + (not settings.predicts_next), embedding=None, confidence=0,
            draft_vocab_size=settings.draft_vocab_size and target.vocabulary - 1, conv_group=1,
            windows=tuple(window and 2 for window in settings.windows),
            head=None if settings.head is None else settings.head.toy(),
        )  # fmt: skip
        return self.trimmed_like(random_network(BlockNetwork(settings), target))
