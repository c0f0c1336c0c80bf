"""Overrides that Hydra cannot compose: one line that says which, and what was probably meant."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

ELSEWHERE = {
    "num_speculative_tokens": "proposer.depth",
    "speculative_num_steps": "proposer.max_depth",
    "speculative_eagle_topk": "proposer.children",
    "speculative_num_draft_tokens": "proposer.nodes",
    "prompt_lookup_max": "proposer.max_ngram",
    "prompt_lookup_min": "proposer.min_ngram",
    "draft_max": "proposer.depth",
    "draft_p_min": "proposer.confidence",
    "model_draft": "proposer.path",
    "speculative_draft_model_path": "proposer.path",
    "model_path": "target.path",
    "ctx_size": "target.context",
    "context_length": "target.context",
    "max_num_seqs": "batch_size",
    "max_running_requests": "batch_size",
    "num_assistant_tokens": "proposer.depth",
    "speculative_model": "proposer.path",
    "draft_model": "proposer.path",
    "model": "target.path",
    "max_model_len": "target.context",
    "n_predict": "max_new_tokens",
    "temp": "sampling.temperature",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
}
"""Options by their names in vLLM, SGLang, llama.cpp and transformers."""

MOST_LISTED = 20
"""Most names that are listed in a line."""


class Composer(NamedTuple):
    """Composes configs, those of the user's folders included.

    Args:
        compose: the default config with some overrides.
        choices: the names of the options of a config group.
    """

    compose: Callable[[list[str]], DictConfig]
    choices: Callable[[str], list[str]]


def undashed(arguments: Sequence[str], flags: Collection[str]) -> str:
    """Return how options that were written as in vLLM ("--proposer ngram") are written here; empty where none was.

    Args:
        arguments: of the command line.
        flags: that Hydra knows, and beginnings of which it accepts.
    """
    wrong, options = [], []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = argument.partition("=")
        if not re.fullmatch(r"--[A-Za-z][\w.-]*", flag) or any(known.startswith(flag) for known in flags):
            continue
        if not equals and re.fullmatch(r"[\w./:][\w./:-]*", following):
            value = following
        name = flag[2:].replace("-", "_")
        wrong.append(flag)
        options.append(f"{ELSEWHERE.get(name, name)}={value or 'VALUE'}")
    none = "is no flag" if len(wrong) == 1 else "are no flags"
    return f"{', '.join(wrong)} {none}: options are written without dashes: {' '.join(options)}" if wrong else ""


def suggestion(error: HydraException, overrides: Sequence[str], composer: Composer) -> str:
    """Return why overrides do not compose, in one line, with the nearest option.

    Args:
        error: of Hydra.
        overrides: of the command line.
        composer: composes fewer of them, to see which options there are.
    """
    override, rest, config = _wrong(str(error), overrides), list(overrides), None
    first = override
    while override in rest and config is None:  # others may not compose either
        rest.remove(override)
        try:
            config = composer.compose(rest)
        except HydraException as other:
            override = _wrong(str(other), rest)
    if missing := re.search(r"Could not find '(.+)/([^/']+)'", str(error)):
        return of_choice(missing[1], missing[2], composer.choices(missing[1]))
    if again := re.match(r"Could not append .* '(.+)'\.|Multiple values for (\S+)\. ", str(error)):
        for given in overrides:
            if given.startswith(f"+{again[1] or again[2]}="):
                return f"{given} must not begin with a plus: {given[1:]}"
    if re.match("Ambiguous value", str(error)):
        return f"{first} has several values: add --multirun to run each, or write one list, as in NAME=[A,B]"
    if first and "=" not in first and not first.startswith("~"):
        if os.path.exists(first) or re.match("(?!hydra/).*/", first):
            named = f"proposer.path={first} for a drafter, target.path={first} for a model"
            return f"{first} has no option before it: a folder? write {named}"
        return f"{first} has no value: write {first}=VALUE"
    option = first.lstrip("+~").partition("=")[0]
    if config is None or not re.match(r"Could not (override|delete)", str(error)):
        return " ".join(str(error).split())
    group, at, _ = option.partition("@")
    value = first.partition("=")[2]
    if group == "experiment" or at:
        known = composer.choices(group)
        return f"{first} must begin with a plus: +{first}" if value in known else of_choice(group, value, known)
    if swept := _swept(option, overrides):
        return f"{option} is no option of every value of {swept}: write ++{option}={value}, or give one value of it"
    return of_option(option, value, config)


def _wrong(message: str, overrides: Sequence[str]) -> str:
    """Return the override that a message of Hydra's is about; nothing where it names none of them."""
    named = re.search(r"'([^']+)'", message)
    name = named[1] if named else ""
    for override in reversed(overrides):  # the last one of several counts
        option, _, value = override.lstrip("+~").partition("=")
        group = option.partition("@")[0]
        if name in (override, option) or (name.startswith(f"{group}/") and name.removeprefix(f"{group}/") == value):
            return override
    return ""


