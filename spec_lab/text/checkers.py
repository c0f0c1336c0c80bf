"""Checkers: whether an answer is correct, from its text. Nothing is executed.

Each is a pure function of the answer's text, of what it should be, and of whether the model completed a text (without
a chat template) or answered a message. Thinking is no part of an answer (``final``). A model that completes a text goes
on after its answer, often with a question of its own: there the text ends before the next "Question:", and of several
answers the first one counts, not the last.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from textwrap import dedent

from spec_lab.core.options import brief

MAX_CODE = 1_000_000
"""Maximum length of code that is parsed, in characters."""
MAX_DIGITS = 60
"""A longer number is compared with none."""

LATEX = (
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]{0,100})\}"), r"\1"),
    (re.compile(r"\\[dt]?frac\s?\{(\d{1,60})\}\s?\{(\d{1,60})\}"), r"\1/\2"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!;:])(?=\d)"), ","),
)
"""Patterns that are replaced by plain text before a number or a letter is searched."""

NUMBER = re.compile(
    r"(?P<sign>[-+][ \t]?)?\$?"
    r"(?P<digits>(?:\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|\d+(?:,\d+)*)(?:\.\d+)?|(?<!\w)\.\d+)"
    r"(?:\s?/\s?(?P<below>\d+))?"
)
GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
MARKED = re.compile(r"####([^\n#]*)$", re.MULTILINE)
BOXED = re.compile(r"\\boxed\s?\{([^{}]*)\}")

OPENING = r"(?:[\s:*_`\"'$({\[]|(?i:option|choice|letter)\b){0,20}"
CLOSED = r"(?![-'\u2019]?\w|[+#])"
LETTER = re.compile(
    r"(?i:\b(?:answer|choice|option)[*_`\"']{0,3}\s{0,3}(?:is|:)|\\boxed)" + OPENING + r"(?:"
    r"([B-HJ-Z])" + CLOSED + r"|"
    r"([AI])" + CLOSED + r"(?!\s+(?!(?:because|since|as|and|but|which)\b)[a-z])|"  # "A" and "I" are words as well
    r"(?<=[(\[])([a-z])(?=[)\]]))"
)
FIRST_LETTER = re.compile(OPENING + r"([A-Z])[*_`\"'$}\]]{0,4}(?:[.):\n]|\s*$)")
BLOCK = re.compile(r"(?<![ \t])([ \t]*)```[^\n`]*\n(.*?)```", re.DOTALL)

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```", "\nassert ")
"""Where the completion of a function ends (HumanEval, 2107.03374, ends it at the first five)."""


def check(checker: str, text: str, answer: str, prompt: str = "", completes: bool = False) -> bool:
    """Return whether an answer is correct.

    Args:
        checker: one of ``CHECKERS``.
        answer: what it should be.
        prompt: the text that the model continued.
        completes: whether it completed a text, instead of answering a message.
    """
    final_text = final(text, prompt)
    return CHECKERS[checker](final_text.partition("\nQuestion:")[0] if completes else final_text, answer, completes)


def check_answer(checker: str, answer: str, where: str) -> None:
    """Refuse an answer that no text could be compared with.

    Raises:
        ValueError: it is one; names ``where`` it stands.
    """
    expected = {
        "number": (_only_number(answer) is not None, "a number"),
        "choice": (re.fullmatch(r"\s*[A-Za-z]\s*", answer) is not None, "one letter"),
        "contains": (bool(_plain(answer)), "a text that is not empty"),
        "exact": (bool(_plain(answer)), "a text that is not empty"),
    }
    known, what = expected.get(checker, (True, ""))
    if not known:
        raise ValueError(
            f"{where}: 'answer' must be {what}, not {brief(answer)}, for prompts.checker={checker}; correct it, or "
            "choose another checker"
        )


def final(text: str, prompt: str = "") -> str:
    """Return an answer without its thinking; empty if the thinking has not ended.

    Thinking ends with the last "</think>". It begins in the text, or at the end of the prompt (DeepSeek-R1,
    Qwen3-Thinking). GPT-OSS's answer is its channel "final"; the markers of channels are special tokens, of which the
    text shows only the names of roles and channels.

    Args:
        prompt: the text that the model continued.
    """
    if _has_channels(text, prompt):
        _, ended, final_text = f"assistant{text}".rpartition("assistantfinal")
        return final_text if ended else ""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if "<think>" in text or prompt.rstrip().endswith("<think>") else text


def reply(text: str, prompt: str) -> str:
    """Return an answer as the next turn's template reads it. Arguments as in ``final``.

    Of GPT-OSS it is the channel "final", if there is one. Other templates remove thinking themselves.
    """
    return (_has_channels(text, prompt) and final(text, prompt)) or text


def _has_channels(text: str, prompt: str) -> bool:
    return prompt.endswith("<|start|>assistant") and text.startswith(("analysis", "commentary", "final"))


def exact(text: str, answer: str, completes: bool = False) -> bool:
    """Return whether text and answer are the same but for case, white space and a final full stop."""
    return _plain(text) == _plain(answer)


def contains(text: str, answer: str, completes: bool = False) -> bool:
    """Return whether the answer occurs in the text as whole words, case and white space left out."""
    return re.search(rf"(?<!\w){re.escape(_plain(answer))}(?!\w)", _plain(text)) is not None


def number(text: str, answer: str, completes: bool = False) -> bool:
    r"""Return whether the final number of the text equals the answer's.

    It is the last one that stands alone between "####" and the end of its line (the first, if the model completed a
    text), else that in the last "\boxed{}", else the last one.
    """
    text = _without_latex(text)
    marked = [value for line in MARKED.findall(text) if (value := _only_number(line)) is not None]
    if marked:
        result: Fraction | None = marked[0 if completes else -1]
    else:
        boxed = [values[-1] for inside in BOXED.findall(text) if (values := list(_numbers(inside)))]
        result = boxed[-1] if boxed else _last(text)
    return result is not None and result == _only_number(answer)


def choice(text: str, answer: str, completes: bool = False) -> bool:
    r"""Return whether the text chooses the answer's letter: the last "answer is X", "Answer: X" or "\boxed{X}", else a
    capital letter at its beginning. If the model completed a text, the beginning comes first, then the first of those.
    """
    text = _without_latex(text)
    given = ["".join(groups).upper() for groups in LETTER.findall(text)]
    first = [match[1] for match in (FIRST_LETTER.match(text),) if match]
    letters = [*given[::-1], *first] if not completes else [*first, *given]
    return bool(letters) and letters[0] == answer.strip().upper()


def python_syntax(text: str, answer: str, completes: bool = False) -> bool:
    """Return whether the answer's code is valid Python. It is parsed, never executed.

    Args:
        text: the model's output. Its last code block is the code; where the model completed code, all of it is.
        answer: the code that the model completed; empty for none.
        completes: whether the model completed a text, instead of answering a message.
    """
    begun = answer if completes else ""
    written = completion(text) if begun else last_block(text) or ""
    code = begun + written
    if not written.strip() or len(code) > MAX_CODE:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as for invalid escapes
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def last_block(text: str) -> str | None:
    """Return the last code block of a text, without the indentation that its fence has; None where it has none."""
    blocks = BLOCK.findall(text)
    return None if not blocks else dedent(blocks[-1][1]) if blocks[-1][0] else blocks[-1][1]


def completion(text: str) -> str:
    """Return the part of a text that completes a function: it ends before the next statement that is not indented."""
    ends = [end for stop in STOPS if (end := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def _without_latex(text: str) -> str:
    """Return a text whose minus signs, and LaTeX's texts, fractions and groups of digits, are plain characters."""
    text = text.replace("\u2212", "-")
    for pattern, plain in LATEX:
        text = pattern.sub(plain, text)
    return text


