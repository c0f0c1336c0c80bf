"""Find and blank secrets: values of keys such as ``api_key`` or ``password``, and passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

BLANK = "***"
OWNERS = (
    r"api|access|secret|private|account|client|service|signing|encryption|license|ssh|"
    r"openai|anthropic|wandb|hf|hub|aws|azure|gcp|google|github|gitlab"
)
NAMES = (
    rf"({OWNERS})[_-]?key([_-]pem)?|auth|authorization|bearer|cookie|credential|jwt|pat|pass(word|wd|phrase)|pwd|secret"
)
VOCABULARY = r"bos|eos|pad|unk|sep|cls|mask|stop|start|end|image|audio|video"
SECRET = re.compile(rf"(^|[_-])(({NAMES})s?|token)$", re.IGNORECASE)
TOKEN = re.compile(r"(^|[_-])token$", re.IGNORECASE)
SPECIAL_TOKEN = re.compile(rf"(^|[_-])({VOCABULARY})[_-]token$", re.IGNORECASE)
"""Keys that name a token of a vocabulary."""

INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""The beginning of an interpolation of OmegaConf; after an odd number of backslashes it is plain text."""
_WHOLE = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"
URL_PASSWORD = re.compile(rf"(://(?:{_WHOLE}|(?!\$\{{)[^/\s:@])*):(?!{_WHOLE}@[^@/\s]*(?:[/\s]|\Z))[^/\s]+@")
"""A URL up to the last "@" before its path. A password that is one interpolation does not match."""

_QUOTED = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
_PIECE = re.compile(rf"""[{{}}\[\],]|(?:{_QUOTED}|{_WHOLE}|\\.|[^{{}}\[\],"'\\])+|.""", re.DOTALL)
_ENTRY = re.compile(rf"""\s*(?P<key>{_QUOTED}|[^:"']+?)\s*:""")
_NUMBER_OR_BOOL = re.compile(r"[+-]?\d+(\.\d+)?|true|false", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Return whether a key of a config looks like that of a secret."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    return SECRET.search(name) is not None and SPECIAL_TOKEN.search(name) is None


def is_secret_value(key: str, value: Any) -> bool:
    """Return whether ``value`` under ``key`` is a secret.

    Texts are, and numbers except under ``..._token``, which may be the id of a token. A text with an interpolation such
    as ``Bearer ${oc.env:NAME}`` is not: it names the variable that holds the secret.
    """
    if isinstance(value, bool) or not is_secret(key):
        return False
    if isinstance(value, str):
        return value not in ("", "null", "???", BLANK) and INTERPOLATION.search(value) is None
    return isinstance(value, int | float) and TOKEN.search(key) is None


def below(key: str, name: str) -> str:
    """Return the key that decides whether a value is secret, for an entry ``name`` of a mapping under ``key``.

    Below ``auth: {...}`` every value is secret, except those of ``_target_`` and the like. ``token: {...}`` may be a
    config of that name.
    """
    return key if is_secret(key) and TOKEN.search(key) is None and not name.startswith("_") else name


def replace_secrets(
    value: Any,
    replace: Callable[[Any, str, str], Any],
    key: str = "",
    path: str = "",
    plain: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Return the same tree with each secret and each text with the password of a URL replaced.

    Args:
        value: a tree of mappings, lists and scalars.
        replace: called with a scalar, its key and its path; returns the replacement.
        key: of ``value``; each entry of a list has the list's key.
        path: of ``value``, with dots.
        plain: returns the text, number or bool that a key or a scalar of the tree stands for.
    """
    if isinstance(value, Mapping):
        return {
            name: replace_secrets(inner, replace, below(key, str(plain(name))), f"{path}.{plain(name)}", plain)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [replace_secrets(inner, replace, key, f"{path}.{n}", plain) for n, inner in enumerate(value)]
    leaf = plain(value)
    if is_secret_value(key, leaf) or (isinstance(leaf, str) and URL_PASSWORD.search(leaf)):
        return replace(value, key, path)
    return value


def without_secrets(value: Any, key: str = "") -> Any:
    """Return the same tree with secrets blanked; arguments as in ``replace_secrets``."""
    return replace_secrets(value, _blank, key)


def _blank(value: Any, key: str, _: str) -> str:
    return BLANK if is_secret_value(key, value) else URL_PASSWORD.sub(rf"\1:{BLANK}@", value)


def key_of(option: str) -> str:
    """Return the key that decides whether the value of an option such as ``+tracker.api_key`` is secret.

    A choice of a config group (``verifier@verifiers.token``) is not: its key is empty.
    """
    key = ""
    for name in re.split(r"[./]", option.lstrip("+~")):
        key = below(key, name)
    return "" if "@" in option else key


def redacted(override: str) -> str:
    """Return ``override``, an option and its value as on the command line, with secrets blanked."""
    option, equals, value = override.partition("=")
    key = key_of(option)
    if not equals:
        return override
    if is_secret(key) and value.lstrip()[:1] not in ("{", "["):
        return f"{option}={_redacted_leaf(value, key)}"
    return f"{option}={_redacted_tree(value, key)}"


def _redacted_tree(text: str, key: str) -> str:
    """Return a value in Hydra's grammar with secrets blanked; ``key`` is the value's key."""
    written, above = "", []
    in_mapping, outer, inner = False, key, key
    for piece in _PIECE.findall(text):
        if piece in ("{", "["):
            above.append((in_mapping, outer))
            in_mapping, outer = piece == "{", inner
        elif piece in ("}", "]"):
            in_mapping, outer = above.pop() if above else (False, key)
        elif piece != ",":
            entry = _ENTRY.match(piece) if in_mapping else None
            inner = below(outer, entry["key"].strip("'\"")) if entry else outer
            start = entry.end() if entry else 0
            piece = piece[:start] + _redacted_leaf(piece[start:], inner)
        if piece == "," or piece in ("}", "]"):
            inner = outer
        written += piece
    return written


def _redacted_leaf(text: str, key: str) -> str:
    value = text.strip()
    scalar = _NUMBER_OR_BOOL.fullmatch(value) is not None
    if scalar and (value.lower() in ("true", "false") or TOKEN.search(key)):
        return text
    if is_secret_value(key, value.strip("'\"")):
        return text[: len(text) - len(text.lstrip())] + BLANK
    return URL_PASSWORD.sub(rf"\1:{BLANK}@", text)
