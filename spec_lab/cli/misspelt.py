"""Overrides that Hydra cannot compose: one line that says which, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.bundled import conf

ELSEWHERE = {
    "num_speculative_tokens": "proposer.depth",
    "speculative_num_steps": "proposer.max_depth",
    "speculative_eagle_topk": "proposer.children",
    "speculative_num_draft_tokens": "proposer.nodes",
    "prompt_lookup_max": "proposer.max_ngram",
    "prompt_lookup_min": "proposer.min_ngram",
    "draft_max": "proposer.depth",
    "num_assistant_tokens": "proposer.depth",
    "speculative_model": "proposer.path",
    "draft_model": "proposer.path",
    "model": "target.path",
    "max_model_len": "target.context",
    "tensor_parallel_size": "target.tensor_parallel",
    "n_predict": "max_new_tokens",
    "temp": "sampling.temperature",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
}
"""Options by their names in vLLM, SGLang, llama.cpp and transformers."""

ANOTHER = {"target=hf": "target=zoo target.path=MODEL", "target=transformers": "target=zoo target.path=MODEL"}
"""Choices that have another name here."""

MOST_LISTED = 20
"""Most options that are listed in a line."""

Compose = Callable[[list[str]], DictConfig]
"""Composes the default config with some overrides."""


def suggestion(message: str, overrides: Sequence[str], compose: Compose) -> str:
    """Return why overrides do not compose, in one line, with the nearest option.

    Args:
        message: of Hydra.
        overrides: of the command line.
        compose: with fewer of them, to see which options there are.
    """
    if missing := re.search(r"Could not find '(.+?)/([^/']+)'", message):
        return of_choice(*missing.groups())
    if wrong := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", message):
        option = wrong[1]
        override = next((given for given in overrides if given.lstrip("+~").partition("=")[0] == option), option)
        rest = [given for given in overrides if given != override]
        if (group := option.partition("@")[0]) == "experiment" or "@" in option:
            value = override.partition("=")[2]
            known = value in choices(group)
            return f"{override} must begin with a plus: +{override}" if known else of_choice(group, value)
        return of_option(override, compose(rest))
    return message.partition("\n")[0]


def of_choice(group: str, name: str) -> str:
    """Return that a group has no such option, and the nearest ones."""
    known, given = choices(group), f"{group}={name}"
    if given in ANOTHER:
        return f"{given} is not an option of conf/{group}: write {ANOTHER[given]}"
    near = get_close_matches(name, known, 2)
    plus = "+" * (group == "experiment")
    meant = " or ".join(f"{plus}{group}={other}" for other in near)
    return f"{given} is not an option of conf/{group}; " + (
        f"did you mean {meant}?" if near else f"the options are {', '.join(known)}"
    )


def choices(group: str) -> list[str]:
    """Return the names of a config group's options."""
    return sorted(file.stem for file in Path(conf(), group).glob("*.yaml"))


def of_option(override: str, config: DictConfig) -> str:
    """Return that there is no such option, and the nearest one, or those beside it.

    Args:
        override: of the command line.
        config: composed without it.
    """
    name, equals, value = override.lstrip("+~").partition("=")
    above, _, last = name.rpartition(".")
    beside = OmegaConf.select(config, above) if above else config
    known = [str(key) for key in beside if key != "_target_"] if OmegaConf.is_dict(beside) else []
    near = [f"{above}.{key}".lstrip(".") for key in get_close_matches(last, known, 1)]
    if other := ELSEWHERE.get(last.replace("-", "_")):
        near = [other]
    elif not near and above.startswith("arms."):
        return f"there is no option {name}, since no arm has this name: add it by +proposer@{above}=NAME"
    elif not near and not (known and above):
        every = list(_names(config))
        near = [path for path in every if path.rpartition(".")[2] == last] or get_close_matches(name, every, 1)
    if near:
        return f"there is no option {name}; did you mean {near[0]}{equals}{value}?"
    if known and len(known) <= MOST_LISTED:
        return f"there is no option {name}; {above} has {', '.join(known)}"
    return f"there is no option {name}; spec-lab explain{f' {above}' * bool(known and above)} lists all"


def _names(config: DictConfig, above: str = "") -> Iterator[str]:
    """The names of all options, those that hold others before them."""
    for key in map(str, config):
        if key in ("hydra", "_target_"):
            continue
        yield above + key
        stated = not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, key)
        if stated and OmegaConf.is_dict(config[key]):
            yield from _names(config[key], f"{above}{key}.")
