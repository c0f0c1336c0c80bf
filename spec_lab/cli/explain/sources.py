"""Declarations of options, read from source files: nothing that a config names is imported, so that a check comes
before torch and an answer at once. ``core.options`` states how options are declared.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_origin

from spec_lab.core.options import bounds, evaluate, words

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
IMPORTED = ("typing", "collections.abc", "pathlib", "spec_lab.core.options")
"""Modules whose names in annotations are the objects themselves."""


class Argument(NamedTuple):
    """An argument that a config may give.

    Args:
        hint: its declared type with the bounds; ``Any`` if none is stated, or it is no type of a config.
        meaning: from the docstring; may be empty.
    """

    hint: Any = Any
    meaning: str = ""

    def meaning_in(self, value: str, given: Collection[str]) -> str:
        """Return its meaning in a config file, without clauses that do not concern it.

        These are "null: ..." where a value must be given, and "unless NAME: ..." where the file gives that option.

        Args:
            value: as the file writes it.
            given: the names of the file's options that are not null.
        """
        kept = []
        for clause in plain(self.meaning).split("; "):
            unless = re.match(r"unless (\w+):? ?", clause)
            if not (unless and unless[1] in given) and not (value == "???" and clause.startswith("null")):
                kept.append(clause[unless.end() :] if unless else clause)
        return "; ".join(kept)

    def comment(self, value: str, given: Collection[str], name: str) -> str:
        """Return its meaning in a config file with its bounds.

        Args:
            value: as the file writes it; where it is the file's name, other names are not listed.
            given: as in ``meaning_in``.
        """
        chosen = value if value == name else ""
        meaning, listed = self.meaning_in(value, given), bounds(self.hint, plain(self.meaning), chosen)
        return "; ".join((meaning, *[listed] * bool(listed))) if meaning else ""

    @property
    def type(self) -> str:
        """Return its type such as "int or null"; empty if it is no type of a config."""
        return words(self.hint, 0)


class Description(NamedTuple):
    """A function or class that a config names.

    Args:
        summary: the first paragraph of its docstring; of a method ``load``, of the class's.
        open: whether it has arguments of any name (``**options``) besides.
    """

    summary: str
    arguments: Mapping[str, Argument]
    open: bool = False


class Definition(NamedTuple):
    """Where something is defined.

    Args:
        module: its dotted name.
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
        definition = self.definition(path)
        if definition is None or not isinstance(definition.node, FUNCTIONS | ast.ClassDef):
            return None
        named = definition.owner if definition.owner and path.endswith(".load") else definition.node
        summary = " ".join((ast.get_docstring(named) or "").partition("\n\n")[0].split())
        return Description(summary, *self._arguments(definition))

    def package(self, name: str) -> Path:
        """Return the folder of a package, which is not imported.

        Raises:
            FileNotFoundError: there is none.
        """
        folders = self._folders(name)
        if not folders:
            raise FileNotFoundError(f"there is no package {name}")
        return Path(folders[0])

    def definition(self, path: str) -> Definition | None:
        """Return where a dotted path is defined; None if its source is not found."""
        return self._find(path.split("."))

    def module(self, name: str) -> ast.Module | None:
        """Return the parsed source of a module; None without a readable one."""
        if name not in self.parsed:
            self.parsed[name] = None
            if file := self._file(name):
                with suppress(OSError, SyntaxError, ValueError):  # else its config alone describes it
                    self.parsed[name] = ast.parse(file.read_bytes())
        return self.parsed[name]

    def _file(self, name: str) -> Path | None:
        above, _, last = name.rpartition(".")
        spec = PathFinder.find_spec(last, self._folders(above))
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None

    def _folders(self, package: str) -> list[str]:
        """Return the folders of a package; nothing is imported, no package above it either. Empty: where all begin."""
        folders = [*map(str, self.folders), *sys.path]
        for part in package.split(".") if package else ():
            spec = PathFinder.find_spec(part, folders)
            folders = list(spec.submodule_search_locations or ()) if spec else []
        return folders

    def _find(self, names: Sequence[str]) -> Definition | None:
        for length in range(len(names) - 1, 0, -1):
            module = ".".join(names[:length])
            if (tree := self.module(module)) is not None:
                return self._inside(module, tree.body, names[length:])
        return None

    def _inside(
        self, module: str, body: Sequence[ast.stmt], names: Sequence[str], owner: ast.ClassDef | None = None
    ) -> Definition | None:
        """Find ``names`` among statements, through imports and base classes."""
        name, *more = names
        for node in body:
            if isinstance(node, ast.If):  # if TYPE_CHECKING
                if definition := self._inside(module, node.body, names, owner):
                    return definition
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module:
                        if node.module in IMPORTED:
                            return Definition(node.module, ast.Expr(ast.Name(alias.name)))
                        return self._find([*node.module.split("."), alias.name, *more])
            elif isinstance(node, ast.ClassDef) and node.name == name:
                return self._member(module, node, more) if more else Definition(module, node)
            elif name in _defines(node) and not more:
                return Definition(module, node, owner)
        return None

    def _member(self, module: str, node: ast.ClassDef, names: Sequence[str]) -> Definition | None:
        if definition := self._inside(module, node.body, names, node):
            return definition
        for base in node.bases:
            if definition := self._find([*module.split("."), *ast.unparse(base).split("."), *names]):
                return definition._replace(owner=node)
        return None

    def _arguments(self, definition: Definition) -> tuple[dict[str, Argument], bool]:
        """Return the arguments of a function or class, and whether it has others of any name."""
        node, module = definition.node, definition.module
        meanings: dict[str, str] = {}
        for documented in (definition.owner, node):
            if isinstance(documented, FUNCTIONS | ast.ClassDef):
                meanings |= _documented(ast.get_docstring(documented) or "")
        if isinstance(node, ast.ClassDef):
            if (made := self._constructor(module, node)) is None:
                return {}, True
            if isinstance(made.node, ast.ClassDef):
                return self._fields(module, node, meanings), False
            if made.owner is not None:
                meanings = _documented(ast.get_docstring(made.owner) or "") | meanings
            module, node = made.module, made.node
        if not isinstance(node, FUNCTIONS):
            return {}, True
        arguments = {}
        for given in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            arguments[given.arg] = Argument(self._hint(module, given.annotation), meanings.get(given.arg, ""))
        further = node.args.kwarg.annotation if node.args.kwarg else None
        if isinstance(further, ast.Subscript) and ast.unparse(further.value) == "Unpack":
            options = self._find([*module.split("."), *ast.unparse(further.slice).split(".")])
            if options is not None and isinstance(options.node, ast.ClassDef):
                return arguments | self._fields(options.module, options.node, meanings), False
        return arguments, node.args.kwarg is not None

    def _constructor(self, module: str, node: ast.ClassDef) -> Definition | None:
        """Return the ``__init__`` of a class or of the first base that has one; a class whose fields are the arguments;
        None where a base is not known.
        """
        if made := self._inside(module, node.body, ["__init__"], node):
            return made
        for base in () if _is_dataclass(node) else node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            above = self._find([*module.split("."), *ast.unparse(named).split(".")])
            if above is None:
                return None
            if isinstance(above.node, ast.ClassDef):
                made = self._constructor(above.module, above.node)
                if made is None or isinstance(made.node, FUNCTIONS) or _is_dataclass(made.node):
                    return made
        return Definition(module, node)

    def _fields(self, module: str, node: ast.ClassDef, meanings: Mapping[str, str]) -> dict[str, Argument]:
        """Return the fields of a dataclass or TypedDict, those of its bases first."""
        arguments: dict[str, Argument] = {}
        for base in node.bases:
            above = self._find([*module.split("."), *ast.unparse(base).split(".")])
            if above is not None and isinstance(above.node, ast.ClassDef):
                arguments |= self._fields(above.module, above.node, meanings)
        documented = {**_documented(ast.get_docstring(node) or ""), **meanings}
        for stated in node.body:
            if isinstance(stated, ast.AnnAssign) and isinstance(stated.target, ast.Name):
                name, hint = stated.target.id, self._hint(module, stated.annotation)
                if hint is not ClassVar and get_origin(hint) is not ClassVar:
                    arguments[name] = Argument(hint, documented.get(name, ""))
        return arguments

    def _hint(self, module: str, annotation: ast.expr | None) -> Any:
        if annotation is None:
            return Any
        text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
        return evaluate(text, _ModuleNames(self, module))

    def value(self, module: str, name: str) -> Any:
        """Return what a name of a module stands for in an annotation; ``Any`` of a class, or if it is not known."""
        definition = self._find([*module.split("."), name])
        if definition is None:
            return getattr(builtins, name, Any)
        if isinstance(definition.node, ast.Expr):
            return getattr(import_module(definition.module), ast.unparse(definition.node), Any)
        if not isinstance(definition.node, ast.Assign | ast.AnnAssign) or definition.node.value is None:
            return Any
        if isinstance(made := definition.node.value, ast.Dict):  # a table: its keys
            return [evaluate(ast.unparse(key), _ModuleNames(self, definition.module)) for key in made.keys if key]
        return evaluate(ast.unparse(made), _ModuleNames(self, definition.module))


class _ModuleNames(Mapping[str, Any]):
    """The names of a module, each evaluated when it is needed."""

    def __init__(self, sources: Sources, module: str) -> None:
        self.sources, self.module = sources, module

    def __getitem__(self, name: str) -> Any:
        return self.sources.value(self.module, name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _is_dataclass(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)


def _defines(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, FUNCTIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def plain(text: str) -> str:
    """Return the first sentence of a docstring's text as the comment of a config; others are details for Python."""
    text = re.split(r"(?<=[^.])\.\s+(?=[A-Z(\"`])", text)[0]
    text = re.sub(r"^Return (?:an? |the )?|\. Arguments (?:and errors )?as in .*", "", text.replace("``", ""))
    return re.sub(r"\bNone\b", "null", text).rstrip(".")


def _documented(docstring: str) -> dict[str, str]:
    """Return what the section "Args" of a docstring says, by argument."""
    section = re.search(r"^Args:\n((?:[ \t]+.*(?:\n|\Z)|\n)*)", docstring, re.MULTILINE)
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section[1] if section else ""):
        names, colon, text = entry.strip().partition(":")
        if colon and re.fullmatch(r"[\w, ]+", names):
            meanings |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return meanings
