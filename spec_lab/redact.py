"""Finds and blanks secrets: values of keys such as ``api_key`` or ``password``, and passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BLANK = "***"
NAMES = r"(api|access|secret|private)[_-]?key|auth|authorization|credentials?|pass(word|wd|phrase)|pwd|secret"
SECRET = re.compile(rf"(^|[_-])({NAMES}|token)$", re.IGNORECASE)
TOKEN = re.compile(r"(^|[_-])token$", re.IGNORECASE)
INTERPOLATION = re.compile(r"\$\{[^{}]*\}")
URL_PASSWORD = re.compile(r"(://[^/\s:@]*):[^@/\s$]+@")
_VALUE = r"""(?P<value>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^,{}\[\]]+)"""
_ENTRY = re.compile(r"""(?P<key>[\w-]+)(?P<colon>['"]?\s*:\s*)""" + _VALUE)


def is_secret(key: str) -> bool:
    """Whether a key of a config looks like one that holds a secret."""
    return SECRET.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)) is not None


def is_secret_value(key: str, value: Any) -> bool:
    """Whether ``value`` under ``key`` is a secret.

    Texts are, and numbers except under ``..._token``, which may be the id of a token. An interpolation such as
    ``${oc.env:NAME}`` is not: it says where the secret is.
    """
    if isinstance(value, bool) or not is_secret(key):
        return False
    if isinstance(value, str):
        return value not in ("", "null", "???", BLANK) and INTERPOLATION.fullmatch(value) is None
    return isinstance(value, int | float) and TOKEN.search(key) is None


def without_secrets(value: Any, key: str = "") -> Any:
    """The same tree with secrets blanked.

    Args:
        value: a tree of mappings, lists and scalars.
        key: what ``value`` stands under; each entry of a list stands under the list's.
    """
    if isinstance(value, Mapping):
        # below ``auth: {...}`` everything is secret; ``token: {...}`` may be a part called so
        whole = is_secret(key) and TOKEN.search(key) is None
        return {
            name: without_secrets(inner, key if whole and not str(name).startswith("_") else str(name))
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner, key) for inner in value]
    if is_secret_value(key, value):
        return BLANK
    return URL_PASSWORD.sub(rf"\1:{BLANK}@", value) if isinstance(value, str) else value


def names_secret(option: str) -> bool:
    """Whether an option such as ``+tracker.api_key`` looks like one that holds a secret.

    A choice of a config group (``verifier@verifiers.token``) does not.
    """
    return "@" not in option and is_secret(re.split(r"[./]", option.lstrip("+~"))[-1])


def redacted(override: str) -> str:
    """``override``, an option and its value as on the command line, with secrets blanked."""
    option, equals, value = override.partition("=")
    if not equals:
        return override
    if names_secret(option):
        number = re.fullmatch(r"[+-]?\d+(\.\d+)?", value) is not None and TOKEN.search(option) is not None
        return override if number or not is_secret_value("secret", value.strip("'\"")) else f"{option}={BLANK}"
    if value.lstrip()[:1] in ("{", "["):
        return f"{option}={_ENTRY.sub(_blanked, value)}"
    return override


def _blanked(entry: re.Match[str]) -> str:
    """An entry of a mapping that is written out, with its value blanked if it is a secret."""
    value = entry["value"].strip(" '\"")
    number = re.fullmatch(r"[+-]?\d+(\.\d+)?", value) is not None
    if is_secret_value(entry["key"], value) and not (number and TOKEN.search(entry["key"])):
        return entry["key"] + entry["colon"] + BLANK
    return entry[0]
