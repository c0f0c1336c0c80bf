"""Config files with their comments, which YAML parsers drop."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from spec_lab.cli.explain.sources import Argument
from spec_lab.cli.yaml_files import read_yaml


class Setting(NamedTuple):
    """A key of a config file.

    Args:
        name: dotted, as far as mappings nest.
        value: as the file writes it, on one line.
        comment: behind it, and on the lines below that hold only a comment.
    """

    name: str
    value: str
    comment: str

    @property
    def here(self) -> str:
        """Return the remark on this file's value, which stands behind "; here: " in the comment; empty if none does."""
        return "".join(self.comment.partition("; here: ")[1:])


class Chosen(NamedTuple):
    """An entry of a defaults list.

    Args:
        option: such as "proposer", "proposer@arms.chain", "hydra/sweeper"; empty of a file of the same group.
        value: the name of a file.
        comment: as in ``Setting``.
    """

    option: str
    value: str
    comment: str


class ConfigFile(NamedTuple):
    """A config file.

    Args:
        head: the comment above its first key, without @package.
        defaults: its defaults list, without _self_.
        settings: its keys; of a mapping in block style the keys within.
        target: what ``_target_`` names; empty without.
        package: where its keys stand, by ``# @package``; empty without.
    """

    path: Path
    head: str
    defaults: tuple[Chosen, ...]
    settings: tuple[Setting, ...]
    target: str
    package: str


PRIVATE = ("_target_", "_convert_", "_recursive_")


def read(path: Path, flat: bool = False) -> ConfigFile:
    """Read a config file.

    Args:
        flat: whether mappings in flow style, ``{a: 1}``, are taken apart too.

    Raises:
        ValueError: it is no YAML mapping.
        OSError: it cannot be read.
    """
    text, root = read_yaml(path)
    if root is not None and not isinstance(root, MappingNode):
        raise ValueError(f"{path} must hold a mapping of options to values")
    comments = _Comments(text)
    settings = list(_settings(root, comments, flat)) if root else []
    return ConfigFile(
        path,
        comments.head(),
        tuple(_defaults(root, comments)) if root else (),
        tuple(
            setting
            for setting in settings
            if setting.name.rpartition(".")[2] not in PRIVATE or (flat and "." in setting.name)
        ),
        next((setting.value for setting in settings if setting.name == "_target_"), ""),
        "".join(re.findall(r"^# @package (\S+)", text)),
    )


def write(path: Path, options: Mapping[str, Argument]) -> str:
    """Return a config file with the comments of its options; what stands behind "here:" is kept.

    Args:
        path: of the file.
        options: those that have a declaration, by the name of their key.
    """
    text, root = read_yaml(path)
    comments, lines = _Comments(text), text.splitlines()
    written = {setting.name: setting.value for setting in read(path).settings}
    given = {name for name, value in written.items() if value != "null"}
    for key, value in reversed(root.value if root else ()):
        comment = (
            options[key.value].comment(written.get(key.value, ""), given, path.stem) if key.value in options else ""
        )
        if not comment or (isinstance(value, MappingNode) and value.value and not value.flow_style):
            continue
        mark, old = value.end_mark, comments.behind(value)
        shown = comment + Setting("", "", old).here
        left = lines[mark.line][: mark.column].rstrip()
        column = max(27, len(left) + 3)
        rest = [f"{' ' * column}# {part}" for part in textwrap.wrap(shown, 118 - column, break_on_hyphens=False)]
        rest[0] = left + rest[0][len(left) :]
        lines[mark.line : mark.line + 1 + comments.below(mark.line)] = rest
    return "\n".join(lines) + "\n"


class _Comments:
    """The comments of a file, by the places that its nodes end at."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines()

    def head(self) -> str:
        """Return the comment above the first key."""
        lines = []
        for line in self.lines:
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("#").strip())
        return " ".join(line for line in lines if not line.startswith("@package"))

    def behind(self, node: Node, colon: bool = False) -> str:
        """Return the comment behind a node; with ``colon`` that of a key whose value is on the lines below."""
        line, column = node.end_mark.line, node.end_mark.column
        if line >= len(self.lines):
            return ""
        comment = re.fullmatch(r"[\s,}\]:]*#\s*(.*)" if colon else r"[\s,}\]]*#\s*(.*)", self.lines[line][column:])
        below = self.lines[line + 1 : line + 1 + self.below(line)] if comment else []
        return " ".join([comment[1].strip(), *(more.strip(" #") for more in below)] if comment else [])

    def below(self, line: int) -> int:
        """Return on how many lines below a line its comment goes on."""
        lines = itertools.takewhile(lambda text: re.match(r"\s+#", text), self.lines[line + 1 :])
        return sum(1 for _ in lines)

    def value(self, node: Node) -> str:
        """Return a node as it is written, on one line."""
        return " ".join(self.text[node.start_mark.index : node.end_mark.index].split())


def _settings(node: MappingNode, comments: _Comments, flat: bool, above: str = "") -> Iterator[Setting]:
    for key, value in node.value:
        name = f"{above}{key.value}"
        if not above and key.value == "defaults":
            continue
        if isinstance(value, MappingNode) and value.value and (flat or not value.flow_style):
            yield from _settings(value, comments, flat, f"{name}.")
        else:
            empty = value.start_mark.index == value.end_mark.index
            yield Setting(name, comments.value(value), comments.behind(key if empty else value, empty))


def _defaults(node: MappingNode, comments: _Comments) -> Iterator[Chosen]:
    for key, value in node.value:
        if key.value != "defaults" or not isinstance(value, SequenceNode):
            continue
        for entry in value.value:
            if isinstance(entry, ScalarNode) and entry.value != "_self_":
                yield Chosen("", entry.value, comments.behind(entry))
            for option, chosen in entry.value if isinstance(entry, MappingNode) else ():
                named = option.value.removeprefix("override ").strip().lstrip("/")
                value = chosen.value if isinstance(chosen, ScalarNode) else comments.value(chosen)
                yield Chosen(named, value, comments.behind(chosen))
