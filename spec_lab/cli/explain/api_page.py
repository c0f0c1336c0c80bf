"""The pages of docs/reference/api: what stands between two comments is generated from the sources.

``<!-- ::: spec_lab.core.clock.Clock -->`` begins the description of what it names, ``<!-- end -->`` ends it. With
``(docstring)`` after the path, members are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spec_lab.cli.explain.api import Documented, describe, sections
from spec_lab.cli.explain.sources import Sources

PART = re.compile(r"(<!-- ::: (\S+)( \(docstring\))? -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str, sources: Sources) -> str:
    """Return a page with its generated parts as the sources are now.

    Raises:
        ValueError: a comment names nothing.
    """

    def generated(match: re.Match[str]) -> str:
        entry = describe(sources, match[2])
        lines = _docstring(entry.docstring) if match[3] else _entry(entry, 3)
        return f"{match[1]}\n{_joined(lines)}\n\n{match[4]}"

    return PART.sub(generated, text)


def _joined(lines: Iterator[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _entry(entry: Documented, level: int) -> Iterator[str]:
    """Yield what is asked for, and the members of a class or a module below it."""
    is_module = not entry.signature
    if not is_module:
        module, _, name = entry.name.rpartition(".")
        yield from (f"{'#' * level} {name}", "", "```text", entry.signature, "```", "")
        yield from (f"In `{module}`.", "") if module else ()
    yield from (*_docstring(entry.docstring), "")
    if entry.rows:
        yield from ("| name | type | meaning |", "|---|---|---|")
        yield from (f"| `{name}` | `{kind.strip('_')}` | {_text(meaning)} |" for name, kind, meaning in entry.rows)
    for member in entry.members:
        if is_module:
            yield from _entry(member, level)
            continue
        required = " (no default)" if member.required else ""
        yield from (f"- `{member.signature}`{required}", "")
        yield from (f"  {line}".rstrip() for line in (*_docstring(member.docstring), ""))


def _docstring(docstring: str) -> Iterator[str]:
    """Yield a docstring as Markdown: its sections are lists."""
    for head, items in sections(docstring):
        if not head:
            yield from (*map(_text, items), "")
            continue
        yield from (f"{head}:", "")
        for item in items:
            name, colon, meaning = item.partition(": ")
            named = colon and re.fullmatch(r"[\w., *]+", name)
            yield f"- `{name}`: {_text(meaning)}" if named else f"- {_text(item)}"
        yield ""


def _text(text: str) -> str:
    """Return the text of a docstring as Markdown; numbers of papers are links."""
    parts = re.split(r"``(.+?)``", text)
    plain = [re.sub(r"(?<!\*)([<|]|\*(?!\*))", lambda sign: f"&#{ord(sign[1])};", part) for part in parts[::2]]
    plain = [re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", part) for part in plain]
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(piece for pair in zip(plain, [*code, ""], strict=True) for piece in pair)
