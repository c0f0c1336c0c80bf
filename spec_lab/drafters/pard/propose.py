"""PARD: a small language model drafts several tokens in one forward, by reading mask tokens (2504.18583).

The model reads the committed tokens and, after the pending token, one mask token for each further level. Its logits at
the pending token draft the first level, those at mask token i level i + 1. A level's distribution q therefore does not
depend on the tokens drafted above it: along a path the tokens are independent, with a product of distributions. Every
row of a tree states the q of its level, so sampled drafts are verified exactly; constraints and repetition penalties
still apply along each path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import DrafterPath, Filled, Whole, brief, checked
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.core.upload import upload
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.draft_model.cache import CachedDrafter
from spec_lab.drafters.draft_model.loading import check_same_tokens, load_draft
from spec_lab.drafters.draft_model.vocabularies import TrimmedTokens
from spec_lab.drafters.trimmed import Drafted, chosen_tokens, with_tokens
from spec_lab.models.target import Target
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.tree_plan import TreeOptions, TreePlan
from spec_lab.propose.tree_proposer import Forwards
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner


class Pard(CachedDrafter):
    """Drafts with a causal LM that was trained to read mask tokens, whose KV cache follows each sequence.

    It reads tokens only, so it drafts in every step: in the first one of a request, where it computes the whole prompt,
    and where several forced tokens are pending. The mask tokens' keys and values are dropped in the next step.

    Args:
        lm: the draft.
        context: most positions the draft has; beyond, nothing is drafted.
        mask_token: the number of the mask token, which is never drafted; it may lie beyond the target's vocabulary.
        plan: the trees, and how their tokens are drawn.
        sha256: of the draft's weights.
        vocabulary: how many tokens the draft can read, where these are fewer than the target's; others are read as the
            mask token.
        trimmed: the tokens that alone are drafted, of which alone it has logits; None: all.
    """

    def __init__(
        self,
        lm: DraftRunner,
        context: int,
        mask_token: int,
        plan: TreePlan,
        sha256: str = "",
        vocabulary: int | None = None,
        trimmed: TrimmedTokens | None = None,
    ) -> None:
        super().__init__(plan, "pard", Requires(), sha256)
        self.lm, self.context, self.reserve, self.mask_token = lm, context, plan.depth, mask_token
        self.vocabulary, self.trimmed = vocabulary, trimmed
        self._masks = lru_cache(maxsize=256)(self._mask_chains)

    @staticmethod
    @checked
    def load(
        target: Target,
        path: Annotated[str, DrafterPath("a PARD model", model=True)],
        revision: Filled | None = None,
        mask_token: Annotated[int, Whole(0)] | None = None,
        tokens: Drafted | None = None,
        **options: Unpack[TreeOptions],
    ) -> Pard:
        """Load a draft in the target's dtype and on its device.

        Args:
            target: whose tokens are drafted.
            path: folder of a checkpoint trained by PARD, or a hub name; it must have the target's tokenizer.
            revision: branch, tag or commit of a hub name; None: main.
            mask_token: number of the mask token; None: pard_token of the checkpoint's config.
            tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
                target's stop tokens; None: all.
            options: of the trees.

        Raises:
            ValueError: a wrong option; a draft of another kind than PARD's; no mask token, or one that the draft's
                embedding lacks; another tokenizer than the target's, apart from the mask token; a tree wider than the
                vocabulary.
            Unsupported: a model of a kind that cannot decode forests.
            OSError: no checkpoint there.
        """
        plan = TreePlan.read(**options)
        draft = load_draft(target, path, revision)
        _refuse_other_kinds(path, draft.config)
        mask = _mask_token(path, mask_token, draft.config, draft.vocabulary)
        # Both sizes may include padding, of different widths in models of one family (Qwen2.5); logits are fitted.
        check_same_tokens(target, target.vocabulary, draft.tokenizer, path, mask_token=mask)
        shared = min(target.vocabulary, draft.vocabulary)
        narrower = shared if shared < target.vocabulary else None
        if tokens is None:
            plan.check_width(shared - (mask < shared))
            return Pard(draft.runner(None), draft.context, mask, plan, draft.sha256, narrower)
        kept = [token for token in chosen_tokens(tokens, target).tolist() if token < shared and token != mask]
        trimmed = TrimmedTokens(kept, target.vocabulary)
        plan.check_width(trimmed.count)
        sha256 = with_tokens(draft.sha256, kept)
        return Pard(draft.runner(trimmed.rows), draft.context, mask, plan, sha256, narrower, trimmed)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Pard:
        """The same proposer with another draft and tree; the last token is the mask token. See ``Proposer``."""
        trimmed = None if self.trimmed is None else self.trimmed.toy(target.vocabulary)
        return Pard(draft, target.context, target.vocabulary - 1, self.plan.toy(tree), trimmed=trimmed)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        drafted = {} if self.trimmed is None else self.trimmed.facts
        return self.plan.facts | drafted | {"mask_token": self.mask_token}

    def levels(self, sequence: SequenceState, room: int) -> int:
        """The last mask token stands one position before the last level."""
        return min(room, self.context + 1 - len(sequence.tokens))

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Compute all levels by one forward of the draft."""
        active = [sequence for sequence, depth in zip(batch.sequences, depths, strict=True) if depth]
        number = np.cumsum(np.array(depths) > 0) - 1  # of each tree among the active ones
        masks = self._masks(tuple(depth - 1 for depth in depths if depth))
        pending = [sequence.state.follow(self._read(sequence.tokens)) for sequence in active]
        timed = batch.clock.phase("propose_forward")
        computed = self.lm.forward([sequence.state.kv for sequence in active], pending, masks, timed=timed)
        logits = self._fitted(computed.logits, batch.target.vocabulary)  # [A + mask tokens, V]

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> RowLogits:
            level = masks.shape.grid[number[shape.root[rows]], shape.depth[rows]]
            return RowLogits.of(logits.index_select(0, upload(logits.device, level)[0]))

        return Forwards(RowLogits.of(logits[: len(active)]), expand)

    def _read(self, tokens: list[int]) -> list[int]:
        """The tokens as the draft reads them."""
        if self.vocabulary is None:
            return tokens
        return [token if token < self.vocabulary else self.mask_token for token in tokens]

    def _mask_chains(self, lengths: tuple[int, ...]) -> Draft:
        """Mask tokens as nodes of a chain below each root, so that the draft computes them with the pending token."""
        shape = forest(tuple(map(chain, lengths)))
        return Draft(shape, torch.full((shape.nodes,), self.mask_token, device=self.lm.device))

    def _fitted(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Logits ``[R, W]`` over the target's tokens ``[R, V]``: -inf of the mask token and of those it lacks."""
        if self.trimmed is not None:
            logits = self.trimmed.logits(RowLogits(logits)).logits
        if logits.shape[1] < vocabulary:
            logits = torch.nn.functional.pad(logits, (0, vocabulary - logits.shape[1]), value=-torch.inf)
        logits = logits[:, :vocabulary]
        if self.mask_token >= vocabulary:
            return logits
        logits = logits.clone()
        logits[:, self.mask_token] = -torch.inf
        return logits


def _refuse_other_kinds(path: str, config: Any) -> None:
    """Refuse a draft whose config has fields of a later kind, which reads more than tokens (PARD-2)."""
    for name, value in {} if config is None else vars(config).items():
        known = name == "pard_token" or (name == "spd_type" and value == "pard")
        if name.startswith(("pard_", "spd_")) and not known and value is not None:
            raise ValueError(
                f"the draft {path} has {name} ({brief(value)}) in its config, and only drafts with pard_token are "
                "supported: read as one of those, it would draft worse tokens. Choose another draft"
            )


def _mask_token(path: str, given: Any, config: Any, vocabulary: int) -> int:
    """The mask token of a draft with so many tokens. Errors as in ``Pard.load``."""
    name, value = "mask_token", given
    if given is None:
        name, value = f"pard_token in the config of {path}", getattr(config, "pard_token", None)
        if value is None:
            raise ValueError(
                f"the draft {path} has no pard_token in its config, which numbers the mask token of a model trained by "
                "PARD: set proposer.mask_token, or choose such a model"
            )
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise ValueError(f"{name} must be a token of the draft, from 0 to {vocabulary - 1}, not {brief(value)}")
    return value
