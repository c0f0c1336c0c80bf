"""Sources in xgrammar's dialect: what it would misread is rewritten, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PIECE = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|\[\^?|\(\?:?|\{[0-9,]*\d{7}|&&|--|~~|.", re.DOTALL
)

_HALVES = r"\U0000d800-\U0000dfff"
_NEGATED = {".": r"\n", r"\D": r"\d", r"\W": r"\w", r"\S": r"\s"}


def pattern_for(pattern: str, quoted: bool = False) -> str:
    """Return the pattern rewritten so that the engine reads it as Python and Rust do.

    The engine's dot also matches line feeds, and its negations outside of a class match halves of surrogate pairs.

    Args:
        quoted: whether it describes the inside of a JSON string, where the engine escapes nothing.

    Raises:
        ValueError: the engine would misread it; names the character.
    """
    given, opened = [], -1  # where the current class began
    for match in _PIECE.finditer(pattern):
        piece, at = match[0], match.start()
        code, inside, first, bad = piece[1:2], opened >= 0, at == opened, False
        if piece[0] == "\\":
            if code in "xuU" and len(piece) > 2:  # the engine reads up to eight hexadecimal digits
                piece = f"\\U{int(piece[2:], 16):08x}"
            else:
                bad = code.isalnum() and code not in "dDwWsSnrtvf"
            bad = bad or (first and pattern[at - 1] == "[" and piece in ("\\^", "\\U0000005e"))
            bad = bad or (quoted and code in '\\"nrtvfxuU')
        elif inside:
            bad = piece[0] == "[" or piece in ("&&", "--", "~~") or (piece == "]" and first)
            opened = -1 if piece == "]" else opened
        elif piece[0] == "[":
            opened = match.end()
            piece += _HALVES if piece == "[^" and not quoted else ""
        else:
            bad = (piece == "^" and at > 0) or (piece == "$" and match.end() < len(pattern))
            bad = bad or piece == "(?" or (piece[0] == "{" and len(piece) > 1)
        if bad or (quoted and (piece == '"' or piece < " ")):
            where = " in a schema" if quoted else ""
            raise ValueError(f"xgrammar would misread {match[0]!r} at character {at} of {pattern[:60]!r}{where}")
        if not quoted and not inside and piece in _NEGATED:
            piece = f"[^{_NEGATED[piece]}{_HALVES}]"
        given.append(piece)
    return "".join(given)


def either(choices: Any) -> str:
    """Return a grammar of these strings and no others.

    Raises:
        ValueError: not a list of one or more strings.
    """
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices must be a list of one or more strings, not {str(choices)[:60]}")
    spelt = ("".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in choice) for choice in choices)
    return "root ::= " + " | ".join(f'"{choice}"' for choice in spelt)


_ANNOTATIONS = set(
    "$comment $defs $id $schema default definitions deprecated description examples readOnly title".split()
)
_BOUNDS = set("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_KEYWORDS: Mapping[str, set[str]] = {
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS,
    "string": {"pattern", "format"},  # with lengths the engine allows raw control characters
    "array": set("items prefixItems minItems maxItems".split()),
    "object": set("properties required additionalProperties minProperties maxProperties".split()),
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def check_exact(schema: Any, where: str = "#") -> None:
    """Refuse a schema of which the engine would misread a part. The engine itself checks that it is a schema.

    Raises:
        ValueError: names that part.
    """
    if not isinstance(schema, dict):
        return
    keys = set(schema) - _ANNOTATIONS
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else list(types)
    alone = next((key for key in ("$ref", "enum", "const", "anyOf", "allOf") if key in keys), "")
    known = {alone} if alone else {"type"}.union(*(_KEYWORDS.get(kind, set()) for kind in types))
    if alone in ("enum", "const"):
        values = schema["enum"] if alone == "enum" else [schema["const"]]
        value_types = {_TYPES.get(type(value), "null") for value in values}
        known |= {"type"} if not value_types - {*types, *(["integer"] if "number" in types else [])} else set()
        large = [value for value in values if isinstance(value, int) and not -(2**63) <= value < 2**63]
        known -= {alone} if large else set()
    elif alone == "$ref":
        known -= set() if str(schema["$ref"]).startswith("#") else {"$ref"}
    elif alone == "allOf":
        known -= set() if len(schema["allOf"]) == 1 else {"allOf"}
    elif not keys - known:
        known -= {"required"} if set(schema.get("required", [])) - set(schema.get("properties", {})) else set()
        others = schema.get("additionalProperties", False) is not False and schema.get("properties")
        known -= {"additionalProperties"} if others else set()  # they may write a property's name with escapes
        known -= {"format"} if "pattern" in keys else set()
        known -= {"multipleOf"} if keys & _BOUNDS or schema.get("multipleOf", 1) not in range(1, 1025) else set()
    if keys - known:
        raise ValueError(
            f"xgrammar would misread {', '.join(sorted(keys - known))} at {where} of the schema: write it "
            "differently, use constraint.engine=llguidance, or allow it with constraint.lenient=true"
        )
    if "pattern" in keys:
        pattern_for(schema["pattern"], quoted=True)
    for key in keys & {"anyOf", "allOf", "prefixItems"}:
        for number, inner in enumerate(schema[key]):
            check_exact(inner, f"{where}/{key}/{number}")
    for key in keys & {"items", "additionalProperties"}:
        check_exact(schema[key], f"{where}/{key}")
    for key in set(schema) & {"properties", "$defs", "definitions"}:
        for name, inner in schema[key].items():
            check_exact(inner, f"{where}/{key}/{name}")
