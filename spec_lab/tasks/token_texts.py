"""The text of the tokens that a run recorded, so that a report shows them without the target."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.constrain.vocabulary import text_bytes
from spec_lab.models.target import Target
from spec_lab.results.table_parts import Rows

LOG = logging.getLogger(__name__)

MAX_LETTERS = 64


@dataclass(frozen=True, eq=False)
class TokenTexts:
    """The text of each token of a target.

    Args:
        tokenizer: the target's.
        pieces: the bytes of every token, empty for special tokens; None where they are not known.
    """

    tokenizer: Any
    pieces: Sequence[bytes] | None

    @staticmethod
    def of(target: Target) -> TokenTexts:
        """Return the texts of a target's tokens."""
        try:
            return TokenTexts(target.tokenizer, text_bytes(target))
        except Exception as error:  # tokens without bytes, or an unknown kind: no run may fail for its report
            LOG.warning("The bytes of tokens are not known (%s): tokens.parquet has their decoded texts", error)
            return TokenTexts(target.tokenizer, None)

    def text(self, token: int) -> str:
        r"""Return a token's text, at most ``MAX_LETTERS`` characters; bytes that are no UTF-8 as ``\x..``."""
        piece = b"" if self.pieces is None or token >= len(self.pieces) else self.pieces[token]
        text = piece.decode(errors="backslashreplace") if piece else str(self.tokenizer.decode([token]))
        text = text.encode(errors="backslashreplace").decode()  # a table holds no lone surrogates
        return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 1]}…"


def token_rows(group: int, steps: Iterable[Mapping[str, Any]], texts: TokenTexts) -> Rows:
    """Return the rows of the table ``tokens`` (``schema.TOKENS``) for the steps of a group."""
    names = ("draft_tokens", "emitted_tokens")
    tokens = sorted({token for step in steps for name in names for token in step.get(name) or ()})
    return [{"id": f"{group}/{token}", "group": group, "token": token, "text": texts.text(token)} for token in tokens]
