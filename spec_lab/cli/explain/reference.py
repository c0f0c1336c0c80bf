"""The reference of all options: every key of the configs, its type, its default and what it means.

Types, bounds and meanings are those of the signature and the docstring of what the config names; the comments of conf/
are generated from them (``commented``). A comment states the meaning of what is declared nowhere: a group, a value that
an experiment sets, a part of another package; behind "here:" also why a config's value is what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from spec_lab.cli.declarations import APPLIED, SETTINGS, declared
from spec_lab.cli.explain import comments
from spec_lab.cli.explain.comments import ConfigFile
from spec_lab.cli.explain.sources import Argument, Sources, plain

EXPERIMENT = "experiment"
METRICS = "metrics"
"""A group of which several options are chosen at once: each stands below its name."""

HYDRA_GROUPS = {
    EXPERIMENT: ("", "values for other options, under one name: +experiment=NAME"),
    "hydra/launcher": ("basic", "where the runs of a sweep are executed; basic: one by one; joblib: in parallel"),
    "hydra/sweeper": ("basic", "which runs a sweep has; basic: every combination of the values given"),
}
"""Groups that the defaults of conf/config.yaml do not list: their default, which is Hydra's, and what they choose."""

ALIASES = {"arms": "proposer", "verifiers": "verifier", "parts": "proposer", "inner": "proposer"}
"""Where parts of another group stand: ``arms.NAME.depth`` is the ``proposer.depth`` of the arm."""


@dataclass(frozen=True)
class ConfigKey:
    """A key of an option; of an experiment, a value that it sets.

    Args:
        name: dotted, within the option; of an experiment, as on the command line.
        default: as the config writes it; ``???`` if it must be given.
        type: such as "int or null", or "sweep" of a value that an experiment sweeps over; empty if it is not stated.
        meaning: what it does; empty if nothing states it.
    """

    name: str
    default: str
    type: str
    meaning: str


@dataclass(frozen=True)
class ConfigOption:
    """A file of a config group: what ``GROUP=NAME`` chooses.

    Args:
        group: such as "proposer" or "hydra/launcher"; empty of conf/config.yaml.
        name: of the file, without .yaml.
        target: dotted name of what it builds; may be empty.
        file: where it stands, from the folder above its conf/.
        keys: in the order of the file, those of the file that it is based on first.
    """

    group: str
    name: str
    summary: str
    target: str
    file: str
    keys: tuple[ConfigKey, ...]

    def path(self, key: ConfigKey) -> str:
        """Return the name that ``key`` has on the command line."""
        above = self.group.replace("/", ".")
        if self.group == METRICS:
            return f"{above}.{self.name}.{key.name}"
        return key.name if above in ("", EXPERIMENT) else f"{above}.{key.name}"


@dataclass(frozen=True)
class ConfigGroup:
    """A config group.

    Args:
        name: such as "proposer".
        default: the option that is chosen without another; empty for none.
    """

    name: str
    default: str
    summary: str
    options: tuple[ConfigOption, ...]


@dataclass(frozen=True)
class Reference:
    """All options.

    Args:
        top: those of conf/config.yaml that belong to no group.
        groups: in the order of conf/config.yaml, then experiments and Hydra's.
    """

    top: ConfigOption
    groups: tuple[ConfigGroup, ...]

    def group(self, name: str) -> ConfigGroup | None:
        """Return the group of this name."""
        return next((group for group in self.groups if group.name == name), None)

    def option(self, group: str, name: str) -> ConfigOption | None:
        """Return an option of a group."""
        known = self.group(group)
        return next((option for option in known.options if option.name == name), None) if known else None

    def each_key(self) -> Iterator[tuple[str, ConfigOption, ConfigKey]]:
        """Yield every key but those of experiments: its name on the command line, its option, and the key."""
        for option in (
            self.top,
            *(choice for group in self.groups if group.name != EXPERIMENT for choice in group.options),
        ):
            for key in option.keys:
                yield option.path(key), option, key

    def meaning(self, path: str, option: str = "") -> str:
        """Return what the key with a name on the command line means, of ``option`` if it has the key; else empty."""
        path, meaning = canonical(path), ""
        for name, owner, key in self.each_key():
            if name == path and (not meaning or owner.name == option):
                meaning = key.meaning
        return meaning


