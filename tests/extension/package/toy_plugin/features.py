"""A feature-level drafter: one layer of its own reads three of the target's hidden states, as EAGLE-3 does.

It drafts a tree of sampled nodes that grows best first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec_lab.core.draft import Draft, Drawn, Shape
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.proposer import Lifecycle, Observation, Requires
from spec_lab.engine.request import Request
from spec_lab.engine.runner import KVSequence
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.best_first import BestFirst, Budget
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.features import Features


@dataclass
class State:
    """The state of one sequence.

    Args:
        kv: of the drafter's layer. Its stable part has one entry for each target position whose next token is known.
        features: observed hidden states.
    """

    kv: KVSequence
    features: Features


class FeatureDrafter(Lifecycle):
    """Input j is fc([embed(t_{j+1}); g_j]), where g_j mixes the target's hidden states at position j; below the root
    the drafter's own last hidden state stands in place of g.

    Args:
        target: with at least three layers.
        budget: of the tree.
        drawn: how siblings are drawn.
        seed: of the random weights.
    """

    name = "features"
    branches = True

    def __init__(self, target: Target, budget: Budget, drawn: Drawn = "iid", seed: int = 0) -> None:
        self.budget, self.drawn, self.nodes = budget, drawn, budget.nodes
        layers, width = target.services.num_layers, target.services.hidden_size
        self.requires = Requires(hidden=(1, layers // 2, -1))
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=target.vocabulary, hidden_size=width, intermediate_size=width, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=target.context,
        )  # fmt: skip
        self.lm = CausalLM(LlamaForCausalLM(config).to(target.lm.dtype).eval())
        self.lm.capture((-1,))
        self.mix = torch.randn(width, 3 * width, dtype=target.lm.dtype) / width
        self.fc = torch.randn(width, 2 * width, dtype=target.lm.dtype)
        self.embed = target.services.embed

    def init(self, request: Request) -> State:
        """An empty state."""
        return State(self.lm.open(), Features())

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the hidden states of every computed position."""
        for one in observed:
            one.sequence.state.features.add(one.start, one.hidden)

    def fork(self, state: State) -> State:
        """Share the stable part, drop the tentative part."""
        return State(state.kv.fork(), state.features.copy())

    def rewind(self, state: State, length: int) -> None:
        """The entry of the last computed position depends on the removed next token, so it is dropped as well."""
        state.features.rewind(length)
        state.kv.truncate(min(len(state.kv), max(length - 1, 0)))

    def close(self, state: State) -> None:
        """Free the KV cache."""
        state.kv.close()

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Draft:
        """Draft trees where one token is pending and every computed position was observed; nothing elsewhere."""
        timed = batch.clock.phase("propose_forward")
        depths, kvs, lengths, inputs = [], [], [], []
        for room, one in zip(batch.room(), batch.sequences, strict=True):
            state, computed = one.state, len(one.kv)
            state.kv.accept()  # the last step's nodes used the drafter's own features
            ready = computed > len(state.kv) and state.features.end == computed and len(one.tokens) == computed + 1
            depths.append(max(0, min(room, self.budget.depth)) if ready else 0)
            kvs.append(state.kv if depths[-1] else None)
            if not depths[-1]:
                continue
            begin = len(state.kv)
            lengths.append(computed - begin)
            tokens = torch.tensor(one.tokens[begin + 1 : computed + 1])
            inputs.append(self._input(tokens, state.features.since(begin) @ self.mix.T))
        keys, samplings = [one.key for one in batch.sequences], [one.request.sampling for one in batch.sequences]
        growth = BestFirst(
            self.budget, self.drawn, batch.draws, keys, samplings, depths, masks=batch.draft_masks, read=batch.read
        )
        if not lengths:
            return growth.grow(torch.empty(0, batch.target.vocabulary), lambda *_: RowLogits(torch.empty(0)))
        output = self.lm.forward_embeds([kv for kv in kvs if kv is not None], lengths, torch.cat(inputs), timed)
        active = [tree for tree, depth in enumerate(depths) if depth]
        hidden = dict(zip(active, (rows[-1] for rows in output.pending), strict=True))

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
            nodes = rows - shape.roots
            above = torch.stack([hidden[row] for row in shape.parent[nodes].tolist()])
            found = self.lm.extend(kvs, shape, rows, self._input(torch.from_numpy(token[nodes]), above), timed)
            hidden.update(zip(rows.tolist(), found.hidden, strict=True))
            return RowLogits(found.logits)

        return growth.grow(output.logits, expand)

    def _input(self, token: Tensor, feature: Tensor) -> Tensor:  # [n], [n, H] -> [n, H]
        return torch.cat([self.embed(token), feature], -1) @ self.fc.T
