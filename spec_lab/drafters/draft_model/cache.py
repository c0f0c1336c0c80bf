"""The KV cache of a draft for one sequence: a stable part, and a tentative part below it that belongs to one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.decode.proposer import runner_kv_bytes
from spec_lab.propose.tree_proposer import TreeProposer
from spec_lab.runners.runner import DraftRunner, KVSequence


@dataclass(frozen=True, eq=False)
class Tentative:
    """The computed nodes of one drafted tree.

    Args:
        shape: the forest they belong to, and which tree of it is theirs.
        token: ``[M]`` the forest's tokens.
        computed: ``[R]`` bool, which rows are computed.
    """

    shape: Shape
    tree: int
    token: np.ndarray  # [M]
    computed: np.ndarray  # [R]

    def find(self, tokens: list[int]) -> list[int]:
        """The longest path of computed nodes from the root down whose tokens begin ``tokens``.

        All of them are searched: siblings drawn iid may repeat a token with different nodes below.
        """
        roots, parent, depth = self.shape.roots, self.shape.parent, self.shape.depth
        matched, deepest = {self.tree}, self.tree
        rows = self.shape.trees[self.tree]
        for row in rows[self.computed[rows]].tolist():
            level = int(depth[row])
            if parent[row - roots] in matched and level <= len(tokens) and self.token[row - roots] == tokens[level - 1]:
                matched.add(row)
                if level > depth[deepest]:
                    deepest = row
        return self.shape.path(deepest)


@dataclass(eq=False)
class DraftCache:
    """A draft model's KV cache for one sequence.

    The stable part holds a prefix of the sequence. The tentative part holds the nodes drafted last. Each step starts
    from the longest prefix of the sequence found in both; after a rewind, a fork or a forced token that prefix is only
    shorter. (A drafter whose tentative keys and values rest on its own features, not on the target's, needs only the
    KV cache itself: ``KVSequence.accept()`` drops its tentative part in every step.)

    Args:
        kv: in the draft's runner.
        tokens: those whose positions the stable part holds, and those that follow it for certain.
        tentative: what was drafted last.
        text: what the draft reads of the sequence, in its own tokens, as of this step.
    """

    kv: KVSequence
    tokens: list[int] = field(default_factory=list)
    tentative: Tentative | None = None
    text: list[int] = field(default_factory=list)

    def follow(self, tokens: list[int]) -> list[int]:
        """Keep the longest common prefix with ``tokens``, drop the rest; return the tokens not yet computed.

        At least one is left, since the distribution after the last token is what drafting begins with.
        """
        end = len(self.tokens)
        if end < len(tokens) and tokens[:end] == self.tokens:
            cells: list[int] = []
            if self.tentative is not None:
                cells = self.tentative.find(tokens[end:-1])
                cells = self.tentative.shape.places[np.array(cells, dtype=np.int64)].tolist()
            self.kv.accept(cells)
            self.tokens += tokens[end:]
        else:
            common = 0
            for mine, theirs in zip(self.tokens, tokens[:-1], strict=False):
                if mine != theirs:
                    break
                common += 1
            self.kv.truncate(min(common, len(self.kv)))
            self.tokens = list(tokens)
        self.tentative = None
        return tokens[len(self.kv) :]

    def fork(self) -> DraftCache:
        """A cache for a fork of the sequence, which shares the stable part."""
        return DraftCache(self.kv.fork(), list(self.tokens))

    def close(self) -> None:
        """Free the cells."""
        self.tentative = None
        self.kv.close()


class CachedDrafter(TreeProposer):
    """A drafter with a causal LM of its own, whose KV cache follows each sequence: the life cycle of its states.

    Subclasses set ``lm``; ``context``, most positions of a sequence; and ``reserve``, how many more of a sequence's
    positions the KV cache holds while it drafts.
    """

    lm: DraftRunner
    context: int
    reserve: int

    def init(self, request: Request) -> DraftCache:
        """The draft's KV cache for a sequence, empty."""
        tokens = min(len(request.tokens) + request.max_new_tokens, self.context)
        return DraftCache(self.lm.open(tokens + self.reserve))

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """See ``Proposer``."""
        return runner_kv_bytes(self.lm, [min(end, self.context) + self.reserve for end in positions])

    def fork(self, state: DraftCache) -> DraftCache:
        """See ``DraftCache.fork``."""
        return state.fork()

    def close(self, state: DraftCache) -> None:
        """See ``DraftCache.close``."""
        state.close()
