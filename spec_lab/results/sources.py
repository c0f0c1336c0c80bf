"""Record the code and data of parts from other packages: versions, and hashes of sources and input files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from inspect import isroutine
from itertools import islice
from pathlib import Path
from typing import Any

from spec_lab.core.process_cache import ProcessCache

OWN = "spec_lab"

MAX_SOURCES = 5000, 64 * 2**20
"""Maximum files and bytes of a package whose source is hashed; of a larger one only the version is recorded."""

INPUTS = ("weights", "checkpoint", "model", "tokenizer", "vocab", "prompts", "schema", "grammar")
"""An option of another package's part whose name contains one of these names a file that decides the output."""

OUTPUTS = {"log", "logs", "cache", "out", "output", "outputs", "tmp"}
"""Words of an option's name by which the part writes there, as in ``model_cache``; such options are left out."""

MAX_DATA = 4 * 2**30
"""Maximum bytes of a file or folder that is hashed by its contents. Larger ones are hashed by the files' names, sizes
and times of modification.
"""

MAX_FILES = 10_000
"""Maximum files and folders in a folder that is hashed; a larger folder is left out."""


def code(config: Mapping[str, Any], parts: Iterable[Any], cache: ProcessCache) -> dict[str, dict[str, Any]]:
    """Return versions and source hashes of the code that a run uses, by top-level package, without this package's own.

    Args:
        config: the resolved configuration; its ``_target_`` and ``make`` name code.
        parts: the objects that the run is made of.
        cache: as in ``source``.
    """
    named = [name.partition(".")[0] for name in _named(config)]
    built = [_module(part).partition(".")[0] for part in parts]
    known = {OWN, *sys.stdlib_module_names} - {"__main__"}
    return {name: source(name, cache) for name in sorted({*named, *built} - known)}


def foreign(code: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest's "code" of other packages."""
    return {name: entry for name, entry in code.items() if name != OWN}


def source(package: str, cache: ProcessCache) -> dict[str, Any]:
    """Return the versions of the distributions that hold a top-level package, and the SHA-256 of its source.

    The hash covers the ``.py`` files of a package, or the one file of a module. It is None where there is no file, as
    in a notebook, or where there are more than ``MAX_SOURCES``.

    Args:
        cache: what this process has found before: it runs the code that it imported, so an edit after the first call
            must not change what its runs record.
    """
    if package not in cache.sources:
        versions = (
            {}
            if package == OWN
            else {
                distribution: version(distribution) for distribution in set(packages_distributions().get(package, ()))
            }
        )
        cache.sources[package] = {"versions": dict(sorted(versions.items())), "sha256": _hash(_files(package))}
    return cache.sources[package]


def _module(part: Any) -> str:
    """Return the module of a class, of a function, or of an object's class."""
    return str((part if isinstance(part, type) or isroutine(part) else type(part)).__module__)


def _files(package: str) -> dict[str, Path]:
    """Return the files of a package's source by their names in it."""
    if package == "__main__":
        file = vars(sys.modules["__main__"]).get("__file__")
        return {} if file is None else {"__main__": Path(file)}
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return {}
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        return {package: Path(spec.origin)} if spec.origin and Path(spec.origin).is_file() else {}
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return {str(file.relative_to(folder)): file for folder in folders for file in sorted(folder.rglob("*.py"))}


def _hash(files: Mapping[str, Path]) -> str | None:
    max_files, max_bytes = MAX_SOURCES
    if not files or len(files) > max_files or sum(file.stat().st_size for file in files.values()) > max_bytes:
        return None
    whole = sha256()
    for name, file in files.items():
        whole.update(f"{name}\0{sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def data(config: Mapping[str, Any], cache: ProcessCache) -> dict[str, str]:
    """Return the SHA-256 of the files and folders that options of other packages' parts read, by option.

    Those are the options called ``path``, and those whose name contains one of ``INPUTS`` and no word of ``OUTPUTS``,
    where the value is a file or a folder. Other options, such as ``log_path``, may name what the part writes. Bounds:
    ``MAX_DATA``, ``MAX_FILES``.

    Args:
        cache: what this process has read before; contents are read again once a size or a time of modification changes.
    """
    hashes = {}
    for option, value in _inputs(config):
        try:
            hashes[option] = _contents(Path(value).expanduser(), cache)
        except (OSError, ValueError, RuntimeError):  # no path, or not readable: the part itself reports it
            continue
    return {option: digest for option, digest in hashes.items() if digest}


def _contents(path: Path, cache: ProcessCache) -> str:
    """Return the SHA-256 of a file or a folder; empty where there are no files, or too many."""
    if path.is_file():
        files = {"": path}
    else:
        inside = list(islice(path.rglob("*"), MAX_FILES + 1))
        if len(inside) > MAX_FILES:
            return ""
        files = {str(file.relative_to(path)): file for file in sorted(inside) if file.is_file()}
    stats = {name: file.stat() for name, file in files.items()}
    known = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
    key = (path.absolute(), known)
    if files and key not in cache.digests:
        cache.digests[key] = _digest(*key)
    return cache.digests[key] if files else ""


def _digest(path: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """Return the SHA-256 of files by name, size and contents; by time in place of contents above ``MAX_DATA``.

    Args:
        path: the file, or the folder.
        files: name in the folder (empty for the file itself), size and time of modification of each.
    """
    whole, large = sha256(), sum(size for _, size, _ in files) > MAX_DATA
    for name, size, time in files:
        whole.update(f"{name}\0{size}\n".encode())
        if large:
            whole.update(str(time).encode())
            continue
        with (path / name if name else path).open("rb") as stream:
            while block := stream.read(2**20):
                whole.update(block)
    return whole.hexdigest()


def _named(config: Any) -> Iterator[str]:
    """Yield the dotted names of what a configuration builds or calls."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in ("_target_", "make") and isinstance(value, str) and "." in value:
                yield value
            yield from _named(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(value)


def _inputs(config: Mapping[str, Any], above: str = "", foreign: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the options by which parts of other packages read files, and their values. See ``data``."""
    targets = (config.get(key) for key in ("_target_", "make"))
    foreign = foreign or any(isinstance(target, str) and target.partition(".")[0] != OWN for target in targets)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _inputs(value, f"{above}{key}.", foreign)
        elif foreign and isinstance(value, str) and value and _is_input(str(key).lower()):
            yield f"{above}{key}", value


def _is_input(option: str) -> bool:
    """Return whether an option of this name names what the part reads."""
    named = option == "path" or any(word in option for word in INPUTS)
    return named and not OUTPUTS & set(option.split("_"))
