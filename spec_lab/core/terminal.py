"""Texts of unknown origin, for a terminal or a page."""

from __future__ import annotations

import re

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
UNSEEN = re.compile("[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]")


def visible(text: object) -> str:
    """The text with control characters as pictures, and those that turn, hide or break a line as <U+...>.

    So a page or a terminal shows what is there, and no text can disturb what stands beside it.
    """
    return UNSEEN.sub(lambda found: f"<U+{ord(found[0]):04X}>", str(text).translate(CONTROLS))
