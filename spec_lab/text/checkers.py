"""Checkers: whether an answer is correct, from its text. Nothing is executed.

Each is a pure function of the answer's text and of what it should be. The text inside ``<think>`` is no part of an
answer: it is checked from the last ``</think>`` on.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal

MAX_CODE = 1_000_000
"""Maximum length of code that is parsed, in characters."""

NUMBER = re.compile(r"[-+]?\$?\d[\d,]{0,60}(?:\.\d{1,60})?")
MARKED = re.compile(r"####\s*([-+]?\$?\d[\d,]{0,60}(?:\.\d{1,60})?)")
LETTER = re.compile(r"(?i:answer\s*(?:is|:)|\\boxed\{)[\s*(\"'{]*([A-Z])\b")
FIRST_LETTER = re.compile(r"\W*([A-Z])\b")
BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```", "\nassert ")
"""Where the completion of a function ends (HumanEval, 2107.03374, ends it at the first five)."""


def check(checker: str, text: str, answer: str) -> bool:
    """Return whether an answer is correct.

    Args:
        checker: one of ``CHECKERS``.
        text: the answer.
        answer: what it should be.
    """
    return CHECKERS[checker](final(text), answer)


def final(text: str) -> str:
    """Return an answer without its thinking; empty if the thinking has not ended."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def exact(text: str, answer: str) -> bool:
    """Return whether text and answer are the same but for case, white space and a final full stop."""
    return _plain(text) == _plain(answer)


def contains(text: str, answer: str) -> bool:
    """Return whether the answer occurs in the text as whole words, case and white space left out."""
    return re.search(rf"(?<!\w){re.escape(_plain(answer))}(?!\w)", _plain(text)) is not None


def number(text: str, answer: str) -> bool:
    """Return whether the final number of the text equals the answer's: after the first "####", else the last one."""
    found, wanted = _number(text), _number(answer)
    return found is not None and found == wanted


def choice(text: str, answer: str) -> bool:
    r"""Return whether the text chooses the answer's letter: the last "answer is X", "Answer: X" or "\boxed{X}", else a
    capital letter at its beginning.
    """
    letters = LETTER.findall(text)
    if not letters and (first := FIRST_LETTER.match(text)):
        letters = [first[1]]
    return bool(letters) and letters[-1] == answer.strip().upper()


def python_syntax(text: str, answer: str) -> bool:
    """Return whether the answer's code is valid Python. It is parsed, never executed.

    Args:
        text: code that continues ``answer``, or with code blocks, of which the last is the code.
        answer: the code before; empty for none.
    """
    code = last_block(text)
    if code is None:
        code = answer + completion(text) if completion(text).strip() else ""
    if not code.strip() or len(code) > MAX_CODE:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def last_block(text: str) -> str | None:
    """Return the last code block of a text; None where it has none."""
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else None


def completion(text: str) -> str:
    """Return the part of a text that completes a function: it ends before the next statement that is not indented."""
    ends = [place for stop in STOPS if (place := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def _number(text: str) -> Decimal | None:
    found = MARKED.search(text)
    digits = found[1] if found else next(reversed(NUMBER.findall(text)), None)
    return None if digits is None else Decimal(digits.replace(",", "").replace("$", ""))


CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "choice": choice,
    "python_syntax": python_syntax,
}
"""By the name that ``prompts.checker`` gives."""
