"""Results and tables on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_lab.core.terminal import visible
from spec_lab.results.result import Cell, DataTable, Result, Section

WIDE = 130
"""Columns of a terminal that shows every column of a table without ``verbose``."""

FOLDED = (24, 12)
"""Letters of a text in the first column, and in another, from which it may be broken so that more columns fit."""


def standard_output(quiet: bool = False) -> Console:
    """Return a console that prints text on standard output, in a notebook as well, where rich would show HTML."""
    return Console(quiet=quiet, markup=False, force_jupyter=False)


def say(console: Console, text: str, style: str = "", wrap: bool = True) -> None:
    """Print a text as it is."""
    console.print(Text(visible(text), style=style), soft_wrap=not wrap)


def show(result: Result, console: Console, verbose: bool = False) -> None:
    """Print a result: what was measured, the first table, the verdict on its times, and what else there is.

    Args:
        verbose: print every column, what the columns hold, and details; a console of ``WIDE`` columns or more prints
            every column anyway.
    """
    say(console, f"{result.title}: {result.lead}", "bold")
    for line in result.warnings:
        say(console, line, "bold", wrap=not line.startswith("Left out"))  # folders stay on one line
    for line in result.verdict if result.verdict_first else ():
        say(console, line)
    for number, section in enumerate(result.sections):
        show_section(section, console, verbose, () if number or result.verdict_first else result.verdict)
    hidden = any(section.details or (section.table and section.explanation()) for section in result.sections)
    if hidden and not verbose:
        say(console, "-v adds what the columns hold, and further figures.")


def show_section(section: Section, console: Console, verbose: bool = False, verdict: Sequence[str] = ()) -> None:
    """Print a section's table, the verdict, notes and failures; a section of figures alone prints no more.

    Args:
        verbose: as in ``show``.
        verdict: lines on the times in its table.
    """
    shown = [] if section.table is None else show_table(section.title, section.table, console, verbose)
    if verbose and shown and (explanation := section.explanation(shown)):
        say(console, explanation)
    for line in (*verdict, *section.notes, *(section.details if verbose else ())):
        say(console, line)
    for line in section.failures:
        say(console, f"FAILS: {line}", "bold red")


def show_table(title: str, table: DataTable, console: Console, verbose: bool = False) -> list[str]:
    """Print a table; return the headings shown, none where there was nothing to print.

    Columns of ``more`` are left out unless ``verbose`` or on a wide console. Where the others do not fit the width,
    intervals are left out if they fit without; else the table continues below, with its first column again.
    """
    every = verbose or console.width >= WIDE
    columns = [number for number, (name, _) in enumerate(table.columns) if every or name not in table.more]
    if not columns or not table.rows:
        return []
    main = [number for number in columns if table.columns[number][0] not in table.more]
    ends = _width(table, main, True) <= console.width or _width(table, main, False) > console.width
    for number, part in enumerate(
        _parts(table, [*main, *(column for column in columns if column not in main)], ends, console)
    ):
        if title:
            say(console, f"\n{title}{', continued' * (number > 0)}", "bold")
        console.print(_grid(table, part, ends, console.width))
    return [table.columns[column][0] for column in columns]


def _text(cell: Cell, ends: bool) -> str:
    return visible(cell.whole if ends else cell.text)


def _needed(table: DataTable, column: int, ends: bool) -> int:
    """Return the width that a column needs: its numbers stay on one line, its heading and long texts may be broken."""
    heading, numeric = table.columns[column]
    longest = max(cell_len(_text(row[column], ends)) for row in table.rows)
    return max(
        longest if numeric else min(longest, FOLDED[column > 0]), *map(cell_len, visible(heading).split() or [""]), 0
    )


def _width(table: DataTable, columns: Sequence[int], ends: bool) -> int:
    return 1 + sum(1 + _needed(table, column, ends) for column in columns)


def _parts(table: DataTable, columns: Sequence[int], ends: bool, console: Console) -> Iterator[list[int]]:
    """Yield the columns of tables that fit the console, each with the first column."""
    first, *others = columns
    part = [first]
    for column in others:
        if len(part) > 1 and _width(table, [*part, column], ends) > console.width:
            yield part
            part = [first]
        part.append(column)
    yield part


def _widths(table: DataTable, columns: Sequence[int], ends: bool, width: int) -> list[int]:
    """Return the width of each column: what it needs, and an even share of what is left, up to its longest text.

    (Left to itself, rich cuts columns whose least widths only just fit.)
    """
    widths = [_needed(table, column, ends) for column in columns]
    wanted = []
    for number, column in enumerate(columns):
        texts = [visible(table.columns[column][0]), *(_text(row[column], ends) for row in table.rows)]
        wanted.append((max(0, max(map(cell_len, texts)) - widths[number]), number))
    left = max(0, width - _width(table, columns, ends))
    for rank, (more, number) in enumerate(sorted(wanted)):
        share = min(more, left // (len(wanted) - rank))
        widths[number] += share
        left -= share
    return widths


def _folded(text: str, width: int) -> str:
    """Return a text in which words longer than a column are broken before "=" and after ".", if they have them."""
    words = []
    for word in text.split(" "):
        lines = [""]
        for part in re.split(r"(?==)|(?<=\.)", word) if cell_len(word) > width else [word]:
            if lines[-1] and cell_len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        words.append("\n".join(lines))
    return " ".join(words)


def _grid(table: DataTable, columns: Sequence[int], ends: bool, width: int) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    widths = _widths(table, columns, ends, width)
    for column, column_width in zip(columns, widths, strict=True):
        heading, numeric = table.columns[column]
        shown.add_column(
            Text(visible(heading)),
            justify="right" if numeric else "left",
            overflow="fold",
            width=column_width,
        )
    for row in table.rows:
        texts = [_text(row[column], ends) for column in columns]
        shown.add_row(*(Text(_folded(text, column_width)) for text, column_width in zip(texts, widths, strict=True)))
    return shown
