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

from spec_lab.core.options import Count, check_fields
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import AlikeObjective
from spec_lab.train.export import export_model
from spec_lab.train.objectives import Loss
from spec_lab.train.recipe import Beginning, Recipe, TargetHead
from spec_lab.train.texts import Texts


@dataclass(frozen=True)
class DraftRecipe(Recipe):
    """A Llama with the target's tokens.

    Args:
        depth: tokens that are drafted in a chain.
        loss: "kl", "reverse_kl" or "tv".
        hidden_size, layers, heads, intermediate_size: its sizes.
        tied: whether the LM head is the embedding.
    """

    depth: Count = 5
    loss: Loss = "kl"
    hidden_size: Count = 256
    layers: Count = 2
    heads: Count = 4
    intermediate_size: Count = 768
    tied: bool = True
    name: ClassVar = "draft_chain"

    def __post_init__(self) -> None:
        check_llama(self)

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``."""
        network = llama(self, target, target.vocabulary, seed)

        def states(text: Texts) -> Tensor:
            out: Tensor = network.model(input_ids=text.ids[:, :-1], use_cache=False).last_hidden_state
            return out

        own = TargetHead.of(target), target.lm.dtype, self.depth, self.loss
        return Beginning(network, AlikeObjective(states, network.lm_head, *own), {"layers": self.layers})

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe`` and ``write_llama``."""
        return write_llama(module, target, folder)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return DraftModel.load(target, str(folder), depth=depth)


def check_llama(recipe: Any) -> None:
    """Refuse wrong options of a recipe of a Llama, which has those of ``DraftRecipe``.

    Raises:
        ValueError: names the option.
    """
    check_fields(recipe)
    if recipe.hidden_size % (2 * recipe.heads):
        raise ValueError(
            f"task.recipe.hidden_size must be a multiple of twice task.recipe.heads={recipe.heads}, which rotary "
            f"embeddings require, not {recipe.hidden_size}"
        )


def llama(recipe: Any, target: Target, vocabulary: int, seed: int, **fields: Any) -> Any:
    """Return a LlamaForCausalLM with random weights in float32, in training.

    Args:
        recipe: has the sizes, by their names in ``DraftRecipe``.
        target: whose context and device it has.
        vocabulary: tokens that it reads.
        seed: of the weights.
        fields: further ones of its config.
    """
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads,
        max_position_embeddings=target.context, tie_word_embeddings=recipe.tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **fields,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast(Any, LlamaForCausalLM(config)).to(target.lm.device, torch.float32).train()


def write_llama(module: Any, target: Target, folder: Path) -> str:
    """Write a checkpoint of transformers in bfloat16, with the target's tokenizer; return its weights' SHA-256."""
    return export_model(deepcopy(module), target.tokenizer, folder)
