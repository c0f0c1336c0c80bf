"""The training corpus: three workloads of documents, gathered from what is installed.

``code``   Python sources of the standard library and of permissively licensed packages;
``json``   generated records (``records.py``);
``prose``  paragraphs of documentation strings and of pydoc's topics.

Hold-out is by whole modules (with their docstrings), whole topics and whole record seeds, all named in
``zoo/holdout.json``.
"""

import ast
import hashlib
import json
import re
import string
import sysconfig
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import records

WORKLOADS = ("code", "json", "prose")

# Package -> most bytes of it that enter the corpus. All under the PSF, BSD, MIT or Apache licences.
STDLIB = "stdlib"
PACKAGES = {
    STDLIB: 20_000_000, "numpy": 4_000_000, "pandas": 5_000_000, "scipy": 6_000_000, "networkx": 4_000_000,
    "sympy": 6_000_000, "matplotlib": 5_000_000, "torch": 7_000_000, "transformers": 6_000_000,
    "huggingface_hub": 2_000_000, "setuptools": 1_500_000, "fontTools": 2_000_000, "mypy": 2_500_000,
    "pydantic": 1_500_000, "rich": 1_500_000, "wandb": 1_500_000, "PIL": 1_500_000, "mpmath": 1_000_000,
    "click": 500_000, "jinja2": 500_000, "typer": 500_000, "httpx": 300_000, "httpcore": 300_000, "anyio": 600_000,
    "requests": 300_000, "urllib3": 500_000, "hydra": 500_000, "omegaconf": 400_000, "fsspec": 800_000,
    "pyparsing": 500_000, "packaging": 500_000, "markdown_it": 300_000, "yaml": 300_000, "dateutil": 300_000,
    "filelock": 300_000, "pygments": 700_000,
}  # fmt: skip
SKIPPED_PARTS = set(
    "test tests testing _vendor vendor encodings pydoc_data lib2to3 "
    "site-packages turtledemo data _generated ensurepip unifiedparsers".split()
)
HELD_OUT_TOPICS_EVERY = 6
# Characters that training text may not share with a prompt. Records share their keys and so longer runs than text does.
WINDOWS = {"text": 64, "json": 160}


@dataclass(frozen=True)
class Document:
    """One text with its workload and where it came from, e.g. ``code``, ``stdlib:asyncio/queues.py``."""

    workload: str
    source: str
    text: str


def sha256(text: str) -> str:
    """Hexadecimal digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _order(name: str) -> str:
    """Pseudo-random but fixed order of names, the same on every machine."""
    return hashlib.sha256(name.encode()).hexdigest()


def package_root(package: str) -> Path:
    """The folder of an installed package, which may not exist."""
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    return Path(sysconfig.get_paths()["purelib"]) / package


def modules(package: str, only: Container[str] | None = None) -> Iterator[tuple[str, str]]:
    """(source, text) of the readable modules of a package, or of those in ``only``, in a fixed pseudo-random order."""
    root = package_root(package)
    paths = {f"{package}:{p.relative_to(root).as_posix()}": p for p in root.rglob("*.py")} if root.is_dir() else {}
    for source in sorted(paths, key=_order):
        if only is not None and source not in only:
            continue
        parts = source.split(":")[1].lower().split("/")
        if SKIPPED_PARTS & set(parts) or any("test" in p for p in parts):
            continue
        try:
            text = paths[source].read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(8)
        except (UnicodeDecodeError, OSError):
            continue
        if is_readable(text):
            yield source, text


def is_readable(text: str) -> bool:
    """False for generated tables, minified sources and near-empty modules."""
    lines = text.splitlines()
    if (
        not 400 <= len(text) <= 300_000
        or len(lines) < 12
        or "do not edit" in text[:2000].lower()
        or "auto-generated" in text[:2000].lower()
    ):
        return False
    plain = text.encode("ascii", "ignore")
    letters, digits = (
        len(plain) - len(plain.translate(None, kind))
        for kind in (string.ascii_letters.encode(), string.digits.encode())
    )
    share = 1 / len(text)
    if max(map(len, lines)) >= 400 or len(text) / len(lines) >= 70:
        return False
    return letters * share > 0.35 and digits * share < 0.12 and 1 - len(plain) * share < 0.02


def trim(text: str) -> str:
    """Drop a leading licence comment and long runs of literal lines (tables)."""
    lines = text.splitlines()
    start = 0
    while start < len(lines) and (lines[start].startswith("#") or not lines[start].strip()):
        start += 1
    kept: list[str] = []
    run = 0
    for line in lines[start:] if start > 6 else lines:
        run = run + 1 if re.fullmatch(r"[\s\-+.,()\[\]{}'\"0-9xXa-fA-Fe]+", line) and line.strip() else 0
        if run <= 8:
            kept.append(line.rstrip())
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip() + "\n"


def _lines(text: str) -> set[str]:
    """Return hashes of the lines with content."""
    return {s for line in text.splitlines() if len(s := line.strip()) > 24}


def deduplicated(documents: Iterable[Document], seen: set[str], most: float) -> Iterator[Document]:
    """Drop documents of which more than the share ``most`` of lines was in ``seen``; the others' lines enter it."""
    for document in documents:
        lines = _lines(document.text)
        if lines and len(lines & seen) / len(lines) > most:
            continue
        seen |= lines
        yield document


