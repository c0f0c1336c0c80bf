"""Signatures and docstrings, read from source files. What a config names is never imported: answers are fast."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

SCALARS = {"int": "int", "float": "float", "str": "str", "bool": "bool", "Path": "str", "None": "null"}
LISTS = {"Sequence", "Collection", "Iterable", "list", "tuple"}
MAPPINGS = {"Mapping", "dict"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Argument(NamedTuple):
    """An argument as a config gives it.

    Args:
        type: such as "int or null"; empty if it is not stated, or is no type of a config.
        meaning: from the docstring; may be empty.
    """

    type: str = ""
    meaning: str = ""


class Description(NamedTuple):
    """A function or class that a config names.

    Args:
        summary: the first paragraph of its docstring; of a method ``load``, of the class's.
        arguments: by name.
    """

    summary: str
    arguments: Mapping[str, Argument]


class Definition(NamedTuple):
    """Where something is defined.

    Args:
        module: its dotted name.
        node: its definition.
        owner: the class whose method it is; None of others.
    """

    module: str
    node: ast.stmt
    owner: ast.ClassDef | None = None


@dataclass
class Sources:
    """Source files by module.

    Args:
        folders: where modules are looked up, before ``sys.path``.
        parsed: the modules that were read; None of one without a source file.
    """

    folders: Sequence[Path] = ()
    parsed: dict[str, ast.Module | None] = field(default_factory=dict)

    def describe(self, path: str) -> Description | None:
        """Describe the function or class with a dotted path; None if its source is not found."""
        place = self._find(path.split("."))
        if place is None or not isinstance(place.node, FUNCTIONS | ast.ClassDef):
            return None
        named = place.owner if place.owner and path.endswith(".load") else place.node
        summary = " ".join((ast.get_docstring(named) or "").partition("\n\n")[0].split())
        return Description(summary, self._arguments(place))

    def package(self, name: str) -> Path:
        """Return the folder of a package, which is not imported.

        Raises:
            FileNotFoundError: there is none.
        """
        folders = self._folders(name)
        if not folders:
            raise FileNotFoundError(f"there is no package {name}")
        return Path(folders[0])

    def _module(self, name: str) -> ast.Module | None:
        if name not in self.parsed:
            self.parsed[name] = None
            if file := self._file(name):
                with suppress(OSError, SyntaxError, ValueError):  # else its config alone describes it
                    self.parsed[name] = ast.parse(file.read_bytes())
        return self.parsed[name]

    def _file(self, name: str) -> Path | None:
        above, _, last = name.rpartition(".")
        found = PathFinder.find_spec(last, self._folders(above))
        return Path(found.origin) if found and found.origin and found.origin.endswith(".py") else None

    def _folders(self, package: str) -> list[str]:
        """Return the folders of a package; nothing is imported, no package above it either. Empty: where all begin."""
        folders = [*map(str, self.folders), *sys.path]
        for part in package.split(".") if package else ():
            found = PathFinder.find_spec(part, folders)
            folders = list(found.submodule_search_locations or ()) if found else []
        return folders

    def _find(self, names: Sequence[str]) -> Definition | None:
        for length in range(len(names) - 1, 0, -1):
            module = ".".join(names[:length])
            if (tree := self._module(module)) is not None:
                return self._inside(module, tree.body, names[length:])
        return None

    def _inside(
        self, module: str, body: Sequence[ast.stmt], names: Sequence[str], owner: ast.ClassDef | None = None
    ) -> Definition | None:
        """Find ``names`` among statements, through imports and base classes."""
        name, *more = names
        for node in body:
            if isinstance(node, ast.If):  # if TYPE_CHECKING
                if found := self._inside(module, node.body, names, owner):
                    return found
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for one in node.names:
                    if (one.asname or one.name) == name and node.module:
                        return self._find([*node.module.split("."), one.name, *more])
            elif isinstance(node, ast.ClassDef) and node.name == name:
                return self._member(module, node, more) if more else Definition(module, node)
            elif name in _defines(node) and not more:
                return Definition(module, node, owner)
        return None

    def _member(self, module: str, node: ast.ClassDef, names: Sequence[str]) -> Definition | None:
        if found := self._inside(module, node.body, names, node):
            return found
        for base in node.bases:
            if found := self._find([*module.split("."), *ast.unparse(base).split("."), *names]):
                return found._replace(owner=node)
        return None

    def _arguments(self, place: Definition) -> dict[str, Argument]:
        node, module = place.node, place.module
        meanings: dict[str, str] = {}
        for one in (place.owner, node):
            if isinstance(one, FUNCTIONS | ast.ClassDef):
                meanings |= _documented(ast.get_docstring(one) or "")
        if isinstance(node, ast.ClassDef):
            made = self._inside(module, node.body, ["__init__"])
            if made is None:
                return self._fields(module, node, meanings)
            node = made.node
        if not isinstance(node, FUNCTIONS):
            return {}
        found = {}
        for given in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            found[given.arg] = Argument(self._type(module, given.annotation), meanings.get(given.arg, ""))
        further = node.args.kwarg.annotation if node.args.kwarg else None
        if isinstance(further, ast.Subscript) and ast.unparse(further.value) == "Unpack":
            options = self._find([*module.split("."), *ast.unparse(further.slice).split(".")])
            if options is not None and isinstance(options.node, ast.ClassDef):
                found |= self._fields(options.module, options.node, meanings)
        return found

    def _fields(self, module: str, node: ast.ClassDef, meanings: Mapping[str, str]) -> dict[str, Argument]:
        """Return the fields of a dataclass or TypedDict, those of its bases first."""
        found: dict[str, Argument] = {}
        for base in node.bases:
            above = self._find([*module.split("."), *ast.unparse(base).split(".")])
            if above is not None and isinstance(above.node, ast.ClassDef):
                found |= self._fields(above.module, above.node, meanings)
        own = {**_documented(ast.get_docstring(node) or ""), **meanings}
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = Argument(self._type(module, one.annotation), own.get(one.target.id, ""))
        return found

    def _type(self, module: str, annotation: ast.expr | None) -> str:
        """Return a type as configs state it, such as "int or null" or "run or request"; empty for other types."""
        return " or ".join(self._types(module, annotation))

    def _types(self, module: str, node: ast.expr | None) -> list[str]:
        if isinstance(node, ast.BinOp):
            return [*dict.fromkeys((*self._types(module, node.left), *self._types(module, node.right)))]
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return self._types(module, ast.parse(node.value, mode="eval").body)
            return ["null"] if node.value is None else []
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).rpartition(".")[2]
            if outer == "Literal":
                values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                return [str(one.value) for one in values if isinstance(one, ast.Constant)]
            if outer in MAPPINGS:
                return ["mapping"]
            if outer in LISTS:
                inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                of = self._type(module, inner)
                return [f"list of {of}" if of else "list"]
        if isinstance(node, ast.Name):
            if node.id in SCALARS:
                return [SCALARS[node.id]]
            alias = self._find([*module.split("."), node.id])
            if alias is not None and isinstance(alias.node, ast.Assign | ast.AnnAssign):
                return self._types(alias.module, alias.node.value)
        return []


def _defines(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, FUNCTIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _documented(docstring: str) -> dict[str, str]:
    """Return what the section "Args" of a docstring says, by argument."""
    section = re.search(r"^Args:\n((?:[ \t]+.*(?:\n|\Z)|\n)*)", docstring, re.MULTILINE)
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section[1] if section else ""):
        names, colon, text = entry.strip().partition(":")
        if colon and re.fullmatch(r"[\w, ]+", names):
            found |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return found
