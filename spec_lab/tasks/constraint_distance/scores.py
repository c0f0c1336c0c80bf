"""The probability of outputs without a constraint, and masked token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spec_lab.constrain.potential import NO_TOKENS, Text
from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, allows, tokens_of
from spec_lab.core.request import Request
from spec_lab.decode.text_logits import ROWS, text_logits
from spec_lab.models.target import Target

MAX_LOGITS = 2**23
"""Logits that are in memory at once, in float64: 64 MiB. With large vocabularies a forward has fewer texts."""


class Row(NamedTuple):
    """Tokens that may follow a text.

    Args:
        tokens: ``[n]`` allowed, in ascending order.
        log_p: ``[n]`` log of their probabilities without the constraint.
        log_local: ``[n]`` log of their probabilities when everything else is masked.
    """

    tokens: np.ndarray
    log_p: np.ndarray
    log_local: np.ndarray


def rows_after(target: Target, request: Request, texts: Sequence[Text], allowed: Sequence[np.ndarray]) -> list[Row]:
    """Return the row after each text, given the tokens ``[n]`` that the constraint allows after it."""
    rows = dict(_rows(target, request, texts, lambda number: allowed[number]))
    return [rows[number] for number in range(len(texts))]


def _rows(
    target: Target, request: Request, texts: Sequence[Text], allowed: Callable[[int], np.ndarray]
) -> Iterator[tuple[int, Row]]:
    """Yield the number of each text and the row after it.

    Args:
        target, request, texts: as in ``rows_after``.
        allowed: returns the tokens ``[n]`` that the constraint allows after the text with this number.
    """
    for some in text_logits(target, request, texts, max(min(ROWS, MAX_LOGITS // target.vocabulary), 1)):
        numbers = some.numbers.tolist()
        tokens = [allowed(number) for number in numbers]
        mask = np.zeros(some.logits.shape, dtype=bool)
        for row, columns in enumerate(tokens):
            mask[row, columns] = True
        with np.errstate(divide="ignore"):
            p, local = some.log_probabilities(), some.log_probabilities(mask)
        for row, (number, columns) in enumerate(zip(numbers, tokens, strict=True)):
            yield number, Row(columns, p[row, columns], local[row, columns])


@dataclass(frozen=True)
class Seen:
    """Probabilities kept of the row after a text.

    Args:
        rest: the probability, without the constraint, of the other allowed tokens that may follow.
        p: without the constraint, the log probability of each allowed token that followed the text in an output.
        local: the same when everything else is masked.
    """

    rest: float
    p: Mapping[int, float]
    local: Mapping[int, float]


class Scores:
    """The probabilities along outputs of one request.

    Of each text only the tokens that followed it are kept, so that memory grows with the outputs, not with the
    vocabulary. Where another token follows a text later, its row is computed again.

    Args:
        may_follow: returns which of the allowed tokens ``[n]`` may follow a text (``ExpectedFutures.may_follow``).
    """

    def __init__(
        self,
        target: Target,
        constraint: Constraint,
        request: Request,
        may_follow: Callable[[Text, np.ndarray], np.ndarray],
    ) -> None:
        self.target, self.constraint, self.request, self.may_follow = target, constraint, request, may_follow
        self.seen: dict[Text, Seen] = {}

    def add(self, outputs: Collection[Text]) -> dict[Text, bool]:
        """Compute the probabilities along outputs, and return which outputs are valid."""
        new: dict[Text, _New] = {}
        valid = {output: self._walk(output, new) for output in dict.fromkeys(outputs)}
        texts = list(new)

        def allowed(number: int) -> np.ndarray:
            state = new[texts[number]]
            return NO_TOKENS if state.dead else tokens_of(state.mask, self.constraint.vocabulary)

        for number, row in _rows(self.target, self.request, texts, allowed):
            text = texts[number]
            followed = sorted({*new[text].tokens, *(self.seen[text].p if text in self.seen else ())})
            columns = np.searchsorted(row.tokens, followed)
            others = self.may_follow(text, row.tokens)
            others[columns] = False
            p, local = (
                dict(zip(followed, log_p[columns].tolist(), strict=True)) for log_p in (row.log_p, row.log_local)
            )
            self.seen[text] = Seen(float(np.exp(row.log_p[others]).sum()), p, local)
        return valid

    def log_probabilities(self, output: Text) -> tuple[float, float]:
        """Return log p and log p_local of a valid output."""
        rows = [(self.seen[output[:position]], token) for position, token in enumerate(output)]
        return sum(row.p[token] for row, token in rows), sum(row.local[token] for row, token in rows)

    def _walk(self, output: Text, new: dict[Text, _New]) -> bool:
        """Note in ``new`` what must be computed along an output, and return whether it is valid."""
        state = self.constraint.start(self.request)
        for position, token in enumerate(output):
            text = output[:position]
            if text not in self.seen or token not in self.seen[text].p:
                if text not in new:
                    new[text] = _masked(state)
                if not new[text].allows(token):
                    return False
                new[text].tokens.add(token)
            if token in self.request.stop:
                return True
            try:
                state.advance(token)
            except ConstraintError:  # a dead end
                new.setdefault(output[: position + 1], _New(dead=True))
                return False
        if len(output) < self.request.max_new_tokens and output not in self.seen and output not in new:
            new[output] = _masked(state)  # perhaps a dead end
        return False


@dataclass
class _New:
    """A text whose row must be computed.

    Args:
        mask: ``[W]`` of the tokens that are allowed after it; None allows all.
        dead: whether none is.
        tokens: those that followed it in outputs.
    """

    mask: np.ndarray | None = None
    dead: bool = False
    tokens: set[int] = field(default_factory=set)

    def allows(self, token: int) -> bool:
        """Whether a token is allowed after it."""
        return not self.dead and (self.mask is None or allows(self.mask, token))


def _masked(state: ConstraintState) -> _New:
    """A text at whose end the constraint has this state."""
    try:
        mask = state.mask()
    except ConstraintError:
        return _New(dead=True)
    return _New(None if mask is None else mask.copy())
