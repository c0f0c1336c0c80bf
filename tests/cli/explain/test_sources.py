"""Signatures and docstrings are read from source files as Python would import them."""

import sys

import pytest

from spec_lab.cli.explain.sources import Sources

FILES = {
    "parts/__init__.py": "from parts.deep import Made as Renamed\n",
    "parts/kinds.py": """
from typing import Literal
Kind = Literal["a", "b"]
MAX_WIDTH = 2**6
NAMES = {"x": print(1), "y": 2}
""",
    "parts/deep.py": '''
from __future__ import annotations
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypedDict, Unpack
from spec_lab.core.options import OneOf, Whole
from parts.kinds import MAX_WIDTH, NAMES
if TYPE_CHECKING:
    from parts.kinds import Kind

raise RuntimeError("imported")


class Options(TypedDict):
    """Options.

    Args:
        width: of trees.
    """

    width: Annotated[int, Whole(1, MAX_WIDTH)] | None


class Base:
    """The base."""

    @staticmethod
    def load(size: int, *, kind: Kind | None = None, **options: Unpack[Options]) -> Base:
        """Load it.

        Args:
            size: how large, over
                two lines.
            kind, width: which one.

        Raises:
            ValueError: never.
        """


class Made(Base):
    """The made one,
    in two lines.

    More.
    """


class Fields(Made):
    """Fields.

    Args:
        rate: per second.
    """

    kind: ClassVar[str] = "fields"
    rate: float
    names: list[str] = ()
    table: "Mapping[str, int] | None" = None
    live: Base | None = None


class Sized:
    """Sized.

    Args:
        share: of all.
    """

    def __init__(self, share: float = 0.5) -> None: ...


class Resized(Sized):
    """Resized."""


class Foreign(Unknown):
    """Foreign."""


def function(one: Literal["x", 2], path: Path, name: Annotated[str, OneOf(NAMES)], more: Any = None, **rest) -> None:
    """A function."""
''',
}


@pytest.fixture
def sources(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources([tmp_path])


def stated(arguments):
    return {name: (argument.type, argument.meaning) for name, argument in arguments.arguments.items()}


def test_a_method_is_described_through_imports_bases_and_typed_dicts(sources):
    description = sources.describe("parts.Renamed.load")
    assert description.summary == "The made one, in two lines."
    assert stated(description) == {
        "size": ("int", "how large, over two lines."),
        "kind": ("a, b or null", "which one."),
        "width": ("int from 1 to 64 or null", "which one."),
    }
    assert description.arguments["width"].comment("3", (), "") == "which one; from 1 to 64" and not description.open
    assert "parts" not in sys.modules


def test_a_class_has_the_fields_of_a_dataclass(sources):
    assert stated(sources.describe("parts.deep.Fields")) == {
        "rate": ("float", "per second."),
        "names": ("list of str", ""),
        "table": ("mapping or null", ""),
        "live": ("null", ""),
    }


def test_a_class_without_a_constructor_has_the_options_of_its_base_s(sources):
    description = sources.describe("parts.deep.Resized")
    assert stated(description)["share"] == ("float", "of all.") and not description.open
    assert sources.describe("parts.deep.Foreign").open, "of a base that is not found nothing is known"


def test_a_function_has_its_own_summary_and_the_values_of_a_literal(sources):
    description = sources.describe("parts.deep.function")
    assert description.summary == "A function."
    types = {name: kind for name, (kind, _) in stated(description).items()}
    assert types == {"one": "x or 2", "path": "str", "name": "x or y", "more": ""} and description.open


@pytest.mark.parametrize("path", ["parts.deep.Absent", "absent.module.load", "parts.kinds.Kind", "parts", ""])
def test_what_is_not_found_has_no_description(sources, path):
    assert sources.describe(path) is None


def test_a_file_that_python_cannot_read_has_no_description(sources, tmp_path):
    (tmp_path / "parts" / "broken.py").write_text("def load(:\n")
    assert sources.describe("parts.broken.load") is None


def test_the_folder_of_a_package_is_found_and_a_missing_one_refused(sources, tmp_path):
    assert sources.package("parts") == tmp_path / "parts"
    with pytest.raises(FileNotFoundError, match="no package parts.none"):
        sources.package("parts.none")
