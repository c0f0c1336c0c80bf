"""One of several texts, in the tokenizer's own tokens; tokens without an alternative are fast-forwarded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from spec_lab.constrain.control import Branch, ControllerConstraint, Event
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import Texts, WrongOption, checked

Tokens = tuple[int, ...]


class ChoicesController:
    """Descends the prefix tree of the choices.

    Args:
        left: the remaining tokens of each choice that is still possible.
        ends: tokens that end a text: they tell a choice from a longer one that begins with it.
    """

    def __init__(self, left: Sequence[Tokens], ends: Tokens) -> None:
        self.left, self.ends = tuple(left), ends

    def fork(self) -> ChoicesController:
        """See ``Controller``."""
        return ChoicesController(self.left, self.ends)

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        got = event.append
        self.left = tuple(rest[len(got) :] for rest in self.left if rest[: len(got)] == got)
        longer = [rest for rest in self.left if rest]
        if not longer:
            return []  # a choice is complete, or a stop token completed it
        shared = {tokens[0]: _shared([rest for rest in longer if rest[0] == tokens[0]]) for tokens in longer}
        if len(shared) == 1 and len(longer) == len(self.left):
            return [Branch(allow=None, ff=tuple(shared.values()))]
        ends = self.ends if len(longer) < len(self.left) else ()
        return [Branch(allow={*shared, *ends}, ff=tuple(shared.values()))]


def _shared(several: Sequence[Tokens]) -> Tokens:
    """Return the tokens with which all of them begin."""
    return tuple(same[0] for same in takewhile(lambda same: len(set(same)) == 1, zip(*several, strict=False)))


@checked
def load(vocabulary: Vocabulary, choices: Texts) -> ControllerConstraint:
    """Return a constraint by which the output is one of ``choices``.

    Args:
        choices: texts to choose from, as the tokenizer encodes them.

    Raises:
        ValueError: not a list of texts, or an empty one.
    """
    if not choices:
        raise WrongOption("choices is empty: give the texts to choose from")
    written = [tuple(vocabulary.encode(text)) for text in dict.fromkeys(choices)]
    made = ChoicesController(written, vocabulary.ends)
    return ControllerConstraint(
        lambda request: made.fork(), vocabulary.size, "choices", facts={"choices": list(choices)}
    )
