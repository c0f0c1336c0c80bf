"""Token healing: the prompt's last tokens are removed, and the output must begin with their bytes.

A prompt that ends inside what the model would write as one token ("http:" before "//") leads to an unlikely text. With
its last token removed, the model writes those bytes itself, in the tokens that it prefers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, pack
from spec_lab.core.request import Request


def heal(request: Request, pieces: Sequence[bytes], tokens: int = 1, begin: int | None = None) -> Request:
    """Return the request with the last tokens of its prompt removed and their bytes in ``healed``.

    Args:
        request: to heal; it is returned unchanged if one of these tokens has no bytes.
        pieces: the bytes of each token.
        tokens: number of tokens to remove.
        begin: the beginning-of-text token, used as the prompt where nothing else is left of it; None if there is none.

    Raises:
        ValueError: nothing of the prompt is left, and there is no beginning-of-text token.
    """
    cut = request.tokens[-tokens:]
    if any(not pieces[token] for token in cut):
        return request
    left = request.tokens[:-tokens] or (() if begin is None else (begin,))
    if not left:
        raise ValueError(
            f"prompt '{request.name}' has {len(request.tokens)} tokens; token healing removes {tokens}, and the model "
            "has no beginning-of-text token to start from instead: give a longer prompt, or set token_healing=false"
        )
    return replace(request, tokens=left, healed=b"".join(pieces[token] for token in cut))


@dataclass(frozen=True)
class Healing(Constraint):
    """The output begins with ``request.healed``. See ``Constraint``.

    Args:
        pieces: the bytes of each token; padding has none.
    """

    pieces: Sequence[bytes]

    name = "healing"

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.pieces)

    def start(self, request: Request) -> BytePrefix:
        """See ``Constraint``."""
        return BytePrefix(self.pieces, request.healed, {})


class BytePrefix(ConstraintState):
    """The bytes that the next tokens must repeat. See ``ConstraintState``."""

    def __init__(self, pieces: Sequence[bytes], rest: bytes, masks: dict[bytes, np.ndarray] | None = None) -> None:
        self.pieces, self.rest = pieces, rest
        self.masks = {} if masks is None else masks  # by the remaining bytes; forks share it

    def fork(self) -> BytePrefix:
        """See ``ConstraintState``."""
        return BytePrefix(self.pieces, self.rest, self.masks)

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""
        self.rest = self.rest[len(self.pieces[token]) :]

    def mask(self) -> np.ndarray | None:
        """Return the tokens whose bytes are a prefix of the remaining bytes, or begin with all of them."""
        rest = self.rest
        if not rest or rest in self.masks:
            return self.masks.get(rest)
        allowed = np.fromiter((bool(p) and (p.startswith(rest) or rest.startswith(p)) for p in self.pieces), dtype=bool)
        if not allowed.any():
            raise ConstraintError(
                f"no token is a prefix of the bytes {rest[:8]!r}, which token healing removed from the prompt"
            )
        self.masks[rest] = pack(allowed)
        return self.masks[rest]
