"""Keep secrets and values of environment variables out of the files that a run writes.

A secret on the command line is moved to an environment variable before Hydra reads the command line, and its option
becomes ``${oc.env:NAME}``: folder names, ``multirun.yaml``, ``study.jsonl`` and the files of launchers then hold only
the name of the variable. Interpolations are written as they are, except those that read bundled files, the time or
other options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from spec_lab.core.terminal import visible
from spec_lab.results.redact import (
    BLANK,
    INTERPOLATION,
    below,
    is_secret,
    key_of,
    redacted,
    replace_secrets,
    without_secrets,
)
from spec_lab.results.run_names import identifying

PLAIN = ("zoo", "now")
"""Resolvers whose values are not secret."""

SHORTEST = 4
"""Minimum number of characters of a text that is replaced in error messages."""


class InvalidSecret(ValueError):
    """A secret on the command line that cannot be read, or that is swept over or mixed with interpolations."""


# The command line --------------------------------------------------------------------------------------------------


def moved(arguments: Sequence[str]) -> list[str]:
    """Return the command line with its secrets moved to environment variables, which child processes inherit.

    Args:
        arguments: ``sys.argv`` without the program.

    Raises:
        InvalidSecret: Hydra cannot read a secret, or a secret is swept over.
    """
    return [_moved(argument) if re.match(r"[+~]{0,2}[\w./@-]+=", argument) else argument for argument in arguments]


def _moved(argument: str) -> str:
    option = argument.partition("=")[0]
    if redacted(argument) == argument and not is_secret(key_of(option)):
        return argument
    try:
        read = OverridesParser.create().parse_rule(argument, "override")
    except HydraException:
        raise InvalidSecret(f"{option} is not readable: quote its value, as in '{option}=\"...\"'") from None
    if read.is_sweep_override():
        raise InvalidSecret(
            f"{option} cannot be swept: it holds a secret, and the values would name the runs' folders; give one value"
        )
    value = replace_secrets(read._value, _variable, key_of(option), option.lstrip("+~"), unquoted)
    return argument if value == read._value else f"{option}={replace(read, _value=value).get_value_element_as_str()}"


def _variable(value: Any, _: str, path: str) -> QuotedString:
    """Move a secret to an environment variable; return the interpolation that reads it."""
    secret = str(unquoted(value))
    if INTERPOLATION.search(secret):
        raise InvalidSecret(
            f"{path} holds a password and an interpolation: set an environment variable to the password, and write "
            "${oc.env:NAME} in its place"
        )
    variable = "SPEC_LAB_SECRET_" + re.sub(r"\W", "_", path).upper()
    os.environ[variable] = str(OmegaConf.create([secret])[0])  # "\\${" stands for "${"
    return QuotedString(f"${{oc.env:{variable}}}", Quote.double)


def unquoted(value: Any) -> Any:
    """Return a value of Hydra's parser without its quotes."""
    return value.text if isinstance(value, QuotedString) else value


# Configs -----------------------------------------------------------------------------------------------------------


def overrides_of(facts: Any) -> list[str]:
    """Return the overrides of a run or a sweep as given, with interpolations; ``facts`` is Hydra's config."""
    given: Any = OmegaConf.to_container(facts.overrides.task, resolve=False)
    return given


def repeating(facts: Any) -> list[str]:
    """Return the words of a command line that repeats a run, in another folder: options, and the folder of options of
    one's own; ``facts`` is Hydra's config.
    """
    folders = [Path(source.path) for source in facts.runtime.config_sources if source.provider == "command-line"]
    words = []
    for folder in folders:
        near = folder.relative_to(facts.runtime.cwd) if folder.is_relative_to(facts.runtime.cwd) else folder
        words += ["--config-dir", str(near)]
    return [*words, *identifying(overrides_of(facts), ("metrics",))]


def as_given(overrides: Sequence[str] | ListConfig) -> list[str]:
    """Return the overrides that a resolver was called with, with interpolations."""
    given: Any = OmegaConf.to_container(overrides, resolve=False) if OmegaConf.is_list(overrides) else list(overrides)
    return given