def _numbers(text: str) -> Iterator[Fraction | None]:
    """Yield the numbers of a text; None for digits that are no number, such as "1,5" and "1/0"."""
    for match in NUMBER.finditer(text):
        digits, below = match["digits"], match["below"] or "1"
        grouped = "," not in digits or GROUPED.fullmatch(digits)
        if not grouped or len(digits) > MAX_DIGITS or len(below) > MAX_DIGITS or not int(below):
            yield None
            continue
        value = Fraction(re.sub(r"[^\d.]", "", digits)) / int(below)
        yield -value if (match["sign"] or "").startswith("-") and _is_sign(text, match) else value


def _is_sign(text: str, match: re.Match[str]) -> bool:
    """Return whether the minus of a number is its sign: not that of a difference, a hyphen, or the bullet of a list."""
    before = text[max(match.start() - 20, 0) : match.start()]
    spaced = len(match["sign"]) > 1
    if spaced and "\n" in text.strip() and before.rpartition("\n")[2].strip() == "":
        return False
    return not re.search(r"[\w)\]}%]$|[\d)\]}%]\s*$", before)


def _last(text: str) -> Fraction | None:
    values = list(_numbers(text))
    return values[-1] if values else None


def _only_number(text: str) -> Fraction | None:
    """Return the number of a text that holds nothing else but marks; None for another text."""
    plain = _without_latex(text).strip(" \t\r\n*_`$.%") if text.strip()[:1] != "." else text.strip()
    boxed = BOXED.fullmatch(plain)
    plain = boxed[1] if boxed else plain
    return _last(plain) if NUMBER.fullmatch(plain) else None


CHECKERS: Mapping[str, Callable[[str, str, bool], bool]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "choice": choice,
    "python_syntax": python_syntax,
}
"""By the name that ``prompts.checker`` gives."""
