"""Strings that never appear, by the Branch protocol: the same law as ``spec_lab.constrain.banned``, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.constrain.control import ANY, Branch, Controlled, Event
from spec_lab.constrain.protocol import everything, only
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import strings
from spec_lab.engine.request import Request
from spec_lab.text.detokenizer import Strings, Watcher


class Banned:
    """Takes back each string as soon as it is complete; the token in which it began may not come there again."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def fork(self) -> Banned:
        """See ``Controller``."""
        return Banned(self.watcher.fork())

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        backtrack = 0
        for token in event.append:  # one at most: nothing is fast-forwarded
            match = self.watcher.push(token)
            if match is not None:
                self.watcher.rewind(match.tokens, match.ban)
                backtrack = match.tokens
        width, bans = len(self.watcher.pieces), self.watcher.bans
        return [Branch(backtrack, everything(width) & ~only(bans, width) if bans else ANY)]


def load(vocabulary: Vocabulary, strings: Sequence[str]) -> Controlled:
    """None of ``strings`` is in the output.

    Raises:
        ValueError: no list of texts, or an empty one.
    """
    return by_pieces(vocabulary.bytes, strings)


def by_pieces(pieces: Sequence[bytes], banned: Sequence[str]) -> Controlled:
    """``load``, given the bytes of each token."""
    texts = strings("constraint.strings", banned)
    if not texts:
        raise ValueError("constraint.strings is empty: give the texts to keep out")
    found = Strings(texts)

    def make(request: Request) -> Banned:
        return Banned(Watcher(pieces, found, request.healed, request.stop))

    return Controlled(make, len(pieces), "banned", facts={"strings": list(texts)})
