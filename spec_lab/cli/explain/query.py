"""Find what a name on the command line stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from spec_lab.cli.config_checks import renamed
from spec_lab.cli.explain.reference import EXPERIMENT, ConfigGroup, ConfigKey, ConfigOption, Reference, canonical


@dataclass(frozen=True)
class KeyMatch:
    """A key, and the options of its group in which it has this type, default and meaning.

    Args:
        path: its name on the command line.
        options: that have it; conf/config.yaml of a key of no group.
    """

    path: str
    key: ConfigKey
    options: tuple[ConfigOption, ...]


Answer = Reference | ConfigGroup | ConfigOption | KeyMatch


def find(reference: Reference, query: str) -> tuple[Answer, ...]:
    """Find what a query names; at least one answer.

    Args:
        query: nothing: everything; a group (``proposer``); an option (``proposer=medusa``, ``proposer.medusa``,
            ``+experiment=NAME``); a key (``proposer.depth``, ``arms.NAME.depth``), also by the end of its name
            (``temperature``); or as on the command line, with a value (``seed=1``).

    Raises:
        ValueError: there is no such name; the message has the nearest ones.
    """
    if not query:
        return (reference,)
    name, equals, value = query.lstrip("+~").partition("=")
    name = name.partition("@")[0].removeprefix("/")
    if reference.group(slashed := name.replace(".", "/")):
        name = slashed
    if (message := renamed(name)) and all(path != name for path, _, _ in reference.each_key()):
        raise ValueError(message)
    if group := reference.group(name):
        if not equals:
            return (group,)
        options = [known for known in group.options if known.name == value]
        return tuple(options) or _unknown(query, [f"{name}={known.name}" for known in group.options])
    above, _, last = name.rpartition(".")
    option = reference.option(above.replace(".", "/"), last)
    matches = (*((option,) if option and not equals else ()), *_keys(reference, canonical(name)))
    return matches or _unknown(name or query, names(reference))


def _keys(reference: Reference, name: str) -> tuple[KeyMatch, ...]:
    """Return the keys with this name; if there are none, those that end with it. Equal ones of a group are one."""
    exact = [match for match in reference.each_key() if match[0] == name]
    places: dict[tuple[str, ConfigKey], list[ConfigOption]] = {}
    for path, option, key in exact or (*reference.each_key(), *_settings(reference, name)):
        if path == name or f".{path}".endswith(f".{name}"):
            places.setdefault((path, key), []).append(option)
    return tuple(KeyMatch(path, key, tuple(options)) for (path, key), options in places.items())


def _settings(reference: Reference, name: str) -> list[tuple[str, ConfigOption, ConfigKey]]:
    """Return the keys that only experiments have, such as ``task.recipe.loss``."""
    known = {path for path, _, _ in reference.each_key()}
    group = reference.group(EXPERIMENT)
    given = [(key.name, option, key) for option in group.options for key in option.keys] if group else []
    typed = [match for match in given if match[2].type and canonical(match[0]) not in known]
    return [match for match in typed if f".{match[0]}".endswith(f".{name}")]


def names(reference: Reference) -> Iterator[str]:
    """Yield everything that can be asked for: groups, their options, and keys."""
    for group in reference.groups:
        yield group.name
        yield from (f"{group.name}={option.name}" for option in group.options)
    yield from dict.fromkeys(path for path, _, _ in reference.each_key())


def _unknown(query: str, known: Iterator[str] | list[str]) -> tuple[Answer, ...]:
    """Refuse an unknown name."""
    known = list(known)
    ends = {path.rpartition(".")[2]: path for path in known}
    near = get_close_matches(query, known, 3) or [ends[end] for end in get_close_matches(query, ends, 3)]
    hint = f"did you mean {' or '.join(near)}?" if near else "spec-lab explain lists all"
    raise ValueError(f"there is no option {query}; {hint}")