def _swept(option: str, overrides: Sequence[str]) -> str:
    """Return the choice with several values whose part an option belongs to; nothing where there is none."""
    for override in overrides:
        chosen, _, values = override.lstrip("+").partition("=")
        part = chosen.partition("@")[2] or chosen
        if option.startswith(f"{part}.") and ("," in values or "(" in values):
            return chosen
    return ""


def of_choice(group: str, name: str, known: Sequence[str]) -> str:
    """Return that a group has no such option, and the nearest ones.

    Args:
        group: the config group.
        name: that it does not have.
        known: names of its options.
    """
    given = f"{group}={name}"
    if group == "prompts" and name.endswith(".jsonl"):
        return f"{given} is not an option of conf/prompts; your own file: prompts=jsonl prompts.path={name}"
    near = get_close_matches(name, known, 2)
    plus = "+" * (group == "experiment")
    if near:
        meant = " or ".join(f"{plus}{group}={other}" for other in near)
        return f"{given} is not an option of conf/{group}; did you mean {meant}?"
    if known and len(known) <= MOST_LISTED:
        return f"{given} is not an option of conf/{group}; the options are {', '.join(known)}"
    return f"{given} is not an option of conf/{group}; spec-lab explain {group} lists all"


def of_option(name: str, value: str, config: DictConfig) -> str:
    """Return that there is no such option, and the nearest one, or those beside it.

    Args:
        name: of the option.
        value: that was given; may be empty.
        config: composed without it.
    """
    above, _, last = name.rpartition(".")
    known = _keys(config, above)
    near = [f"{above}.{key}".lstrip(".") for key in get_close_matches(last, known, 1)]
    if other := ELSEWHERE.get(last.replace("-", "_")):
        if above.startswith("arms."):
            other = f"{above}.{other.rpartition('.')[2]}"
        part, _, key = other.rpartition(".")
        if key not in _keys(config, part):
            has = ", ".join(_keys(config, part)[:MOST_LISTED])
            return f"there is no option {name}: here it is {other}, which this {part} does not have; it has {has}"
        near = [other]
    elif not near and above.startswith("arms.") and not known:
        return f"there is no option {name}, since no arm has this name: add it by +proposer@{above}=NAME"
    elif not near and not (known and above):
        every = list(_names(config))
        alike = [path for path in every if path.rpartition(".")[2] == last]
        near = get_close_matches(name, alike, 1, cutoff=0) or get_close_matches(name, every, 1)
    near = [path for path in near if path != name]
    if near:
        return f"there is no option {name}; did you mean {near[0]}{f'={value}' * bool(value)}?"
    if above and known and len(known) <= MOST_LISTED:
        return f"there is no option {name}; {above} has {', '.join(known)}"
    return f"there is no option {name}; spec-lab explain{f' {above}' * bool(known and above)} lists all"


def _keys(config: DictConfig, above: str) -> list[str]:
    """The names of the options below a name; none where it holds no options."""
    beside = OmegaConf.select(config, above) if above else config
    return [str(key) for key in beside if key != "_target_"] if OmegaConf.is_dict(beside) else []


def _names(config: DictConfig, above: str = "") -> Iterator[str]:
    """The names of all options, those that hold others before them."""
    for key in map(str, config):
        if key in ("hydra", "_target_"):
            continue
        yield above + key
        stated = not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, key)
        if stated and OmegaConf.is_dict(config[key]):
            yield from _names(config[key], f"{above}{key}.")
