"""A small model drafts: a chain (speculative sampling), a static tree, or a tree that grows best first.

Source: chains 2211.17192 and 2302.01318; trees with iid siblings SpecInfer (2305.09781), without replacement 2402.14160
and Sequoia (2402.12374), deterministic top-k siblings EAGLE-2 (2406.16858); noise shared with the target 2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, Unpack

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, empty
from spec_lab.core.inference import inference
from spec_lab.core.options import DraftModelPath, Filled, WrongOption, checked
from spec_lab.core.shape import Shape, forest
from spec_lab.core.upload import upload_tokens
from spec_lab.decode.proposer import Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.draft_model.cache import CachedDrafter, DraftCache, Tentative
from spec_lab.drafters.draft_model.loading import check_same_tokens, load_draft
from spec_lab.drafters.draft_model.retokenized import Tokens
from spec_lab.drafters.draft_model.strings import StringTokens, strings
from spec_lab.drafters.draft_model.vocabularies import SameTokens, SharedTokens, TrimmedTokens, intersect
from spec_lab.drafters.trimmed import Drafted, chosen_tokens, with_tokens
from spec_lab.models.target import Target
from spec_lab.propose.continuations import merged
from spec_lab.propose.device_levels import DeviceLevels
from spec_lab.propose.expansion import Computed, RowLogits
from spec_lab.propose.levels import RUN
from spec_lab.propose.tree_plan import Grown, TreeOptions, TreePlan
from spec_lab.propose.tree_proposer import Forwards
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner


class DraftModel(CachedDrafter):
    """Drafts with a causal LM of its own, whose KV cache follows each sequence.

    Args:
        lm: the draft.
        context: maximum number of positions of the draft model; longer sequences have no draft.
        plan: the trees, and how their tokens are drawn.
        name: as in records.
        sha256: of the draft's weights.
        vocabularies: between the target's tokens and the draft's; None if they are the same.
    """

    text_only = True

    def __init__(
        self,
        lm: DraftRunner,
        context: int,
        plan: TreePlan,
        name: str = "draft_model",
        sha256: str = "",
        vocabularies: SameTokens | None = None,
    ) -> None:
        super().__init__(plan, name, Requires(), sha256)
        self.lm, self.context, self.reserve = lm, context, plan.computed
        self.vocabularies: SameTokens = vocabularies or SameTokens()
        self._bare = lru_cache(maxsize=256)(lambda roots: empty(roots, lm.device))

    @staticmethod
    @checked
    def load(
        target: Target,
        path: DraftModelPath,
        revision: Filled | None = None,
        vocabularies: Literal["same", "intersect", "strings"] = "same",
        tokens: Drafted | None = None,
        **options: Unpack[TreeOptions],
    ) -> DraftModel:
        """Load a draft in the target's dtype and on its device.

        Args:
            target: whose tokens are drafted.
            path: a folder of a transformers checkpoint, or a hub name.
            revision: branch, tag or commit of a hub name; None: main.
            vocabularies: same: it has the target's tokens; intersect: the tokens that both have are drafted; strings:
                its likeliest tokens are translated as text (SLEM), which requires drawn=deterministic.
            tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
                target's stop tokens; None: all.
            options: of the trees.

        Raises:
            ValueError: a wrong option; another tokenizer or vocabulary than the target's, or too few shared tokens; a
                tree wider than the vocabulary; a model of a kind that cannot decode forests (``Unsupported``).
            OSError: no checkpoint there.
        """
        plan = TreePlan.read(**options)
        if vocabularies == "strings" and (plan.drawn != "deterministic" or tokens is not None):
            what = f"drawn is {plan.drawn}" if plan.drawn != "deterministic" else f"tokens is {tokens}"
            change = "drawn=deterministic" if plan.drawn != "deterministic" else "tokens=null"
            raise WrongOption(
                f"vocabularies=strings translates the draft model's likeliest tokens, all of its own, and {what}: "
                f"set proposer.{change}"
            )
        draft = load_draft(target, path, revision)
        if draft.chains and plan.branches:
            raise WrongOption(
                f"path: the draft {path} has recurrent layers, whose runner can take back rejected tokens of "
                "a chain only: choose proposer=draft_chain, or another draft"
            )
        if vocabularies == "strings":
            plan.check_width(draft.vocabulary)
            translation = strings(target, Tokens(draft.tokenizer, draft.vocabulary, draft.ends, path))
            unpenalized, name = replace(plan, penalized=False), f"draft_{plan.kind}"
            return StringDraftModel(draft.runner(None), draft.context, unpenalized, name, draft.sha256, translation)
        shared: SharedTokens | None = None
        kept = None if tokens is None else chosen_tokens(tokens, target)
        if vocabularies == "intersect":
            shared = intersect(target, Tokens(draft.tokenizer, draft.vocabulary, draft.ends, path))
        else:
            advice = "; proposer.vocabularies=intersect drafts the tokens that both have, strings any text"
            check_same_tokens(target, draft.vocabulary, draft.tokenizer, path, advice)
        if kept is not None:
            shared = TrimmedTokens(kept.tolist(), target.vocabulary) if shared is None else shared.only(kept)
        plan.check_width(target.vocabulary if shared is None else shared.count)
        runner = draft.runner(None if kept is None or shared is None else shared.rows)
        sha256 = with_tokens(draft.sha256, kept)
        return DraftModel(runner, draft.context, plan, f"draft_{plan.kind}", sha256, shared)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> DraftModel:
        """The same proposer with another draft and tree. See ``Proposer``."""
        vocabularies = self.vocabularies.toy(target.vocabulary)
        return type(self)(draft, target.context, self.plan.toy(tree), self.name, vocabularies=vocabularies)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return self.plan.facts | self.vocabularies.facts

    @property
    def forced_nodes(self) -> int:
        """See ``Proposer``: of chains. With another vocabulary the draft may have no such token."""
        chains = self.plan.budget is None and not self.branches
        return RUN if chains and self.vocabularies.same and self.drawn != "gumbel" else 0

    def levels(self, sequence: SequenceState, room: int) -> int:
        """As many as the draft's context still holds; new prompts are computed on the way.

        Nodes at the last depth are not computed: they may stand one beyond the draft's last position.
        """
        cache: DraftCache = sequence.state
        cache.text = text = self.vocabularies.read(sequence.tokens)
        return min(room, self.context + 1 - len(text)) if text else 0

    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Compute the tokens that follow the cached ones."""
        between, timed, computed = self.vocabularies, batch.clock.phase("propose_forward"), list[np.ndarray]()
        caches: list[DraftCache | None] = [
            sequence.state if depth else None for sequence, depth in zip(batch.sequences, depths, strict=True)
        ]
        kvs = [None if cache is None else cache.kv for cache in caches]

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Computed:
            computed.append(rows)
            return between.logits(self.lm.extend(kvs, shape, rows, between.nodes(token), timed))

        def finish(grown: Grown) -> None:
            done = np.zeros(grown.shape.rows, dtype=bool)
            for rows in computed:
                done[rows] = True
            nodes = between.nodes(grown.token)
            for tree, cache in enumerate(caches):
                if cache is not None:
                    cache.tentative = Tentative(grown.shape, tree, nodes, done)

        active = [cache for cache in caches if cache is not None]
        pending = [cache.follow(cache.text) for cache in active]
        bare = self._bare(len(active))
        roots = self.lm.forward([cache.kv for cache in active], pending, bare, timed=timed)
        return Forwards(between.logits(roots), expand, finish)

    def draft_ahead(self, batch: Batch, depths: Sequence[int], levels: DeviceLevels) -> Draft | None:
        """See ``TreeProposer``."""
        if not self.vocabularies.same or not self.lm.plans_levels:
            return None
        timed, shape = batch.clock.phase("propose_forward"), levels.shape
        caches: list[DraftCache | None] = [
            sequence.state if depth else None for sequence, depth in zip(batch.sequences, depths, strict=True)
        ]
        pending = [cache.follow(cache.text) for cache in caches if cache is not None]
        kvs = [None if cache is None else cache.kv for cache in caches]
        planned = self.lm.levels_ahead(kvs, pending, shape, levels.arrays)
        if planned is None:
            return None

        def computed(prepared: Any, token: Tensor | None) -> Tensor:
            return self.vocabularies.logits(RowLogits(self.lm.run_level(prepared, token, timed))).logits

        def compute(level: int, token: Tensor, above: Tensor) -> Tensor:
            return computed(planned.levels[level - 1], token)

        def finish(token: np.ndarray) -> None:
            done = np.zeros(shape.rows, dtype=bool)
            done[shape.drawing.rows] = True
            for tree, cache in enumerate(caches):
                if cache is not None:
                    cache.tentative = Tentative(shape, tree, token, done)

        return levels.grow(computed(planned.first, None), compute, planned.given, finish)


