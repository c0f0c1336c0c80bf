"""Untrusted text on a terminal or a page."""

from __future__ import annotations

import re

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Symbols for control characters, which a terminal would execute."""

UNSEEN = re.compile("[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]")


def visible(text: object) -> str:
    """Return the text with control characters as symbols, and invisible and direction-changing ones as <U+...>.

    A page or a terminal then shows every character, and no text can change how other text is displayed.
    """
    return UNSEEN.sub(lambda match: f"<U+{ord(match[0]):04X}>", str(text).translate(CONTROLS))


def short_path(path: object) -> str:
    """Return a path without directories of one machine: from ``zoo/`` on in the package, else its last two parts.

    Names on the hub and relative paths are kept; None is empty.
    """
    text = "" if path is None else str(path)
    if not text.startswith(("/", "~")):
        return text
    _, package, inside = text.rpartition("/spec_lab/zoo/")
    return f"zoo/{inside}" if package else "/".join([part for part in text.split("/") if part][-2:])
