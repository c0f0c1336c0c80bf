"""Bounds on how much longer a ``tokenizer.json`` can make a text, before anything is loaded from it.

Its normalizers, pre-tokenizers and decoders are lists of replacements, of any number. Sixty that make "aa" of each "a"
make 2**60 characters of one, inside a library that no signal interrupts.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from typing import Any

from spec_lab.core.files import Unreadable

MAX_GROWTH = 5000
"""Maximum factor. ALBERT's has the largest one known: 1452, of NFKD, a character map of NFKC and a meta symbol."""


class TooLong(Unreadable):
    """A tokenizer that can make a text too long."""


CONSUMING = re.compile(r"(?:(?:\\[sSdDwWnrt.]|\[[^\[\]]+\]|[^\\\[\]{}()^$|?*+])(?:\+|\{[1-9][0-9]*(?:,[0-9]*)?\})?)+")
"""Regular expressions that match at least one character, wherever they match: sequences of characters and classes."""

FORMS = {"NFC": 4, "NFD": 4, "NFKC": 11, "NFKD": 11, "ByteLevel": 2, "Metaspace": 4}
"""Largest factors, in bytes of UTF-8: U+FDFA has 3, and 33 in NFKD; a byte becomes at most 2, a space 4."""


def check_growth(text: str, where: str) -> None:
    """Refuse a tokenizer that can make a text, or its tokens, more than ``MAX_GROWTH`` times as long.

    Args:
        text: of ``tokenizer.json``; what is no JSON is left to whoever loads it.
        where: the file, for messages.

    Raises:
        TooLong: names the file and the part; also of a part whose factor is not known.
    """
    try:
        described = json.loads(text, parse_int=float)  # int() refuses long numbers, which the library may read
    except (ValueError, RecursionError):
        return
    if not isinstance(described, dict):
        return
    for parts in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        factor = 1.0
        for part in parts:
            try:
                factor *= 1.0 if described.get(part) is None else growth(described[part])
            except (ValueError, RecursionError) as error:
                why = " ".join(str(error).split())
                raise TooLong(
                    f"{where} is refused: how much longer its {part} makes a text is not known ({why}): save it again "
                    "with a current version of tokenizers, or copy or download it again"
                ) from error
        if factor > MAX_GROWTH:
            raise TooLong(
                f"{where} is refused: its {' and '.join(parts)} can make a text {factor:.3g} times as long, and at "
                f"most {MAX_GROWTH} times is allowed: remove the replacements that repeat, or copy or download it again"
            )


def growth(part: Any) -> float:
    """Return the largest factor by which a part can multiply the bytes of a text; 1 for one that only adds some.

    Raises:
        ValueError: a part has no type (the library would read it by its fields), or cannot be decoded.
    """
    match part:
        case {"type": "Sequence", **named}:
            return math.prod(growth(inner) for parts in named.values() if isinstance(parts, list) for inner in parts)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, _size(new) / _size(old))
        case {"type": "Replace", "pattern": {"Regex": str(old)}, "content": str(new)} if CONSUMING.fullmatch(old):
            return max(1.0, _size(new))
        case {"type": "Replace", "content": str(new)}:  # it can match nothing, before every character
            return 1.0 + _size(new)
        case {"type": "BPEDecoder", "suffix": ""} | {"type": "CTC", "word_delimiter_token": ""}:  # become a space
            return 2.0
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:  # the trie's size, the trie, texts
            data = base64.b64decode(encoded)
            return max(1.0, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)}:
            return float(max(1, *_repeated(single).values(), *_repeated(pair).values()))
        case {"type": str(name)}:
            return float(FORMS.get(name, 1))
    raise ValueError(f"a part has no type: {json.dumps(part)[:60]}")


def _size(text: str) -> float:
    return float(len(text.encode("utf-8", "surrogatepass")))


def _repeated(pieces: list[Any]) -> Counter[str]:
    """Return how often a template holds each of its sequences."""
    return Counter(str(piece["Sequence"]) for piece in pieces if isinstance(piece, dict) and "Sequence" in piece)
