"""The code that a run's parts come from, apart from this package's own: packages, versions, hashes of their sources."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from itertools import islice
from pathlib import Path
from typing import Any

OWN = "spec_lab"

MOST_SOURCES = 5000, 64 * 2**20
"""Files and bytes of the largest package whose source is hashed; of a larger one the version alone is noted."""

INPUTS = ("weights", "checkpoint", "model", "tokenizer", "vocab", "prompts", "schema", "grammar")
"""Options of foreign parts whose names contain one of these name files that decide the output, as ``path`` does."""

OUTPUTS = {"log", "logs", "cache", "out", "output", "outputs", "tmp"}
"""Words of a name that say that the part writes there, as in ``model_cache``; such options are left out."""

MOST_DATA = 4 * 2**30
"""Bytes of the largest file or folder named by an option that is hashed by its contents; of a larger one the files'
names, sizes and times of modification are.
"""

MOST_FILES = 10_000
"""Files and folders in the largest folder that is hashed; a larger one is left out."""


def code(config: Mapping[str, Any], parts: Iterable[Any] = ()) -> dict[str, dict[str, Any]]:
    """What tells the code of a run's parts from other code, by top-level package; this package's own is left out.

    Args:
        config: the resolved configuration; what its ``_target_`` and ``make`` name.
        parts: the objects that the run is made of.
    """
    named = [name.partition(".")[0] for name in _named(config)]
    built = [str(getattr(part, "__module__", None) or type(part).__module__).partition(".")[0] for part in parts]
    known = {OWN, *sys.stdlib_module_names} - {"__main__"}
    return {name: source(name) for name in sorted({*named, *built} - known)}


@cache  # A process runs the code that it imported, so edits after the first call must not change what its runs record.
def source(package: str) -> dict[str, Any]:
    """Versions of the distributions that hold a top-level package, and SHA-256 of its source.

    Hashed are the ``.py`` files of a package, or the one file of a module; None where there is none, as in a notebook,
    or more than ``MOST_SOURCES``.
    """
    found = {} if package == OWN else {one: version(one) for one in set(packages_distributions().get(package, ()))}
    return {"versions": dict(sorted(found.items())), "sha256": _hash(_files(package))}


def _files(package: str) -> dict[str, Path]:
    """The files of a package's source, by their names in it."""
    if package == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        return {} if file is None else {"__main__": Path(file)}
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return {}
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {package: Path(spec.origin)} if spec.origin and Path(spec.origin).is_file() else {}
    folders = [Path(one) for one in spec.submodule_search_locations]
    return {str(file.relative_to(folder)): file for folder in folders for file in sorted(folder.rglob("*.py"))}


def _hash(found: Mapping[str, Path]) -> str | None:
    most, most_bytes = MOST_SOURCES
    if not found or len(found) > most or sum(file.stat().st_size for file in found.values()) > most_bytes:
        return None
    whole = sha256()
    for name, file in found.items():
        whole.update(f"{name}\0{sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def data(config: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files and folders that options of parts from elsewhere read, by option.

    Those are the options called ``path`` and those whose name contains one of ``INPUTS`` and no word of ``OUTPUTS``,
    where the value is a file or a folder. Others, such as ``log_path``, may name what the part writes. Contents are
    read once in a process, unless a size or a time of modification changes. Bounds: ``MOST_DATA``, ``MOST_FILES``.
    """
    found = {}
    for option, value in _inputs(config):
        try:
            found[option] = _contents(Path(value).expanduser())
        except (OSError, ValueError, RuntimeError):  # no path, or not readable: the part itself will say so
            continue
    return {option: one for option, one in found.items() if one}


def _contents(path: Path) -> str:
    """SHA-256 of a file or a folder; empty where there are no files, or too many."""
    if path.is_file():
        files = {"": path}
    else:
        inside = list(islice(path.rglob("*"), MOST_FILES + 1))
        if len(inside) > MOST_FILES:
            return ""
        files = {str(one.relative_to(path)): one for one in sorted(inside) if one.is_file()}
    stats = {name: file.stat() for name, file in files.items()}
    known = tuple((name, one.st_size, one.st_mtime_ns) for name, one in stats.items())
    return _digest(path.absolute(), known) if files else ""


@lru_cache(maxsize=64)  # of the contents alone: other sizes or times are other arguments
def _digest(path: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """SHA-256 of files by name, size and contents, or time where they are larger than ``MOST_DATA``.

    Args:
        path: the file, or the folder.
        files: name in the folder (empty for the file itself), size and time of modification of each.
    """
    whole, large = sha256(), sum(size for _, size, _ in files) > MOST_DATA
    for name, size, time in files:
        whole.update(f"{name}\0{size}\n".encode())
        if large:
            whole.update(str(time).encode())
            continue
        with (path / name if name else path).open("rb") as stream:
            while piece := stream.read(2**20):
                whole.update(piece)
    return whole.hexdigest()


def _named(config: Any) -> Iterator[str]:
    """Dotted names of what a configuration builds or calls."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in ("_target_", "make") and isinstance(value, str) and "." in value:
                yield value
            yield from _named(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(value)


def _inputs(config: Mapping[str, Any], above: str = "", foreign: bool = False) -> Iterator[tuple[str, str]]:
    """Options of parts that are not this package's that name what the part reads, and their values. See ``data``."""
    own = (config.get(key) for key in ("_target_", "make"))
    foreign = foreign or any(isinstance(one, str) and one.partition(".")[0] != OWN for one in own)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _inputs(value, f"{above}{key}.", foreign)
        elif foreign and isinstance(value, str) and value and _is_input(str(key).lower()):
            yield f"{above}{key}", value


def _is_input(option: str) -> bool:
    """Whether an option of this name says what the part reads."""
    named = option == "path" or any(word in option for word in INPUTS)
    return named and not OUTPUTS & set(option.split("_"))
