"""Where the bundled files and the configs are: those of this package, and those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

ENTRY_POINTS = "spec_lab.conf"
"""Entry points by which an installed package names its folder of configs, as ``my_parts.conf``."""


def zoo(name: str) -> str:
    """The path of a bundled file or folder."""
    return str(PACKAGE / "zoo" / name)


def conf() -> str:
    """Return the folder of the configs: inside an installed package, next to the package in a checkout."""
    for folder in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"no conf/config.yaml in {PACKAGE} or next to it: install spec_lab again")


def installed() -> list[Path]:
    """Return the config folders of installed packages, in the order of their names; no package is imported.

    Raises:
        ValueError: an entry point names no folder; names the package.
    """
    folders = {}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.value):
        top, *below = point.value.split(".")
        spec = find_spec(top)
        candidates = [Path(location, *below) for location in (spec.submodule_search_locations or () if spec else ())]
        folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
        if folder is None:
            package = point.dist.name if point.dist else "a package"
            raise ValueError(
                f"the entry point {ENTRY_POINTS} of {package} names {point.value}, which is no folder of an installed "
                "package: name the folder of its configs with dots, or uninstall it"
            )
        folders[folder] = point.value
    return list(folders)


def check_installed() -> None:
    """Refuse a config of an installed package that would never be read, since another has its name.

    Raises:
        ValueError: names both files; as in ``installed``.
    """
    _check_names([Path(conf()), *installed()])


def _check_names(folders: Sequence[Path]) -> None:
    files: dict[Path, Path] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.yaml")):
            if (first := files.setdefault(file.relative_to(folder), file)) != file:
                raise ValueError(f"{file} has the name of {first}, which Hydra reads in its place: rename it")


def choices(group: str) -> list[str]:
    """Return the names of the options of a config group, those of installed packages included."""
    return sorted(file.stem for folder in (Path(conf()), *installed()) for file in Path(folder, group).glob("*.yaml"))
