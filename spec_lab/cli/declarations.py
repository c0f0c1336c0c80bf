"""Values of a config against the declarations of what it names, under the full name of each option.

Nothing is imported for it (``explain.sources``): a misspelt option or a value out of bounds is refused before torch is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.explain.sources import Argument, Sources
from spec_lab.core.options import WrongOption, accept

PACKAGE = Path(__file__).resolve().parents[1]

SETTINGS = "spec_lab.tasks.settings.Settings"
"""The options of every run."""

APPLIED = "spec_lab.constrain.applied.AppliedConstraint"
"""Class whose options say how a constraint applies; every constraint has them."""


DRAFTERS = "block|draft_model|eagle|hydra|kangaroo|medusa|mtp|pard|skip"
MOVED = (
    (rf"propose\.({DRAFTERS})\.", r"drafters.\1.propose."),
    (r"propose\.(cascade|early_exit)\.", r"drafters.\1."),
    (rf"train\.({DRAFTERS})\.", r"drafters.\1.train."),
    (r"train\.draft\.", "drafters.draft_model.train."),
    (r"train\.eagle1\.", "drafters.eagle.train_eagle1."),
    (r"train\.task\.", "tasks.train."),
    (r"(certify|cost)\.", r"tasks.\1."),
    (r"policy\.depths\.Fixed\.", "policy.depths.FixedDepth."),
    (r"policy\.goodput\.GainOverCost\.", "policy.gain.GainOverCost."),
    (r"policy\.recorded\.Recorded\.", "policy.recorded.RecordedPolicy."),
    (r"(tasks\.)?peers_llama\.", "tasks.peers_llama."),
    (r"(run|tasks\.run)\.run$", "tasks.benchmark.run"),
    (r"(stream|peers)\.", r"tasks.\1."),
    (r"target\.", "models.target."),
    (r"prompts\.", "text.prompts."),
    (r"track\.", "analysis.tracking."),
    (r"(tasks\.verifier_study|recorded)\.judge$", "tasks.verifier_study.study_verifiers"),
    (r"(text\.prompts|text|prompts)\.spec_bench$", "text.datasets.load"),
    (r"text\.jsonl$", "text.prompts.jsonl"),
    (r"engine\.", "decode."),
    (r"engine\.", "runners."),
)
"""Modules that have another name now: how dotted names below the package began, and how they begin now."""


def check_target(sources: Sources, path: str, target: str) -> None:
    """Refuse a name of this package that nothing has, before it is imported.

    Raises:
        WrongOption: there is no such function or class; says what it is called now, or what is called alike.
    """
    package, _, name = target.partition(".")
    if package != PACKAGE.name or sources.describe(target) is not None:
        return
    renamed = (f"{package}.{re.sub(rf'^{old}', new, name)}" for old, new in MOVED if re.match(old, name))
    now = next((each for each in renamed if sources.describe(each) is not None), None)
    hint = f"it is called {now} now" if now else f"see spec-lab explain {path.partition('.')[0]}"
    raise WrongOption(f"{path}._target_={target} names no function or class of {package}: {hint}")


def qualified(message: str, path: str, part: Mapping[Any, Any]) -> str:
    """Return the message of a part with the full paths of the options that it names.

    Beside the first word, those are meant that have an underscore, or stand before "=" or in "set NAME to".

    Args:
        message: begins with the name of an option.
    """
    known = {*declared(package_sources(), path.partition(".")[0], str(part["_target_"]))[0], *map(str, part)}
    assigned, written = "|".join(map(re.escape, known)), "|".join(re.escape(name) for name in known if "_" in name)
    first, space, rest = message.partition(" ")
    options = rf"(?<![\w.])((?:{assigned})(?==)|(?<=set )(?:{assigned})(?= to )|(?:{written})(?![\w.(=]))"
    return f"{path}.{first}{space}" + re.sub(options, rf"{path}.\1", rest)


def declared(sources: Sources, group: str, target: str) -> tuple[Mapping[str, Argument], bool]:
    """Return the declared options of what a config names, and whether it may have others."""
    described = sources.describe(target)
    if described is None:
        return {}, True
    arguments = dict(described.arguments)
    if group == "constraint" and (applied := sources.describe(APPLIED)):
        arguments = {**applied.arguments, **arguments}
    return arguments, described.open


def check_values(config: DictConfig, top: Collection[str]) -> None:
    """Check the options of every run and those of each part, parts of parts included.

    Args:
        top: names of the options of every run, of which none may be missing.

    Raises:
        WrongOption: an option that a part does not have, or a value that its declaration does not allow.
    """
    sources = package_sources()
    settings = declared(sources, "", SETTINGS)[0]
    if missing := [name for name in settings if name in top and name not in config]:
        raise WrongOption(f"{missing[0]} is missing: leave ~{missing[0]} out, or give {missing[0]}=...")
    values: Any = OmegaConf.to_container(config, resolve=True)
    for name in settings.keys() & values.keys():
        accept(name, values[name], settings[name].hint)
    written: Any = OmegaConf.to_container(config, resolve=False)
    written_parts = dict(parts(written))
    referring = []  # values that are those of other options, which are checked first
    for path, part in parts(values):
        check_target(sources, path, str(part["_target_"]))
        options, others = declared(sources, path.partition(".")[0], str(part["_target_"]))
        for name, value in part.items():
            if name.startswith("_") or value == "???" or (isinstance(value, Mapping) and "_target_" in value):
                continue
            if name in options and "${" in str(written_parts.get(path, {}).get(name)):
                referring.append((f"{path}.{name}", value, options[name].hint))
            elif name in options:
                accept(f"{path}.{name}", value, options[name].hint)
            elif not others:
                near = get_close_matches(name, options, 1)
                hint = f"did you mean {path}.{near[0]}?" if near else f"{part['_target_']} does not have it"
                raise WrongOption(f"there is no option {path}.{name}: {hint}")
    for full_name, value, hint in referring:
        accept(full_name, value, hint)


def parts(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each mapping that names what it builds, with its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            path = f"{above}{name}"
            if "_target_" in value:
                yield path, value
            yield from parts({str(key): item for key, item in value.items()}, f"{path}.")


@cache
def package_sources() -> Sources:
    """Return the sources of this package, of its plugins and of what stands in the working directory."""
    return Sources([PACKAGE.parent, PACKAGE / "cli" / "plugins", Path.cwd()])
