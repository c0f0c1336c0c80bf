"""Token recycling: a table of the tokens that the target found likeliest after each token drafts a static tree.

Source: 2408.08696, section 3. The likeliest tokens of every row that the target computes, rejected rows too, replace
the table's entry of that row's token; child i of a node is entry i of its token. Prompts are not used, as published.
Where two rows of a step have the same token the later one counts, in the order of requests and of nodes. (The official
code leaves this to the GPU, and drafts token 0 where nothing is known; here nothing is drafted there.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, forest
from spec_lab.core.shape import tree as shape_of
from spec_lab.core.upload import upload_tokens
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.trees import Choices, TreeText, parse, width_of, write
from spec_lab.runners.runner import DraftRunner

UNKNOWN = -1
"""An entry of a token that no row has had yet."""


@dataclass(eq=False)
class Recycling(Proposer):
    """Drafts the tokens that followed before, in a tree of fixed shape. What followed a token once may follow again:
    nothing is forgotten when a sequence is rewound.

    Args:
        vocabulary: V.
        tree: the shape; a child's rank is the place of its token among the likeliest.
        scope: "run": all requests share one table, as published; "request": each has a table of its own.
    """

    vocabulary: int
    tree: Choices
    scope: str = "run"
    name: str = "recycling"
    drawn: Drawn = "deterministic"
    _shared: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._shared = self._unknown()

    @staticmethod
    @checked
    def load(
        target: Target, tree: TreeText = "token_recycling_80", scope: Literal["run", "request"] = "run"
    ) -> Recycling:
        """Return the proposer with an empty table.

        Args:
            target: whose likeliest tokens are recycled.
            tree: paths of child ranks, widths (3x2x1), or a published tree.
            scope: run: all requests share the table, as published; request: each has its own.

        Raises:
            ValueError: no such tree or scope, or a tree wider than the vocabulary.
        """
        shape = parse(tree)
        if width_of(shape) > target.vocabulary:
            raise WrongOption(f"tree: a tree {width_of(shape)} wide does not fit a vocabulary of {target.vocabulary}")
        return Recycling(target.vocabulary, shape, scope)

    @property
    def nodes(self) -> int:
        """Most nodes below one root."""
        return len(self.tree)

    @property
    def branches(self) -> bool:
        """Whether the tree does."""
        return width_of(self.tree) > 1

    @property
    def requires(self) -> Requires:
        """The likeliest tokens of all rows, as many as the tree's largest rank has."""
        return Requires(top_k=1 + max(path[-1] for path in self.tree))

    @property
    def shared_store(self) -> str:
        """See ``Proposer``."""
        return "the likeliest tokens after each token, of all requests" if self.scope == "run" else ""

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {"tree": write(self.tree), "nodes": self.nodes, "scope": self.scope}

    def forget(self) -> None:
        """Empty the shared table."""
        self._shared = self._unknown()

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Recycling:
        """The same with an own table, for a toy target. A table for each request, so that replays draft the same."""
        return Recycling(target.vocabulary, tree, "request")

    def init(self, request: Request) -> np.ndarray | None:
        """The request's own table; None with a shared one."""
        return self._unknown() if self.scope == "request" else None

    def fork(self, state: np.ndarray | None) -> np.ndarray | None:
        """A copy of the request's own table."""
        return None if state is None else state.copy()

    def observe(self, observed: Sequence[Observation]) -> None:
        """Replace the entries of the tokens of all rows."""
        for observation in observed:
            if observation.top_k is not None and len(observation.rows):
                table = self._table(observation.sequence.state)
                for token, likeliest in zip(observation.rows, observation.top_k, strict=True):
                    table[token] = likeliest

    def propose(self, batch: Batch) -> Draft:
        """Look the children of every node up, level by level; nothing is drafted below a token without an entry."""
        shapes, tokens = [], []
        whole, parent, rank = self._whole
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            if not room:  # as a policy decided: nothing is looked up
                shapes.append(Shape(1, np.empty(0, dtype=np.int64)))
                tokens.append(np.empty(0, dtype=np.int64))
                continue
            table = self._table(sequence.state)
            token = np.empty(whole.rows, dtype=np.int64)
            token[0] = sequence.tokens[-1]
            for first, end in self._levels:
                above = token[parent[first - 1 : end - 1]]
                likeliest = table[above, rank[first - 1 : end - 1]]
                token[first:end] = np.where(above == UNKNOWN, UNKNOWN, likeliest)
            known = token != UNKNOWN
            shape, kept = (whole, slice(None)) if known.all() else whole.keep(known)
            shapes.append(shape)
            tokens.append(token[1:][kept])
        return Draft(forest(tuple(shapes)), upload_tokens(batch.device, np.concatenate(tokens)))

    def _unknown(self) -> np.ndarray:  # [V, k]
        return np.full((self.vocabulary, self.requires.top_k), UNKNOWN, dtype=np.int32)

    def _table(self, state: np.ndarray | None) -> np.ndarray:
        return self._shared if state is None else state

    @cached_property
    def _whole(self) -> tuple[Shape, np.ndarray, np.ndarray]:
        """The whole tree, breadth first, each node's parent row, and its rank."""
        shape = shape_of(self.tree)
        return shape, shape.parent, shape.rank

    @cached_property
    def _levels(self) -> list[tuple[int, int]]:
        """The first row of each level, and the one after its last."""
        ends = np.bincount(self._whole[0].depth).cumsum().tolist()
        return [(ends[depth - 1], ends[depth]) for depth in range(1, len(ends))]
