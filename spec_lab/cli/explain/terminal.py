"""``spec-lab explain``: answers on a terminal."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spec_lab.cli.bundled import conf, installed
from spec_lab.cli.declarations import package_sources
from spec_lab.cli.explain import contracts
from spec_lab.cli.explain.api import Documented, describe, sections
from spec_lab.cli.explain.query import KeyMatch, find, names
from spec_lab.cli.explain.reference import EXPERIMENT, ConfigGroup, ConfigKey, ConfigOption, Reference, read
from spec_lab.core.terminal import visible

WIDEST = 100
"""Maximum columns of text; lines that are longer are hard to read."""


def reference(further: Sequence[str] = ()) -> Reference:
    """Return the reference of the options of this package.

    Args:
        further: folders of configs that are added, or packages of them, as ``pkg://toy_plugin.conf``.

    Raises:
        ValueError, OSError: as in ``read``.
    """
    sources = package_sources()
    folders = [
        Path(folder) if folder == (name := folder.removeprefix("pkg://")) else sources.package(name)
        for folder in further
    ]
    return read([Path(conf()), *folders], sources)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    what = "such as proposer.depth, proposer, proposer=medusa, +experiment=certify; contract PART: what a proposer, "
    what += "verifier, ... of your own must have; without a name, all"
    parser.add_argument("names", nargs="*", metavar="NAME", help=what)
    more = "also options of your own: a folder of configs, or pkg://PACKAGE"
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help=more)


def run(given: argparse.Namespace, console: Console) -> int:
    """Print what options mean, their type, default and file; or the contract of a part."""
    if given.names[:1] == ["contract"]:
        for number, name in enumerate(given.names[1:] or [""]):
            console.print("\n" * bool(number), end="")
            show_contract(name, console)
        return 0
    known = reference([*map(str, installed()), *given.config_dir])
    for number, name in enumerate(given.names or [""]):
        console.print("\n" * bool(number), end="")
        answer(known, name, console)
    return 0


def answer(known: Reference, name: str, console: Console) -> None:
    """Print what a name stands for.

    Raises:
        ValueError: nothing has this name; the message has the nearest ones.
    """
    matches = find(known, name)
    for match in matches:
        if not isinstance(match, KeyMatch):
            show(match, console)
    keys = [match for match in matches if isinstance(match, KeyMatch)]
    for _, same in groupby(keys, lambda match: (match.path, match.options[0].group)):
        show_key(list(same), console)


def complete(begins: str) -> list[str]:
    """Return what can be asked for that begins with a text."""
    sign = "+" if begins.startswith("+") else ""
    return [
        f"{sign}{name}"
        for name in names(reference([*map(str, installed())]))
        if name.startswith(begins.removeprefix("+"))
    ]


def show(answer: Reference | ConfigGroup | ConfigOption, console: Console) -> None:
    """Print everything, a group or an option."""
    width = min(console.width, WIDEST)
    if isinstance(answer, Reference):
        _line(console, "Groups, of each of which a run has one: GROUP=OPTION", "", width)
        for group in answer.groups:
            _entry(console, group.name, group.summary, width, f"default {group.default}" if group.default else "")
        console.print()
        _line(console, "Options of every run: OPTION=VALUE", "", width)
        for key in answer.top.keys:
            _entry(console, key.name, key.meaning, width, _facts(key))
        console.print()
        _line(console, "", "spec-lab explain NAME explains one.", width)
    elif isinstance(answer, ConfigGroup):
        default = f"; {answer.name}={answer.default} by default" if answer.default else ""
        _line(console, answer.name, f"{answer.summary}{default}", width)
        for option in answer.options:
            _entry(console, option.name, option.summary, width)
        console.print()
        plus = "+" if answer.name == EXPERIMENT else ""
        _line(console, "", f"spec-lab explain {plus}{answer.name}=NAME lists the options of one.", width)
    else:
        plus = "+" if answer.group == EXPERIMENT else ""
        _line(console, f"{plus}{answer.group}={answer.name}", answer.summary, width)
        _line(console, "", answer.file + (f": {answer.target}" if answer.target else ""), width)
        for key in answer.keys:
            if answer.group == EXPERIMENT:
                swept = "sweeps over these values; " if key.type == "sweep" else ""
                _entry(console, f"{key.name}={key.default}", swept + key.meaning, width)
            else:
                _entry(console, answer.path(key), key.meaning, width, _facts(key))


def show_key(matches: Sequence[KeyMatch], console: Console) -> None:
    """Print a key with all that it may be: one entry for each type, default and meaning."""
    width = min(console.width, WIDEST)
    path, group = matches[0].path, matches[0].options[0].group
    if not group:
        _entry(console, path, matches[0].key.meaning, width, _facts(matches[0].key), 0)
        _indented(console, matches[0].options[0].file, width, 4)
        return
    plus = "+" if group == EXPERIMENT else ""
    _line(console, path, f"is an option of these; their files are conf/{group}/NAME.yaml", width)
    for match in matches:
        names = ", ".join(option.name for option in match.options)
        _entry(console, f"{plus}{group}={names}", match.key.meaning, width, _facts(match.key))


def show_contract(name: str, console: Console) -> None:
    """Print the members that a part must have and those that it may have, with defaults and shapes.

    Args:
        name: of ``contracts.CONTRACTS``, or a dotted path; empty: list them.

    Raises:
        ValueError: there is no such part.
    """
    width, part = min(console.width, WIDEST), contracts.find(name)
    if part is None and "." not in name:
        names = ", ".join(contract.name for contract in contracts.CONTRACTS)
        if name:
            raise ValueError(f"there is no contract {name}: the parts are {names}")
        return _line(console, "spec-lab explain contract PART", f"prints the contract of a part: {names}", width)
    if part is not None:
        given = f"; given {part.given}" if part.given else ""
        _line(console, part.name, f"config group {part.group}{given}; a small example: {part.example}", width)
    path = part.kind if part else name
    entry = (
        describe(package_sources(), path, inherited=True) if path else Documented("", "", "values for other options")
    )
    if path:
        _line(console, path, "", width)
    _documentation(console, entry.docstring, width, 4)
    for title, required in (("Without a default", True), ("With a default", False)):
        members = [member for member in entry.members if member.required == required]
        if members:
            console.print()
            _line(console, title, "", width)
        for member in members:
            _line(console, f"  {member.signature}", "", width)
            _documentation(console, member.docstring, width, 6)
    if part is not None and part.further:
        console.print()
        _line(console, "", f"spec-lab explain contract PATH prints these too: {', '.join(part.further)}", width)


def _documentation(console: Console, docstring: str, width: int, columns: int) -> None:
    """Print a docstring, the entries of its sections further to the right."""
    for head, items in sections(docstring):
        if head:
            _indented(console, f"{head}:", width, columns)
        for item in items:
            _indented(console, item.replace("``", ""), width, columns + 4 * bool(head))


def _facts(key: ConfigKey) -> str:
    """Return the type and default of a key."""
    default = "must be given" if key.default == "???" else f"default {key.default}"
    return ", ".join(part for part in (key.type, default) if part)


def _entry(console: Console, name: str, meaning: str, width: int, facts: str = "", columns: int = 2) -> None:
    """Print a name, its type and default, and below them what it means."""
    _line(console, " " * columns + name, facts, width)
    _indented(console, meaning, width, columns + 4)


def _line(console: Console, name: str, text: str, width: int) -> None:
    """Print a name in bold, and text after it."""
    name, text = visible(name), visible(text)
    gap = "  " if name and text else ""
    lines = textwrap.wrap(f"{name}{gap}{text}", width, subsequent_indent=" " * 6, break_on_hyphens=False)
    for number, line in enumerate(lines):
        shown = Text(line)
        shown.stylize("bold", 0, 0 if number else min(len(name), len(line)))
        console.print(shown, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, of which no word is broken at a hyphen; one at least."""
    return textwrap.wrap(visible(text), width, break_on_hyphens=False) or [""]


def _indented(console: Console, text: str, width: int, columns: int) -> None:
    """Print text with as many spaces before each line."""
    space = " " * columns
    lines = textwrap.wrap(visible(text), width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
