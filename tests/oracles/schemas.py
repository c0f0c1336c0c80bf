"""JSON schemas as expressions: the JSON texts, without whitespace, that satisfy a schema of a bounded subset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tests.oracles.expressions import (
    ANY,
    DEPTH,
    Characters,
    Either,
    Expression,
    Ranges,
    Repeat,
    Sequence,
    among,
    parse,
    text,
    within,
    without,
)

WHOLE = "-?(?:0|[1-9][0-9]*)"
SCALAR_TYPES = {
    "null": parse("null"),
    "boolean": parse("true|false"),
    "integer": parse(WHOLE),
    "number": parse(WHOLE + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"),
}
KEYS = {
    **dict.fromkeys(SCALAR_TYPES, frozenset[str]()),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
NOTES = frozenset("$schema $comment $defs definitions title description default examples deprecated".split())

# What stands for itself in a string, the letters that escape the rest, and the characters behind \u00 and a digit.
PLAIN = without(among([*map(chr, range(32)), '"', "\\", "\x7f"]))
LETTERS = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
CODES = {"0": range(16), "1": range(16, 32), "7": range(127, 128)}


def expression_of(schema: Any) -> Expression:
    """The texts that satisfy a schema; ``languages.json_schema`` documents the subset.

    Raises:
        ValueError: not in the subset, with cause and place.
    """
    return _Schemas(schema).translate(schema, "#")


def spelled(expression: Expression) -> Expression:
    """The texts of an expression as spelled inside a JSON string."""
    if isinstance(expression, Characters):
        return _character(expression.ranges)
    if isinstance(expression, Repeat):
        return Repeat(spelled(expression.part), expression.least, expression.most)
    return type(expression)(tuple(spelled(part) for part in expression.parts))


def _character(ranges: Ranges) -> Expression:
    ways: list[Expression] = [Characters(within(ranges, PLAIN))]
    if letters := [letter for one, letter in LETTERS.items() if within(ranges, among(one))]:
        ways.append(_between("\\", Characters(among(letters)), ""))
    for high, codes in CODES.items():
        if lows := "".join(f"{code & 15:x}{code & 15:X}" for code in codes if within(ranges, ((code, code),))):
            ways.append(_between(f"\\u00{high}", Characters(among(lows)), ""))
    return Either(tuple(ways))


def _between(opening: str, inside: Expression, closing: str) -> Expression:
    return Sequence((text(opening), inside, text(closing)))


def _joined(parts: list[Expression]) -> Expression:
    """The parts, separated by commas."""
    return Sequence(tuple(part for one in parts for part in (text(","), one))[1:])


class _Schemas:
    """Translates one schema and those inside it."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.open: list[str] = []  # references under translation
        self.known: dict[str, Expression] = {}
        self.depth = 0

    def translate(self, schema: Any, where: str) -> Expression:
        if not isinstance(schema, Mapping):
            raise _refused(where, f"it must be an object, not {schema!r}")
        if self.depth == DEPTH:
            raise _refused(where, f"it is nested deeper than {DEPTH}")
        self.depth += 1
        keys = schema.keys() - NOTES
        if "$ref" in keys:
            self._only(keys, {"$ref"}, where)
            found = self._reference(schema["$ref"], where)
        elif "anyOf" in keys:
            self._only(keys, {"anyOf"}, where)
            ways = _several(schema["anyOf"], "anyOf", where)
            found = Either(tuple(self.translate(way, f"{where}/anyOf/{n}") for n, way in enumerate(ways)))
        elif keys & {"enum", "const"}:
            self._only(keys, {"type", "enum"} if "enum" in keys else {"type", "const"}, where)
            values = _several(schema["enum"], "enum", where) if "enum" in keys else [schema["const"]]
            types = self._types(schema, where) if "type" in keys else list(KEYS)
            found = Either(tuple(self._literal(value, types, where) for value in values))
        else:
            types = self._types(schema, where)
            self._only(keys, {"type"}.union(*(KEYS[one] for one in types)), where)
            found = Either(tuple(self._typed(one, schema, where) for one in types))
        self.depth -= 1
        return found

    def _only(self, keys: set[str], allowed: set[str], where: str) -> None:
        if keys - allowed:
            other, fits = ", ".join(sorted(keys - allowed)), ", ".join(sorted(allowed))
            raise _refused(where, f"{other} is not supported there ({fits} is); use llguidance")

    def _types(self, schema: Mapping[str, Any], where: str) -> list[str]:
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(isinstance(one, str) and one in KEYS for one in types):
            raise _refused(where, f"it needs a type among {', '.join(KEYS)}, not {schema.get('type')!r}")
        return types

    def _reference(self, pointer: Any, where: str) -> Expression:
        if pointer in self.open:
            raise _refused(where, f"the reference {pointer} is recursive, which is not supported; use llguidance")
        if pointer not in self.known:
            at = self.root
            for key in str(pointer).split("/")[1:]:
                at = at.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
            if not str(pointer).startswith("#/") or at is None:
                raise _refused(where, f"the reference {pointer!r} leads nowhere inside the schema")
            self.open.append(pointer)
            self.known[pointer] = self.translate(at, pointer)
            self.open.pop()
        return self.known[pointer]

    def _literal(self, value: Any, types: list[str], where: str) -> Expression:
        """One value, as llguidance writes it."""
        if isinstance(value, str):
            kind, found = "string", _between('"', spelled(text(value)), '"')
        elif value is None or isinstance(value, bool):
            kind, found = "null" if value is None else "boolean", text(json.dumps(value))
        elif isinstance(value, int | float):
            kind, found = "integer" if value == value // 1 else "number", text(_number(value, where))
        elif isinstance(value, list):
            items = [self._literal(one, list(KEYS), where) for one in value]
            kind, found = "array", _between("[", _joined(items), "]")
        else:
            members = [_member(key, self._literal(one, list(KEYS), where)) for key, one in value.items()]
            kind, found = "object", _between("{", _joined(members), "}")
        if kind not in types and not (kind == "integer" and "number" in types):
            raise _refused(where, f"the value {value!r} is not of type {', '.join(types)}")
        return found

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str) -> Expression:
        if kind == "string":
            return _between('"', self._string(schema, where), '"')
        if kind == "array":
            return _between("[", self._items(schema, where), "]")
        if kind == "object":
            return _between("{", self._members(schema, where), "}")
        return SCALAR_TYPES[kind]

    def _string(self, schema: Mapping[str, Any], where: str) -> Expression:
        if "pattern" not in schema:
            return Repeat(spelled(ANY), *_counts(schema, "minLength", "maxLength", where))
        if schema.keys() & {"minLength", "maxLength"}:
            raise _refused(where, "a pattern and a length together are not supported; write the length as a pattern")
        try:
            return spelled(parse(str(schema["pattern"]), search=True, ascii_only=True))
        except ValueError as error:
            raise _refused(where, str(error)) from error

    def _items(self, schema: Mapping[str, Any], where: str) -> Expression:
        least, most = _counts(schema, "minItems", "maxItems", where)
        if "items" not in schema:
            raise _refused(where, "it says nothing of the array's items; give items")
        item = self.translate(schema["items"], f"{where}/items")
        if most == 0:
            return Sequence(())
        rest = Repeat(Sequence((text(","), item)), max(least - 1, 0), None if most is None else most - 1)
        return Repeat(Sequence((item, rest)), min(least, 1), 1)

    def _members(self, schema: Mapping[str, Any], where: str) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("additionalProperties") is not False:
            raise _refused(where, "objects are supported only with additionalProperties false")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _refused(where, "properties must be an object, and required a list")
        for key in required:
            if key not in properties:
                raise _refused(where, f"it requires {key!r}, which is none of its properties")
        members = [
            _member(key, self.translate(value, f"{where}/properties/{key}")) for key, value in properties.items()
        ]
        further = [
            Repeat(Sequence((text(","), member)), int(key in required), 1)
            for key, member in zip(properties, members, strict=True)
        ]
        ways: list[Expression] = []  # by the member that comes first
        for number, key in enumerate(properties):
            ways.append(Sequence((members[number], *further[number + 1 :])))
            if key in required:
                return Either(tuple(ways))
        return Either((*ways, Sequence(())))


def _refused(where: str, what: str) -> ValueError:
    return ValueError(f"the schema at {where}: {what}")


def _several(values: Any, key: str, where: str) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise _refused(where, f"{key} must be a list of one or more, not {values!r}")
    return values


def _member(key: str, value: Expression) -> Expression:
    return Sequence((text(json.dumps(key, ensure_ascii=False) + ":"), value))


def _number(value: float, where: str) -> str:
    if value and not 1e-6 <= abs(value) < 2**53:
        raise _refused(where, f"the number {value!r} is not supported; only those from 1e-6 to 2**53, with either sign")
    whole = int(value) if value == value // 1 else None
    return f"{Decimal(repr(value)):f}" if whole is None else str(whole)


def _counts(schema: Mapping[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for key, count in ((least, low), (most, 0 if high is None else high)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise _refused(where, f"{key} must be a whole number of 0 or more, not {count!r}")
    if high is not None and high < low:
        raise _refused(where, f"{least} is {low}, more than {most}, which is {high}")
    return low, high
