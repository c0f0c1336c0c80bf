"""The probability of outputs without a constraint, and masked token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from spec_lab.constrain.potential import NO_TOKENS, Text
from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, tokens_of
from spec_lab.engine.request import Request
from spec_lab.engine.text_logits import text_logits
from spec_lab.models.target import Target


class Row(NamedTuple):
    """What may follow a text.

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
    found: list[Row | None] = [None] * len(texts)
    for some in text_logits(target, request, texts):
        mask = np.zeros(some.logits.shape, dtype=bool)
        for row, number in enumerate(some.numbers.tolist()):
            mask[row, allowed[number]] = True
        with np.errstate(divide="ignore"):
            p, local = some.log_probabilities(), some.log_probabilities(mask)
        for row, number in enumerate(some.numbers.tolist()):
            found[number] = Row(allowed[number], p[row, allowed[number]], local[row, allowed[number]])
    return [one for one in found if one is not None]


class Scores:
    """The rows of one request after all texts that were asked about.

    Args:
        target: computes them.
        constraint: allows tokens.
        request: its prompt and sampling.
    """

    def __init__(self, target: Target, constraint: Constraint, request: Request) -> None:
        self.target, self.constraint, self.request = target, constraint, request
        self.rows: dict[Text, Row] = {}
        self._allowed: dict[Text, np.ndarray] = {}

    def add(self, outputs: Collection[Text]) -> dict[Text, bool]:
        """Compute the rows along outputs, and return which outputs are valid."""
        valid = {output: self._walk(output) for output in dict.fromkeys(outputs)}
        new = [text for text in self._allowed if text not in self.rows]
        rows = rows_after(self.target, self.request, new, [self._allowed[text] for text in new])
        self.rows |= dict(zip(new, rows, strict=True))
        return valid

    def log_probabilities(self, output: Text) -> tuple[float, float]:
        """Return log p and log p_local of a valid output."""
        totals = [0.0, 0.0]
        for place, token in enumerate(output):
            row = self.rows[output[:place]]
            at = int(np.searchsorted(row.tokens, token))
            totals = [totals[0] + float(row.log_p[at]), totals[1] + float(row.log_local[at])]
        return totals[0], totals[1]

    def _walk(self, output: Text) -> bool:
        """Note what is allowed along an output, and return whether it is valid."""
        state = self.constraint.start(self.request)
        for place, token in enumerate(output):
            if token not in self._after(output[:place], state):
                return False
            if token in self.request.stop:
                return True
            try:
                state.advance(token)
            except ConstraintError:  # a dead end
                self._allowed[output[: place + 1]] = NO_TOKENS
                return False
        if len(output) < self.request.max_new_tokens:
            self._after(output, state)  # perhaps a dead end
        return False

    def _after(self, text: Text, state: ConstraintState) -> np.ndarray:
        """The tokens that are allowed after a text, none at a dead end."""
        if text not in self._allowed:
            try:
                self._allowed[text] = tokens_of(state.mask(), self.constraint.vocabulary)
            except ConstraintError:
                self._allowed[text] = NO_TOKENS
        return self._allowed[text]
