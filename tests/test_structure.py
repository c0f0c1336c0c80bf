"""One name, one class: no two classes of the package share a name, and none hides a standard one.

Docstrings, those of attributes too, begin with a verb or a noun.
"""

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


def docstrings() -> dict[str, str]:
    """Every docstring of the package, those of attributes too, by where it stands."""
    package = Path(spec_lab.__file__).parent
    return {
        f"{file.relative_to(package)}:{node.lineno}": node.value.value
        for file in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def test_no_docstring_begins_with_what_or_of():
    assert {where: text for where, text in docstrings().items() if text.split()[0] in {"What", "Of"}} == {}
