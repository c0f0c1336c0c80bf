"""Checks of a config before a target or a drafter is read; those of its options before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from spec_lab.cli.build import part_config
from spec_lab.cli.bundled import conf
from spec_lab.cli.declarations import check_values, declared, package_sources, qualified
from spec_lab.cli.misspelt import of_option
from spec_lab.cli.redaction import overrides_of
from spec_lab.cli.refusals import Refused, reason
from spec_lab.core.options import WrongOption, brief
from spec_lab.models import ranks
from spec_lab.models.hub_name import check_folder_or_name
from spec_lab.results import run_names

STREAM, RECOMMEND = "spec_lab.tasks.stream.stream", "spec_lab.tasks.recommend.recommend"
TRAIN, CHECK = "spec_lab.tasks.train.train", "spec_lab.tasks.certify.check.check"
TRAIN_ONLINE = "spec_lab.tasks.train_online.train_online"
BENCHMARK = "spec_lab.tasks.benchmark.run"
DECODING = (BENCHMARK, "spec_lab.tasks.serve.serve", STREAM)
"""Tasks that decode with every proposer and the one verifier."""

UNUSED = {
    CHECK: ((), "task=check checks one proposer with one verifier at a time, and no {}"),
    RECOMMEND: (("proposer", "policy"), "task=recommend chooses its {} itself, also among task.drafters"),
    TRAIN: (("proposer", "policy", "verifier"), "task=train learns the drafter of task.recipe, and uses no {}"),
    TRAIN_ONLINE: (
        ("proposer", "policy", "verifier"),
        "task=train_online serves with the drafter of task.recipe, and uses no {}",
    ),
}
"""Tasks, each with parts that it does not use, and why."""

WITHOUT = {
    "proposer": ("none", "spec_lab.propose.Null.load"),
    "policy": ("none", "spec_lab.policy.none"),
    "verifier": ("token", "spec_lab.verify.Token"),
}
"""Name and ``_target_`` of a part in its simplest form."""

GGUF, SMOLLM2 = "spec_lab.models.gguf.load", "spec_lab.models.smollm2.load"
TARGET = "spec_lab.models.target.Target.load"
PROMPT_FILES = ("spec_lab.text.prompts.jsonl", "spec_lab.text.conversations.chat")
REQUIRE_TRANSFORMERS = {
    "task": ("spec_lab.tasks.train",
             "drafters learn from the hidden states of a model of transformers"),
    "sampling": ("spec_lab.models.generation.", "a GGUF file holds no generation_config.json: set sampling=greedy, or "
                 "sampling.temperature and others"),
    "peers": ("spec_lab.tasks.peers.", "transformers' own generation computes a model of transformers; "
              "+experiment=llama_cpp_peers measures llama.cpp's"),
}  # fmt: skip
"""Parts that require a target of transformers: of each group the beginning of such ``_target_``, and why."""

RENAMED = {
    "out": "output_dir",
    "beside": "arms",
    "stop": "stop_strings",
    "banned": "banned_strings",
    "heal": "token_healing",
    "prompt": "task.prompt",
    "objective": "hydra.sweeper.objective",
    "constraint.beside": "constraint.async_masks",
    "task.turns": "task.repeats",
    "task.rounds": "task.steps",
    "policy.most": "policy.max_depth",
}
"""Options that have another name now, by their former one."""

RENAMED_GROUPS = ("beside",)
"""Those of them that hold options."""

PARTS_RENAMED = ("constraint", "task", "policy")
"""Parts with such options. One of the user's own may have an option of the former name."""


def renamed(option: str) -> str:
    """Why an option has no effect: it has another name now. Empty of an option that was not renamed."""
    for old, new in RENAMED.items():
        if option == old or (old in RENAMED_GROUPS and option.startswith(f"{old}.")):
            return f"{option} is now called {new + option.removeprefix(old)}"
    return ""


def top_level_options() -> set[str]:
    """Return the names of the top-level options: those of the default config."""
    config = OmegaConf.load(Path(conf(), "config.yaml"))
    return groups(config) | config.keys() - {"defaults", "hydra"}


def groups(config: Any = None) -> set[str]:
    """Return the names of the config groups that the default config chooses a file of. Reads it unless it is given."""
    chosen = (config or OmegaConf.load(Path(conf(), "config.yaml"))).defaults
    return {key for options in chosen if OmegaConf.is_dict(options) for key in options if " " not in key}


def check_options(config: DictConfig) -> None:
    """Refuse options that nothing reads, scalars removed with "~", and values that no option may have.

    Raises:
        Refused: names the option, and the known one nearest to it.
    """
    options = top_level_options()
    for key in map(str, config):
        if key not in options:
            raise Refused(f"spec_lab: {_unknown(key, config, options)}")
    for group in PARTS_RENAMED:
        for key in config[group] if OmegaConf.is_dict(config.get(group)) else ():
            if (message := renamed(f"{group}.{key}")) and not _declares(group, config[group], str(key)):
                raise Refused(f"spec_lab: {message}")
    try:
        check_values(config, options)
    except WrongOption as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


