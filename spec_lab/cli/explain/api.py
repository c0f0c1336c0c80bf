"""Classes, functions and modules as their source files declare them: signatures, members, docstrings. Nothing is
imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spec_lab.cli.explain.sources import FUNCTIONS, Definition, Sources


class Documented(NamedTuple):
    """A class, a function, a constant, or a member of a class.

    Args:
        name: its own name; dotted of what is asked for.
        signature: such as ``propose(batch: Batch) -> Draft`` or ``requires: Requires = Requires()``.
        docstring: may be empty.
        members: of a class, its public ones; of a module, what it defines.
        required: whether a member of a contract has no default.
        rows: of a constant that maps names to a type and a meaning, these three.
    """

    name: str
    signature: str
    docstring: str
    members: tuple[Documented, ...] = ()
    required: bool = False
    rows: tuple[tuple[str, str, str], ...] = ()


def describe(sources: Sources, path: str, inherited: bool = False) -> Documented:
    """Describe what a dotted path names.

    Args:
        sources: where it is looked up.
        path: of a class, a function, a constant or a module.
        inherited: whether a class has the members of its base classes too, after its own.

    Raises:
        ValueError: nothing has this path.
    """
    if (module := sources.module(path)) is not None:
        docstring = ast.get_docstring(module) or ""
        return Documented(path, "", docstring, tuple(_entries(sources, path, module.body)))
    if (definition := sources.definition(path)) is None:
        raise ValueError(f"there is no {path}")
    if isinstance(definition.node, ast.ClassDef):
        return _class(sources, definition, inherited)._replace(name=path)
    body = definition.owner.body if definition.owner else (sources.module(definition.module) or ast.Module([], [])).body
    return next(
        entry for entry in _entries(sources, definition.module, body) if entry.name == path.rpartition(".")[2]
    )._replace(name=path)


SECTIONS = ("Args", "Returns", "Yields", "Raises")


def sections(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of a docstring, each entry on one line: sections; paragraphs and lists under an empty name."""
    for block in re.split(rf"\n(?=(?:{'|'.join(SECTIONS)}):\n)|\n\n", docstring):
        head, _, rest = block.strip("\n").partition("\n")
        if head.endswith(":") and head[:-1] in SECTIONS:
            entries = re.split(r"\n(?=    \S)", rest) if head[:-1] in ("Args", "Raises") else [rest]
            yield head[:-1], [" ".join(entry.split()) for entry in entries]
        elif block.strip():
            yield "", [" ".join(line.split()) for line in re.split(r"\n(?=- )", block.strip())]


def _entries(sources: Sources, module: str, body: Sequence[ast.stmt]) -> Iterator[Documented]:
    """Yield what statements define under public names, but for constants without a docstring."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield _class(sources, Definition(module, node), False)
        elif isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield Documented(node.name, _call(node), ast.get_docstring(node) or "")
        elif (constant := _constant(node, after)) is not None:
            yield constant


def _constant(node: ast.stmt, after: ast.stmt | None) -> Documented | None:
    """Return a public constant with a docstring below it; None of another statement."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    if len(targets) != 1 or not isinstance(targets[0], ast.Name) or not documented or targets[0].id.startswith("_"):
        return None
    assert isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr)
    assert isinstance(after.value, ast.Constant)
    name, value, rows = targets[0].id, node.value, []
    if isinstance(value, ast.Dict):
        for key, given in zip(value.keys, value.values, strict=True):
            match key, given:
                case ast.Constant(str(column)), ast.Tuple([kind, ast.Constant(str(meaning))]):
                    rows.append((column, ast.unparse(kind), meaning))
    shown = "" if value is None or len(ast.unparse(value)) > 100 else f" = {ast.unparse(value)}"
    hint = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    return Documented(name, f"{name}{hint}{shown}", " ".join(str(after.value.value).split()), rows=tuple(rows))


def _class(sources: Sources, definition: Definition, inherited: bool) -> Documented:
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    members = {member.name: member for member in _members(node)}
    for base in node.bases if inherited else ():
        above = sources.definition(f"{definition.module}.{ast.unparse(base)}")
        if above is not None and isinstance(above.node, ast.ClassDef):
            members = {member.name: member for member in _class(sources, above, True).members} | members
    docstring = ast.get_docstring(node) or ""
    return Documented(node.name, f"class {node.name}{bases}", docstring, tuple(members.values()))


def _members(node: ast.ClassDef) -> Iterator[Documented]:
    """Yield the public members of a class; fields that its docstring describes are left to that."""
    protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
    described = ast.get_docstring(node) or ""
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, FUNCTIONS) and (member.name == "__call__" or not member.name.startswith("_")):
            marks = {ast.unparse(mark) for mark in member.decorator_list}
            required = protocol or "abstractmethod" in marks
            signature = _call(member)
            if marks & {"property", "cached_property", "default"}:
                signature = _attribute(member, shown="default" in marks and not required)
            yield Documented(member.name, signature, ast.get_docstring(member) or "", (), required)
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            name = member.target.id
            text = _constant(member, after)
            if not name.startswith("_") and (text is not None or f"{name}:" not in described):
                default = f" = {ast.unparse(member.value)}" if member.value else ""
                signature = f"{name}: {ast.unparse(member.annotation)}{default}"
                yield Documented(name, signature, text.docstring if text else "", (), protocol or member.value is None)


def _attribute(node: ast.FunctionDef | ast.AsyncFunctionDef, shown: bool) -> str:
    """Return a property as an attribute, with its default where it is ``shown`` and one expression."""
    made = node.body[-1]
    default = f" = {ast.unparse(made.value)}" if shown and isinstance(made, ast.Return) and made.value else ""
    return f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}{default}"


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a function with its arguments, without ``self``."""
    text = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    return f"{node.name}({text})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
