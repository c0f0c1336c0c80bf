"""The code that a run's parts come from, apart from this package's own: packages, versions, hashes of their sources."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

OWN = "spec_lab"

MOST_SOURCES = 5000, 64 * 2**20
"""Files and bytes of the largest package whose source is hashed; of a larger one the version alone is noted."""

MOST_DATA = 4 * 2**30
"""Bytes of the largest file or folder named by an option ``path`` that is hashed by its contents; of a larger one the
files' names, sizes and times of modification are.
"""


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


@cache  # the code that this process runs is what it has imported, whatever is edited meanwhile
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
    """SHA-256 of the files and folders that options of parts from elsewhere name, by option.

    Those are options called ``path``, or ending in ``_path``, whose value is a file or a folder. See ``MOST_DATA``.
    """
    found = {}
    for option, value in _paths(config):
        try:
            found[option] = _contents(Path(value).expanduser())
        except (OSError, ValueError, RuntimeError):  # no path, or not readable: the part itself will say so
            continue
    return {option: one for option, one in found.items() if one}


def _contents(path: Path) -> str:
    if path.is_file():
        files = {"": path}
    else:
        files = {str(one.relative_to(path)): one for one in sorted(path.rglob("*")) if one.is_file()}
    stats = {name: file.stat() for name, file in files.items()}
    whole, large = sha256(), sum(one.st_size for one in stats.values()) > MOST_DATA
    for name, file in files.items():
        whole.update(f"{name}\0{stats[name].st_size}\n".encode())
        if large:
            whole.update(str(stats[name].st_mtime_ns).encode())
            continue
        with file.open("rb") as stream:
            while piece := stream.read(2**20):
                whole.update(piece)
    return whole.hexdigest() if files else ""


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


def _paths(config: Mapping[str, Any], above: str = "", foreign: bool = False) -> Iterator[tuple[str, str]]:
    """Options called ``path`` of parts that are not this package's, and what they name."""
    own = (config.get(key) for key in ("_target_", "make"))
    foreign = foreign or any(isinstance(one, str) and one.partition(".")[0] != OWN for one in own)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{key}.", foreign)
        elif foreign and isinstance(value, str) and value and (key == "path" or str(key).endswith("_path")):
            yield f"{above}{key}", value