def _unknown(key: str, config: DictConfig, options: Collection[str]) -> str:
    """Return that nothing reads what stands below a top-level name, and what was probably meant.

    Args:
        key: the name, such as that of ``+prompt.limit=4``, which Hydra adds.
        config: with it.
        options: names of the top-level options.
    """
    content: Any = OmegaConf.to_container(config, resolve=False)
    written = {str(name): value for name, value in content.items()}
    name, value = key, written[key]
    while isinstance(value, Mapping) and (inner := next((each for each in value if each != "_target_"), None)):
        name, value = f"{name}.{inner}", value[inner]
    if (name == key or key in RENAMED_GROUPS) and (message := renamed(name)):
        return message
    shown = value if isinstance(value, str) else "" if isinstance(value, Mapping) else brief(value)
    return of_option(name, shown, OmegaConf.masked_copy(config, [option for option in written if option in options]))


def _declares(group: str, part: DictConfig, option: str) -> bool:
    """Return whether a part's class or function has an option, or may have it: one of another package with any."""
    target = str(part.get("_target_"))
    known, more = declared(package_sources(), group, target)
    return option in known or (more and target.partition(".")[0] != __name__.partition(".")[0])


def check_metrics(config: DictConfig) -> None:
    """Refuse metrics that are no mapping of names to functions, and those of a task that does not compute any.

    Raises:
        Refused: says how a metric is named, or which task computes it.
    """
    if not (named := config.get("metrics")):
        return
    if not OmegaConf.is_dict(named):
        raise Refused(f"spec_lab: metrics must be a mapping of names to functions, not {brief(named)}")
    if "_target_" in named:
        name = named["_target_"].rpartition(".")[2]
        raise Refused(
            f"spec_lab: metrics._target_={named['_target_']} has no name, by which several can be chosen: let its file "
            f"in conf/metrics begin with the line '# @package metrics.NAME', where NAME is such as {name}"
        )
    if OmegaConf.select(config, "task._target_") != BENCHMARK:
        raise Refused(
            "spec_lab: metrics are functions of the tables of task=benchmark, and this task has none: leave out "
            f"metrics=[{','.join(map(str, named))}], or set task=benchmark"
        )


def check_torchrun(config: DictConfig) -> None:
    """Refuse ranks of torchrun that nothing is split over, and peers together with ranks.

    Raises:
        Refused: says so.
    """
    if ranks.size() == 1:
        return
    if not OmegaConf.select(config, "target.tensor_parallel"):
        raise Refused(
            "spec_lab: torchrun started several ranks, and they share no model: give target.tensor_parallel=true"
        )
    if config.get("peers"):
        raise Refused("spec_lab: peers run in one process: leave them out with target.tensor_parallel=true")


def check_texts(config: DictConfig) -> None:
    """Refuse options of a task that name its texts and exclude each other, and answers that do not exist.

    Raises:
        Refused: names the option, and what to set instead.
    """
    given = config.get("task") or {}
    try:
        if given.get("_target_") == STREAM:
            from spec_lab.text.conversations import check_said

            check_said(given.get("prompt"), bool(given.get("chat")), given.get("messages"))
        elif "answers_from" in given:
            from spec_lab.text.answers import check_source

            check_source(given["answers_from"], given.get("generate"), given.get("answers", 1))
    except WrongOption as error:
        raise Refused(f"spec_lab: {qualified(str(error), 'task', given)}") from error


def check_files(config: DictConfig) -> None:
    """Refuse a file of prompts and a target that are not there, before torch is imported.

    Raises:
        Refused: names the option.
    """
    prompts, target = (config[part] if OmegaConf.is_dict(config.get(part)) else {} for part in ("prompts", "target"))
    path = prompts.get("path")
    if prompts.get("_target_") in PROMPT_FILES and isinstance(path, str) and path and not os.path.exists(path):
        raise Refused(f"spec_lab: prompts file {path} does not exist; set prompts.path to a JSONL file")
    path = target.get("path")
    if target.get("_target_") == TARGET and isinstance(path, str) and path and not path.endswith(".gguf"):
        try:
            check_folder_or_name(path)
        except OSError as error:
            raise Refused(f"spec_lab: target.path={path}: {reason(error)}") from error


