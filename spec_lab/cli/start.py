"""A run: its parts are built in order, the target and drafters last, and the task does its work with them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spec_lab.cli import interrupt
from spec_lab.cli.build import (
    apply_constraint,
    build,
    build_each,
    build_mode,
    mode_config,
    own_metrics,
    rebuilt,
    task,
    under_policy,
)
from spec_lab.cli.bundled import zoo
from spec_lab.cli.config_checks import (
    CHECK,
    RECOMMEND,
    check_drawing,
    check_files,
    check_gguf,
    check_metrics,
    check_options,
    check_policy,
    check_texts,
    check_torchrun,
    chosen,
    drop_unused,
)
from spec_lab.cli.declarations import qualified
from spec_lab.cli.redaction import repeating, written
from spec_lab.cli.refusals import Refused, reason
from spec_lab.cli.status import Status
from spec_lab.core.options import WrongOption, brief
from spec_lab.core.process_cache import ProcessCache
from spec_lab.results import run_names

if TYPE_CHECKING:
    from spec_lab.models.target import Target

LOG = logging.getLogger(__name__)

REUSED = ProcessCache()
"""Cache that the runs of this process share, above all those of a sweep; it is passed to the parts."""

ONE_TURN = {
    "spec_lab.tasks.check_drafter.check": "check_drafter",
    "spec_lab.tasks.constraint_distance.task.measure": "constraint_distance",
    "spec_lab.tasks.serve.serve": "serve_trace",
    "spec_lab.tasks.train_online.train_online": "train_online",
    "spec_lab.tasks.verifier_study.study_verifiers": "verifier_study",
}
"""Names of the tasks that decode one answer for each prompt."""


def with_trees(config: DictConfig, trees: Mapping[str, str | int]) -> DictConfig:
    """Return the config with the trees that the run calibrated, and the depths that it chose, when it began, so that a
    resumed run is not calibrated again. They are named as by ``manifest.begun_trees``.
    """
    config = deepcopy(config)
    for name, tree in trees.items():
        arm, dot, part = name.partition(".")
        chosen, later = ("depth", "auto") if isinstance(tree, int) else ("tree", "calibrated")
        option = f"{f'arms.{arm}' if arm in (config.get('arms') or ()) else 'proposer'}{dot}{part}.{chosen}"
        if OmegaConf.select(config, option) == later:
            OmegaConf.update(config, option, tree)
    return config


def of_checkpoint(sampling: Any, target: Target) -> Any:
    """Return the sampling parameters, those of the target's checkpoint where ``sampling`` names them.

    Raises:
        Refused: the checkpoint has none, or some that are not supported.
    """
    from spec_lab.models.generation import CheckpointSampling

    if not isinstance(sampling, CheckpointSampling):
        return sampling
    try:
        return sampling.resolved(target.folder)
    except (OSError, ValueError) as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


def plain_text(config: DictConfig, prompts: Sequence[Any], target: Target) -> str:
    """Return that prompts are plain text for a target with a chat template, and what changes it; empty otherwise."""
    from spec_lab.text.chat_template import HasTemplate

    plain, task = sum(getattr(prompt, "template", None) is None for prompt in prompts), config.get("task") or {}
    tokenizer = target.tokenizer
    if not plain or not isinstance(tokenizer, HasTemplate) or not tokenizer.chat_template:
        return ""
    if task.get("answers_from") or task.get("messages") or task.get("chat"):
        return ""
    if task.get("prompt"):
        return (
            "task.prompt is plain text to the target, although its tokenizer has a chat template: set task.chat=true "
            "to send it as a message"
        )
    change = "set prompts.template=checkpoint"
    if "template" not in config.prompts:
        change = "choose prompts=chat and a file of messages"
    return (
        f"{plain} of {len(prompts)} prompts are plain text to the target, although its tokenizer has a chat template: "
        f"{change} to send them through it"
    )


def check_tried(config: DictConfig) -> None:
    """Check the drafters that a recommendation is to try as those of a run are, before the target is loaded.

    Raises:
        ValueError: one is malformed, names no proposer, or has no files for this target.
    """
    if config.task.get("_target_") != RECOMMEND:
        return
    from spec_lab.cli.drafter_paths import check_drafters
    from spec_lab.tasks.recommend.modes import families_of

    drafters: Any = OmegaConf.to_container(config.task.drafters, resolve=True)
    try:
        for family in families_of(drafters):
            check_drafters(mode_config(config, family.mode))
    except (OSError, ValueError) as error:
        raise ValueError(f"task.drafters={brief(drafters)}: {error}") from error


def check_turns(config: DictConfig, prompts: Sequence[Any]) -> None:
    """Refuse conversations of several turns for a task that decodes first turns only, before any weights are read.

    Raises:
        ValueError: there is one.
    """
    from spec_lab.text.prompts import check_one_turn

    task = config.task
    if task.get("_target_") in ONE_TURN and task.get("answers_from") is None:
        check_one_turn(prompts, f"task={ONE_TURN[task._target_]}")


def with_written_name(target: Target, path: Any, shown: Mapping[str, Any] | str) -> Target:
    """Return the target under the name that files may hold: not with values of environment variables in its path."""
    name = shown.get("path", path) if isinstance(shown, Mapping) else shown
    return replace(target, name=name) if target.name == path != name else target


def _prepare(
    config: DictConfig, out: Path, overrides: Sequence[str] | None, retried: bool
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Build the task, the lab, its settings, and the config as it is written to files."""
    LOG.info("Importing transformers")
    from spec_lab.cli.drafter_paths import check_drafters
    from spec_lab.results.manifest import begun_dtype, begun_trees, digest
    from spec_lab.tasks.lab import Lab, Settings

    work = task(config)
    resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    shown, identity = written(config), digest(resolved)
    given = None if overrides is None else run_names.identifying(overrides)
    scalars = {name: resolved[name] for name in Settings.names()}
    typed = repeating(HydraConfig.get()) if HydraConfig.initialized() else ()
    settings = Settings(
        output_dir=out, overrides=given, retried=retried, given=typed, config_sha256=identity, **scalars
    )
    settings.use_threads()
    sampling, verifier = build(config, "sampling"), build(config, "verifier")
    prompts, tracker, metrics = build(config, "prompts"), build(config, "tracker"), own_metrics(config)
    check_turns(config, prompts)
    check_drawing(config, verifier)
    if verifier.invalid_text:
        LOG.warning("verifier=%s accepts any drafted token: every text of this run is INVALID", verifier.name)
    begun = config if settings.overwrite else with_trees(config, begun_trees(out, shown, identity))
    dtype = None if settings.overwrite else begun_dtype(out, shown, identity)
    if dtype is not None and OmegaConf.select(config, "target.dtype") == "auto":
        OmegaConf.update(config, "target.dtype", dtype)
    try:
        check_drafters(config)
        check_tried(config)
    except (OSError, ValueError) as error:
        raise Refused(f"spec_lab: {reason(error)}") from error
    named = shown["target"].get("path")
    bundled = named == zoo("target")
    LOG.info("Loading %s", "the bundled target" if bundled else f"target {named or chosen('target', '')}".strip())
    target = with_written_name(
        build(config, "target", cache=REUSED), OmegaConf.select(config, "target.path"), shown["target"]
    )
    sampling = of_checkpoint(sampling, target)
    if message := plain_text(config, prompts, target):
        LOG.warning("%s", message)
    LOG.info("Loading proposer")
    proposer = under_policy(begun, "policy", build(begun, "proposer", target=target), target=target)
    arms = build_each(begun, "arms", target=target)
    peers = build_each(config, "peers", target=target, sampling=sampling, seed=settings.seed)
    verifiers = build_each(config, "verifiers")
    applied, pieces = apply_constraint(config, settings, target)
    lab = Lab(
        target, proposer, verifier, sampling, prompts, tracker, arms, peers, verifiers, applied, pieces,
        partial(rebuilt, begun, target), partial(build_mode, begun, target), metrics,
    )  # fmt: skip
    return work, lab, settings, shown


