"""Contents of this repository's documents: links, headings, commands and names of options."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from spec_lab.cli.explain.markdown import slug

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=fence)\s*$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = ("python", "python3", "spec-lab", "torchrun", "srun", "time")


class Command(NamedTuple):
    """A command in a block of code.

    Args:
        document: where it stands.
        words: as the shell splits it, without assignments before it and comments after it.
    """

    document: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {shlex.join(self.words)}"


def documents() -> list[Path]:
    """Every page for readers."""
    patterns = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "experiments/**/*.md")
    return [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page, as a forge makes them of its headings; and those that it names itself."""
    plain = FENCE.sub("", text)
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", plain, re.MULTILINE):
        name = slug(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading))
        counts[name] = counts.get(name, -1) + 1
        if counts[name]:
            counts[f"{name}-{counts[name]}"] = 0
    return {*counts, *re.findall(r"<a (?:id|name)=\"([^\"]+)\"", plain)}


def commands(document: Path, text: str) -> Iterator[Command]:
    """Yield the commands in the shell blocks of a page."""
    for block in FENCE.finditer(text):
        if block["language"] not in ("", "bash", "console", "sh", "shell"):
            continue
        lines = re.sub(r"\\\n\s*", " ", block["text"]).splitlines()
        if block["language"] == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            for words in _split(line):
                if words and Path(words[0]).name in PROGRAMS:
                    yield Command(document, words)


def _split(line: str) -> Iterator[tuple[str, ...]]:
    """Split a line into commands as a shell does; nothing of a line that does not parse alone, such as Python's."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    reader.whitespace_split, reader.commenters = True, ""
    words: list[str] = []
    try:
        for word in reader:
            if word.startswith("#"):
                break
            if set(word) <= set(";&|"):
                yield tuple(words)
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)
    except ValueError:
        return
    yield tuple(words)


def of_spec_lab(command: Command) -> list[str] | None:
    """Return the arguments of ``spec-lab``; None of other commands."""
    words = list(command.words)
    for number, word in enumerate(words):
        if Path(word).name == "spec-lab":
            return words[number + 1 :]
        if word == "-m":
            return words[number + 2 :] if words[number + 1 : number + 2] == ["spec_lab"] else None
    return None


def is_placeholder(word: str) -> bool:
    """Whether a word of a command stands for what a reader fills in: ``...``, ``NAME``, ``OPTION=VALUE``."""
    name, equals, value = word.lstrip("+~").partition("=")
    names = r"[A-Z_]+(,[A-Z_]+)*"
    if not equals or "." in name:
        return not word.strip(".") or bool(re.fullmatch(names, word))
    return bool(re.fullmatch(names, name) or (word[0] == "+" and re.fullmatch(names, value)))


def inline_code(text: str) -> Iterator[str]:
    """Yield the words in backticks outside of blocks of code."""
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text)):
        yield from code.split()