def drop_unused(config: DictConfig) -> None:
    """Refuse parts that were given to a task that does not use them; leave out others that it does not use.

    They would be built, and drafters may calibrate, policies measure. Others are defaults, of every run or of an
    experiment; outside of a Hydra run nothing is known of that, and all are refused.

    Raises:
        Refused: names the part, and what to set instead.
    """
    task = (config.get("task") or {}).get("_target_")
    if task not in UNUSED:
        return
    parts, why = UNUSED[task]
    typed = (
        [run_names.key(override) for override in overrides_of(HydraConfig.get())] if HydraConfig.initialized() else None
    )
    for part in parts:
        name, without = WITHOUT[part]
        if (target := (config.get(part) or {}).get("_target_", without)) == without:
            continue
        if typed is not None and not any(re.match(rf"{part}\b", option) for option in typed):
            with open_dict(config):
                config[part] = {"_target_": without}
            continue
        raise Refused(f"spec_lab: {why.format(part)}: set {part}={name}, not {part}={chosen(part, target)}")
    for group in ("arms", "verifiers"):
        if OmegaConf.is_dict(further := config.get(group)) and further:
            raise Refused(f"spec_lab: {why.format(group)}: leave out {group}.{next(iter(further))}")


def check_policy(config: DictConfig) -> None:
    """Refuse a policy without a proposer in ``task=check``: the reference that drafts in its place obeys none.

    Raises:
        Refused: says which proposer to add.
    """
    given = {part: (config.get(part) or {}).get("_target_", without) for part, (_, without) in WITHOUT.items()}
    if given["proposer"] == WITHOUT["proposer"][1] and given["policy"] != WITHOUT["policy"][1]:
        raise Refused(
            f"spec_lab: policy={chosen('policy', str(given['policy']))} is not checked: a policy is checked with a "
            "proposer: add proposer=draft_chain"
        )


def check_gguf(config: DictConfig) -> None:
    """Refuse parts that require a model of transformers beside a GGUF file as the target, before torch is imported.

    Raises:
        Refused: names the part, and what to set instead.
    """
    target = config.get("target") or {}
    ours = target.get("_target_") == SMOLLM2
    if target.get("_target_") != GGUF and not (ours and target.get("engine", "llama.cpp") == "llama.cpp"):
        return
    name, instead = (
        "gguf",
        "target=transformers with target.path=FILE.gguf, whose weights transformers computes dequantised",
    )
    if ours:
        name, instead = "smollm2", "target.engine=transformers"
    every = {part: config.get(part) for part in ("task", "sampling")}
    peers = config.get("peers")
    every |= {f"peers.{name}": peer for name, peer in peers.items()} if OmegaConf.is_dict(peers) else {}
    for part, named in every.items():
        begins, why = REQUIRE_TRANSFORMERS[part.partition(".")[0]]
        if OmegaConf.is_dict(named) and str(named.get("_target_", "")).startswith(begins):
            raise Refused(f"spec_lab: {part} ({named._target_}) does not support target={name}: {why}; set {instead}")


def check_drawing(config: DictConfig, verifier: Any) -> None:
    """Refuse proposers whose drafts the verifier cannot verify, before any weights are read.

    Checked are, for the tasks that decode every proposer with ``verifier``, ``draws`` as the proposer's class declares
    it, else ``drawn`` as the config or the class does, and whether the options ``tree`` or ``children`` describe trees
    that branch. What a proposer declares only once it is loaded is checked with the loaded parts.

    Raises:
        Refused: names the proposer, how it draws, and what would fit.
    """
    from spec_lab.core.draft import Drawn
    from spec_lab.verify.verdict import misfit

    if OmegaConf.select(config, "task._target_") not in DECODING:
        return
    arms = [f"arms.{name}" for name in config.arms] if OmegaConf.is_dict(config.get("arms")) else []
    for part in ("proposer", *arms):
        named = part_config(config, part)
        target = str(named["_target_"])
        declared = _class_attributes(target.removesuffix(".load"))
        drawn, draws = named.get("drawn", declared.get("drawn")), declared.get("draws")
        if not isinstance(draws, frozenset):  # not the class but each object declares it, or it is drawn one way
            draws = frozenset(kind for kind in get_args(Drawn) if kind == drawn)
        if not draws or not draws <= {*get_args(Drawn)} or target.endswith(".Null.load"):
            continue
        name = declared.get("name", chosen(part, target.removesuffix(".load").rpartition(".")[2]))
        if why := misfit(str(name), draws, verifier, _branches(named)):
            raise Refused(f"spec_lab: {part}: {why}")


def chosen(part: str, otherwise: str) -> str:
    """Return the name of a part's config, such as draft_chain; ``otherwise`` outside of a Hydra run."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return str(choices.get(part, choices.get(f"proposer@{part}", otherwise)))


def _branches(options: Mapping[Any, Any]) -> bool | None:
    """Return whether a proposer's options describe trees that branch; None where they do not state it."""
    from spec_lab.propose.trees import parse, width_of

    children = options.get("children")
    if isinstance(children, int):
        return children > 1
    if options.get("tree") is None:
        return None
    try:
        return width_of(parse(options["tree"])) > 1
    except ValueError:  # a tree that is chosen later ("calibrated"), or one that loading refuses
        return None


def _class_attributes(path: str) -> Mapping[str, Any]:
    """Return what the class at a dotted path declares; nothing where there is no class."""
    try:
        target = get_object(path)
    except (ImportError, ValueError):
        return {}
    return vars(target) if isinstance(target, type) else {}
