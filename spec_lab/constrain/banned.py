"""Banned strings: as soon as one is complete, the text backtracks to before it, and its first token is banned there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_lab.constrain.healing import BytePrefix
from spec_lab.constrain.protocol import Constraint, ConstraintState, Continuation, full_mask, mask_of
from spec_lab.core.request import Request
from spec_lab.text.strings import StringMatch, Strings, Watcher


@dataclass(frozen=True)
class Banned(Constraint):
    """Backtracks over every string of ``strings`` that the output completes. See ``Constraint``.

    The text backtracks to before the token in which the string began, and that token is not allowed there again. The
    search lasts until the text ends, also while a complete stop string waits for a longer one around it. The procedure
    defines the output distribution; it is not the model's distribution conditioned on no string appearing.

    Args:
        pieces: the bytes of each token.
    """

    strings: Sequence[str]
    pieces: Sequence[bytes]
    _found: Strings = field(init=False, repr=False)

    name = "banned"
    has_actions = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", Strings(tuple(self.strings)))

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.pieces)

    @property
    def facts(self) -> dict[str, list[str]]:
        """See ``Part``."""
        return {"strings": list(self.strings)}

    def start(self, request: Request) -> BannedState:
        """See ``Constraint``. Strings in the prompt do not count."""
        return BannedState(Watcher(self.pieces, self._found, request.healed, request.stop), None)


class BannedState(ConstraintState):
    """The output so far, followed by a watcher, and the string that it completed. See ``ConstraintState``."""

    def __init__(self, watcher: Watcher, match: StringMatch | None) -> None:
        self.watcher, self.match = watcher, match

    def fork(self) -> BannedState:
        """See ``ConstraintState``."""
        return BannedState(self.watcher.fork(), self.match)

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""
        self.match = self.watcher.push(token)

    def mask(self) -> np.ndarray | None:
        """Return the tokens that are not banned here and, while healed bytes must be repeated, repeat them."""
        watcher, mask = self.watcher, None
        if watcher.position.end < 0:
            mask = BytePrefix(watcher.pieces, watcher.healed[watcher.position.end :]).mask()
        if not watcher.bans:
            return mask
        width = len(watcher.pieces)
        return (full_mask(width) if mask is None else mask) & ~mask_of(watcher.bans, width)

    def action(self) -> tuple[Continuation, ...] | None:
        """See ``ConstraintState``."""
        if self.match is None:
            return None
        watcher = self.watcher.fork()
        watcher.rewind(self.match.tokens, self.match.ban)
        return (Continuation(self.match.tokens, BannedState(watcher, None)),)
