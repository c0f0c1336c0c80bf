"""Lookahead decoding (2402.02057): a window of guesses is computed with the draft and never accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from spec_lab.core.draft import ComputedOnly, Draft, Drawn
from spec_lab.core.request import Request
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch


@dataclass
class State:
    """The state of one sequence.

    Args:
        window: W guesses, one after another: the tokens of the rows that are computed only.
        pool: the last token seen after each pair's first token: 2-grams that the window found.
        observed: how often the window's rows were observed.
    """

    window: list[int]
    pool: dict[int, list[int]] = field(default_factory=dict)
    observed: int = 0

    def chain(self, token: int, length: int) -> list[int]:
        """The tokens that the pool holds after ``token``."""
        followed: list[int] = []
        while len(followed) < length and (last := (followed or [token])[-1]) in self.pool:
            followed.append(self.pool[last][-1])
        return followed


@dataclass(frozen=True)
class Lookahead(Proposer):
    """Verifies a chain of 2-grams from its pool; a window of guesses below the root finds new ones (Jacobi iteration).

    Args:
        window: W, rows computed only.
        depth: of the verified chain.
    """

    window: int = 3
    depth: int = 2
    name: str = "lookahead"
    drawn: Drawn = "deterministic"
    branches: bool = False
    requires: Requires = Requires(logits=True)

    @property
    def nodes(self) -> int:
        """Most rows below one root, the window's included."""
        return self.depth + self.window

    def init(self, request: Request) -> State:
        """The first window consists of tokens of the prompt."""
        tokens = request.tokens
        return State([tokens[n % len(tokens)] for n in range(self.window)])

    def observe(self, observed: Sequence[Observation]) -> None:
        """The arg max of each window row is the next guess of its column, and ends a 2-gram."""
        for observation in observed:
            if observation.logits is None or len(observation.rows) <= self.window:
                continue
            state: State = observation.sequence.state
            best = observation.logits[-self.window :].argmax(-1).tolist()
            for token, following in zip(observation.rows[-self.window :], best, strict=True):
                state.pool.setdefault(token, []).append(following)
            state.window, state.observed = best, state.observed + 1

    def propose(self, batch: Batch) -> Draft:
        """A chain for each sequence, and the window as another chain below the root."""
        shapes, tokens, room = [], [], batch.room()
        for deepest, sequence in zip(room, batch.sequences, strict=True):
            continued = sequence.state.chain(sequence.tokens[-1], max(0, min(self.depth, deepest)))
            shapes.append(chain(len(continued)))
            tokens += continued
        shape = forest(tuple(shapes))
        parents, guesses = [], []
        for tree, sequence in enumerate(batch.sequences):
            above = tree
            for guess in sequence.state.window if room[tree] > self.window else ():
                parents.append(above)
                above = shape.rows + len(guesses)
                guesses.append(guess)
        extra = ComputedOnly(np.array(parents, dtype=np.int64), torch.tensor(guesses, dtype=torch.long))
        return Draft(shape, torch.tensor(tokens, dtype=torch.long, device=batch.device), computed_only=extra)
