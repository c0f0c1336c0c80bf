"""Toy models: a target and a draft model over V tokens whose probabilities after every text are known exactly.

The probabilities p and q after a text are rows of tables. A text is all tokens after the prompt. Its number among the
texts of its length is its tokens read as digits in base V, the first one highest, so the tables of one length are two
arrays ``[V ** length, V]``.

``table_models`` puts the tables behind the interface of a causal LM, so that the engine's own prefill, KV cache,
attention mask and forward run on them. Each attention layer attends to all visible tokens equally. A token after the
prompt contributes itself times a power of V, so that the sum over the visible tokens is the number of the text, whose
row is looked up. A row that attends to one token too many, too few or at a wrong position gets the probabilities of
another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.core.history import TextHistories
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.models.target import Target
from spec_lab.runners.attention import Pack, cell_attention
from spec_lab.runners.causal_lm import CausalLM

PROMPT = (0, 1, 2, 0, 1, 3, 2, 0, 1)
"""The prompt of every toy request. Its last tokens have occurred before, so that prompt lookup can draft."""

IMPOSSIBLE = -1e6
"""A finite logit without probability: its exponential is 0 in float64 at any temperature below 1000."""


class ToyModel(Protocol):
    """The probabilities of a target and of a draft model after every text."""

    @property
    def v(self) -> int:
        """V, the number of tokens."""
        ...

    def probabilities(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return p and q after every text of ``length`` tokens, each ``[V ** length, V]``."""
        ...