def canonical(path: str) -> str:
    """Return the name of a key in its group: ``proposer.depth`` for ``arms.NAME.depth``, ``proposer.inner.depth``."""
    parts = path.split(".")
    while True:
        named = next((n for n, part in enumerate(parts[:2]) if part in ALIASES), None)
        skipped = 1 if named is not None and parts[named] == "inner" else 2
        if named is None or len(parts) <= named + skipped or (parts[named] in ("parts", "inner")) != (named == 1):
            return ".".join(parts)
        parts = [ALIASES[parts[named]], *parts[named + skipped :]]


def read(folders: Sequence[Path], sources: Sources) -> Reference:
    """Read config folders.

    Args:
        folders: the first holds config.yaml; files of later ones are added, and replace those of the same name.

    Raises:
        ValueError: a file is not readable.
        OSError: a folder or file is missing.
    """
    main = comments.read(folders[0] / "config.yaml")
    files: dict[str, dict[str, ConfigFile]] = {
        chosen.option: {} for chosen in main.defaults if chosen.option and " " not in chosen.option
    }
    shared = {file.package: file for file in _shared(main)}
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder of configs")
        for file in sorted(folder.rglob("*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if group != ".":
                files.setdefault(group, {})[file.stem] = comments.read(file, flat=group == EXPERIMENT)
    chosen = {group.option: (group.value, group.comment) for group in main.defaults} | HYDRA_GROUPS
    keys = tuple(_keys(main, declared(sources, "", SETTINGS)[0]))
    top = ConfigOption("", "config", main.head, "", _shown(main.path, 2), keys)
    groups = []
    for group, named in files.items():
        if named and group != EXPERIMENT and not group.startswith("hydra/job"):
            options = tuple(_option(group, name, named, sources, shared.get(group)) for name in sorted(named))
            groups.append(ConfigGroup(group, *chosen.get(group, ("", "")), options))
    reference = Reference(top, tuple(groups))
    given = files.get(EXPERIMENT, {})
    made = tuple(_experiment(name, given, reference, sources) for name in sorted(given))
    index = len([group for group in groups if not group.name.startswith("hydra/")])
    groups.insert(index, ConfigGroup(EXPERIMENT, *HYDRA_GROUPS[EXPERIMENT], made))
    return Reference(top, tuple(groups))


def _shared(main: ConfigFile) -> list[ConfigFile]:
    """Return the files beside config.yaml that hold options of every part of a group, which ``@package`` names."""
    return [comments.read(main.path.with_stem(chosen.value)) for chosen in main.defaults if not chosen.option]


def _shown(path: Path, parts: int) -> str:
    return Path(*path.parts[-parts:]).as_posix()


def _keys(file: ConfigFile, arguments: Mapping[str, Argument]) -> Iterator[ConfigKey]:
    """Yield the keys of a file, without Hydra's own in config.yaml."""
    for chosen in file.defaults:
        part, at, package = chosen.option.partition("@")
        if at:
            yield ConfigKey(package, chosen.value, f"an option of {part}", chosen.comment)
    given = {setting.name for setting in file.settings if setting.value != "null"}
    for setting in file.settings:
        if setting.name.partition(".")[0] != "hydra":
            known = arguments.get(setting.name, Argument())
            meaning = f"{known.meaning_in(setting.value, given)}{setting.here}" if known.meaning else setting.comment
            yield ConfigKey(setting.name, setting.value, known.type or _type(setting.value), meaning)


def _type(value: str) -> str:
    """Return the type of a value as it is written; empty if it does not tell."""
    kinds = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "mapping"}
    if value.startswith(("${", "???", "*")):  # "*": an alias of another value
        return ""
    try:
        return kinds.get(type(yaml.safe_load(value or "null")), "")
    except yaml.YAMLError:  # aliases within
        return ""


def target_of(name: str, files: Mapping[str, ConfigFile]) -> str:
    """Return what a file of a group builds, or the file that it is based on; empty if neither says."""
    file = files[name]
    based = [chosen.value for chosen in file.defaults if not chosen.option and chosen.value in {*files} - {name}]
    return file.target or next((target_of(base, files) for base in based), "")


def _option(
    group: str, name: str, files: Mapping[str, ConfigFile], sources: Sources, shared: ConfigFile | None = None
) -> ConfigOption:
    """Return an option with the keys that it has from the files that it is based on, and those of ``shared``."""
    file, target = files[name], target_of(name, files)
    keys: dict[str, ConfigKey] = {}
    for chosen in file.defaults:
        if not chosen.option and chosen.value in files and chosen.value != name:
            keys |= {key.name: key for key in _option(group, chosen.value, files, sources).keys}
    for key in _keys(file, declared(sources, group, target)[0] if target else {}):
        before = keys.get(key.name)
        keys[key.name] = replace(key, meaning=key.meaning or (before.meaning if before else ""))
    for key in _keys(shared, declared(sources, group, target)[0]) if shared else ():
        keys.setdefault(key.name, key)
    described = None if file.head or not target else sources.describe(target)
    summary = file.head or (plain(described.summary) if described else "")
    shown = _shown(file.path, 2 + len(group.split("/")))
    return ConfigOption(group, name, summary, target, shown, tuple(keys.values()))


def commented(folder: Path, sources: Sources) -> dict[Path, str]:
    """Return the text of each config file with the comments that the declarations of its options give.

    Args:
        folder: of the configs; experiments and Hydra's groups declare nothing.
    """
    main = folder / "config.yaml"
    texts = {main: comments.write(main, declared(sources, "", SETTINGS)[0])}
    for file in _shared(comments.read(main)):
        texts[file.path] = comments.write(file.path, declared(sources, file.package, APPLIED)[0])
    for group in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in (EXPERIMENT, "hydra")):
        files = {path.stem: comments.read(path) for path in sorted(group.glob("*.yaml"))}
        for name, file in files.items():
            target = target_of(name, files)
            options = declared(sources, group.name, target)[0] if target else {}
            texts[file.path] = comments.write(file.path, options)
    return texts


