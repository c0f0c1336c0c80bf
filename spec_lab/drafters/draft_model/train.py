"""The recipe of a draft model: a small Llama that learns the target's distributions (DistillSpec, 2310.08461)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec_lab.core.options import Count
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import AlikeObjective
from spec_lab.train.export import export_model
from spec_lab.train.objectives import Loss
from spec_lab.train.recipe import Beginning, Recipe, TargetHead
from spec_lab.train.texts import Texts


@dataclass(frozen=True)
class LlamaRecipe(Recipe):
    """The sizes of a Llama that is trained.

    Args:
        hidden_size, layers, heads, intermediate_size: its sizes.
        tied: whether the LM head is the embedding.
    """

    hidden_size: Count = 256
    layers: Count = 2
    heads: Count = 4
    intermediate_size: Count = 768
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"task.recipe.hidden_size must be a multiple of twice task.recipe.heads={self.heads}, which rotary "
                f"embeddings require, not {self.hidden_size}"
            )

    def llama(self, target: Target, vocabulary: int, seed: int, **fields: Any) -> Any:
        """Return a LlamaForCausalLM with random weights in float32, in training.

        Args:
            target: whose context and device it has.
            vocabulary: tokens that it reads.
            fields: further ones of its config.
        """
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads,
            max_position_embeddings=target.context, tie_word_embeddings=self.tied,
            bos_token_id=None, eos_token_id=None, pad_token_id=None, **fields,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cast(Any, LlamaForCausalLM(config)).to(target.lm.device, torch.float32).train()

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: a checkpoint of transformers in bfloat16, with the target's tokenizer."""
        return export_model(deepcopy(module), target.tokenizer, folder)


@dataclass(frozen=True)
class DraftRecipe(LlamaRecipe):
    """A Llama with the target's tokens.

    Args:
        depth: tokens that are drafted in a chain.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk" or "ce" (of the texts'
            own tokens); see ``train.objectives``.
    """

    depth: Count = 5
    loss: Loss = "kl"
    name: ClassVar = "draft_chain"

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``."""
        network = self.llama(target, target.vocabulary, seed)

        def states(text: Texts) -> Tensor:
            out: Tensor = network.model(input_ids=text.ids[:, :-1], use_cache=False).last_hidden_state
            return out

        head = TargetHead.of(target)
        objective = AlikeObjective(network, states, network.lm_head, head, target.lm.dtype, self.depth, self.loss)
        return Beginning(network, objective, {"layers": self.layers})

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return DraftModel.load(target, str(folder), depth=depth)
