"""A small model drafts, level by level: a chain (speculative sampling) or a static tree.

Source: chains 2211.17192 and 2302.01318; trees with iid siblings SpecInfer (2305.09781), without replacement 2402.14160
and Sequoia (2402.12374), deterministic top-k siblings EAGLE-2 (2406.16858); noise shared with the target 2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Shape, empty, forest
from spec_lab.core.draft import tree as shape_of
from spec_lab.core.inference import inference
from spec_lab.core.options import one_of, share, temperature_or_none, whole
from spec_lab.core.probabilities import Sampling
from spec_lab.engine.proposer import Lifecycle
from spec_lab.engine.request import Request
from spec_lab.engine.runner import DraftRunner
from spec_lab.engine.sequence import Batch, DraftMasks
from spec_lab.models import gguf
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.loading import load_model
from spec_lab.models.support import model_context
from spec_lab.models.target import Target
from spec_lab.propose.best_first import BestFirst, Budget
from spec_lab.propose.draft_cache import DraftCache, Tentative
from spec_lab.propose.forced import RUN, ForcedChains
from spec_lab.propose.growth import Growth
from spec_lab.propose.trees import MOST_DEPTH, MOST_NODES, Choices, depth_of, parse, width_of, widths, write


class DraftModel(Lifecycle):
    """Drafts with a causal LM of its own, whose KV cache follows each sequence.

    Siblings are drawn from q at their parent, with the sampling parameters of the request: ``iid``; ``without``
    replacement, fewer where the support is exhausted; or as ``point``, the likeliest tokens. ``gumbel`` also draws
    without replacement: the siblings are the best of log q + g (Gumbel-top-k, 1903.06059), and the draft carries the
    Gumbel noise g of each parent, with which a verifier of that name samples from the target. A row without children
    has no noise. At temperature 0 q is one-hot, so only ``point`` would draw a second sibling: a tree then needs
    ``point`` or a temperature of the draft's own (``check``). Which siblings are left out depends on q alone, never on
    a drawn value.

    With a ``confidence``, drafting stops early: children of a row at which no token has that draft probability get no
    children, since these are likely to be rejected and cost a forward of the draft. Dynamic draft lengths (2405.04304)
    and transformers' ``assistant_confidence_threshold`` compare the probability of the drawn token; here it is the
    maximum, so that whether drafting stops depends on the path above only, and verification stays exact.

    Args:
        lm: the draft.
        context: most positions the draft has; beyond, nothing is drafted.
        tree: the tree drafted below every root.
        drawn: how siblings are drawn.
        temperature: the draft's own; None uses each request's.
        confidence: between 0, off, and 1.
        name: as in records.
        sha256: of the draft's weights.
        budget: of a tree that grows best first, instead of ``tree``; None for none.
    """

    def __init__(
        self,
        lm: DraftRunner,
        context: int,
        tree: Choices,
        drawn: Drawn = "iid",
        temperature: float | None = None,
        confidence: float = 0.0,
        name: str = "draft_model",
        sha256: str = "",
        budget: Budget | None = None,
    ) -> None:
        self.lm = lm
        self.context = context
        self.tree = tree
        self.drawn = drawn
        self.temperature = temperature
        self.confidence = confidence
        self.name = name
        self.sha256 = sha256
        self.budget = budget
        self.nodes = len(tree) if budget is None else budget.nodes
        self.branches = (width_of(tree) if budget is None else budget.children) > 1
        self._shapes = [shape_of(tuple(path for path in tree if len(path) <= d)) for d in range(depth_of(tree) + 1)]
        self._bare = lru_cache(maxsize=256)(lambda roots: empty(roots, lm.device))

    @staticmethod
    def load(
        target: Target,
        path: str,
        depth: int | None = None,
        tree: str | None = None,
        drawn: str = "iid",
        temperature: float | None = None,
        confidence: float = 0.0,
        nodes: int | None = None,
        children: int = 2,
        max_depth: int = 8,
        width: int = 4,
    ) -> DraftModel:
        """Load a draft in the target's dtype and on its device.

        Args:
            target: whose tokens are drafted.
            path: folder of a checkpoint, a hub name, or a GGUF file, which llama.cpp computes.
            depth: drafts a chain of so many tokens, at most ``trees.MOST_DEPTH``; or
            tree: drafts a tree, written as ``trees.parse`` reads it.
            drawn: "iid", "without", "point" or "gumbel".
            temperature: the draft's own, at most 1e6; null uses each request's.
            confidence: a token drawn where none was this likely ends its path; 0 never ends one.
            nodes: grows a tree of at most so many nodes best first, instead of a fixed one, with so many
            children: below each expanded node, at most
            max_depth: levels, and
            width: nodes expanded by each forward of the draft.

        Raises:
            ValueError: a wrong option; another tokenizer or vocabulary than the target's; a tree wider than the
                vocabulary; a model of a kind that cannot decode forests (``Unsupported``).
            OSError: no checkpoint there.
        """
        if sum(one is not None for one in (depth, tree, nodes)) != 1:
            raise ValueError(
                "give one of proposer.depth, for a chain, proposer.tree, for a fixed tree, and proposer.nodes, for a "
                "tree that grows best first"
            )
        budget: Budget | None = None
        choices: Choices = ()
        if nodes is not None:
            budget = Budget(
                whole("proposer.nodes", nodes, most=MOST_NODES),
                whole("proposer.children", children, most=nodes),
                whole("proposer.max_depth", max_depth, most=MOST_DEPTH),
                whole("proposer.width", width, most=MOST_NODES),
            )
            if drawn == "gumbel" or confidence:
                raise ValueError("proposer.nodes supports neither proposer.drawn=gumbel nor proposer.confidence")
        elif depth is not None:
            choices = widths([1] * whole("proposer.depth", depth, most=MOST_DEPTH))
        else:
            choices = parse(cast(str, tree))
        kind = one_of("proposer.drawn", drawn, ("iid", "without", "point", "gumbel"))
        own = temperature_or_none("proposer.temperature", temperature)
        least = share("proposer.confidence", confidence)
        draft = _load_draft(target, path)
        check_same_tokens(target, draft.vocabulary, draft.tokenizer, path)
        if width_of(choices) > target.vocabulary:
            raise ValueError(
                f"proposer.tree: a tree {width_of(choices)} wide does not fit a vocabulary of {target.vocabulary}"
            )
        if budget is not None and budget.children > target.vocabulary:
            raise ValueError(
                f"proposer.children: {budget.children} children do not fit a vocabulary of {target.vocabulary}"
            )
        name = "draft_best_first" if budget else "draft_chain" if width_of(choices) == 1 else "draft_tree"
        return DraftModel(
            draft.runner(), draft.context, choices, cast(Drawn, kind), own, least, name, draft.sha256, budget
        )

    def check_sampling(self, request: Sampling) -> None:
        """Refuse what could draw only a chain.

        Raises:
            ValueError: siblings sampled at temperature 0.
        """
        if self.drawn != "point" and self.branches and self.sampling(request).temperature == 0:
            raise ValueError(
                f"at temperature 0 the draft distribution is one-hot, so siblings drawn {self.drawn} shrink the tree "
                "to a chain: set proposer.drawn=point, or a draft temperature such as proposer.temperature=1"
            )

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> DraftModel:
        """The same proposer with another draft and tree. See ``Proposer``."""
        budget = self.budget and Budget(min(self.budget.nodes, 3), min(self.budget.children, 2), 2, self.budget.width)
        own = self.drawn, self.temperature, self.confidence, self.name
        return DraftModel(draft, target.context, () if budget else tree, *own, budget=budget)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        facts = {"tree": write(self.tree), "nodes": self.nodes, "temperature": self.temperature}
        if self.budget is not None:
            own = self.budget
            facts |= {"tree": "best first", "children": own.children, "max_depth": own.depth, "width": own.width}
        return facts | {"confidence": self.confidence}

    @property
    def forced_nodes(self) -> int:
        """See ``DraftsForcedTokens``."""
        return RUN if self._drafts_forced else 0

    def init(self, request: Request) -> DraftCache:
        """The draft's KV cache for a sequence, empty."""
        tokens = min(len(request.tokens) + request.max_new_tokens, self.context)
        return DraftCache(self.lm.open(tokens + self.nodes))

    def fork(self, state: DraftCache) -> DraftCache:
        """See ``DraftCache.fork``."""
        return state.fork()

    def close(self, state: DraftCache) -> None:
        """See ``DraftCache.close``."""
        state.close()

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Draft below every sequence that the draft's context still holds; new prompts are computed on the way."""
        shapes, caches, depths = [], [], []
        for deepest, sequence in zip(batch.room(), batch.sequences, strict=True):
            # Nodes at the last depth are not computed: they may stand one beyond the draft's last position.
            deepest = min(deepest, self.context + 1 - len(sequence.tokens))
            if self.budget is not None:
                depths.append(max(0, min(deepest, self.budget.depth)))
                caches.append(sequence.state if deepest > 0 else None)
                continue
            deepest = min(deepest, len(self._shapes) - 1)
            shapes.append(self._shapes[max(0, deepest)])
            caches.append(sequence.state if deepest > 0 else None)
        samplings = [self.sampling(sequence.request.sampling) for sequence in batch.sequences]
        if self.budget is not None:
            return self._best_first(batch, depths, samplings, caches, self.budget)
        if self._fast_forwards(batch):
            depths = [shape.nodes for shape in shapes]
            limits = [
                min(r, self.context + 1 - len(s.tokens)) for r, s in zip(batch.room(), batch.sequences, strict=True)
            ]
            masks = cast(DraftMasks, batch.draft_masks)
            own = self.drawn, batch, masks, depths, samplings, caches, limits, self.confidence
            return ForcedChains(self.lm, *own).run()
        shape = forest(tuple(shapes))
        growth = Growth(self.lm, self.drawn, batch, shape, samplings, caches, self._bare, self.confidence)
        return growth.run()

    def _best_first(
        self,
        batch: Batch,
        depths: Sequence[int],
        samplings: Sequence[Sampling],
        caches: Sequence[DraftCache | None],
        budget: Budget,
    ) -> Draft:
        """Trees that grow best first."""
        active = [tree for tree, cache in enumerate(caches) if cache is not None]
        keys = [one.key for one in batch.sequences]
        texts = [one.tokens for one in batch.sequences]
        growth = BestFirst(
            budget, self.drawn, batch.draws, keys, samplings, depths, texts, batch.draft_masks, batch.read
        )
        if not active:
            nothing = torch.empty(0, batch.target.vocabulary, device=batch.device)
            return growth.grow(nothing, lambda *_: nothing)
        own = [cache for cache in caches if cache is not None]
        pending = [cache.follow(batch.sequences[tree].tokens) for tree, cache in zip(active, own, strict=True)]
        computed: list[int] = []
        timed = batch.clock.phase("propose_forward")

        def expand(shape: Shape, rows: np.ndarray, token: np.ndarray) -> Tensor:
            computed.extend(rows.tolist())
            sequences = [None if cache is None else cache.kv for cache in caches]
            return self.lm.extend(sequences, shape, rows, token[rows - shape.roots], timed).logits

        output = self.lm.forward([cache.kv for cache in own], pending, self._bare(len(own)), timed=timed)
        draft = growth.grow(output.logits, expand)
        rows = np.zeros(draft.shape.rows, dtype=bool)
        rows[computed] = True
        for tree, cache in zip(active, own, strict=True):
            cache.tentative = Tentative(draft.shape, tree, np.array(growth.token, dtype=np.int64), rows)
        return replace(draft, token=draft.token.to(batch.device))

    def _fast_forwards(self, batch: Batch) -> bool:
        """Whether forced tokens are drafted without a forward: in chains, if a constraint fast-forwards."""
        return self._drafts_forced and batch.draft_masks is not None and batch.draft_masks.forces

    @property
    def _drafts_forced(self) -> bool:
        return self.budget is None and self.drawn != "gumbel" and width_of(self.tree) <= 1

    def sampling(self, request: Sampling) -> Sampling:
        """How the draft samples for a request."""
        return request if self.temperature is None else replace(request, temperature=self.temperature)


