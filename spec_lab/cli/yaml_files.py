"""YAML files that a user names, as untrusted input: a few aliases of aliases can stand for millions of values."""

from __future__ import annotations

import math
from pathlib import Path

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node

from spec_lab.core.files import read_text

MAX_CONFIG = 2**20
"""Maximum size of a config file, in bytes."""

MAX_VALUES = 20_000
"""Maximum number of keys and values of a config file with aliases, each alias counted as what it stands for."""


def read_yaml(file: Path) -> tuple[str, Node | None]:
    """Return a config file's text and what it holds, not expanded; None if it is empty.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, is larger than ``MAX_CONFIG``, not readable YAML, or its aliases stand for
            more than ``MAX_VALUES``; names it.
    """
    text = read_text(file, MAX_CONFIG)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and "*" in text and _expanded(root, {}) > MAX_VALUES:
            raise ValueError(
                f"{file} is not read: its aliases stand for more than {MAX_VALUES} values; write out what is needed"
            )
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{file} is not readable YAML: {' '.join(str(error).split())[:200]}") from error
    return text, root


def _expanded(node: Node, sizes: dict[int, float]) -> float:
    """Return how many nodes there are when aliases are replaced by copies; infinity if one holds itself."""
    if not isinstance(node, CollectionNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # while its own parts are counted
        pairs = node.value if isinstance(node, MappingNode) else [(item,) for item in node.value]
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for pair in pairs for part in pair)
    return sizes[id(node)]
