"""Regular expressions as trees over characters, and the reader of the syntax that Python and Rust's regex share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: first and last code points, ascending and apart. Surrogates, which UTF-8 lacks, are never in."""

DEPTH = 50
"""Deepest nesting of anything read."""


@dataclass(frozen=True)
class Characters:
    """Any one character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """One part after the other; the empty text where there are none."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Either:
    """Any one of the parts."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    """The part, at least ``least`` times and at most ``most``; None for any number."""

    part: Expression
    least: int = 0
    most: int | None = None


Expression = Characters | Sequence | Either | Repeat

SCALARS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def within(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of both sets."""
    both = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return tuple(sorted((low, high) for low, high in both if low <= high))


def without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    gaps, low = [], 0
    for first, last in ranges:
        gaps.append((low, first - 1))
        low = last + 1
    return within(tuple((a, b) for a, b in [*gaps, (low, 0x10FFFF)] if a <= b), SCALARS)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The characters of all these ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return within(tuple(merged), SCALARS)


def among(characters: Iterable[str]) -> Ranges:
    """The set of these characters."""
    return union((ord(one), ord(one)) for one in characters)


def text(string: str) -> Sequence:
    """Exactly this string.

    Raises:
        ValueError: it holds a surrogate, which no bytes can spell.
    """
    if any(0xD800 <= ord(one) < 0xE000 for one in string):
        raise ValueError(f"the text {string!r} holds half a surrogate pair, which UTF-8 cannot spell")
    return Sequence(tuple(Characters(among(one)) for one in string))


