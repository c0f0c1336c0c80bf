"""A causal language model that is a table, so that the real decoding path has laws which are known exactly.

Its one attention layer weighs all tokens alike. A token after the prompt contributes itself times a power of V, so what
a row sees adds up to the number of the row's text; its law is looked up there. Cells, masks, positions and forests all
matter: a row that saw one token too many, too few or at a wrong place would find another law.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.engine.attention import Pack, span_attention
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.models.target import Target
from spec_lab.tasks.certify.worlds import PROMPT, World, logits


class Body(nn.Module):
    """From tokens to hidden states, which are the table's logits: their width is V.

    Args:
        tables: logits after every text of each length, ``[V ** length, V]``.
        prompt: tokens of the prompt, which have no influence.
    """

    table: Tensor  # [sum of V ** k, V]
    first: Tensor  # [lengths], where each length's laws begin
    power: Tensor  # [lengths]

    def __init__(self, tables: Sequence[np.ndarray], prompt: int, dtype: torch.dtype) -> None:
        super().__init__()
        v = tables[0].shape[1]
        # A text's number has its first token lowest here, so that a token's share does not depend on what follows.
        turned = [t.reshape((v,) * k + (v,)).transpose(*reversed(range(k)), k) for k, t in enumerate(tables)]
        sizes = np.cumsum([0] + [len(table) for table in tables[:-1]])
        self.register_buffer("table", torch.from_numpy(np.concatenate([t.reshape(-1, v) for t in turned])).to(dtype))
        self.register_buffer("first", torch.from_numpy(sizes))
        self.register_buffer("power", torch.tensor([v**k for k in range(len(tables))]))
        self.prompt = prompt

    def forward(self, token: Tensor, position: Tensor, pack: Pack | None, mask: Tensor | None) -> tuple[Tensor]:
        """Tokens and positions ``[1, N]`` to hidden states ``[1, N, V]``."""
        place = position - self.prompt
        share = torch.where(place >= 0, token * self.power[place.clamp_min(0)], 0)
        value = share.to(self.table.dtype)[:, None, :, None]  # [1, heads 1, N, dim 1]
        query = key = torch.zeros_like(value)
        read: Any = (key, value) if pack is None else pack.update(key, value, 0)
        mean, _ = span_attention(self, query, read[0], read[1], mask, 1.0)
        number = (mean[..., 0, 0] * (position + 1)).round().long()  # a row sees as many tokens as its position says
        row = torch.where(place < 0, 0, self.first[(place + 1).clamp_min(0)] + number)
        return (self.table[row],)


class Table(nn.Module):
    """A causal LM of transformers' kind around ``Body``; the unembedding is the identity."""

    def __init__(self, tables: Sequence[np.ndarray], prompt: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_model = Body(tables, prompt, dtype)
        v = tables[0].shape[1]
        self.lm_head = nn.Linear(v, v, bias=False, dtype=dtype)
        self.embed = nn.Embedding(v, v, dtype=dtype)
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.eye(v))
            self.embed.weight.copy_(torch.eye(v))
        self.config = SimpleNamespace(
            _attn_implementation="", model_type="table", eos_token_id=None, num_hidden_layers=1
        )
        self.dtype, self.device = dtype, torch.device("cpu")

    def set_attn_implementation(self, name: str) -> None:
        """As transformers' models offer it."""
        self.config._attn_implementation = name

    def get_decoder(self) -> Body:
        """What returns the hidden states after the final norm."""
        return self.base_model

    def get_output_embeddings(self) -> nn.Linear:
        """The unembedding."""
        return self.lm_head

    def get_input_embeddings(self) -> nn.Embedding:
        """For heads that read tokens."""
        return self.embed

    def forward(
        self,
        input_ids: Tensor,  # [1, N]
        position_ids: Tensor | None = None,  # [1, N]
        attention_mask: Tensor | None = None,
        past_key_values: Pack | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Logits ``[1, n, V]`` of the rows to keep; hidden state 0 is the embedding, 1 the body's."""
        position = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        (hidden,) = self.base_model(input_ids, position, past_key_values, attention_mask)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        states = (self.embed(input_ids), hidden) if output_hidden_states else None
        return SimpleNamespace(
            logits=self.lm_head(hidden if isinstance(keep, int) else hidden[:, keep]), hidden_states=states
        )


def table_models(
    world: World, length: int, prompt: Sequence[int] = PROMPT, dtype: torch.dtype = torch.float64
) -> tuple[Target, CausalLM]:
    """The world's target and draft, for texts of up to ``length`` tokens after the prompt."""
    laws = [world.laws(k) for k in range(length + 1)]
    lms = [CausalLM(Table([logits(pair[side]) for pair in laws], len(prompt), dtype).eval()) for side in (0, 1)]
    return Target(lms[0], None, "table", len(prompt) + length, "", 0.0), lms[1]
