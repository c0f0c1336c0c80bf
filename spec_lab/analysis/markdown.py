"""Results and tables as Markdown, for issues, pull requests, papers and the cards of trained drafters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_lab.core.terminal import visible
from spec_lab.results.result import Cell, DataTable, Result, Section

SPECIAL = re.compile(r"[\\`*|<~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[:]|^[-+#>]|&(?=#?\w+;)")
"""Characters that Markdown reads: of emphasis, code, tables, HTML, links, and marks at the beginning of a line."""

NUMBERED = re.compile(r"^(\d+)(?=[.)](?:\s|$))")
"""The number of an item of a list."""


def escaped(text: object) -> str:
    """Return a text in one line that Markdown shows as it is, inside of a table too."""
    return NUMBERED.sub(r"\1\\", SPECIAL.sub(r"\\\g<0>", visible(" ".join(str(text).split()))))


def table(data: DataTable) -> str:
    """Return a table of GitHub's Markdown, without the columns of ``more``."""
    columns = [number for number, (name, _) in enumerate(data.columns) if name not in data.more]
    heads = [escaped(data.columns[column][0]) for column in columns]
    rules = ["---:" if data.columns[column][1] else "---" for column in columns]
    rows = ([escaped(row[column].whole) for column in columns] for row in data.rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *rows))


def facts_table(facts: Mapping[str, Any]) -> str:
    """Return facts by name as a table; empty ones are left out."""
    rows = [[Cell(name), Cell(str(value))] for name, value in facts.items() if value not in (None, "")]
    return table(DataTable([("", False), ("", False)], rows))


def code(text: str, language: str = "") -> str:
    """Return a block of code, whatever backticks are in it."""
    fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", text)), 0)
    return f"{fence}{language}\n{text}\n{fence}"


def command(overrides: Sequence[str]) -> str:
    """Return the command with these options of the command line as a block of code."""
    return code(visible(shlex.join(["spec-lab", *overrides])), "sh")


def document(result: Result, facts: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return a result as a page.

    Args:
        facts: configuration and machine; empty ones are left out.
        overrides: the options of the command line that repeat the run.
    """
    blocks = [body(result), "## Command", command(overrides), "## Configuration and machine", facts_table(facts)]
    return "\n\n".join(blocks) + "\n"


def body(result: Result) -> str:
    """Return the title, what was measured, warnings and sections of a result."""
    blocks = [f"# {escaped(result.title)}", escaped(result.lead), *(f"**{escaped(line)}**" for line in result.warnings)]
    blocks += [escaped(line) for line in result.verdict if result.verdict_first]
    for number, section in enumerate(result.sections):
        blocks += _section(section, () if number or result.verdict_first else result.verdict)
    return "\n\n".join(blocks)


def _section(section: Section, verdict: Sequence[str]) -> Iterator[str]:
    """Yield the blocks of a section: as on a terminal, table, verdict, notes and failures, and what the table shows."""
    data = section.table or DataTable([], [])
    heads = [name for name, _ in data.columns if name not in data.more] if data.rows else []
    lines = [*verdict, *section.notes]
    if not (heads or lines or section.failures):
        return
    yield f"## {escaped(section.title)}"
    if heads:
        yield table(data)
        lines += [section.explanation(heads)]
    yield from (escaped(line) for line in lines if line)
    yield from (f"**FAILS: {escaped(line)}**" for line in section.failures)