def paragraphs(text: str) -> str:
    """The running English of a docstring or topic: paragraphs of full sentences, without code, tables and lists."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        indent = min((len(s) - len(s.lstrip()) for s in lines[1:] if s.strip()), default=0)
        body = " ".join(s.strip() for s in lines)
        letters = len(re.sub(r"[^A-Za-z ]", "", body))
        if (
            len(body) < 120
            or letters / len(body) < 0.88
            or ">>>" in body
            or "::" in body
            or indent > 12
            or not re.search(r"[.!?]$", body)
            or body[0] in "*-+|.=<"
            or "  " in body[3:40]
        ):
            continue
        kept.append("\n".join(s.strip() for s in lines))
    return "\n\n".join(kept)


def docstrings(text: str) -> str:
    """All prose paragraphs of a module's documentation strings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    texts = []
    queue: deque[ast.AST] = deque([tree])
    while queue:
        node = queue.popleft()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(paragraphs(ast.get_docstring(node) or ""))
        for name in node._fields:  # statements only: there are far more expressions, and they hold no docstrings
            if isinstance(inner := getattr(node, name), list):
                queue.extend(n for n in inner if isinstance(n, ast.stmt | ast.ExceptHandler | ast.match_case))
    return "\n\n".join(p for p in texts if p)


def topics() -> dict[str, str]:
    """The topics of pydoc (chapters of the language reference) as plain paragraphs."""
    from pydoc_data.topics import topics as raw

    return {
        name: text
        for name in sorted(raw)
        if len(text := paragraphs(re.sub(r"\[[0-9]+\]|\*\*|\*|\"", "", raw[name]))) > 400
    }


def load_holdout(path: Path) -> dict:
    """``{"modules": {source: sha256}, "topics": {name: sha256}}``; both empty where there is no file yet."""
    return json.loads(path.read_text()) if path.exists() else {"modules": {}, "topics": {}}


def choose_holdout(per_package: dict[str, int]) -> dict:
    """Names with hashes of the modules and topics to hold out: the first of middling length in the fixed order."""
    chosen: dict[str, dict[str, str]] = {"modules": {}, "topics": {}}
    for package, count in per_package.items():
        middling = [
            (s, t)
            for s, t in modules(package)
            if 6_000 <= len(t) <= 60_000 and "__init__" not in s and "idlelib" not in s and "tkinter" not in s
        ]
        chosen["modules"] |= {s: sha256(t) for s, t in middling[:count]}
    texts = topics()
    names = sorted(texts, key=_order)[::HELD_OUT_TOPICS_EVERY]
    chosen["topics"] = {name: sha256(texts[name]) for name in sorted(names)}
    return chosen


def held_out(holdout: dict, packages: Iterable[str] = PACKAGES) -> list[Document]:
    """The held-out documents as installed here (a package that is absent gives none)."""
    documents = []
    for package in packages:
        for source, text in modules(package, only=holdout["modules"]):
            documents.append(Document("code", source, trim(text)))
            if prose := docstrings(text):
                documents.append(Document("prose", source, prose))
    documents += [Document("prose", f"topic:{n}", t) for n, t in topics().items() if n in holdout["topics"]]
    documents += [
        Document("json", f"record:{s}:{f}", t)
        for s in range(records.HELD_OUT_SEED, records.HELD_OUT_SEED + 400)
        for f, t in [records.record(s)]
    ]
    return documents


def training(
    holdout: dict,
    prompts: Sequence[dict[str, str]] = (),
    packages: dict[str, int] = PACKAGES,
    record_count: int = 9_000,
) -> Iterator[Document]:
    """All training documents. Held-out ones are left out by name, by hash and by shared lines.

    If another version of a package has a held-out prompt's text elsewhere, that document is dropped: none shares a run
    of ``WINDOWS`` characters with a prompt of its kind (code and prose count as one).
    """
    shared = {
        kind: shared_windows([p["prompt"] for p in prompts if (p["workload"] == "json") == (kind == "json")], window)
        for kind, window in WINDOWS.items()
    }
    for document in _training(holdout, packages, record_count):
        if not shared["json" if document.workload == "json" else "text"](document.text):
            yield document


def _training(holdout: dict, packages: dict[str, int], record_count: int) -> Iterator[Document]:
    hashes = set(holdout["modules"].values())
    reference = held_out(holdout, packages)
    held_lines: set[str] = set().union(*(_lines(d.text) for d in reference if d.workload != "json"))
    seen: set[str] = set()

    def sources(package: str, most: int) -> Iterator[Document]:
        size = 0
        for source, text in modules(package):
            if source in holdout["modules"] or sha256(text) in hashes or size > most:
                continue
            text = trim(text)
            lines = _lines(text)
            if lines and len(lines & held_lines) / len(lines) > 0.15:
                continue
            size += len(text)
            yield Document("code", source, text)

    for package, most in packages.items():
        for document in deduplicated(sources(package, most), seen, most=0.4):
            yield document
            if prose := docstrings(document.text):
                yield Document("prose", document.source, prose)
    yield from (Document("prose", f"topic:{n}", t) for n, t in topics().items() if n not in holdout["topics"])
    for seed in range(record_count):
        family, text = records.record(seed)
        yield Document("json", f"record:{seed}:{family}", text)


def shared_windows(prompts: Sequence[str], window: int) -> Callable[[str], set[int]]:
    """Return a function from a text to the indices of the prompts with which it shares a run of ``window`` characters.

    A shared run covers at least one aligned block of half its length in the text: only those are looked up.
    """
    half = window // 2
    holders: dict[str, set[int]] = {}
    for index, prompt in enumerate(prompts):
        for i in range(len(prompt) - half + 1):
            holders.setdefault(prompt[i : i + half], set()).add(index)

    def shared(text: str) -> set[int]:
        indexes: set[int] = set()
        for i in range(0, len(text) - half + 1, half):
            for index in holders.get(text[i : i + half], set()) - indexes:
                if any(
                    text[j : j + window] in prompts[index]
                    for j in range(max(0, i - half), i + 1)
                    if j + window <= len(text)
                ):
                    indexes.add(index)
        return indexes

    return shared
