"""Write ``records.lark``: a grammar of the schema's records, exactly as ``json.dumps`` formats them.

A JSON schema leaves white space open and describes neither the new line after a text nor JSON Lines. The grammar has a
rule for each object, layout and depth, so that only values are free.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import spec_lab

PROMPTS = Path(spec_lab.__file__).parent / "zoo" / "prompts"

Parts = list[tuple[bool, str]]
"""A sequence of literal texts (True) and names of rules (False)."""


class Layout:
    """Rules of a schema's values in one layout.

    Args:
        schema: with ``$defs``; of the keywords only those that the records' schema uses.
        step: spaces of one level; 0: all on one line.
        rules: filled with the rules used, by name.
    """

    def __init__(self, schema: dict[str, Any], step: int, rules: dict[str, str]) -> None:
        self.schema, self.step, self.rules = schema, step, rules

    def rule(self, name: str, depth: int) -> str:
        """The name of the rule of a definition at a depth."""
        full = f"{name}_{self.step}_{depth}" if self.step else f"{name}_line"
        if full not in self.rules:
            self.rules[full] = ""  # taken
            self.rules[full] = written(self.value(self.schema["$defs"][name], depth))
        return full

    def value(self, schema: dict[str, Any], depth: int) -> Parts:
        """A value that begins at a depth."""
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            inner = self.schema["$defs"][name]
            if inner.get("type") in ("object", "array") or "anyOf" in inner:
                return [(False, self.rule(name, depth))]
            return self.value(inner, depth)
        if "anyOf" in schema:
            return [(False, either(self.value(option, depth) for option in schema["anyOf"]))]
        if "const" in schema or "enum" in schema:
            texts = schema.get("enum", [schema.get("const")])
            return [(False, either([(True, json.dumps(text))] for text in texts))]
        if schema["type"] == "object":
            return self.object(schema, depth)
        if schema["type"] == "array":
            return self.array(schema, depth)
        return [(False, leaf(schema))]

    def object(self, schema: dict[str, Any], depth: int) -> Parts:
        """Its keys in order; optional ones come last."""
        if "patternProperties" in schema:
            ((pattern, inner),) = schema["patternProperties"].items()
            return self.some(
                [(False, regex(f'"{pattern.strip("^$")}": ')), *self.value(inner, depth + 1)], 1, depth, "{}"
            )
        parts: Parts = [(True, "{" + self.line(depth + 1))]
        for number, (key, inner) in enumerate(schema["properties"].items()):
            before = self.between(depth + 1) if number else ""
            pair = [(True, before + json.dumps(key) + ": "), *self.value(inner, depth + 1)]
            parts += pair if key in schema["required"] else [(False, f"({written(pair)})?")]
        return [*parts, (True, self.line(depth) + "}")]

    def array(self, schema: dict[str, Any], depth: int) -> Parts:
        """Return an array of as many items as the schema asks for, or more."""
        least = schema.get("minItems", 0)
        parts = self.some(self.value(schema["items"], depth + 1), max(least, 1), depth, "[]", schema.get("maxItems"))
        return parts if least else [(False, either([[(True, "[]")], parts]))]

    def some(self, item: Parts, least: int, depth: int, ends: str, most: int | None = None) -> Parts:
        """``least`` items or more between two ends."""
        more: Parts = [(True, self.between(depth + 1)), *item]
        tail = [] if most == least else [(False, f"({written(more)})*")]
        return [
            (True, ends[0] + self.line(depth + 1)),
            *item,
            *more * (least - 1),
            *tail,
            (True, self.line(depth) + ends[1]),
        ]

    def line(self, depth: int) -> str:
        """After an opening bracket, and before a closing one."""
        return "\n" + " " * (self.step * depth) if self.step else ""

    def between(self, depth: int) -> str:
        """Between two items."""
        return "," + self.line(depth) if self.step else ", "


def leaf(schema: dict[str, Any]) -> str:
    """A value without parts, as a regular expression; numbers in as many digits as records have."""
    whole = ("" if schema.get("minimum", -1) >= 0 else "-?") + "(0|[1-9][0-9]{0,6})"
    patterns = {
        "string": '"' + schema.get("pattern", r'[^"\\\x00-\x1f]{0,80}').strip("^$") + '"',
        "integer": whole,
        "number": whole + r"(\.[0-9]{1,4})?",
        "boolean": "true|false",
        "null": "null",
    }
    return regex(patterns[schema["type"]])


def regex(pattern: str) -> str:
    """A regular expression as the grammar writes it."""
    return "/" + pattern.replace("/", r"\/") + "/"


def either(parts: Any) -> str:
    """One of several sequences."""
    return "(" + " | ".join(written(part) for part in parts) + ")"


def written(parts: Parts) -> str:
    """Return the sequence with adjacent texts joined."""
    merged: list[tuple[bool, str]] = []
    for plain, text in parts:
        if plain and merged and merged[-1][0]:
            merged[-1] = (True, merged[-1][1] + text)
        elif text:
            merged.append((plain, text))
    return " ".join(json.dumps(text) if plain else text for plain, text in merged)


def grammar(schema: dict[str, Any]) -> str:
    """A document: one record, indented by 2 or 4; a list of them; or a record on each line."""
    rules: dict[str, str] = {}
    two, four, line = (Layout(schema, step, rules) for step in (2, 4, 0))
    listed = written(two.array({"items": {"$ref": "#/$defs/record"}, "minItems": 1}, 0))
    lined = line.rule("record", 0)
    document = f'{two.rule("record", 0)} | {four.rule("record", 0)} | {listed} | {lined} ("\\n" {lined})*'
    start = f'start: ({document}) "\\n"?\n'
    return start + "".join(f"{name}: {text}\n" for name, text in rules.items())


def main() -> None:
    """Write the grammar into the folder of the schema."""
    schema = json.loads((PROMPTS / "records.schema.json").read_text())
    (PROMPTS / "records.lark").write_text(grammar(schema))


if __name__ == "__main__":
    main()