def _experiment(name: str, files: Mapping[str, ConfigFile], reference: Reference, sources: Sources) -> ConfigOption:
    """Return an experiment with what it sets, each with its meaning."""
    file, keys, chosen = files[name], [], {}
    for part in file.defaults:
        group, at, package = part.option.partition("@")
        chosen[package or group] = part.value
        option = reference.option(group, part.value)
        summary = option.summary if option else "" if group else files[part.value].head
        keys.append(ConfigKey("+" * bool(at or not group) + (part.option or EXPERIMENT), part.value, "", summary))

    def option_of(path: str) -> str:
        above = path.rpartition(".")[0]
        group = reference.group(above)
        return chosen.get(above, group.default if group else "")

    targets = {
        setting.name.removesuffix("._target_"): setting.value
        for setting in file.settings
        if setting.name.endswith("._target_")
    }
    for setting in file.settings:
        above, _, end = setting.name.rpartition(".")
        described = sources.describe(targets[above]) if above in targets else None
        if end == "_target_":
            keys.append(
                ConfigKey(
                    setting.name, setting.value, "", setting.comment or plain(described.summary if described else "")
                )
            )
        elif described:
            known = described.arguments.get(end, Argument())
            keys.append(
                ConfigKey(
                    setting.name, setting.value, known.type, setting.comment or known.meaning_in(setting.value, ())
                )
            )
        elif setting.name.startswith(SWEPT):
            swept = setting.name.removeprefix(SWEPT)
            values = reference.group(swept)
            meaning = setting.comment or (values.summary if values else reference.meaning(swept, option_of(swept)))
            keys.append(ConfigKey(swept, setting.value.strip("'\""), "sweep", meaning))
        elif setting.name not in ("hydra.mode", "name"):
            meaning = setting.comment or reference.meaning(setting.name, option_of(setting.name))
            keys.append(ConfigKey(setting.name, setting.value, "", meaning))
    return ConfigOption(EXPERIMENT, name, file.head, "", _shown(file.path, 3), tuple(keys))


SWEPT = "hydra.sweeper.params."
"""Above the names of options that an experiment sweeps over."""
