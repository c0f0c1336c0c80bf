"""Strings that never appear: as soon as one is complete the text goes back to where it began, and begins it no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_lab.constrain.healing import Prefix
from spec_lab.constrain.protocol import Onward, everything, only
from spec_lab.engine.request import Request
from spec_lab.text.strings import Match, Strings, Watcher


@dataclass(frozen=True)
class Banned:
    """Takes back every string of ``strings`` that the output completes. See ``Constraint``.

    They are looked for until the text ends, a stop string that waits for another around it included. The text goes back
    to before the token in which the string began, and that token is not allowed there again. This
    procedure is the law: it is not the model's law given that no string appears.

    Args:
        strings: to keep out.
        pieces: the bytes of each token.
    """

    strings: Sequence[str]
    pieces: Sequence[bytes]
    _found: Strings = field(init=False, repr=False)

    name = "banned"
    acts = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", Strings(tuple(self.strings)))

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.pieces)

    @property
    def facts(self) -> dict[str, list[str]]:
        """What a record should keep."""
        return {"strings": list(self.strings)}

    def start(self, request: Request) -> Watched:
        """See ``Constraint``. What the prompt holds does not count."""
        return Watched(Watcher(self.pieces, self._found, request.healed, request.stop), None)


class Watched:
    """The output so far, as seen by a watcher, and what it found. See ``State``."""

    def __init__(self, watcher: Watcher, match: Match | None) -> None:
        self.watcher, self.match = watcher, match

    def fork(self) -> Watched:
        """See ``State``."""
        return Watched(self.watcher.fork(), self.match)

    def advance(self, token: int) -> None:
        """See ``State``."""
        self.match = self.watcher.push(token)

    def mask(self) -> np.ndarray | None:
        """What is not banned here; as long as healed bytes must be repeated, of what repeats them."""
        watcher, mask = self.watcher, None
        if watcher.place.end < 0:
            mask = Prefix(watcher.pieces, watcher.healed[watcher.place.end :]).mask()
        if not watcher.bans:
            return mask
        width = len(watcher.pieces)
        return (everything(width) if mask is None else mask) & ~only(watcher.bans, width)

    def action(self) -> tuple[Onward, ...] | None:
        """See ``State``."""
        if self.match is None:
            return None
        watcher = self.watcher.fork()
        watcher.rewind(self.match.tokens, self.match.ban)
        return (Onward(self.match.tokens, Watched(watcher, None)),)