def start(config: DictConfig, out: Path, overrides: Sequence[str] | None = None, retried: bool = False) -> int:
    """Build what the config names, and run it. Returns the exit code; arguments as in ``carry_out``.

    The number of torch's threads is restored at the end: the next run of this process may leave it to torch.
    """
    check_options(config)
    check_metrics(config)
    check_gguf(config)
    check_texts(config)
    drop_unused(config)
    check_torchrun(config)
    if OmegaConf.select(config, "task._target_") == CHECK:
        check_policy(config)
        from spec_lab.cli.check import check_parts  # what a run needs besides takes a while to import

        return check_parts(config)
    if overrides is None:  # a sweep's runs are refused as they begin, when torch is imported already
        check_files(config)
    with Status():
        LOG.info("Importing torch")
        import torch

    threads = torch.get_num_threads()
    try:
        with Status():
            work, lab, settings, shown = _prepare(config, out, overrides, retried)
        with interrupt.Raising():
            return int(work(lab, settings, shown))
    except WrongOption as error:  # of the task and the sampling, whose options are checked with the parts
        option, message = re.match(r"\w*", str(error))[0], reason(error)  # type: ignore[index]
        for part in ("task", "sampling"):
            if option in (config.get(part) or {}):
                message = qualified(message, part, config[part])
                break
        raise Refused(f"spec_lab: {message}") from error
    finally:
        torch.set_num_threads(threads)