def blank(config: DictConfig) -> None:
    """Blank secrets in a sweep's config, which Hydra writes to ``multirun.yaml``; each run composes its own config."""
    for key in [key for key in config if key != "hydra"]:
        plain = OmegaConf.create({key: config._get_node(key)})
        raw = OmegaConf.to_container(plain, resolve=False)
        if without_secrets(raw) != raw:
            with read_write(config), open_dict(config):
                config[key] = without_secrets(raw)[key]


def written(config: DictConfig) -> dict[str, Any]:
    """Return the config as it is written to files: resolved, except values that may read environment variables.

    Those are written as their interpolations, of any type; numbers of ``sampling`` are always resolved.

    Raises:
        OmegaConfBaseException: a value is missing or cannot be resolved.
    """
    raw: Any = OmegaConf.to_container(config, resolve=False)
    return {name: _written(raw[name], inner, name, raw) for name, inner in _resolved(config).items()}


def _resolved(config: DictConfig) -> dict[str, Any]:
    resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return resolved


def _written(raw: Any, resolved: Any, path: str, root: Mapping[str, Any]) -> Any:
    if isinstance(raw, Mapping):
        return {name: _written(raw[name], inner, f"{path}.{name}", root) for name, inner in resolved.items()}
    if isinstance(raw, list):
        return [_written(*both, path, root) for both in zip(raw, resolved, strict=True)]
    if path.startswith("sampling.") and isinstance(resolved, int | float):  # reports and resumed runs read them
        return resolved
    return resolved if _is_plain(raw, path, root, frozenset()) else raw


def _is_plain(raw: Any, path: str, root: Mapping[str, Any], seen: frozenset[str]) -> bool:
    """Return whether resolving ``raw``, the value of ``path``, reads only other options, bundled files and the time."""
    if isinstance(raw, Mapping):
        return all(_is_plain(inner, f"{path}.{name}", root, seen) for name, inner in raw.items())
    if isinstance(raw, list):
        return all(_is_plain(inner, path, root, seen) for inner in raw)
    if not isinstance(raw, str) or "${" not in raw:
        return True
    references = re.findall(r"\$\{([^${}]*)\}", raw)
    if len(references) != raw.count("${"):  # nested
        return False
    for inner in references:
        resolver, colon, _ = inner.partition(":")
        if colon:
            if resolver.strip() not in PLAIN:
                return False
        elif inner in seen or not _reads_plain(inner.strip(), root, seen | {inner}):
            return False
    return True


def _reads_plain(reference: str, root: Mapping[str, Any], seen: frozenset[str]) -> bool:
    node: Any = root
    key = ""
    for name in reference.split("."):
        if not isinstance(node, Mapping) or name not in node:  # relative, or below another interpolation
            return False
        node, key = node[name], below(key, name)
    return without_secrets(node, key) == node and _is_plain(node, reference, root, seen)


def without_values(config: DictConfig, text: str) -> str:
    """Return an error message without secrets, with interpolations in place of their values."""
    try:
        pairs = dict(_pairs(without_secrets(written(config)), _resolved(config)))
    except OmegaConfBaseException:
        return text
    for value in sorted(pairs, key=len, reverse=True):
        text = text.replace(value, pairs[value])
    return text


def _pairs(shown: Any, resolved: Any) -> Iterator[tuple[str, str]]:
    """Yield each text of the resolved config that must not be shown, with its replacement."""
    if isinstance(shown, Mapping) and isinstance(resolved, Mapping):
        for name, inner in shown.items():
            yield from _pairs(inner, resolved[name])
    elif isinstance(shown, list) and isinstance(resolved, list):
        for both in zip(shown, resolved, strict=True):
            yield from _pairs(*both)
    elif shown != resolved and isinstance(shown, str):
        for text in _texts(resolved):
            if len(text) >= SHORTEST:
                yield text, shown or BLANK
                yield visible(text), shown or BLANK  # as error messages show it


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for inner in tree.values():
            yield from _texts(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from _texts(inner)
    elif isinstance(tree, str | int | float) and not isinstance(tree, bool):
        yield str(tree)
