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
    return UNSEEN.sub(lambda found: f"<U+{ord(found[0]):04X}>", str(text).translate(CONTROLS))