class _Loaded(NamedTuple):
    """A draft model that was loaded, and what computes it, which is checked when it is made."""

    runner: Callable[[], DraftRunner]
    tokenizer: Any
    vocabulary: int
    context: int
    sha256: str


def _load_draft(target: Target, path: str) -> _Loaded:
    """Load a draft model. Errors as of ``DraftModel.load``."""
    if str(path).endswith(".gguf"):
        own = gguf.load_draft(path, target)
        return _Loaded(lambda: cast(DraftRunner, own.lm), own.tokenizer, own.vocabulary, own.context, own.sha256)
    model, tokenizer = load_model(path, str(target.lm.device), str(target.lm.dtype).removeprefix("torch."))
    sha256, width = weights_hash(path), int(model.get_output_embeddings().weight.shape[0])
    return _Loaded(lambda: target.draft_runner(model, sha256), tokenizer, width, model_context(model.config), sha256)


def check_same_tokens(target: Target, vocabulary: int, tokenizer: Any, path: str) -> None:
    """Refuse a draft with other tokens than the target's.

    Args:
        target: whose tokens are drafted.
        vocabulary: V of the draft.
        tokenizer: the draft's.
        path: of the draft, for messages.

    Raises:
        ValueError: other vocabulary sizes, tokens or splitting; the message states how they differ.
    """
    if target.tokenizer is not None:
        mine, theirs = (
            {number: token for token, number in t.get_vocab().items()} for t in (target.tokenizer, tokenizer)
        )
        wrong = [number for number in sorted({*mine, *theirs}) if mine.get(number) != theirs.get(number)]
        if wrong:
            some = "; ".join(f"{n} is {mine.get(n)!r} against {theirs.get(n)!r}" for n in wrong[:3])
            raise ValueError(
                f"the draft {path} has another tokenizer than the target {target.name}: {len(mine)} tokens in the "
                f"target's, {len(theirs)} in the draft's, {len(wrong)} ids differ (target against draft: {some})"
            )
        probe = "def f(x):\n    return {'né': [x, 1.5]}  # 2024 naïve"
        ours, other = (t(probe, add_special_tokens=False)["input_ids"] for t in (target.tokenizer, tokenizer))
        if ours != other:
            raise ValueError(
                f"the draft {path} has the target's tokens but splits text otherwise: {probe!r} becomes {ours} in the "
                f"target's tokenizer and {other} in the draft's"
            )
    if vocabulary != target.vocabulary:
        raise ValueError(
            f"the draft {path} has logits for {vocabulary} tokens, the target {target.name} for {target.vocabulary}; "
            "they must agree"
        )