@dataclass(frozen=True)
class RandomToy:
    """Random tables with all special cases: p = q, disjoint supports, one-hot p, one-hot q, zeros in either.

    Args:
        v: V.
        support: largest number of tokens with q > 0; p has at most one more. It bounds the number of outcomes.
        plain: no special cases, and p > 0 everywhere.
    """

    seed: int
    v: int = 4
    support: int = 3
    plain: bool = False
    _tables: dict[int, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def probabilities(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """See ``ToyModel.probabilities``."""
        if length not in self._tables:
            rng = np.random.default_rng([self.seed, length])
            pairs = [self._pair(rng) for _ in range(self.v**length)]
            self._tables[length] = np.array([p for p, _ in pairs]), np.array([q for _, q in pairs])
        return self._tables[length]

    def _distribution(self, rng: np.random.Generator, support: np.ndarray) -> np.ndarray:  # [V]
        probabilities = np.zeros(self.v)
        probabilities[support] = rng.dirichlet(np.ones(len(support)))
        return probabilities

    def _pair(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        order = rng.permutation(self.v)
        few, more = order[: self.support], order[: self.support + 1]
        if self.plain:
            return self._distribution(rng, order), self._distribution(rng, few)
        kind = rng.choice(
            ["generic", "zeros", "equal", "disjoint", "one-hot p", "one-hot q"], p=[0.5, 0.2] + [0.075] * 4
        )
        if kind == "disjoint":
            return self._distribution(rng, order[:2]), self._distribution(rng, order[2 : 2 + self.support])
        q = self._distribution(rng, few[:1] if kind == "one-hot q" else few)
        if kind == "equal":
            return q.copy(), q
        if kind == "one-hot p":
            return self._distribution(rng, few[-1:]), q
        return self._distribution(rng, rng.permutation(self.v)[: self.support] if kind == "zeros" else more), q


def code(text: Sequence[int], v: int) -> int:
    """Return the text's number among those of its length."""
    number = 0
    for token in text:
        number = number * v + token
    return number


def text_of(number: int, length: int, v: int) -> tuple[int, ...]:
    """Return the text with this number."""
    return tuple(number // v**digit % v for digit in reversed(range(length)))


def logits(probabilities: np.ndarray) -> np.ndarray:
    """Return logits whose softmax is ``probabilities``."""
    return np.log(probabilities, out=np.full_like(probabilities, IMPOSSIBLE), where=probabilities > 0)


def warped(toy: ToyModel, lengths: int, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> list[np.ndarray]:
    """Return what autoregressive decoding samples from: p after every text of 0 .. ``lengths`` tokens, as ``sampling``
    warps it; ``[V ** length, V]`` for each length.
    """
    distributions = []
    for length in range(lengths + 1):
        raw = torch.from_numpy(logits(toy.probabilities(length)[0]))
        texts = [[*prompt, *text_of(number, length, toy.v)] for number in range(len(raw))]
        histories = TextHistories.of(texts, [len(prompt)] * len(texts), [sampling], toy.v, raw.device)
        history = None if histories is None else histories.here()
        distributions.append(logits_to_probs(raw, [sampling], history).numpy())
    return distributions


# As causal LMs -------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer: it adds the logits after a row's text to its input, and subtracts those of the layer below.

    So its output is right only where its input is the layer below's output for the same text. Without its ``mlp`` it
    returns its input.

    Args:
        tables: logits after every text of each length, ``[V ** length, V]``.
        below: those of the layer below; None for none.
        prompt: number of prompt tokens, which have no influence.
    """

    table: Tensor  # [sum of V ** k, V]
    first: Tensor  # [lengths], where the rows of each length begin
    power: Tensor  # [lengths]

    def __init__(
        self,
        number: int,
        tables: Sequence[np.ndarray],
        below: Sequence[np.ndarray] | None,
        prompt: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        v = tables[0].shape[1]
        sizes = np.cumsum([0] + [len(table) for table in tables[:-1]])
        self.number, self.prompt = number, prompt
        self.register_buffer("table", _turned(tables, dtype))
        self.below = None if below is None else _turned(below, dtype)
        self.register_buffer("first", torch.from_numpy(sizes))
        self.register_buffer("power", torch.tensor([v**k for k in range(len(tables))]))
        self.mlp = nn.Identity()

    def forward(
        self, hidden: Tensor, token: Tensor, position: Tensor, pack: Pack | None, mask: Tensor | None
    ) -> Tensor:
        """``[1, N, V]`` -> ``[1, N, V]``; tokens and positions are ``[1, N]``."""
        digit = position - self.prompt
        share = torch.where(digit >= 0, token * self.power[digit.clamp_min(0)], 0)
        value = share.to(self.table.dtype)[:, None, :, None]  # [1, heads 1, N, dim 1]
        query = key = torch.zeros_like(value)
        read: Any = (key, value) if pack is None else pack.update(key, value, self.number)
        mean, _ = cell_attention(self, query, read[0], read[1], mask, 1.0)
        number = (mean[..., 0, 0] * (position + 1)).round().long()  # position + 1 tokens are visible to a row
        row = torch.where(digit < 0, 0, self.first[(digit + 1).clamp_min(0)] + number)
        row = row.clamp_max(len(self.table) - 1)  # of a row that sees some tokens only, such as of a small KV cache
        output = (hidden if self.below is None else hidden - self.below[row]) + self.table[row]
        return torch.where(self.mlp(torch.ones_like(hidden)) > 0, output, hidden)


def _turned(tables: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:  # [sum of V ** k, V]
    """All tables, with the first token of a text as the lowest digit of its number.

    So a token's contribution to the number does not depend on what follows.
    """
    v = tables[0].shape[1]
    turned = [t.reshape((v,) * k + (v,)).transpose(*reversed(range(k)), k) for k, t in enumerate(tables)]
    return torch.from_numpy(np.concatenate([t.reshape(-1, v) for t in turned])).to(dtype)


class Body(nn.Module):
    """From tokens to hidden states, which are the logits of a table: their width is V.

    Args:
        layers: each layer's logits, as in ``Counting``.
        prompt: number of prompt tokens.
    """

    def __init__(self, layers: Sequence[Sequence[np.ndarray]], prompt: int, dtype: torch.dtype) -> None:
        super().__init__()
        below: list[Sequence[np.ndarray] | None] = [None, *layers[:-1]]
        self.layers = nn.ModuleList(
            Counting(number, layer, other, prompt, dtype)
            for number, (layer, other) in enumerate(zip(layers, below, strict=True))
        )
        self.width, self.dtype = layers[0][0].shape[1], dtype

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Pack | None = None,
        use_cache: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states ``[1, N, V]`` of tokens and positions ``[1, N]``, and each layer's output."""
        hidden, states = torch.zeros(*input_ids.shape, self.width, dtype=self.dtype), []
        for layer in self.layers:
            hidden = layer(hidden, input_ids, position_ids, past_key_values, attention_mask)
            states.append(hidden)
        return hidden, states


class Table(nn.Module):
    """A causal LM with the interface of transformers around ``Body``; the unembedding is the identity.

    Arguments as in ``Body``.
    """

    def __init__(self, layers: Sequence[Sequence[np.ndarray]], prompt: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_model = Body(layers, prompt, dtype)
        v = layers[0][0].shape[1]
        self.lm_head = nn.Linear(v, v, bias=False, dtype=dtype)
        self.embed = nn.Embedding(v, v, dtype=dtype)
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.eye(v))
            self.embed.weight.copy_(torch.eye(v))
        self.config = SimpleNamespace(
            _attn_implementation="", model_type="table", eos_token_id=None, num_hidden_layers=len(layers)
        )
        self.dtype, self.device = dtype, torch.device("cpu")

    def set_attn_implementation(self, name: str) -> None:
        """Set the attention function, as models of transformers do."""
        self.config._attn_implementation = name

    def get_decoder(self) -> Body:
        """Return the part that computes the hidden states after the final norm."""
        return self.base_model

    def get_output_embeddings(self) -> nn.Linear:
        """Return the unembedding."""
        return self.lm_head

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding, for proposers that read tokens."""
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
        """Return logits ``[1, n, V]`` of the rows to keep; hidden state 0 is the embedding, then come the layers'."""
        position = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        hidden, outputs = self.base_model(input_ids, position, attention_mask, past_key_values)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        states = (self.embed(input_ids), *outputs) if output_hidden_states else None
        return SimpleNamespace(
            logits=self.lm_head(hidden if isinstance(keep, int) else hidden[:, keep]), hidden_states=states
        )


def table_models(
    toy: ToyModel, length: int, prompt: Sequence[int] = PROMPT, dtype: torch.dtype = torch.float64
) -> tuple[Target, CausalLM]:
    """Return the toy's target and draft model, for texts of up to ``length`` tokens after the prompt.

    The target has two layers; after the first one its logits are the draft model's.
    """
    tables = [toy.probabilities(k) for k in range(length + 1)]
    p, q = ([logits(pair[side]) for pair in tables] for side in (0, 1))
    lms = [CausalLM(Table(layers, len(prompt), dtype).eval()) for layers in ([q, p], [q])]
    return Target(lms[0], None, "table", len(prompt) + length, "", 0.0), lms[1]
