"""The recipe of P-EAGLE heads (2602.01469): all levels are learned at every token by one forward over mask rows.

Level 0 reads the tokens and features as an EAGLE-3 head does. Level k reads a mask row in each of its columns: at
position j + k it attends to columns 0 to j of level 0 and to the mask rows of levels 1 to k of its own column. Later
levels are learned in fewer columns, drawn at random among those of the level before (section 3.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor

from spec_lab.core.options import Share, Whole
from spec_lab.drafters.eagle.files import write_eagle3
from spec_lab.drafters.eagle.network import Eagle3Settings
from spec_lab.drafters.eagle.train import Eagle3Recipe
from spec_lab.drafters.peagle.files import PEAGLE
from spec_lab.drafters.peagle.network import PEagle, PEagleSettings
from spec_lab.drafters.peagle.propose import PEagleDrafter
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import ChainObjective
from spec_lab.train.recipe import Beginning, TargetHead
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls, columns_of


@dataclass(frozen=True)
class PEagleRecipe(Eagle3Recipe):
    """A P-EAGLE head, with an embedding of its own, which begins as the target's.

    Args:
        unrolls: levels, of which all but the first read a mask row.
        decay: weight of a level's loss over that of the level before it.
        weights: see ``Eagle3Recipe``; so the options that are not named here.
        layers: decoder layers.
        retention: see ``Eagle3Recipe``; here as in the paper.
        mask_token: number of a token that texts do not contain; None: the last one.
    """

    unrolls: Annotated[int, Whole(1, 64)] = 8
    decay: Share = 0.8
    layers: Annotated[int, Whole(1, 64)] = 4
    retention: Share = 0.7
    mask_token: Annotated[int, Whole(0)] | None = None
    name: ClassVar = "peagle"

    def _network(self, target: Target) -> PEagle:
        if self.mask_token is not None and self.mask_token >= target.vocabulary:
            raise ValueError(
                f"task.recipe.mask_token must be below the target's {target.vocabulary} tokens, not {self.mask_token}"
            )
        settings = self._settings(target)
        stated = {field.name: getattr(settings, field.name) for field in fields(Eagle3Settings)}
        mask = target.vocabulary - 1 if self.mask_token is None else self.mask_token
        stated |= {"own_embedding": True, "anchored": False}  # as windows of its files are read
        return PEagle(PEagleSettings(**stated, mask_token=mask))

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``."""
        begun = super().begin(target, paths, seed)
        every, module = torch.arange(target.vocabulary, device=target.lm.device), cast(Any, begun.module)
        with torch.no_grad():
            module.embed_tokens.weight.copy_(TargetHead(target.model).embed(every))
        return begun

    def _objective(self, network: Any, head: TargetHead, dtype: torch.dtype, seed: int) -> ChainObjective:
        drafts = PEagleDrafts(network, self.unrolls, partial(self._kept, network, seed))
        final = network.settings.target_hidden_size
        return ChainObjective(
            network, drafts, head, dtype, self.decay, self.loss, ids=network.ids, final=final, weights=self.weights
        )

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: in the format of speculators."""
        kinds = target.model.config.architectures or [type(target.model).__name__]
        more = {
            "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle",
            "mask_token_id": module.settings.mask_token,
        }  # fmt: skip
        return write_eagle3(module, folder, target.name, kinds[0], facts, torch.bfloat16, PEAGLE, more)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return PEagleDrafter.load(target, str(folder), depth=depth)


@dataclass(frozen=True, eq=False)
class PEagleDrafts:
    """See ``chain.Drafts``.

    Args:
        levels: how many tokens are drafted.
        kept: to which columns of texts each level is limited (``train.unroll.columns_of``).
    """

    network: PEagle
    levels: int
    kept: Callable[[Texts], Sequence[Tensor]] = lambda text: ()

    def states(self, text: Texts, hidden: Tensor, embedded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the normed outputs of each level, ``[B, n, H]``, and their columns."""
        network, cache = self.network, Unrolls(self.network.kinds)
        features = network.features(hidden[:, :-1, : -network.settings.target_hidden_size])
        for level, columns in enumerate(columns_of(text.counts(1), self.levels, self.kept(text))):
            cache.narrowed(columns)
            if not columns.numel():
                yield features[:, :0], columns
                continue
            if level == 0:
                x = network.inputs(text.ids[:, 1:], features)
            else:
                x = network.masks(columns.shape[1]).expand(len(columns), -1, -1)
            positions = (columns.clamp_min(0) + level).to(x.device)
            yield network.norm(network(x, positions, cache)), columns

    def logits(self, position: int, states: Tensor) -> Tensor:
        """``[n, H] -> [n, W]``."""
        assert self.network.lm_head is not None
        logits: Tensor = self.network.lm_head(states)
        return logits
