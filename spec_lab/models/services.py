"""The target's modules that feature-level drafters share: embedding, final norm, LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.models.support import Unsupported

FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm")
"""What transformers calls the norm after the last layer: Llama and most others; GPT-2; OPT, GPT-NeoX; Phi; BioGPT."""


@dataclass(frozen=True, eq=False)
class TargetServices:
    """Parts of the target that a drafter calls on hidden states of its own (EAGLE 2401.15077, Medusa 2401.10774).

    Each method calls the target's own module, so nothing is copied, and a target that is split over devices or ranks
    stays split. Scaling and soft-capping that some families apply outside of these modules (Gemma's embeddings;
    Granite's, Cohere's and Gemma 2's logits) are left out.

    Args:
        model: a causal LM of transformers.
    """

    model: Any

    @property
    def hidden_size(self) -> int:
        """H, the width of the hidden states that enter the LM head."""
        return int(self.model.get_output_embeddings().weight.shape[1])

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers. Layer i reads ``hidden_states[i]`` of transformers, from 0."""
        return int(self.model.config.num_hidden_layers)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of tokens: ``[..]`` int64 -> ``[.., H]``."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the last layer's output ``[.., H]`` as the LM head reads it.

        Raises:
            Unsupported: a model whose final norm is not known by name.
        """
        normed: Tensor = self._final_norm()(hidden)
        return normed

    @torch.inference_mode()
    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits of normed hidden states: ``[.., H] -> [.., V]``."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def _final_norm(self) -> nn.Module:
        base = self.model.base_model
        for part in (base, dict(base.named_children()).get("decoder")):  # OPT's layers are in a submodule "decoder"
            children = {} if part is None else dict(part.named_children())
            for name in FINAL_NORMS:
                if name in children:
                    return children[name]
        raise Unsupported(
            f"model type '{self.model.config.model_type}' has no final norm under a known name "
            f"({', '.join(FINAL_NORMS)}): choose a proposer that does not require the final norm, or another target"
        )
