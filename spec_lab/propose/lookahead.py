"""Lookahead decoding: a window of guesses that the target computes beside the draft fills a pool of n-grams.

Source: 2402.02057, sections 3 and 4. The window has W columns and N - 1 levels. Level 0 is a chain below the pending
token; the token of each further level is what the target found likeliest after the one above it, in an earlier step.
Rows of the window are computed and never accepted. The likeliest tokens after the last level complete an n-gram in
every column, and the levels move up by one. Drafted are the n-grams of the pool that begin with the pending token,
merged into a tree. Guesses are always the arg max, whatever the temperature of the request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from spec_lab.core.draft import ComputedOnly, Draft, Drawn
from spec_lab.core.options import Whole, checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, forest
from spec_lab.core.upload import upload_tokens
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.continuations import merged
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner

MAX_SIZE = 64
"""Maximum of each of the options."""

Followers = tuple[int, ...]
"""The tokens of an n-gram after its first."""


@dataclass
class Window:
    """The window and the pool of one sequence.

    Args:
        levels: from 1 to N - 1 levels of W tokens; none before the first step.
        rows: number of rows of the last step's tree without the window, the root included; 0: without a window.
        pool: n-grams by their first token, those of each the least recently found first.
    """

    levels: list[list[int]] = field(default_factory=list)
    rows: int = 0
    pool: dict[int, OrderedDict[Followers, None]] = field(default_factory=dict)

    def keep(self, first: int, followers: Followers, max_followers: int) -> None:
        """Put an n-gram into the pool; of more than ``max_followers`` with one first token the oldest is forgotten."""
        known = self.pool.setdefault(first, OrderedDict())
        known[followers] = None
        known.move_to_end(followers)
        if len(known) > max_followers:
            known.popitem(last=False)


@dataclass(eq=False)
class Lookahead(Proposer):
    """Drafts n-grams that the target made itself, in rows computed beside the draft.

    Args:
        window: number of columns, W.
        ngram: length of an n-gram, N.
        guesses: most n-grams that are drafted in a step, and that are kept for one first token, G.
    """

    window: int
    ngram: int
    guesses: int
    name: str = "lookahead"
    drawn: Drawn = "deterministic"
    branches: bool = True
    requires: Requires = Requires(top_k=1)

    @staticmethod
    @checked
    def load(
        target: Target,
        window: Annotated[int, Whole(1, MAX_SIZE)] = 7,
        ngram: Annotated[int, Whole(2, MAX_SIZE)] = 4,
        guesses: Annotated[int, Whole(1, MAX_SIZE)] = 7,
    ) -> Lookahead:
        """Return the proposer with valid options.

        Args:
            window: columns of guesses that are computed beside the draft; published for 7B models: 15.
            ngram: length of the n-grams; published: 5.
            guesses: most n-grams that are drafted in a step; published: 15.

        Raises:
            ValueError: an option that is no whole number in its range; names it.
        """
        return Lookahead(window, ngram, guesses)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {"window": self.window, "ngram": self.ngram, "guesses": self.guesses}

    @property
    def nodes(self) -> int:
        """Most rows below one root: the drafted n-grams' and the window's."""
        return (self.guesses + self.window) * (self.ngram - 1)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Lookahead:
        """A small window: a toy's context has few positions."""
        return Lookahead(1, 2, 2)

    def init(self, request: Request) -> Window:
        """Return the state of a new sequence: no n-grams."""
        return Window()

    def observe(self, observed: Sequence[Observation]) -> None:
        """Complete an n-gram in every column, and move the levels up."""
        for observation in observed:
            state: Window = observation.sequence.state
            computed = state.rows + len(state.levels) * self.window
            if not state.rows or observation.top_k is None or len(observation.rows) != computed:
                continue  # a part of a prompt, or a step that computed no window
            last = observation.top_k[computed - self.window :, 0].tolist()
            if len(state.levels) < self.ngram - 1:
                state.levels.append(last)
                continue
            columns = zip(*state.levels, last, strict=True)
            for first, *followers in columns:
                state.keep(first, tuple(followers), self.guesses)
            state.levels = [*state.levels[1:], last]

    def propose(self, batch: Batch) -> Draft:
        """Draft the known n-grams that begin with the last token, and add the rows of the lookahead window.

        The window is left out where the context has no room for all of it. A policy limits the drafted n-grams only:
        without the window no new n-grams would be found.
        """
        tries, windows = [], []
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            state, text = sequence.state, sequence.tokens
            if not state.levels:  # published: random tokens of the prompt. Here: its last ones in turn.
                state.levels = [[text[-1 - n % len(text)] for n in range(self.window)]]
            known = [ngram[: max(0, room)] for ngram in reversed(state.pool.get(text[-1], ()))]
            tries.append(merged(known, self.guesses * (self.ngram - 1)))
            fits = batch.target.context - len(text) >= self.window + self.ngram  # whatever a policy allows
            state.rows = len(tries[-1][1]) + 1 if fits else 0
            windows.append(state.levels if fits else [])
        shapes = tuple(Shape(1, np.array(parents, dtype=np.int64)) for parents, _ in tries)
        token = upload_tokens(batch.device, [token for _, tokens in tries for token in tokens])
        shape = forest(shapes)
        parents, tokens = list[int](), list[int]()
        for root, levels in enumerate(windows):
            for level, level_tokens in enumerate(levels):
                for column in range(self.window):
                    row = shape.rows + len(parents)
                    above = row - self.window if level else row - 1 if column else root
                    parents.append(above)
                tokens += level_tokens
        if not tokens:
            return Draft(shape, token)
        extra = ComputedOnly(np.array(parents, dtype=np.int64), upload_tokens(batch.device, tokens))
        return Draft(shape, token, computed_only=extra)
