"""The suffix proposer: it drafts what followed earlier occurrences of the last tokens, scored by counts.

One structure and one score serve a family of methods, as options: SuffixDecoding (2411.04975; own text and the
responses of finished requests, every match length tried), SAM-Decoding (2411.10666; the longest match, longer drafts
after longer matches) and REST (2311.08252; a store on disk, trees).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import Folder, Number, Share, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, forest
from spec_lab.core.upload import upload, upload_tokens
from spec_lab.decode.proposer import Observation, Proposer
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.target import Target
from spec_lab.propose.suffix_counts import NO_DRAFT, SuffixDraft, SuffixRules
from spec_lab.propose.suffix_index import SuffixIndex
from spec_lab.propose.suffix_search import SuffixSource
from spec_lab.propose.suffix_store import TokenStore
from spec_lab.propose.trees import MAX_NODES, Choices, TreeNodes
from spec_lab.runners.runner import DraftRunner

LONGEST = 64
"""Maximum length of a match."""

MAX_OCCURRENCES = 4096
"""Maximum number of occurrences that are counted."""

MAX_SHARED = 2**26
"""Maximum number of tokens of the responses that are kept."""


@dataclass(eq=False)
class SharedResponses:
    """The responses of finished requests, which all requests share. The oldest are forgotten first.

    Args:
        learns: whether responses are added.
        version: changes with what is known.
    """

    index: SuffixIndex
    max_tokens: int
    learns: bool = True
    version: int = 0

    def learn(self, response: Sequence[int]) -> None:
        """Add a response, or its last ``max_tokens`` tokens; forget the oldest ones that no longer fit."""
        if not self.learns or not response:
            return
        self.version += 1
        self.index.add(response[-self.max_tokens :])
        while sum(self.index.documents) > self.max_tokens:
            self.index.drop()

    def forget(self) -> None:
        """Forget all responses."""
        if self.learns:
            self.version += 1
            self.index = SuffixIndex(self.index.max_match)


@dataclass(eq=False)
class SuffixState:
    """State of one sequence.

    Args:
        own: the index of its text; None where it is not used.
        known: how many of the indexed tokens are unchanged since.
        planned: number of tokens, and version of the shared responses, that ``draft`` was made for.
        longest: of the longest match in the own text, the shared responses and the store, the most it could be then.
        draft: the last one.
    """

    own: SuffixIndex | None
    known: int = 0
    planned: tuple[int, int] | None = None
    longest: tuple[int, ...] = (0, 0, 0)
    draft: SuffixDraft = NO_DRAFT


@dataclass(eq=False)
class Suffix(Proposer):
    """Drafts the continuations of earlier occurrences of the last tokens, by their counts.

    Args:
        rules: how occurrences become a draft.
        max_match: longest match that is looked up, at most ``LONGEST``.
        own: whether the text of the sequence itself is looked up.
        shared: the responses of finished requests; None for none.
        store: further text, such as a store on disk; None for none.
        name: for records.
        sha256: of the store; None without one.
    """

    rules: SuffixRules
    max_match: int = 32
    own: bool = True
    shared: SharedResponses | None = None
    store: SuffixSource | None = None
    name: str = "suffix"
    sha256: str | None = None
    drawn: Drawn = "deterministic"
    _shape: Callable[[tuple[int, ...]], Shape] = field(
        init=False, repr=False, default_factory=lambda: lru_cache(maxsize=1024)(_shape_of)
    )

    @staticmethod
    @checked
    def load(
        target: Target,
        nodes: TreeNodes = 32,
        depth: TreeNodes = 32,
        children: TreeNodes = 1,
        max_match: Annotated[int, Whole(1, LONGEST)] = 32,
        min_match: Annotated[int, Whole(1, LONGEST)] = 1,
        longest_only: bool = False,
        factor: Annotated[float, Number(0, 1024)] = 1.0,
        offset: Annotated[int, Whole(0, MAX_NODES)] = 0,
        min_share: Share = 0.1,
        occurrences: Annotated[int, Whole(1, MAX_OCCURRENCES)] = 64,
        own: bool = True,
        shared: Annotated[int, Whole(0, MAX_SHARED)] = 0,
        store: str | None = None,
        name: Annotated[str, Folder()] = "suffix",
    ) -> Suffix:
        """Return the proposer with valid options.

        Args:
            target: whose tokens a store must hold.
            nodes: maximum drafted tokens.
            depth: maximum depth of a drafted continuation.
            children: maximum children of a node: 1 drafts a chain, more a tree.
            min_match: shortest match that is looked up.
            longest_only: true: look up the longest match only; false: every length, and draft the best score.
            factor: after a match of m tokens at most factor * m + offset nodes.
            offset: see factor.
            min_share: nodes that a smaller share of the occurrences leads to are not drafted; 0: all are.
            occurrences: maximum occurrences that are counted.
            max_match: longest match that is looked up, in a store of 16 tokens.
            own: true: look up prompt and output, too.
            name: name of the proposer in tables and files.
            shared: number of last tokens of finished requests' responses that are looked up, too; 0: none.
            store: a folder that spec-lab index built; None: none.

        Raises:
            OSError, ValueError: a store that is missing, damaged or of another tokenizer.
            ValueError: an option of the wrong type or range; names it.
        """
        if min_match > max_match:
            raise WrongOption(f"min_match is {min_match}, larger than max_match, which is {max_match}")
        rules = SuffixRules(
            nodes=nodes,
            depth=depth,
            min_match=min_match,
            occurrences=occurrences,
            factor=factor,
            offset=offset,
            min_share=min_share,
            children=children,
            longest_only=longest_only,
        )
        if rules.budget(max_match) < 1:
            raise WrongOption("factor and offset allow no nodes: set one of them to more than 0")
        if not own and not shared and store is None:
            raise WrongOption("own=false leaves nothing to look up: set shared or store")
        responses = SharedResponses(SuffixIndex(max_match), shared) if shared else None
        proposer = Suffix(rules, max_match, own, responses, None, name)
        if store is None:
            return proposer
        opened = TokenStore.open(store, target, max_match)
        return replace(proposer, store=opened, sha256=opened.sha256)

    @property
    def nodes(self) -> int:
        """Maximum number of nodes below one root."""
        return self.rules.budget(self.max_match)

    @property
    def branches(self) -> bool:
        """Whether it drafts trees."""
        return self.rules.children > 1

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts = {**asdict(self.rules), "max_match": self.max_match, "own": self.own}
        return {**facts, "store": self.store.facts} if isinstance(self.store, TokenStore) else facts

    @property
    def shared_store(self) -> str:
        """See ``Proposer``."""
        return f"the last {self.shared.max_tokens} tokens of the responses of finished requests" if self.shared else ""

    def forget(self) -> None:
        """Forget the responses."""
        if self.shared is not None:
            self.shared.forget()

    def scores(self, batch: Batch) -> list[float]:
        """Return the expected number of accepted tokens of the draft for each sequence, 0 where nothing matches.

        The drafts are kept until ``propose`` returns them.
        """
        return [self._draft(sequence).score for sequence in batch.sequences]

    def propose(self, batch: Batch) -> Draft:
        """Draft one tree per sequence, an empty one where nothing matches."""
        drafts = [
            self._draft(sequence) if room else NO_DRAFT  # at depth 0, as a policy decides it, nothing is looked up
            for room, sequence in zip(batch.room(), batch.sequences, strict=True)
        ]
        shapes = tuple(self._shape(draft.parents) for draft in drafts)
        tokens = upload_tokens(batch.device, [token for draft in drafts for token in draft.tokens])
        if not batch.recorded:
            return Draft(forest(shapes), tokens)
        shares = np.array([share for draft in drafts for share in draft.shares])
        return Draft(forest(shapes), tokens, greedy_q=upload(batch.device, shares)[0])

    def _draft(self, sequence: SequenceState) -> SuffixDraft:
        """Return the draft of the best score over the sources: the own text first, which wins ties.

        A match is at most as much longer than the longest one in the last step as the text has become. Sources in which
        this allows no better score are not searched.
        """
        state: SuffixState = sequence.state
        tokens = sequence.tokens
        planned = (len(tokens), 0 if self.shared is None else self.shared.version)
        if state.planned == planned:
            return state.draft
        if state.own is not None:
            state.own.follow(tokens, state.known)
        best, context, longest = NO_DRAFT, tokens[-self.max_match :], []
        for source, most in zip(self._sources(state), self._longest(state, planned), strict=True):
            if source is not None and self.rules.worth(most, best.score):
                best, most = self.rules.draft(source, context, best)
            longest.append(most)
        state.draft, state.known, state.planned, state.longest = best, len(tokens), planned, tuple(longest)
        return best

    def _sources(self, state: SuffixState) -> tuple[SuffixSource | None, ...]:
        return state.own, None if self.shared is None else self.shared.index, self.store

    def _longest(self, state: SuffixState, planned: tuple[int, int]) -> tuple[int, ...]:
        """Return the most that the longest match in each source could be."""
        if state.planned is None:
            return (self.max_match,) * 3
        more = planned[0] - state.planned[0]
        text, shared, store = state.longest
        return text + more, self.max_match if state.planned[1] != planned[1] else shared + more, store + more

    def init(self, request: Request) -> SuffixState:
        """Return the state of an empty text."""
        return SuffixState(SuffixIndex(self.max_match) if self.own else None)

    def observe(self, observed: Sequence[Observation]) -> None:
        """Learn the responses of the sequences that end."""
        if self.shared is not None:
            for observation in observed:
                if observation.sequence.finish is not None:
                    self.shared.learn(observation.sequence.emitted)

    def fork(self, state: SuffixState) -> SuffixState:
        """Return an independent copy."""
        return replace(state, own=None if state.own is None else state.own.copy())

    def rewind(self, state: SuffixState, length: int) -> None:
        """Tokens from ``length`` on may have changed."""
        state.known, state.planned = min(state.known, length), None

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Suffix:
        """Return the same proposer for another target, with fixed texts in place of what it shares and stores.

        (Responses that one enumerated outcome leaves would change the drafts of the next.)
        """
        texts = [toy_text(target.vocabulary, step) for step in (1, -1)]
        rules = replace(self.rules, min_match=1)  # a toy's text has a few tokens
        shared = None if self.shared is None else SharedResponses(self._index(texts[0]), 1, learns=False)
        store = None if self.store is None else self._index(texts[1])
        return replace(self, rules=rules, shared=shared, store=store, sha256=None)

    def _index(self, text: Sequence[int]) -> SuffixIndex:
        index = SuffixIndex(self.max_match)
        index.add(text)
        return index


def toy_text(vocabulary: int, step: int) -> list[int]:
    """Return a text in which every token of a small vocabulary follows every other, in one of two orders."""
    tokens = range(vocabulary)[::step]
    return [token for first in tokens for other in tokens for token in (first, other)]


def _shape_of(parents: tuple[int, ...]) -> Shape:
    """Return the one-tree shape with these parent rows."""
    return Shape(1, np.array(parents, dtype=np.int64))