ANY = Characters(SCALARS)
WORD = union([(48, 57), (65, 90), (95, 95), (97, 122)])
# White_Space of Unicode. Python's \s has four more control characters (1C to 1F), llguidance's does not.
SPACE = union(
    [(9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
)
# The zeros of Unicode's digits, each before its nine fellows, as of version 16 (which llguidance has; Python's version
# is its release's).
_ZEROS = (
    "30 660 6f0 7c0 966 9e6 a66 ae6 b66 be6 c66 ce6 d66 de6 e50 ed0 f20 1040 1090 17e0 1810 1946 19d0 1a80 1a90 1b50 "
    "1bb0 1c40 1c50 a620 a8d0 a900 a9d0 a9f0 aa50 abf0 ff10 104a0 10d30 10d40 11066 110f0 11136 111d0 112f0 11450 "
    "114d0 11650 116c0 116d0 116da 11730 118e0 11950 11bf0 11c50 11d50 11da0 11f50 16130 16a60 16ac0 16b50 16d70 "
    "1ccf0 1d7ce 1d7d8 1d7e2 1d7ec 1d7f6 1e140 1e2f0 1e4f0 1e5f1 1e950 1fbf0"
)
DIGIT = union((int(zero, 16), int(zero, 16) + 9) for zero in _ZEROS.split())
CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
HEX = {"x": 2, "u": 4, "U": 8}


def parse(pattern: str, search: bool = False, ascii_only: bool = False) -> Expression:
    r"""The tree of a regular expression that must match the whole text.

    Literals, ``.`` (all but a newline), classes, ``( )`` and ``(?: )``, ``|``, greedy ``* + ? {m} {m,} {m,n}``, and the
    escapes ``\d \D \s \S`` (Unicode's, as llguidance's), ``\n \r \t \f \v \a \xHH \uHHHH \UHHHHHHHH`` and those of
    punctuation; ``^`` and ``$`` where they change nothing, at the ends. The rest is refused: look-arounds,
    back-references, flags, lazy and possessive repeats, and ``\w``, whose characters differ between Unicode's versions.

    Args:
        pattern: the regular expression.
        search: it need only occur in the text, unless anchored by ``^`` and ``$``: as in JSON schemas.
        ascii_only: ``\d`` and ``\w`` are those of ASCII: as in JSON schemas.

    Raises:
        ValueError: no regular expression of this syntax, with cause and place.
    """
    return _Reader(pattern, search, ascii_only).whole()


class _Reader:
    """Reads from left to right; ``at`` is the next character's place."""

    def __init__(self, pattern: str, search: bool, ascii_only: bool) -> None:
        self.pattern, self.search = pattern, search
        self.sets = {"s": SPACE, "S": without(SPACE)}
        digit = among("0123456789") if ascii_only else DIGIT
        self.sets |= {"d": digit, "D": without(digit)}
        if ascii_only:
            self.sets |= {"w": WORD, "W": without(WORD)}
        self.at = self.depth = 0

    def refuse(self, what: str, at: int | None = None) -> ValueError:
        place = self.at if at is None else at
        return ValueError(f"the regular expression {self.pattern!r}, at character {place}: {what}")

    def next_is(self, *starts: str) -> bool:
        return self.pattern.startswith(starts, self.at)

    def take(self, start: str) -> bool:
        found = self.next_is(start)
        self.at += len(start) * found
        return found

    def whole(self) -> Expression:
        found = self.either()
        if self.at < len(self.pattern):
            raise self.refuse(r"a bracket that was never opened; write \)")
        return found

    def either(self) -> Expression:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def sequence(self) -> Expression:
        parts: list[Expression] = []
        top = self.depth == 0
        begins = top and self.take("^")
        while self.at < len(self.pattern) and not self.next_is("|", ")", "$"):
            parts.append(self.repeat())
        start = self.at
        ends = top and self.take("$")
        if self.at < len(self.pattern) and not self.next_is("|", ")"):
            raise self.refuse("anchors may stand only at the ends of the whole expression", start)
        if top and self.search:
            parts = [Repeat(ANY)] * (not begins) + parts + [Repeat(ANY)] * (not ends)
        return Sequence(tuple(parts))

    def repeat(self) -> Expression:
        part = self.atom()
        start = self.at
        if self.next_is("{"):
            least, most = self.counts()
        elif self.next_is("*", "+", "?"):
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self.pattern[self.at]]
            self.at += 1
        else:
            return part
        if self.next_is("*", "+", "?", "{"):
            raise self.refuse("lazy and possessive repeats and repeats of repeats are not supported; use brackets")
        if most is not None and most < least:
            raise self.refuse(f"repeats at least {least} and at most {most} times, which nothing does", start)
        return Repeat(part, least, most)

    def counts(self) -> tuple[int, int | None]:
        end = self.pattern.find("}", self.at)
        least, comma, most = self.pattern[self.at + 1 : max(end, self.at)].partition(",")
        for number in [least] + [most] * bool(most):
            if end < 0 or not (number.isascii() and number.isdecimal()) or len(number) > 9:
                raise self.refuse(r"not a count such as {2}, {2,} or {2,5}; for the bracket itself write \{")
        self.at = end + 1
        return int(least), int(most) if most else None if comma else int(least)

    def atom(self) -> Expression:
        start, one = self.at, self.pattern[self.at]
        if one == "(":
            if self.next_is("(?") and not self.next_is("(?:"):
                raise self.refuse("look-arounds, flags, names and other groups with '(?' are not supported")
            self.at += 3 if self.next_is("(?:") else 1
            self.depth += 1
            if self.depth > DEPTH:
                raise self.refuse(f"groups are nested deeper than {DEPTH}", start)
            found = self.either()
            if not self.take(")"):
                raise self.refuse("a group that is never closed", start)
            self.depth -= 1
            return found
        if one in "*+?{":
            raise self.refuse(rf"nothing to repeat; for the character itself write \{one}")
        if one == "^":
            raise self.refuse("anchors may stand only at the ends of the whole expression")
        if one == "[":
            return self.klass()
        if one == "\\":
            return Characters(self.escape())
        self.at += 1
        return Characters(without(among("\n")) if one == "." else self.among(one, start))

    def among(self, one: str, start: int) -> Ranges:
        if not (found := among(one)):
            raise self.refuse("half a surrogate pair, which UTF-8 cannot spell", start)
        return found

    def escape(self) -> Ranges:
        start, one = self.at, self.pattern[self.at + 1 : self.at + 2]
        self.at += 2
        if one in self.sets:
            return self.sets[one]
        if one in CONTROL:
            return among(CONTROL[one])
        if one in HEX:
            digits = self.pattern[self.at : self.at + HEX[one]]
            self.at += HEX[one]
            if len(digits) < HEX[one] or set(digits) - set("0123456789abcdefABCDEF") or int(digits, 16) > 0x10FFFF:
                raise self.refuse(f"\\{one} wants {HEX[one]} hexadecimal digits of a Unicode character", start)
            return self.among(chr(int(digits, 16)), start)
        if not one or not one.isascii() or one.isalnum() or one in "<>" or not one.isprintable():
            hint = "; write the characters out, such as [0-9A-Za-z_]" if one in ("w", "W") else ""
            raise self.refuse(f"the escape \\{one} is not supported{hint}", start)
        return among(one)

    def klass(self) -> Expression:
        start = self.at
        self.at += 1
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or not self.next_is("]"):
            low = self.member(start)
            if self.next_is("-") and not self.next_is("-]"):
                place = self.at
                self.at += 1
                high = self.member(start)
                if sum(b - a for a, b in low + high) or len(low + high) != 2 or low > high:
                    raise self.refuse("a range must go from one character up to another", place)
                low = ((low[0][0], high[0][0]),)
            ranges += low
            first = False
        self.at += 1
        return Characters(without(union(ranges)) if negated else union(ranges))

    def member(self, start: int) -> Ranges:
        if self.at >= len(self.pattern):
            raise self.refuse("a class that is never closed", start)
        if self.next_is("[", "&&", "--", "~~", "||"):
            raise self.refuse(r"nested classes and set operations are not supported; escape the character with \ ")
        if self.next_is("\\"):
            return self.escape()
        self.at += 1
        return self.among(self.pattern[self.at - 1], self.at - 1)
