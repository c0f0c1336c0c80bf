"""Published layouts of drafters: tables of the names that their authors give to tensors, our names, and shapes.

A name is a pattern. ``{k}`` is an index from 0 on, ``{k+1}`` or ``{2k+3}`` a number that follows from one, ``{K}`` the
number of values that the index k has in the file, and ``*`` any rest of a name. The sizes of a shape are numbers,
letters (``H``) or multiples of letters (``2H``). One table serves runs, which know the shapes from the network that the
config describes, and conversions, which read sizes off the file, since published configs misstate them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor, nn

from spec_lab.core.options import brief

Shape = tuple[int | str, ...]
"""Sizes; a text is a size that no tensor of the file tells."""
Shapes = Mapping[str, tuple[int, ...]]

NUMBER = re.compile(r"\{(\d*)([a-zA-Z])(?:\+(\d+))?\}")


class Entry(NamedTuple):
    """A line of a table.

    Args:
        published: the name in files. Alternatives are separated by "|"; the first is written. An index that ``name``
            does not have numbers equal copies of one tensor.
        own: the network's name; "" for a tensor that is not read.
        shape: sizes; "?" before them marks a tensor that may be missing, and no sizes stand for any shape. Where the
            name ends with "*", those of each rest of the name (``decoder_layer``).
    """

    published: str
    name: str
    shape: str | Mapping[str, str] = ""


class Tensors(NamedTuple):
    """The tensors that a file should hold.

    Args:
        shapes: by published name.
        names: the published names of each of our names; all but the first are copies.
        sizes: by letter.
    """

    shapes: dict[str, Shape]
    names: dict[str, list[str]]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Args:
        rows: of the table; of several that fit a name, the first counts.
    """

    name: str
    rows: tuple[Entry, ...]

    def published(self, name: str, held: Collection[str] = (), copies: int = 1) -> list[str]:
        """The published names of one of the network's tensors.

        Args:
            name: its name in the network.
            held: names in the file, which choose among alternatives.
            copies: how many a tensor has that is repeated.
        """
        row, indices = next((row, values) for row in self.rows if (values := _indices(row.name, name)) is not None)
        copied = _letters(row.published) - indices.keys()
        numbers = range(copies if copied else 1)
        return [_name(row.published, indices | dict.fromkeys(copied, number), held) for number in numbers]

    def network_name(self, published: str) -> str | None:
        """The network's name of a tensor in the file; "" where it is not read, None where no row fits it."""
        for name, pattern in ((row.name, pattern) for row in self.rows for pattern in row.published.split("|")):
            if (indices := _indices(pattern, published)) is not None:
                return _filled(name, indices)
        return None

    def named(self, network: nn.Module, copies: int = 1) -> dict[str, Tensor]:
        """The network's parameters by their published names. Arguments as in ``published``."""
        return {
            published: parameter
            for name, parameter in network.named_parameters()
            for published in self.published(name, copies=copies)
        }

    def of_network(self, parameters: Shapes, held: Shapes, copies: int = 1, **sizes: int) -> Tensors:
        """The tensors of a network.

        Args:
            parameters: the shapes of its tensors.
            held: those in the file.
            copies: as in ``published``.
            sizes: of the tensors that the network does not read.
        """
        names = {name: self.published(name, held, copies) for name in parameters}
        shapes: dict[str, Shape] = {name: parameters[key] for key, published in names.items() for name in published}
        for row, name in product((row for row in self.rows if not row.name), held):
            if any(_indices(pattern, name) is not None for pattern in row.published.split("|")):
                assert isinstance(row.shape, str)
                shapes[name] = _shape(row.shape, held[name], sizes)
        return Tensors(shapes, names, sizes)

    def of_file(self, held: Shapes, **sizes: int) -> Tensors:
        """The tensors that a file holds whose sizes are those of its first tensors.

        Args:
            held: the shapes in the file.
            sizes: that are known before.
        """
        counts: dict[str, set[Any]] = {letter: set() for row in self.rows for letter in _letters(row.published)}
        for row, name in product(self.rows, held):
            for pattern in row.published.split("|"):
                for letter, number in (_indices(pattern, name) or {}).items():
                    counts.setdefault(letter, set()).add(number)
        tensors = Tensors({}, {}, {letter.upper(): len(numbers) for letter, numbers in counts.items()} | sizes)
        for row in self.rows:
            letters = sorted(_letters(row.published))
            rests = row.shape.items() if isinstance(row.shape, Mapping) else [("", row.shape)]
            for numbers in product(*(range(tensors.sizes[letter.upper()]) for letter in letters)):
                for rest, shape in rests:
                    values = dict(zip(letters, numbers, strict=True)) | {"rest": rest} | tensors.sizes
                    name = _name(row.published, values, held)
                    if name in held or not shape.startswith("?"):
                        tensors.shapes[name] = _shape(_filled(shape, values), held.get(name, ()), tensors.sizes)
                        tensors.names.setdefault(_filled(row.name, values), []).append(name)
        return tensors


