"""One name, one class: no two classes of the package share a name, and none hides a standard one."""

import ast
import builtins
import collections
import collections.abc
from pathlib import Path

import spec_lab

STANDARD = {*dir(builtins), *collections.__all__, *collections.abc.__all__}


def classes() -> dict[str, list[str]]:
    """Where each class name of the package is defined."""
    package = Path(spec_lab.__file__).parent
    places: dict[str, list[str]] = collections.defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(package)}:{node.lineno}")
    return places


def test_no_class_name_occurs_twice():
    assert {name: places for name, places in classes().items() if len(places) > 1} == {}


def test_no_class_hides_a_standard_name():
    assert {name: places for name, places in classes().items() if name in STANDARD} == {}
