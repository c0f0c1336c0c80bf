"""Jacobi decoding: the target's own arg max after each wrong guess is the next guess.

Source: 2305.10427, algorithm 1. A chain of k guesses is computed in each step. Where the accepted ones end, the
likeliest tokens of the rows behind, computed below a wrong token, are the guesses for the positions that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.core.upload import upload_tokens
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.trees import Choices, TreeDepth, depth_of
from spec_lab.runners.runner import DraftRunner


@dataclass
class Guesses:
    """The guesses for the tokens after a sequence's text, possibly fewer than are drafted."""

    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Jacobi(Proposer):
    """Drafts a chain of guesses. Those that no row has made yet are tokens of the text, from its beginning.

    Args:
        depth: number of guesses, k.
    """

    depth: int
    name: str = "jacobi"
    drawn: Drawn = "deterministic"
    branches: bool = False
    requires: Requires = Requires(top_k=1)
    _chain: Callable[[int], Shape] = field(init=False, repr=False, default_factory=lambda: lru_cache(None)(chain))

    @staticmethod
    @checked
    def load(target: Target, depth: TreeDepth = 8) -> Jacobi:
        """Return the proposer with a valid option.

        Args:
            depth: number of guesses.

        Raises:
            ValueError: ``depth`` is no whole number from 1 to ``trees.MAX_DEPTH``.
        """
        return Jacobi(depth)

    @property
    def nodes(self) -> int:
        """Maximum number of nodes below one root."""
        return self.depth

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Jacobi:
        """The same with as many guesses as the tree is deep."""
        return Jacobi(depth_of(tree))

    def init(self, request: Request) -> Guesses:
        """No guesses yet."""
        return Guesses()

    def rewind(self, state: Guesses, length: int) -> None:
        """Guesses followed the removed tokens."""
        state.tokens = []

    def observe(self, observed: Sequence[Observation]) -> None:
        """Take the arg max of each row behind the last accepted one."""
        for observation in observed:
            state: Guesses = observation.sequence.state
            behind = len(observation.accepted) + 1
            state.tokens = [] if observation.top_k is None else observation.top_k[behind:, 0].tolist()

    def propose(self, batch: Batch) -> Draft:
        """Draft one chain per sequence, up to the end of the context."""
        drafted: list[int] = []
        shapes = []
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            count, text = max(0, min(self.depth, room)), sequence.tokens
            guesses = sequence.state.tokens[:count]
            guesses = guesses + [text[n % len(text)] for n in range(count - len(guesses))]
            drafted += guesses
            shapes.append(self._chain(count))
        return Draft(forest(tuple(shapes)), upload_tokens(batch.device, drafted))
