"""The target's parts that feature-level drafters share: embedding, final norm, LM head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spec_lab.core.inference import inference
from spec_lab.models.gguf_file import GGUFFile
from spec_lab.models.support import Unsupported

FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm")
"""Names of the norm after the last layer in transformers: Llama and most others; GPT-2; OPT, GPT-NeoX; Phi; BioGPT."""


class TargetServices(Protocol):
    """Parts of the target that a drafter calls on hidden states of its own (EAGLE 2401.15077, Medusa 2401.10774).

    They compute in the target's dtype, whatever the dtype of the hidden states, and return it.

    Scaling and soft-capping that some families apply outside of these parts (Gemma's embeddings; Granite's, Cohere's
    and Gemma 2's logits) are left out.
    """

    @property
    def hidden_size(self) -> int:
        """H, the width of the hidden states that enter the LM head."""
        ...

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers. Layer i reads ``hidden_states[i]`` of transformers, from 0."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of tokens: ``[..]`` int64 -> ``[.., H]``."""
        ...

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the last layer's output ``[.., H]`` as the LM head reads it.

        Raises:
            Unsupported: a model whose final norm is not known.
        """
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits of normed hidden states: ``[.., H] -> [.., V]``."""
        ...

    def lm_head_rows(self, tokens: Tensor) -> nn.Linear:
        """Return an LM head of some tokens ``[W]`` alone: ``[.., H] -> [.., W]``; it shares no weights.

        Raises:
            Unsupported: an LM head whose weights are quantized or split over ranks.
        """
        ...


@dataclass(frozen=True, eq=False)
class ModelServices:
    """The modules of a model of transformers.

    Each method calls the target's own module, so nothing is copied, and a target that is split over devices or ranks
    stays split.

    Args:
        model: a causal LM of transformers.
    """

    model: Any

    @property
    def hidden_size(self) -> int:
        """See ``TargetServices``."""
        return int(self.model.get_output_embeddings().weight.shape[1])

    @property
    def num_layers(self) -> int:
        """See ``TargetServices``."""
        return int(self.model.config.num_hidden_layers)

    @inference
    def embed(self, tokens: Tensor) -> Tensor:
        """See ``TargetServices``."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    @inference
    def final_norm(self, hidden: Tensor) -> Tensor:
        """As ``TargetServices`` says; the norm must be known by name."""
        normed: Tensor = self._final_norm()(hidden.to(self._dtype))
        return normed

    @inference
    def lm_head(self, hidden: Tensor) -> Tensor:
        """See ``TargetServices``."""
        logits: Tensor = self.model.get_output_embeddings()(hidden.to(self._dtype))
        return logits

    @inference
    def lm_head_rows(self, tokens: Tensor) -> nn.Linear:
        """See ``TargetServices``."""
        head = self.model.get_output_embeddings()
        if type(head.weight.data) is not Tensor or not head.weight.is_floating_point():
            raise Unsupported("the rows of an LM head that is quantized or split over ranks cannot be selected")
        weight = head.weight.to_dense() if head.weight.is_mkldnn else head.weight
        return selected_rows(weight, getattr(head, "bias", None), tokens)

    @cached_property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

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


@dataclass(frozen=True, eq=False)
class GGUFServices:
    """Embedding, final norm and LM head of a GGUF file, dequantised when they are first used.

    Matrices are held and multiplied in bfloat16, the default dtype of other targets, unless the file has them in F32:
    a large vocabulary in float32 takes more memory than a small quantised model. Results are float32, the dtype of
    llama.cpp's logits. (A draft states the probabilities of the logits that it drew from, so it stays lossless.)

    Args:
        file: the file.
    """

    file: GGUFFile

    @property
    def hidden_size(self) -> int:
        """See ``TargetServices``."""
        return self.file.hidden_size

    @property
    def num_layers(self) -> int:
        """See ``TargetServices``."""
        return self.file.num_layers

    @inference
    def embed(self, tokens: Tensor) -> Tensor:
        """See ``TargetServices``."""
        return nn.functional.embedding(tokens, self._embedding).float()

    @inference
    def final_norm(self, hidden: Tensor) -> Tensor:
        """As ``TargetServices`` says; the norm must be an RMSNorm."""
        weight, epsilon = self._norm
        return nn.functional.rms_norm(hidden.float(), (self.hidden_size,), weight, epsilon)

    @inference
    def lm_head(self, hidden: Tensor) -> Tensor:
        """See ``TargetServices``."""
        weight, bias = self._head
        logits = nn.functional.linear(hidden.to(weight.dtype), weight).float()
        return logits if bias is None else logits + bias

    @inference
    def lm_head_rows(self, tokens: Tensor) -> nn.Linear:
        """See ``TargetServices``."""
        return selected_rows(*self._head, tokens)

    @cached_property
    def _embedding(self) -> Tensor:
        return self._matrix("token_embd.weight")

    @cached_property
    def _head(self) -> tuple[Tensor, Tensor | None]:
        bias = self.file.tensor("output.bias") if "output.bias" in self.file.tensors else None
        return self._embedding if self.file.tied else self._matrix("output.weight"), bias

    def _matrix(self, name: str) -> Tensor:
        exact = self.file.info(name).type_name == "F32"
        return self.file.tensor(name, torch.float32 if exact else torch.bfloat16)

    @cached_property
    def _norm(self) -> tuple[Tensor, float]:
        epsilon = self.file.metadata.get(f"{self.file.architecture}.attention.layer_norm_rms_epsilon")
        if not isinstance(epsilon, float) or not epsilon > 0 or "output_norm.bias" in self.file.tensors:
            raise Unsupported(
                f"{self.file.path} has no RMSNorm after its last layer: choose a proposer that does not require the "
                "final norm, or another target"
            )
        return self.file.tensor("output_norm.weight"), epsilon


def selected_rows(weight: Tensor, bias: Tensor | None, rows: Tensor) -> nn.Linear:
    """Return the linear layer of rows ``[n]`` of a weight ``[out, in]`` and of its bias ``[out]``, if it has one."""
    layer = nn.Linear(weight.shape[1], len(rows), bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach()[rows.to(weight.device)].clone(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach()[rows.to(bias.device)].to(weight.dtype), requires_grad=False)
    return layer
