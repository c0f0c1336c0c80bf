"""The recipes of block drafters: DFlash, DSpark, Domino and DFlash2.

Sources: DFlash (2602.06036), DSpark (2607.05147, DeepSpec), Domino (2605.29707), DFlash2 (inco.ai/blog/dflash2). Blocks
begin at some positions of a text, the anchors, and all of them are computed by one forward: the rows of a block attend
to the features of the positions before its anchor, and to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from spec_lab.core.options import Count, Number, Share, Whole
from spec_lab.drafters.block.heads import HeadSettings, SelectorHead
from spec_lab.drafters.block.layout import Kind
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.block.texts import BlockTexts, draw_anchors
from spec_lab.drafters.block.write import write_block
from spec_lab.drafters.draft_layers import random_network
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import truth_after
from spec_lab.train.objectives import ChainLoss, Chains, Measured, Truth, Weights, chain_loss, compare
from spec_lab.train.pieces import again, joined, rows_at_once, summed
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, layer_of
from spec_lab.train.texts import Texts, frequent

Positive = Annotated[float, Number(0)]
ZERO = ("head.markov_w2.weight", "head.widen.weight", "head.successor.weight", "kernel_projection.weight")
"""Weights that are zero at first, so that heads and convolutions change nothing."""


@dataclass(frozen=True)
class BlockRecipe(Recipe):
    """A block drafter of Llama layers, which drafts with the target's embedding and LM head.

    Args:
        kind: "dflash", "dspark", "dflash2" or "domino".
        block_size: b, rows of a block, the pending token's among them.
        predicts_next: whether row i drafts the token after its position, so that b levels are drafted; else b - 1.
        layers: decoder layers.
        anchors: blocks of a text, at most.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk", "ce" (of the texts' own tokens)
            or "tau" (-E[tau]); see ``train.objectives``.
        l1: l, share of the L1 distance of p and q in the loss, ``(1 - l) loss + l |p - q|``.
        decay: weight of a level's loss over that of the level before it.
        weights: of the levels: "decay", or "dpace", which follow from the draft's own probabilities.
        rank: of the head; of DSpark 0 for none.
        markov: DSpark's head, "vanilla", "gated" or "rnn".
        confidence: weight of the confidence head's loss; 0: there is no such head. Of DSpark.
        state_size: of Domino's GRU.
        candidates: of DFlash2's selector.
        selector: weight of the selector's cross-entropy, of DFlash2.
        taps: numbers of the hidden states that are read; None: five, spread over the layers.
        mask_token: number of a token that texts do not contain; None: the last one.
        intermediate_size: of the MLP; None: as in the target.
        heads: attention heads; None: as in the target.
        window: W, the sliding window of all layers; None: full attention.
        causal: whether the rows of a block attend to rows before them only.
        draft_vocab_size: W, tokens that are drafted, the most frequent of the target's texts, by an LM head of the
            drafter's own, which begins as the target's rows; None: all, by the target's. DFlash2 drafts all.
    """

    kind: Kind = "dflash"
    block_size: Annotated[int, Whole(2, 256)] = 16
    predicts_next: bool = False
    layers: Annotated[int, Whole(1, 64)] = 5
    anchors: Count = 512
    loss: ChainLoss = "ce"
    l1: Share = 0.0
    decay: Share = 0.867
    weights: Weights = "decay"
    rank: Annotated[int, Whole(0)] = 256
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: Positive = 0.0
    state_size: Count = 1024
    candidates: Annotated[int, Whole(2)] = 16
    selector: Positive = 1.0
    taps: tuple[Annotated[int, Whole(0)], ...] | None = None
    mask_token: Annotated[int, Whole(0)] | None = None
    intermediate_size: Count | None = None
    heads: Count | None = None
    window: Count | None = None
    causal: bool = False
    draft_vocab_size: Count | None = None
    name: ClassVar = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps is not None and len({*self.taps}) < max(1, len(self.taps)):
            raise ValueError("task.recipe.taps must be null or a list of different numbers of hidden states")
        if self.kind in ("dflash2", "domino") and not self.rank:
            raise ValueError(f"task.recipe.rank must be at least 1 for task.recipe.kind={self.kind} (got 0)")
        if self.kind == "dflash2" and self.draft_vocab_size is not None:
            raise ValueError(
                "task.recipe.draft_vocab_size must be null for task.recipe.kind=dflash2: files of DFlash2 have no "
                "smaller vocabulary"
            )
        if self.confidence and self.kind != "dspark":
            raise ValueError(
                f"task.recipe.confidence must be 0 for task.recipe.kind={self.kind}: only dspark has a confidence head"
            )

    @property
    def depth(self) -> int:
        """See ``Recipe``."""
        return self.block_size - (not self.predicts_next)

    def _taps(self, target: Target) -> tuple[int, ...]:
        last = target.services.num_layers
        if self.taps is None:
            first, end = min(2, last), max(last - 2, min(2, last))
            return tuple(sorted({round(first + (end - first) * i / 4) for i in range(5)}))
        if max(self.taps) > last or 0 in self.taps:
            raise ValueError(f"task.recipe.taps must be numbers of hidden states of {target.name}, 1 to {last}")
        return tuple(sorted(self.taps))

    def states(self, target: Target) -> tuple[int, ...]:
        """See ``Recipe``."""
        return (*self._taps(target), -1)

    def _head(self, target: Target) -> HeadSettings | None:
        if self.kind == "domino":
            return HeadSettings("domino", self.rank, state_size=self.state_size, uncorrected=1)
        if self.kind == "dflash2":
            return HeadSettings("selector", self.rank, candidates=min(self.candidates, target.vocabulary))
        return HeadSettings(self.markov, self.rank) if self.kind == "dspark" and self.rank else None

    def _settings(self, target: Target) -> BlockSettings:
        h, v = target.services.hidden_size, target.vocabulary
        mask = v - 1 if self.mask_token is None else self.mask_token
        if mask >= v:
            raise ValueError(f"task.recipe.mask_token must be below the target's {v} tokens, not {mask}")
        head, second = self._head(target), self.kind == "dflash2"
        return BlockSettings(
            layer_of(target, self.heads, self.intermediate_size), h, h, v, self._taps(target), self.block_size, mask,
            self.layers, self.predicts_next, head=head, conv_taps=2 * second,
            confidence=h + (head.rank if head else 0) if self.confidence else 0,
            conv_group=next(group for group in (16, 8, 4, 2, 1) if h % group == 0),
            draft_vocab_size=min(self.draft_vocab_size, v) if self.draft_vocab_size else None,
            windows=(self.window,) * self.layers if self.window else (), causal=(self.causal,) * self.layers,
        )  # fmt: skip

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``. Heads and convolutions begin as if they were not there."""
        network = random_network(BlockNetwork(self._settings(target)), target, torch.float32, seed)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith(ZERO):
                    parameter.zero_()
                if name.endswith("base_kernel"):
                    parameter.zero_()[:, 0] = 1
            if network.lm_head is not None:
                network.ids = frequent(paths, target.vocabulary, network.lm_head.out_features).to(target.lm.device)
                network.lm_head.weight.copy_(target.services.lm_head_rows(network.ids).weight)
        network.requires_grad_(True).train()
        head = TargetHead.of(target)
        network.services = head  # type: ignore[assignment]  # with gradients
        objective = BlockObjective(network, self, head, target.lm.dtype, seed)
        return Beginning(network, objective, {"taps": list(network.settings.taps)}, advance=objective.advance)

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: in the layout of z-lab and SpecForge."""
        return write_block(module, self.kind, folder, facts, torch.bfloat16)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return BlockDrafter.load(target, str(folder), depth=depth)


class ComparedLevels(NamedTuple):
    """The levels of some blocks, compared with the target. Everything is ``[n * L]``, block by block.

    Args:
        loss, alpha, true, learned, accepted, agreed: see ``objectives.ComparedRows``.
        more: losses of the confidence head and of the selector, times their weights.
    """

    loss: Tensor
    alpha: Tensor
    true: Tensor
    learned: Tensor
    accepted: Tensor
    agreed: Tensor
    more: Tensor


class BlockObjective:
    """The loss of the blocks that begin at a text's anchors.

    Args:
        network: in training; it calls ``target``.
        target: its embedding and LM head.
        dtype: of the target.
        seed: of the anchors. A text has the same ones whenever it is seen, so that a resumed training has them too.
    """

    def __init__(
        self, network: BlockNetwork, recipe: BlockRecipe, target: TargetHead, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.network, self.recipe, self.target, self.dtype, self.seed = network, recipe, target, dtype, seed
        self.base = 1.0 if recipe.kind == "domino" else 0.0

    def advance(self, done: float) -> None:
        """Set the weight of the loss of Domino's logits before their correction: from 1 to 0 (2605.29707).

        Args:
            done: share of the training's steps.
        """
        if self.recipe.kind == "domino":
            self.base = 1 - done

    def __call__(self, text: Texts) -> tuple[Tensor, list[Measured]]:
        """The loss of texts whose last hidden state is that after the final norm."""
        assert text.hidden is not None
        network, recipe, device, levels = self.network, self.recipe, text.ids.device, self.network.levels
        h, dtype = network.settings.target_hidden_size, next(network.parameters()).dtype
        counts = text.counts(1)  # [B, T - 1], on the host, as are the anchors [B, A]
        anchors = draw_anchors(text, recipe.anchors, self.seed)
        blocks = BlockTexts(anchors.clamp_min(1), network.settings.block_size, network.kinds, text.ids)
        features = network.features(text.hidden[..., :-h].to(dtype))
        outputs = blocks.run(network, features).unflatten(0, (-1, network.settings.block_size))  # [B * A, b, H]
        # Level k drafts the token after position a + k, and is compared with the target's distribution after it.
        position = (anchors[..., None] + torch.arange(levels, device=anchors.device)).flatten(0, 1)
        row = torch.arange(len(anchors), device=anchors.device).repeat_interleave(anchors.shape[1])[:, None]
        inside = (anchors.flatten()[:, None] > 0) & (position < counts.shape[1])
        position = position.clamp(0, max(0, counts.shape[1] - 1))
        present = inside & counts[row, position]  # [B * A, L]
        number = (counts.flatten().cumsum(0) - 1).view(counts.shape)[row, position] * present
        above = text.ids[row.to(device), position.to(device)]
        if not bool(present.any()):
            nothing = outputs.sum() * 0 + sum(parameter.sum() * 0 for parameter in network.parameters())
            return nothing, [Measured(nothing.detach(), nothing.detach(), nothing.detach(), 0)] * levels
        truth = truth_after(text, self.target, self.dtype, network.ids if network.lm_head else None, h)
        size, number = max(1, rows_at_once(truth.p.shape[1], device) // levels), number.to(device)
        if recipe.loss == "tau" or recipe.weights != "decay":
            given = truth.p, truth.best, truth.token
            pieces = zip(outputs.split(size), above.split(size), number.split(size), strict=True)
            compared = joined([again(self._compared, *piece, *given) for piece in pieces])
            return self._total(compared, present)
        there = present.to(device)  # the weights of rows do not depend on the draft
        decay = torch.tensor([recipe.decay**level for level in range(levels)], dtype=dtype, device=device)
        learned = there & truth.learned(recipe.loss)[number]
        of_loss, of_more = (mask * decay / mask.sum(0).clamp_min(1) for mask in (learned, there))

        def run(_: int, *piece: Tensor) -> tuple[Tensor, ComparedLevels]:
            blocks, above, number, of_loss, of_more = piece
            rows = self._compared(blocks, above, number, truth.p, truth.best, truth.token)
            return (rows.loss * of_loss.flatten() + rows.more * of_more.flatten()).sum(), rows

        of_blocks = [above, number, of_loss, of_more]
        loss, (compared,) = summed(run, [outputs], [of_blocks], list(network.parameters()), size)
        return loss, self._total(compared, present)[1]

    def _compared(
        self, outputs: Tensor, above: Tensor, number: Tensor, p: Tensor, best: Tensor, token: Tensor
    ) -> ComparedLevels:
        """Compare the levels of blocks, below the texts' own tokens.

        Args:
            outputs: ``[n, b, H]`` of the layers.
            above: ``[n, L]`` tokens above the levels.
            number: ``[n, L]`` rows of the truth.
            p, best, token: of the truth.
        """
        network, recipe, (blocks, levels) = self.network, self.recipe, above.shape
        block = network.rows(outputs, above[:, 0], levels)
        truth, state, corrected = Truth(p, best, token)[number.flatten()], block.state, []
        first = torch.arange(blocks, device=above.device) * levels
        for level in range(levels):
            depth = torch.full_like(first, level)
            logits, state = network.corrected(block, first + level, above[:, level], depth, state)
            corrected.append(logits)
        compared = compare(torch.stack(corrected, 1).flatten(0, 1), truth, recipe.loss)
        more = torch.zeros_like(compared.loss)
        loss, alpha, true, learned = compared.loss, compared.alpha, compared.true, compared.learned
        if isinstance(network.head, SelectorHead):
            # The layers' own logits learn the distribution, the selector the order of the candidates.
            alone = compare(block.logits, truth, recipe.loss)
            loss, alpha, true, learned = alone.loss, alone.alpha, alone.true, alone.learned
            more = more + recipe.selector * _selected(network.head, block.logits, block.hidden, above.flatten(), truth)
        elif self.base:
            loss = (1 - self.base) * loss + self.base * compare(block.logits, truth, recipe.loss).loss
        if recipe.l1:
            loss = (1 - recipe.l1) * loss + recipe.l1 * 2 * (1 - alpha) * learned
        if network.confidence_head is not None:
            confidence = network.confidence_logits(block.hidden, above.flatten())
            wanted = compared.alpha.detach().to(confidence.dtype)
            more = more + recipe.confidence * binary_cross_entropy_with_logits(confidence, wanted, reduction="none")
        return ComparedLevels(loss, alpha, true, learned, compared.accepted, compared.agreed, more)

    def _total(self, rows: ComparedLevels, present: Tensor) -> tuple[Tensor, list[Measured]]:
        """The loss of all blocks and what each level achieves. ``present`` is ``[n, L]``, on the host."""
        levels, recipe = present.shape[1], self.recipe
        there = present.to(rows.loss.device)
        loss, alpha, true, learned, accepted, agreed, more = (
            values.view(-1, levels).masked_fill(~there, 0) for values in rows
        )
        decay = [recipe.decay**level for level in range(levels)]
        chains = Chains(loss, alpha, true, learned, there)
        total = chain_loss(chains, recipe.loss, recipe.weights, decay)
        total = total + chain_loss(chains._replace(loss=more, learned=there), "kl", "decay", decay)
        counts = present.sum(0).tolist()
        means = [
            Measured(
                loss[:, level].sum() / learned[:, level].sum().clamp_min(1), accepted[:, level].sum() / max(1, count),
                agreed[:, level].sum() / max(1, count), count,
            )
            for level, count in enumerate(counts)
        ]  # fmt: skip
        return total, means


def _selected(head: SelectorHead, logits: Tensor, hidden: Tensor, above: Tensor, truth: Truth) -> Tensor:
    """The cross-entropy ``[N]`` of the texts' own tokens among the selector's candidates, which they join."""
    tokens = logits.topk(head.candidates, -1).indices
    held = (tokens == truth.token[:, None]).any(-1)
    tokens[:, -1] = torch.where(held, tokens[:, -1], truth.token)
    scores = head.scores(logits, hidden, above, tokens)
    return cross_entropy(scores, (tokens == truth.token[:, None]).int().argmax(-1), reduction="none")
