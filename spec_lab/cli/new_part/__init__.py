"""``spec-lab new KIND NAME``: a package with a part of one's own, its config, and a test that passes."""

from __future__ import annotations

import argparse
import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template

from rich.console import Console

from spec_lab.analysis.console import say
from spec_lab.cli.bundled import choices

NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")

PROJECT = Template("""[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "0.1.0"
description = "A $kind for spec_lab"
requires-python = ">=3.11"
dependencies = ["spec-lab"]

[project.entry-points."spec_lab.conf"]  # where spec_lab finds the config, once the package is installed
$name = "$name.conf"

[tool.hatch.build.targets.wheel]
packages = ["$name"]

[tool.pytest.ini_options]
pythonpath = ["."]
""")


GROUPS = {kind: kind for kind in ("proposer", "verifier", "constraint", "policy")}
GROUPS |= {"metric": "metrics", "drafter": "proposer"}
"""Group of each kind's config. The kind's folder beside this file has a part, its config, a test that passes, and the
experiment that trains it, if one does."""

EXPERIMENT = "experiment.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("kind", choices=tuple(GROUPS), help="what to write")
    parser.add_argument("name", metavar="NAME", help="of the part and of its package, such as my_drafter")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to make (NAME, in the working directory)")


def run(given: argparse.Namespace, console: Console) -> int:
    """Write a package with a part of your own: a proposer, verifier, ..., its config and a test that passes."""
    folder = given.out or Path(given.name)
    for file in write(given.kind, given.name, folder):
        say(console, str(file), wrap=False)
    test, chosen = f"cd {folder} && python -m pytest", f"{GROUPS[given.kind]}={given.name}"
    say(console, f"Test it: {test}. Install it: pip install -e {folder}. Run it: spec-lab {chosen}", wrap=False)
    return 0


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a package into a new folder; return its files.

    Args:
        kind: of ``GROUPS``.
        name: of the part and the package.
        folder: must not exist, in a folder that does.

    Raises:
        ValueError: a name that is not possible, or that something else has.
        OSError: the folder exists, or cannot be written.
    """
    check_name(kind, name)
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another name, or another folder with --out DIR")

    def renamed(file: str) -> str:
        text = (Path(__file__).parent / kind / file).read_text(encoding="utf-8")
        text = text.replace(f"{__name__}.{kind}.part", f"{name}.part")
        return text.replace(f"my_{kind}", name).replace(f"My{kind.capitalize()}", _title(name))

    texts = {
        "pyproject.toml": PROJECT.substitute(name=name, kind=kind),
        f"{name}/__init__.py": "",
        f"{name}/part.py": renamed("part.py"),
        f"{name}/conf/{GROUPS[kind]}/{name}.yaml": renamed("part.yaml"),
        f"tests/test_{name}.py": renamed("test_part.py"),
    }
    if (Path(__file__).parent / kind / EXPERIMENT).is_file():
        texts[f"{name}/conf/experiment/train_{name}.yaml"] = renamed(EXPERIMENT)
    folder.mkdir()
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in texts]


def check_name(kind: str, name: str) -> None:
    """Refuse a name that is no name of a package, or that a module or a config has.

    Raises:
        ValueError: says why.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name.endswith("_"):
        raise ValueError(
            f"{name!r} cannot be the name of a package: write lower-case letters, digits and underscores, a letter "
            "first, at most 50, such as my_drafter"
        )
    written = (Path(__file__).parent / kind / "part.py").read_text(encoding="utf-8")
    if kind != "metric" and _title(name) in set(re.findall(r"\w+", written)) - {f"My{kind.capitalize()}"}:
        raise ValueError(f"the class of {name!r} would be {_title(name)}, which it imports: choose another name")
    if name in choices(GROUPS[kind]):
        raise ValueError(f"{GROUPS[kind]}={name} exists: choose another name")
    if kind == "drafter" and f"train_{name}" in choices("experiment"):
        raise ValueError(f"experiment=train_{name} exists: choose another name")
    if find_spec(name) is not None:
        raise ValueError(f"there is a module {name} already, which the package would hide: choose another name")


def _title(name: str) -> str:
    """Return the name of a part's class."""
    return "".join(word.capitalize() for word in name.split("_"))