def decoder_layer(
    read: str = "H", norms: Collection[str] = ("input_layernorm", "post_attention_layernorm"), mlp: bool = True
) -> dict[str, str]:
    """The shapes of a decoder layer of Llama, Qwen2 or Qwen3 whose attention reads inputs of width ``read``."""
    shapes = {f"self_attn.{kind}_proj.weight": f"{rows} {read}" for kind, rows in (("q", "Q"), ("k", "G"), ("v", "G"))}
    shapes |= {"self_attn.o_proj.weight": "H Q"} | {f"{norm}.weight": "H" for norm in norms}
    if mlp:
        shapes |= {"mlp.gate_proj.weight": "M H", "mlp.up_proj.weight": "M H", "mlp.down_proj.weight": "H M"}
        shapes |= {f"self_attn.{kind}_proj.bias": f"?{rows}" for kind, rows in (("q", "Q"), ("k", "G"), ("v", "G"))}
        shapes |= {f"self_attn.{kind}_norm.weight": "?D" for kind in "qk"}
    return shapes


def misfits(wanted: Mapping[str, Shape], held: Shapes) -> list[str]:
    """Name each tensor of the files that is missing, surplus or misshapen.

    Args:
        wanted: the shapes of a network's tensors, by the names that the files should hold.
        held: those in the files.
    """
    problems = [f"{name} is missing" for name in wanted if name not in held]
    for name, shape in held.items():
        if name not in wanted:
            problems.append(f"{brief(name)} is in no layer of the model")
        elif wanted[name] != shape:
            sizes = ", ".join(map(str, wanted[name]))
            problems.append(f"{name} is {list(shape)}, not [{sizes}]")
    return problems


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """An expression for the names of a pattern, with a group for each index and for the rest of the name."""
    parts = []
    for part in re.split(r"(\{[^}]*\}|\*)", pattern):
        number = NUMBER.fullmatch(part)
        if number:  # of three digits at most: a longer one is that of no published file
            parts.append(rf"(?P<{number[2]}>\d{{1,3}})" if number[2].islower() else r"\d{1,3}")
        else:
            parts.append("(?P<rest>.+)" if part == "*" else re.escape(part))
    return re.compile("".join(parts))


def _indices(pattern: str, name: str) -> dict[str, Any] | None:
    """The index of each letter in a name, and its rest; None of a name that does not fit the pattern."""
    if not pattern or (match := _compiled(pattern).fullmatch(name)) is None:
        return None
    values: dict[str, Any] = match.groupdict()
    for factor, letter, first in NUMBER.findall(pattern):
        if letter.islower():
            number, remainder = divmod(int(values[letter]) - int(first or 0), int(factor or 1))
            if remainder or number < 0:
                return None
            values[letter] = number
    return values


def _letters(pattern: str) -> set[str]:
    return {letter for _, letter, _ in NUMBER.findall(pattern) if letter.islower()}


def _filled(pattern: str, values: Mapping[str, Any]) -> str:
    """The pattern with its numbers and the rest of the name."""
    text = NUMBER.sub(lambda match: str(int(match[1] or 1) * values[match[2]] + int(match[3] or 0)), pattern)
    return text.replace("*", str(values.get("rest", "")))


def _name(published: str, values: Mapping[str, Any], held: Collection[str]) -> str:
    """The alternative that the file holds; of a missing tensor, the one whose layer the file holds, or the first."""
    names = {_filled(pattern, values): _filled(pattern.split("*")[0], values) for pattern in published.split("|")}
    exact = [name for name in names if name in held]
    begun = [name for name, start in names.items() if len(names) > 1 and any(key.startswith(start) for key in held)]
    return [*exact, *begun, *names][0]


def _shape(shape: str, held: tuple[int, ...], sizes: dict[str, int]) -> Shape:
    """A shape in numbers; letters that are not in ``sizes`` are read off the tensor that is held, and added there."""
    terms = shape.removeprefix("?").split()
    if not terms:
        return held
    if len(terms) == len(held):
        for term, size in zip(terms, held, strict=True):
            if term.isalpha():
                sizes.setdefault(term, size)
    matches = [(term, re.fullmatch(r"(\d*)([A-Z]?)", term)) for term in terms]
    return tuple(
        int(match[1] or 1) * sizes.get(match[2], 1) if match and (not match[2] or match[2] in sizes) else term
        for term, match in matches
    )
