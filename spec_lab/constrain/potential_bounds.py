"""An upper bound of the potential that is learned from samples, for constraints whose outputs cannot be enumerated.

Before anything is known every text may be completed: its bound H is 1, and 0 where a text is not allowed or the length
is spent. Whatever was scored gets

    H(s) = sum_t p(t | s) H(s t),

so that h(s) <= H(s) always, and the bounds fall with every sample (Park et al. 2024, arXiv:2405.21047, section 4:
approximate expected futures). Two ways of sampling use them; with both the next token has probability
p(t | s) H(s t) / H(s):

- "rejection": H as it was before the sample, so that a text that was never scored is continued from p itself, by any
  token, and an output that is not valid is rejected. The product of the factors is p(x) / H(root). So accepted outputs
  are independent samples of p(x | valid), whatever was learned; a share h(root) / H(root) is accepted, which grows
  (adaptive rejection sampling; Parys et al. 2025, arXiv:2510.01902). Exact.
- "expected_futures": at texts that were never scored only allowed tokens are drawn, from p masked and renormalised.
  Every output follows the constraint, but it is p(x | valid) only in the limit of many samples (ASAp, 2405.21047).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spec_lab.constrain.potential import Text
from spec_lab.constrain.protocol import (
    Constraint,
    ConstraintError,
    ConstraintState,
    TokenWeights,
    allows,
    mask_of,
    tokens_of,
)
from spec_lab.engine.request import Request

SAMPLERS = ("rejection", "expected_futures")


@dataclass(eq=False)
class LearnedText:
    """A text that was scored.

    Args:
        tokens: ``[n]`` those that the constraint allows, in ascending order.
        p: ``[n]`` their probabilities.
        bound: ``[n]`` H of the text with each of them.
    """

    tokens: np.ndarray
    p: np.ndarray
    bound: np.ndarray

    @property
    def total(self) -> float:
        """H of the text."""
        return float(self.p @ self.bound)

    def place(self, token: int) -> int | None:
        """The place of a token; None where it is not allowed."""
        place = int(np.searchsorted(self.tokens, token))
        return place if place < len(self.tokens) and self.tokens[place] == token else None


@dataclass(eq=False)
class ExpectedFutures:
    """The bounds H of one request.

    Args:
        stop: tokens that end a text.
        length: most tokens of an output, the stop token included.
    """

    stop: frozenset[int]
    length: int
    known: dict[Text, LearnedText] = field(default_factory=dict, init=False)
    found: dict[Text, float] = field(default_factory=dict, init=False)

    @property
    def upper(self) -> float:
        """H of the empty text: an upper bound of Z, the probability of a valid output."""
        return self.known[()].total if () in self.known else 1.0

    @property
    def lower(self) -> float:
        """The probability of all valid outputs seen so far: a lower bound of Z."""
        return sum(self.found.values())

    def learn(self, text: Text, tokens: np.ndarray, p: np.ndarray) -> None:
        """Add a text that was scored; its beginnings were added before.

        Args:
            text: without a stop token.
            tokens: ``[n]`` allowed after it, in ascending order.
            p: ``[n]`` their probabilities.
        """
        if text in self.known:
            return
        bound = np.ones(len(tokens))
        if len(text) + 1 >= self.length:
            bound[~np.isin(tokens, list(self.stop))] = 0.0
        self.known[text] = LearnedText(tokens, p, bound)
        for end in range(len(text), 0, -1):
            above = self.known[text[: end - 1]]
            place = above.place(text[end - 1])
            assert place is not None, "a text that is not allowed"
            above.bound[place] = self.known[text[:end]].total

    def add(self, output: Text, p: float) -> None:
        """Add a valid output with its probability."""
        self.found[output] = p

    def weights(self, text: Text) -> TokenWeights | None:
        """Return H of every token after a text, relative to the largest; None where the text was never scored."""
        one = self.known.get(text)
        if one is None:
            return None
        some = one.bound > 0
        bound = one.bound[some]
        return TokenWeights(one.tokens[some], bound / bound.max(initial=0.0) if len(bound) else bound)


@dataclass(frozen=True, eq=False)
class LearnedConstraint:
    """A constraint under which outputs are sampled as by one of ``SAMPLERS``. See ``Constraint``.

    With "rejection" the sequence of an output that cannot be valid is ended.

    Args:
        constraint: whose outputs are valid.
        futures: of the one request that is sampled; they must not change while a sequence is decoded.
        sampler: how.
    """

    constraint: Constraint
    futures: ExpectedFutures
    sampler: str

    @property
    def name(self) -> str:
        """The constraint's."""
        return self.constraint.name

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.constraint.vocabulary

    @property
    def has_actions(self) -> bool:
        """Whether outputs are rejected while they are decoded."""
        return self.sampler == "rejection"

    def start(self, request: Request) -> FuturesState:
        """See ``Constraint``."""
        return FuturesState(self, self.constraint.start(request), ())


class FuturesState:
    """The bounds of what may follow a text. See ``ConstraintState``."""

    def __init__(self, of: LearnedConstraint, own: ConstraintState | None, text: Text) -> None:
        self.of, self.own, self.text = of, own, text

    def fork(self) -> FuturesState:
        """See ``ConstraintState``."""
        return FuturesState(self.of, None if self.own is None else self.own.fork(), self.text)

    def advance(self, token: int) -> None:
        """See ``ConstraintState``. A token that the constraint does not allow ends the sequence."""
        mask = None if self.own is None else self.own.mask()
        self.text += (token,)
        if mask is not None and not allows(mask, token):
            self.own = None
        elif self.own is not None:
            self.own.advance(token)

    def mask(self) -> np.ndarray | None:  # [W]
        """See ``ConstraintState``."""
        weights = self.potential()
        return None if weights is None else mask_of(weights.tokens.tolist(), self.of.vocabulary)

    def action(self) -> tuple[()] | None:
        """See ``ConstraintState``: an empty tuple where the output is rejected."""
        return () if self.of.sampler == "rejection" and self.own is None else None

    def potential(self) -> TokenWeights | None:
        """See ``HasPotential``."""
        known = self.of.futures.weights(self.text)
        if known is not None or self.of.sampler == "rejection":
            return known
        if self.own is None:
            raise ConstraintError("a token was drawn that its constraint does not allow")
        tokens = tokens_of(self.own.mask(), self.of.vocabulary)
        return TokenWeights(tokens, np.ones(len(tokens)))
