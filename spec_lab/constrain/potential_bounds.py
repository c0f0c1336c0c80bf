"""An upper bound of the potential that is learned from samples, for constraints whose outputs cannot be enumerated.

Before anything is known every text may be completed: its bound H is 1, and 0 where a text is not allowed or the length
is spent. Whatever was scored gets

    H(s) = sum_t p(t | s) H(s t),

so that h(s) <= H(s) always, and the bounds fall with every sample (Park et al. 2024, arXiv:2405.21047, section 4:
approximate expected futures). Two ways of sampling use them; with both the next token has probability
p(t | s) H(s t) / H(s):

- "rejection": H as it was before the sample, so that a text that was never scored is continued from p itself, by any
  token, and an output that is not valid is rejected. The product of the factors is p(x) / H(root). So the first n
  accepted outputs are independent samples of p(x | valid), whatever was learned, for a fixed n; a share h(root) /
  H(root) is accepted, which grows (adaptive rejection sampling; Parys et al. 2025, arXiv:2510.01902). Exact. How many
  of a fixed number of attempts are accepted depends on the outputs, through what was learned from them.
- "expected_futures": at texts that were never scored only allowed tokens are drawn, from p masked and renormalised.
  Every output follows the constraint, but it is p(x | valid) only in the limit of many samples (ASAp, 2405.21047).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from spec_lab.core.request import Request

SAMPLERS = ("rejection", "expected_futures")


@dataclass(frozen=True)
class LearnedText:
    """A text that was scored. What is stored grows with the tokens that followed it, not with the vocabulary.

    Args:
        rest: the probability of the tokens that did not follow it so far, but may: those with H = 1.
        p: the probabilities of those that did.
        bound: H of the text with each of them.
    """

    rest: float
    p: Mapping[int, float]
    bound: dict[int, float]

    @property
    def total(self) -> float:
        """H of the text."""
        return self.rest + sum(p * self.bound[token] for token, p in self.p.items())


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
    outputs: dict[Text, float] = field(default_factory=dict, init=False)

    @property
    def upper(self) -> float:
        """H of the empty text: an upper bound of Z, the probability of a valid output."""
        return self.known[()].total if () in self.known else 1.0

    @property
    def lower(self) -> float:
        """The probability of all valid outputs seen so far: a lower bound of Z."""
        return sum(self.outputs.values())

    def may_follow(self, text: Text, tokens: np.ndarray) -> np.ndarray:  # [n] bool
        """Return which allowed tokens may follow a text: the last token of an output must be a stop token."""
        if len(text) + 1 < self.length:
            return np.ones(len(tokens), dtype=bool)
        return np.isin(tokens, list(self.stop))

    def learn(self, text: Text, rest: float, p: Mapping[int, float]) -> None:
        """Add a text that was scored, or what followed it since; its beginnings were added before.

        Args:
            text: without a stop token.
            rest: the probability of all other tokens that ``may_follow``.
            p: the probabilities of allowed tokens that followed it, also those given before.
        """
        before = self.known[text].bound if text in self.known else {}
        if text in self.known and len(before) == len(p):
            return
        last = len(text) + 1 >= self.length
        new = {token: 0.0 if last and token not in self.stop else 1.0 for token in p}
        self.known[text] = LearnedText(rest, p, new | before)
        for end in range(len(text), 0, -1):
            above = self.known[text[: end - 1]]
            assert text[end - 1] in above.p, "a text that is not allowed"
            above.bound[text[end - 1]] = self.known[text[:end]].total

    def add(self, output: Text, p: float) -> None:
        """Add a valid output with its probability."""
        self.outputs[output] = p

    def weights(self, text: Text, allowed: Callable[[], np.ndarray]) -> TokenWeights | None:
        """Return H of every token after a text, relative to the largest; None where the text was never scored.

        Args:
            allowed: returns the tokens ``[n]`` that the constraint allows after it, in ascending order.
        """
        learned = self.known.get(text)
        if learned is None:
            return None
        if learned.total == 0:  # perhaps a dead end, where the constraint has no mask
            return TokenWeights(np.empty(0, dtype=np.int64), np.empty(0))
        tokens = allowed()
        bound = self.may_follow(text, tokens).astype(np.float64)
        bound[np.searchsorted(tokens, list(learned.bound))] = list(learned.bound.values())
        some = bound > 0
        return TokenWeights(tokens[some], bound[some] / bound.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class LearnedConstraint(Constraint):
    """A constraint under which outputs are sampled as by one of ``SAMPLERS``. See ``Constraint``.

    With "rejection" the sequence of an output that cannot be valid is ended.

    Args:
        futures: of the one request that is sampled; they must not change while a sequence is decoded.
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


class FuturesState(ConstraintState):
    """The bounds of what may follow a text. See ``ConstraintState``."""

    def __init__(self, of: LearnedConstraint, state: ConstraintState | None, text: Text) -> None:
        self.of, self.own, self.text = of, state, text

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
        """See ``ConstraintState``."""
        known = self.of.futures.weights(self.text, self._allowed)
        if known is not None or self.of.sampler == "rejection":
            return known
        if self.own is None:
            raise ConstraintError("a token was drawn that its constraint does not allow")
        tokens = self._allowed()
        return TokenWeights(tokens, np.ones(len(tokens)))

    def _allowed(self) -> np.ndarray:  # [n]
        assert self.own is not None, "a text that was scored is allowed"
        return tokens_of(self.own.mask(), self.of.vocabulary)