class StringDraftModel(DraftModel):
    """Drafts with a causal LM that has other tokens, whose likeliest ones are translated as text.

    As many of the target's tokens are drafted as the plan has nodes, and no deeper than its depth. Arguments as of
    ``DraftModel``; siblings are drawn as "deterministic".
    """

    vocabularies: StringTokens
    why_not_admitted = (
        "proposer.vocabularies=strings translates tokens, so that its drafts state no draft probabilities: set "
        "policy=goodput, or proposer.vocabularies to same or intersect"
    )

    @inference
    def propose(self, batch: Batch) -> Draft:
        """See ``Proposer``. Masks of a constraint concern the target's tokens, so that the draft model has none."""
        drafted = super().propose(replace(batch, draft_masks=None, deferred=False))
        shapes, tokens = list[Shape](), list[int]()
        for tree, (sequence, room) in enumerate(zip(batch.sequences, batch.room(), strict=True)):
            parents, nodes = merged(self._paths(drafted, tree, sequence.tokens, room), self.nodes)
            shapes.append(Shape(1, np.array(parents, dtype=np.int64)))
            tokens += nodes
        return Draft(forest(tuple(shapes)), upload_tokens(batch.device, tokens), broken=drafted.broken)

    def _paths(self, draft: Draft, tree: int, text: Sequence[int], room: int) -> list[list[int]]:
        """The target's tokens of every path of a tree of draft tokens, in the order of its leaves."""
        shape, token = draft.shape, draft.token.tolist()
        leaves = [row for row in shape.trees[tree].tolist()[1:] if not shape.count[row]]
        paths = [[token[row - shape.roots] for row in shape.path(leaf)] for leaf in leaves]
        return [self.vocabularies.write(text, path)[: min(room, self.plan.depth)] for path in paths]
