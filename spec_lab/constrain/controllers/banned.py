"""Banned strings by the Branch protocol: the same output distribution as ``spec_lab.constrain.banned``."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.constrain.control import ANY, Branch, ControllerConstraint, Event
from spec_lab.constrain.protocol import full_mask, mask_of
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import Texts, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.text.detokenizer import Strings, Watcher


class BannedController:
    """Backtracks over each string as soon as it is complete; the token in which it began is banned there."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def fork(self) -> BannedController:
        """See ``Controller``."""
        return BannedController(self.watcher.fork())

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        backtrack = 0
        for token in event.append:  # at most one: no token is fast-forwarded
            match = self.watcher.push(token)
            if match is not None:
                self.watcher.rewind(match.tokens, match.ban)
                backtrack = match.tokens
        width, bans = len(self.watcher.pieces), self.watcher.bans
        return [Branch(backtrack, full_mask(width) & ~mask_of(bans, width) if bans else ANY)]


@checked
def load(vocabulary: Vocabulary, strings: Texts) -> ControllerConstraint:
    """Return a constraint that keeps ``strings`` out of the output.

    Args:
        strings: texts that never appear.

    Raises:
        ValueError: not a list of texts, or an empty one.
    """
    return by_pieces(vocabulary.bytes, strings)


def by_pieces(pieces: Sequence[bytes], banned: Sequence[str]) -> ControllerConstraint:
    """Return what ``load`` returns, given the bytes of each token."""
    if not banned:
        raise WrongOption("strings is empty: give the texts to ban")
    matcher = Strings(tuple(banned))

    def make(request: Request) -> BannedController:
        return BannedController(Watcher(pieces, matcher, request.healed, request.stop))

    return ControllerConstraint(make, len(pieces), "banned", facts={"strings": list(banned)})
