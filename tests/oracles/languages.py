"""Languages by source: a regular expression, a choice, a JSON schema, a grammar.

Each is a bounded subset of what llguidance reads, with the same texts in it; the rest is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.oracles.expressions import DEPTH, Either, Expression, Repeat, parse, text
from tests.oracles.expressions import Sequence as Then
from tests.oracles.nfa import STATES, Language
from tests.oracles.schemas import expression_of


def regex(pattern: str, limit: int = STATES) -> Language:
    """The texts that match the whole pattern; ``expressions.parse`` documents the syntax.

    Raises:
        ValueError: not in the subset, too large, or without a match.
    """
    return Language.of(parse(pattern), limit)


def choice(choices: str | Sequence[str], limit: int = STATES) -> Language:
    """Exactly these texts.

    Args:
        choices: the texts, or a JSON list of them.
        limit: most states.

    Raises:
        ValueError: no choices, not texts, or too large.
    """
    found: Any = _loads(choices, "choices, as one text,") if isinstance(choices, str) else list(choices)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise ValueError(f"choices must be a list of one text or more, not {found!r}")
    return Language.of(Either(tuple(text(one) for one in found)), limit)


def json_schema(schema: str | Mapping[str, Any], limit: int = STATES) -> Language:
    """The JSON texts, without whitespace, that satisfy a schema.

    ``type`` (also a list): "null", "boolean", "integer", "number"; "string" with ``pattern`` or ``minLength`` and
    ``maxLength``; "array" with ``items``, ``minItems`` and ``maxItems``; "object" with ``properties``, ``required`` and
    ``additionalProperties`` false. ``enum``, ``const``, ``anyOf``, and ``$ref`` into the schema itself, not recursive.
    Annotations such as ``title`` are ignored. As in llguidance, properties come in the schema's order, numbers may have
    any length, and a string escapes what it must and nothing else.

    Args:
        schema: as JSON, or read already.
        limit: most states.

    Raises:
        ValueError: not in the subset, too large, or nothing satisfies it.
    """
    return Language.of(expression_of(_loads(schema, "the schema") if isinstance(schema, str) else schema), limit)


def lark(grammar: str, limit: int = STATES) -> Language:
    """The texts of a grammar in Lark's syntax whose rules are not recursive; ``start`` is the whole.

    In rules and terminals: strings, ``/regexes/``, names, ``|``, ``( )``, ``[ ]`` (optional), ``* + ?``, ``~n``,
    ``~n..m``, ``{n}``, ``{n,}``, ``{n,m}``, and comments behind ``//`` and ``#``.

    llguidance matches strings, regexes and terminals greedily: in ``start: /a*/ "ab"`` all the a's go to the first, so
    that "aab" is not in its language. Here a text is in the language if any parse exists. The two agree where no ended
    string, regex or terminal could also continue with what may follow.

    Raises:
        ValueError: not in the subset, too large, or without a text.
    """
    return Language.of(_Grammar(grammar).rule("start", 1), limit)


def _loads(source: str, what: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


TOKENS = re.compile(
    r"""(?P<blank> [ \t\r]+ | (?://|\#)[^\n]* | \n(?=\s*\|))
      | (?P<line> \n)
      | (?P<name> _?(?:[a-z][a-z0-9_]* | [A-Z][A-Z0-9_]*)(?![A-Za-z0-9_-]))
      | (?P<string> "(?:[^"\\\n]|\\.)*"(?![A-Za-z]))
      | (?P<regex> /(?:[^/\\\n]|\\.)+/(?![A-Za-z]))
      | (?P<count> ~[ ]*\d{1,9}(?:\.\.\d{1,9})? | \{\d{1,9}(?:,(?:\d{1,9})?)?\})
      | (?P<mark> [:|()\[\]*+?])""",
    re.VERBOSE,
)
REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class _Grammar:
    """Reads every rule once, those it names before it."""

    def __init__(self, grammar: str) -> None:
        self.rules: dict[str, list[_Token]] = {}  # what is left of each to read, the last token first
        self.known: dict[str, Expression] = {}
        self.open: list[str] = []  # rules being read, each named by the one before
        self.depth = 0
        rule: list[_Token] = []
        for token in _tokens(grammar):
            if token.kind != "line":
                rule.append(token)
            elif rule:
                if len(rule) < 2 or rule[0].kind != "name" or rule[1].text != ":":
                    raise _refused(rule[0].line, f"a rule 'name: ...' was expected, not {rule[0].text!r}")
                if rule[0].text in self.rules:
                    raise _refused(rule[0].line, f"the rule {rule[0].text} is there already")
                self.rules[rule[0].text] = rule[:1:-1]
                rule = []
        for name in list(self.rules):
            self.rule(name, 1)

    def rule(self, name: str, line: int) -> Expression:
        if name in self.open:
            circle = " -> ".join([*self.open[self.open.index(name) :], name])
            raise _refused(line, f"the rules are recursive ({circle}), which is not supported; use llguidance")
        if name not in self.known:
            if name not in self.rules:
                raise _refused(line, f"there is no rule {name}")
            left = self.rules[name]
            self.open.append(name)
            self.known[name] = self.either(left)
            if left:
                raise _refused(left[-1].line, f"{left[-1].text!r} was not expected")
            self.open.pop()
        return self.known[name]

    def either(self, left: list[_Token]) -> Expression:
        self.depth += 1
        if self.depth > DEPTH:
            raise ValueError(f"the grammar is nested deeper than {DEPTH}")
        ways: list[Expression] = [self.sequence(left)]
        while left and left[-1].text == "|":
            left.pop()
            ways.append(self.sequence(left))
        self.depth -= 1
        return Either(tuple(ways))

    def sequence(self, left: list[_Token]) -> Expression:
        parts: list[Expression] = []
        while left and left[-1].text not in ("|", ")", "]"):
            part = self.atom(left)
            while left and (left[-1].kind == "count" or left[-1].text in REPEATS):
                token = left.pop()
                least, most = REPEATS.get(token.text) or _counts(token)
                part = Repeat(part, least, most)
            parts.append(part)
        return Then(tuple(parts))

    def atom(self, left: list[_Token]) -> Expression:
        token = left.pop()
        if token.kind == "name":
            return self.rule(token.text, token.line)
        try:
            if token.kind == "string":
                return text(json.loads(token.text))
            if token.kind == "regex":
                return parse(token.text[1:-1])
        except ValueError as error:
            raise _refused(token.line, f"{token.text}: {error}") from error
        if token.text not in ("(", "["):
            raise _refused(token.line, f"{token.text!r} was not expected")
        inside = self.either(left)
        if not left or left.pop().text != {"(": ")", "[": "]"}[token.text]:
            raise _refused(token.line, f"a {token.text!r} that is not closed")
        return inside if token.text == "(" else Repeat(inside, 0, 1)


def _tokens(grammar: str) -> list[_Token]:
    """Without blanks and comments, and with the end of a line after the last."""
    found, at = [], 0
    while at < len(grammar):
        line = grammar.count("\n", 0, at) + 1
        match = TOKENS.match(grammar, at)
        if match is None:
            raise _refused(line, f"{grammar[at : at + 12]!r} is not supported; use llguidance")
        if match.lastgroup != "blank":
            found.append(_Token(str(match.lastgroup), match.group(), line))
        at = match.end()
    return [*found, _Token("line", "\n", 0)]


def _counts(token: _Token) -> tuple[int, int | None]:
    least, comma, most = token.text.strip("~{} ").replace("..", ",").partition(",")
    if most and int(most) < int(least):
        raise _refused(
            token.line, f"{token.text} repeats at least {least} and at most {most} times, which nothing does"
        )
    return int(least), int(most) if most else None if comma else int(least)


def _refused(line: int, what: str) -> ValueError:
    return ValueError(f"the grammar, line {line}: {what}")
