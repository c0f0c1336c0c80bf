"""A regular expression as a controller: how to wrap any ``ConstraintState`` that has no actions."""

from __future__ import annotations

from spec_lab.constrain import load as constraints
from spec_lab.constrain.control import ANY, Branch, ControllerConstraint, Event
from spec_lab.constrain.load import EngineName
from spec_lab.constrain.protocol import ConstraintState
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request


class PatternController:
    """Follows a state, and ends the sequence where the state's text ends.

    Args:
        state: without actions.
        ends: tokens that end a text; if the request does not stop at them, the controller does.
    """

    def __init__(self, state: ConstraintState, ends: tuple[int, ...] = ()) -> None:
        self.state, self.ends = state, ends

    def fork(self) -> PatternController:
        """See ``Controller``."""
        return PatternController(self.state.fork(), self.ends)

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        for token in event.append:
            if token in self.ends:
                return []
            self.state.advance(token)
        mask = self.state.mask()
        return [Branch(allow=ANY if mask is None else mask)]


def load(
    vocabulary: Vocabulary, pattern: str, prompt: bool = False, engine: EngineName = "llguidance"
) -> ControllerConstraint:
    """Return a constraint by which the output matches ``pattern``. Arguments and errors as in ``load.regex``.

    Args:
        pattern: a regular expression that the whole output matches.
        prompt: whether the matched text begins with the prompt.
        engine: llguidance or xgrammar (an extra).
    """
    inner = constraints.regex(vocabulary, pattern, prompt, engine)

    def make(request: Request) -> PatternController:
        return PatternController(inner.start(request), vocabulary.ends)

    facts = {"pattern": pattern, "prompt": prompt, "engine": engine}
    return ControllerConstraint(make, vocabulary.size, "pattern", facts=facts)
