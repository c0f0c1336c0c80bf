"""The recipe of PARD: a small Llama that drafts all levels by one forward over mask tokens (2504.18583).

Level 0 reads the tokens. Level k reads the mask token in every column: at position j + k it attends to the tokens up to
t_j and to the masks of levels 1 to k of its own column, and drafts t_{j+1+k}. A text is thus learned at every token and
level without copies of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.options import Count, Share
from spec_lab.drafters.draft_model.train import LlamaRecipe
from spec_lab.drafters.pard.propose import Pard
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.runners.attention import spans
from spec_lab.train.chain import ChainObjective
from spec_lab.train.objectives import ChainLoss
from spec_lab.train.recipe import Beginning, TargetHead
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls, columns_of


@dataclass(frozen=True)
class PardRecipe(LlamaRecipe):
    """A Llama with the target's tokens and, as the last one, a mask token.

    Args:
        depth: levels, of which all but the first read a mask token.
        decay: weight of a level's loss over that of the level before it.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk", "ce" (of the texts' own tokens)
            or "tau" (-E[tau]); see ``train.objectives``.
    """

    depth: Count = 8
    decay: Share = 0.8
    loss: ChainLoss = "kl"
    name: ClassVar = "pard"

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``."""
        mask = target.vocabulary
        network = self.llama(target, mask + 1, seed, pard_token=mask)
        network.set_attn_implementation(spans())
        drafts, head = PardDrafts(network, mask, self.depth), TargetHead.of(target)
        objective = ChainObjective(network, drafts, head, target.lm.dtype, self.decay, self.loss)
        return Beginning(network, objective, {"layers": self.layers, "mask_token": mask})

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return Pard.load(target, str(folder), depth=depth)


@dataclass(frozen=True, eq=False)
class PardDrafts:
    """See ``chain.Drafts``: the draft's own states after its final norm.

    Args:
        network: a LlamaForCausalLM with attention over cells (``per_sequence``).
        mask: the mask token, which is the last one.
        depth: levels.
    """

    network: Any
    mask: int
    depth: int

    def states(self, text: Texts, hidden: Tensor, embedded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """``[B, n, H]``, and the columns: the pending token of ``chain``'s column j is t_{j+1}, so t_0 has none."""
        cache, ids = Unrolls(), text.ids
        for level, columns in enumerate(columns_of(text.counts(0), self.depth)):
            cache.narrowed(columns)
            if not columns.numel():
                yield hidden.new_zeros(len(ids), 0, self.network.config.hidden_size), columns
                continue
            tokens = ids if level == 0 else ids.new_full(columns.shape, self.mask)
            states = self.network.model(
                input_ids=tokens, position_ids=(columns.clamp_min(0) + level).to(ids.device), use_cache=False,
                **{cache_argument(self.network.model): cache},
            ).last_hidden_state  # fmt: skip
            yield states, (columns - 1).clamp_min(-1)

    def logits(self, position: int, states: Tensor) -> Tensor:
        """``[n, H] -> [n, V]``: of the target's tokens, since the mask token is never drafted."""
        return cast(Tensor, self.network.lm_head(states)[..., : self.mask])
