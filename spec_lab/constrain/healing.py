"""Token healing: the prompt's last tokens are taken off, and what is generated must begin with their bytes.

A prompt that ends within what the model would write as one token ("http:" before "//") leads to an unlikely text. With
its end taken off, the model writes those bytes itself, in the tokens that it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_lab.constrain.protocol import Stuck, pack
from spec_lab.engine.request import Request


def heal(request: Request, pieces: Sequence[bytes], tokens: int = 1, begin: int | None = None) -> Request:
    """The request with the last tokens of its prompt taken off and kept as bytes to begin with.

    Args:
        request: to heal; it stays as it is where its last token has no bytes.
        pieces: the bytes of each token.
        tokens: to take off.
        begin: the token that begins texts, which is left of a prompt that is healed away; None for none.

    Raises:
        ValueError: nothing of the prompt is left, and no token begins texts.
    """
    cut = request.tokens[-tokens:]
    if any(not pieces[token] for token in cut):
        return request
    left = request.tokens[:-tokens] or (() if begin is None else (begin,))
    if not left:
        raise ValueError(
            f"prompt '{request.name}' has {len(request.tokens)} tokens; healing removes {tokens} and leaves nothing "
            "to continue, and the model has no BOS token: give a longer prompt, or set token_healing=false"
        )
    return replace(request, tokens=left, healed=b"".join(pieces[token] for token in cut))


@dataclass(frozen=True)
class Healing:
    """What is generated begins with ``request.healed``. See ``Constraint``.

    Args:
        pieces: the bytes of each token; padding has none.
    """

    pieces: Sequence[bytes]

    name = "healing"
    acts = False

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.pieces)

    def start(self, request: Request) -> Prefix:
        """See ``Constraint``."""
        return Prefix(self.pieces, request.healed, {})


class Prefix:
    """The bytes that must still come first. See ``State``."""

    def __init__(self, pieces: Sequence[bytes], rest: bytes, masks: dict[bytes, np.ndarray] | None = None) -> None:
        self.pieces, self.rest = pieces, rest
        self.masks = {} if masks is None else masks  # by the rest, shared by forks

    def fork(self) -> Prefix:
        """See ``State``."""
        return Prefix(self.pieces, self.rest, self.masks)

    def advance(self, token: int) -> None:
        """See ``State``."""
        self.rest = self.rest[len(self.pieces[token]) :]

    def mask(self) -> np.ndarray | None:
        """Tokens that begin the bytes still wanted, or begin with them."""
        rest = self.rest
        if not rest or rest in self.masks:
            return self.masks.get(rest)
        allowed = np.fromiter((bool(p) and (p.startswith(rest) or rest.startswith(p)) for p in self.pieces), dtype=bool)
        if not allowed.any():
            raise Stuck(f"no token begins the bytes {rest[:8]!r} that were taken off the prompt's end")
        self.masks[rest] = pack(allowed)
        return self.masks[rest]

    def action(self) -> None:
        """None is ever wanted."""
        return None
