"""Where the bundled files and the configs are."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def zoo(name: str) -> str:
    """The path of a bundled file or folder."""
    return str(PACKAGE / "zoo" / name)


def conf() -> str:
    """Return the folder of the configs: inside an installed package, next to the package in a checkout."""
    for folder in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"no conf/config.yaml in {PACKAGE} or next to it: install spec_lab again")
