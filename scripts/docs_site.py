"""Hooks of the documentation site (mkdocs.yml): files outside docs/ that pages link to become part of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:  # the tests of links need no mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md", "experiments/*/README.md")
"""Pages outside docs/ that are always part of the site."""
SHOWN = {".json": "json", ".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
"""Files that a page shows, by the language that they are highlighted as."""
MAX_BYTES = 200_000
"""Maximum size in bytes of a file that a page shows; larger ones are copied."""
LINK = re.compile(
    r"(?:\]\(|\b(?:src|href)=\"|^\[[^\]]+\]:[ \t]+)(?P<target>[^\s)\"#]*)(?:#(?P<anchor>[^\s)\"]*))?", re.MULTILINE
)
CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence)\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL
)


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield the relative links of a page, outside of code."""
    code = [spans.span() for spans in CODE.finditer(text)]
    for link in LINK.finditer(text):
        inside = any(start <= link.start("target") < end for start, end in code)
        if not inside and not re.match(r"[a-z]+:|/", link["target"]):
            yield link


def place(path: str) -> str:
    """Return the file of the repository that a page of the site comes from."""
    inside = ROOT / "docs" / path
    return f"docs/{path}" if inside.is_file() else path


def linked(page: str, target: str) -> str | None:
    """Return the file or folder of the repository that ``target`` names on the page ``page``; None if there is none."""
    path = os.path.normpath(PurePosixPath(page).parent / unquote(target))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    if (ROOT / path / "README.md").is_file():
        path = f"{path}/README.md".removeprefix("./")
    return path


def site_file(path: str) -> str:
    """Return the page or file of the site, relative to docs/, for a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":  # the home page of the site
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return f"{path}.md" if _shown(path) else path


def _shown(path: str) -> bool:
    file = ROOT / path
    return file.suffix in SHOWN and file.stat().st_size <= MAX_BYTES


def page_of(path: str) -> str:
    """Return the Markdown of a page that shows a source file, or lists a folder."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in file.iterdir() if entry.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = file.read_text(encoding="utf-8")
    fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", text)), 0)
    return f"# {path}\n\n{fence}{SHOWN[file.suffix]}\n{text.rstrip()}\n{fence}\n"


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    added = [str(path.relative_to(ROOT)) for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    pages = [place(page.src_uri) for page in files.documentation_pages()] + added
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in dict.fromkeys(linked(page, link["target"]) for link in links(text) if link["target"]):
            if path and not path.startswith("docs/") and path != "README.md" and path not in added:
                added.append(path)
                if path.endswith(".md"):
                    pages.append(path)
    in_nav = {str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern)}
    for path in added:
        made = (ROOT / path).is_dir() or _shown(path)
        source = {"content": page_of(path)} if made else {"abs_src_path": str(ROOT / path)}
        level = InclusionLevel.UNDEFINED if path in in_nav else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_file(path), inclusion=level, **source))
    config.nav = _expanded(config.nav, files)
    return files


def _expanded(nav: Any, files: Files) -> Any:
    """Return ``nav`` with all pages of a folder in place of FOLDER/*.md."""
    text, pages = str(nav), [page.src_uri for page in files.documentation_pages()]

    def expanded(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            inner = each(inner) if isinstance(inner, list) else inner
            return [{title: inner}] if inner else []  # no section of no pages
        if "*" not in entry:
            return [entry]
        return [page for page in sorted(pages) if PurePosixPath(page).match(entry) and f"'{page}'" not in text]

    def each(entries: list[Any]) -> list[Any]:
        return [kept for entry in entries for kept in expanded(entry)]

    return each(nav)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links that leave docs/ name the pages and files that ``on_files`` added."""
    source = place(page.file.src_uri)
    start, parts = 0, []
    for link in links(markdown):
        path = linked(source, link["target"]) if link["target"] else None
        if path is not None:
            target = os.path.relpath(site_file(path), PurePosixPath(page.file.src_uri).parent)
            parts += [markdown[start : link.start("target")], target]
            start = link.end("target")
    return "".join((*parts, markdown[start:]))
