"""A regular expression, by way of a controller: how any ``State`` that only masks becomes one."""

from __future__ import annotations

from spec_lab.constrain import load as constraints
from spec_lab.constrain.control import ANY, Branch, Controlled, Event
from spec_lab.constrain.protocol import State
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.engine.request import Request


class Pattern:
    """Follows a state, and ends with it.

    Args:
        state: wants no actions.
        ends: tokens that end a text; where the request does not stop at them, the controller does.
    """

    def __init__(self, state: State, ends: tuple[int, ...] = ()) -> None:
        self.state, self.ends = state, ends

    def fork(self) -> Pattern:
        """See ``Controller``."""
        return Pattern(self.state.fork(), self.ends)

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        for token in event.append:
            if token in self.ends:
                return []
            self.state.advance(token)
        mask = self.state.mask()
        return [Branch(allow=ANY if mask is None else mask)]


def load(vocabulary: Vocabulary, pattern: str, prompt: bool = False, engine: str = "llguidance") -> Controlled:
    """The output matches ``pattern`` as a whole. Arguments and errors as in ``load.regex``."""
    inner = constraints.regex(vocabulary, pattern, prompt, engine)

    def make(request: Request) -> Pattern:
        return Pattern(inner.start(request), vocabulary.ends)

    facts = {"pattern": pattern, "prompt": prompt, "engine": engine}
    return Controlled(make, vocabulary.size, "pattern", facts=facts)
