"""From a config to the parts that it names: every refusal is one line that says which option is wrong."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from spec_lab.cli import interrupt
from spec_lab.cli.declarations import check_values, qualified
from spec_lab.cli.redaction import written
from spec_lab.cli.status import Status
from spec_lab.core.faults import causes, described, location
from spec_lab.core.options import WrongOption, brief, brief_repr
from spec_lab.core.process_cache import ProcessCache
from spec_lab.core.protocols import Part, WrongValue, check_declared, required
from spec_lab.core.terminal import visible
from spec_lab.models import ranks
from spec_lab.results import sweep

if TYPE_CHECKING:
    from spec_lab.models.target import Target

LOG = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parents[1]

REUSED = ProcessCache()
"""What the runs of this process share, a sweep's above all; it is passed to the parts."""

CONTRACTS = {
    "target": "spec_lab.models.target.Target",
    "proposer": "spec_lab.decode.proposer.Proposer",
    "policy": "spec_lab.policy.policy.Policy",
    "verifier": "spec_lab.verify.Verifier",
    "constraint": "spec_lab.constrain.protocol.Constraint",
    "sampling": "spec_lab.core.probabilities.Sampling",
    "prompts": "collections.abc.Sequence",
    "tracker": "spec_lab.analysis.tracking.Tracker",
    "peers": "spec_lab.tasks.lab.GroupDecoder",
}
"""The class whose members (``core.protocols.required``) each part of a run must have."""

DECLARED = {
    "proposer": "spec_lab.decode.proposer.DECLARED",
    "policy": "spec_lab.policy.policy.DECLARED",
    "verifier": "spec_lab.verify.verdict.DECLARED",
    "constraint": "spec_lab.constrain.protocol.DECLARED",
}
"""What the attributes of each part must be (``core.protocols.Declared``)."""

NOTHING = ("spec_lab.constrain.load.none", "spec_lab.policy.none")
"""What returns no part."""

DECODING = ("spec_lab.tasks.benchmark.run", "spec_lab.tasks.serve.serve", "spec_lab.tasks.stream.stream")
"""Tasks that decode with every proposer and the one verifier."""

GGUF = "spec_lab.models.gguf.load"
REQUIRE_TRANSFORMERS = {
    "task": ("spec_lab.tasks.train.",
             "drafters learn from the hidden states of a model of transformers; leave target=gguf out"),
    "sampling": ("spec_lab.models.generation.", "a GGUF file holds no generation_config.json; set sampling=greedy, or "
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
}
"""Options that have another name now, by their former one."""


def zoo(name: str) -> str:
    """The path of a bundled file or folder."""
    return str(PACKAGE / "zoo" / name)


def conf() -> str:
    """Return the folder of the configs: inside an installed package, next to the package in a checkout."""
    for folder in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"no conf/config.yaml in {PACKAGE} or next to it: install spec_lab again")


class Refused(CompactHydraException):
    """A run that cannot be: one line instead of a traceback (HYDRA_FULL_ERROR=1 shows it)."""


def reason(error: BaseException) -> str:
    """What went wrong in one line, without characters that a terminal would execute."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no default: give {error.full_key}=... on the command line"
    if isinstance(error, InterpolationResolutionError):  # of several lines; the first one says what is wrong
        named, said = f"{error.full_key}: " * bool(error.full_key), str(error).partition("\n")[0]
        said = said.rpartition("raised while resolving interpolation: ")[2]
        return visible(f"{named}{said}: correct the value, or what it refers to")
    if isinstance(error, ModuleNotFoundError) and isinstance(error.__cause__, Exception):
        # transformers imports lazily and reports every error inside such an import as a missing module: also that of
        # a signal which a launcher handles by raising.
        return reason(error.__cause__)
    return visible(" ".join(str(error).split())) or type(error).__name__


def part_config(config: DictConfig, part: str) -> DictConfig:
    """``config[part]``.

    Raises:
        Refused: it names nothing to build or call.
    """
    named = OmegaConf.select(config, part)
    if not OmegaConf.is_dict(named) or "_target_" not in named:
        raise Refused(f"spec_lab: {part} must be a mapping whose _target_ names what to build, not {brief(named)}")
    return named


def task(config: DictConfig) -> Any:
    """What ``config.task`` names, with its scalar arguments: called with the lab, its settings and the config, it does
    the work.

    Raises:
        Refused: there is no such thing; an option it does not take; names it.
    """
    named = part_config(config, "task")
    for key in sorted(OmegaConf.missing_keys(named)):
        raise Refused(f"spec_lab: {key} has no default: give {key}=... on the command line")
    try:
        made = instantiate(named, _partial_=True)
        inspect.signature(made.func).bind(None, None, None, **made.keywords)
    except (Exception, SystemExit) as error:
        said = fault(error, str(named["_target_"]))
        raise Refused(f"spec_lab: {'task.' if said.startswith('_target_=') else 'task: '}{said}") from error
    return made


def build(config: DictConfig, part: str, group: str = "", **live: Any) -> Any:
    """Call what ``config[part]`` names with its scalar arguments and with live objects.

    Live objects go in by call: Hydra would turn those that are dataclasses into configs. The ``parts`` of a hybrid are
    built first. The ``inner`` proposer of another is loaded by it, for the target that it passes; its inner
    ``verifier`` is built first.

    Args:
        config: of the run.
        part: what to build.
        group: names its contract; empty: the first word of ``part``.
        live: the live objects.

    Raises:
        Refused: what went wrong, with the part where it did; if a file is at fault, with the part's path.
    """
    named = part_config(config, part)
    if OmegaConf.is_dict(named.get("parts")):  # of a hybrid, which are built first
        live |= {"parts": build_each(config, f"{part}.parts", **live)}
        named = without(named, "parts")
    if OmegaConf.is_dict(named.get("inner")):

        def inner(target: Target) -> Any:
            return build(config, f"{part}.inner", target=target)

        live |= {"inner": inner, "verifier": build(config, f"{part}.verifier", "verifier")}
        named = without(named, "inner", "verifier")
    with_policy = part.partition(".")[0] in ("proposer", "arms") and "policy" in named
    if with_policy:
        named = without(named, "policy")
    group = group or part.partition(".")[0]
    group = {"arms": "proposer", "verifiers": "verifier"}.get(group, group)
    try:
        made = instantiate(named, _partial_=True, _convert_="all")(**live)
        if made is None and named._target_ in NOTHING:
            return None
        check_part(made, group, str(named._target_))
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        text = fault(error, str(named._target_))
        if text.startswith("_target_="):
            raise Refused(f"spec_lab: {part}.{text}") from error
        if isinstance(error, WrongOption) or isinstance(causes(error)[-1], WrongOption):
            text = qualified(reason(causes(error)[-1]), part, named)
            raise Refused(f"spec_lab: {_of_part(text, group, part)}") from error
        where = f"{part}.path={named.path}" if isinstance(error, OSError) and "path" in named else part
        text = _of_part(text, group, part)
        raise Refused(f"spec_lab: {text}" if text.startswith(part) else f"spec_lab: {where}: {text}") from error
    return under_policy(config, f"{part}.policy", made, **live) if with_policy else made


def _of_part(message: str, group: str, part: str) -> str:
    """Return a message with the options of a part in place of those of its group, ``arms.x.`` for ``proposer.``."""
    return re.sub(rf"(?<![\w.]){group}\.(?=\w+=)", f"{part}.", message)


def check_part(made: Any, group: str, target: str) -> None:
    """Check that a part has the members of its contract, and that their values are of the right types.

    Raises:
        ValueError: names the attribute, and the line where its class is defined.
    """
    contract = get_object(CONTRACTS[group])
    if issubclass(contract, Part) and not isinstance(made, contract):
        raise ValueError(
            f"_target_={target} returns an object of type {type(made).__name__}, which is no {contract.__name__}: make "
            f"its class a subclass of {CONTRACTS[group]}{_defined(type(made))}"
        )
    if lacks := [name for name in required(contract) if not hasattr(made, name)]:
        raise ValueError(
            f"_target_={target} returns an object of type {type(made).__name__} without {', '.join(lacks)}: these are "
            f"members of {CONTRACTS[group]}"
        )
    try:
        check_declared(made, get_object(DECLARED[group]) if group in DECLARED else {})
    except (TypeError, WrongValue) as error:
        raise ValueError(f"_target_={target}: {error}{_defined(type(made))}") from error
    if group == "prompts" and isinstance(made, list | tuple):
        from spec_lab.text.prompts import Prompt

        for number, prompt in enumerate(made):
            if not isinstance(prompt, Prompt):
                raise ValueError(
                    f"_target_={target} returns {brief_repr(prompt)} as prompt {number}: it must be a "
                    "spec_lab.text.prompts.Prompt"
                )


def _defined(made: type) -> str:
    """Return `` (file:line)`` of a class's definition; empty where it has no file."""
    try:
        return f" ({inspect.getsourcefile(made)}:{inspect.getsourcelines(made)[1]})"
    except (OSError, TypeError):
        return ""


def fault(error: BaseException, target: str) -> str:
    """Return what went wrong in one line: for code of another package, or an error that no part of this package raises
    on purpose, with its type and the file and line.

    Args:
        error: raised while a part was imported or built.
        target: the part's dotted name.
    """
    expected = isinstance(error, InstantiationException | OSError | OmegaConfBaseException | TypeError | ValueError)
    cause = causes(error)[-1]  # of Hydra's errors: that of the import
    if isinstance(error, InstantiationException) and cause is not error:
        return visible(f"_target_={target} cannot be imported: {described(cause)}{location(cause, target)}")
    if expected and target.partition(".")[0] == __name__.partition(".")[0]:
        return reason(error)
    where = location(error, target)
    if expected:
        return f"_target_={target}: {reason(error)}{where}" if where else reason(error)
    return visible(f"_target_={target} raised {' '.join(described(error).split())}{where}")


def without(named: DictConfig, *keys: str) -> DictConfig:
    """Return a config without some of its keys; its interpolations still refer to the whole."""
    copy = deepcopy(named)
    with open_dict(copy):
        for key in keys:
            copy.pop(key, None)
    return copy


def under_policy(config: DictConfig, part: str, proposer: Any, **live: Any) -> Any:
    """Return the proposer under the policy that ``config[part]`` names; the proposer itself where it names none.

    Raises:
        Refused: as in ``build``; a policy and a proposer that do not go together, a policy of a hybrid's part.
    """
    if ".parts." in part:
        raise Refused(f"spec_lab: {part}: a policy limits a whole hybrid, not one of its parts: name it one level up")
    policy = build(config, part, "policy", proposer=proposer, target=live["target"])
    if policy is None:
        return proposer
    from spec_lab.policy.adaptive import adapt

    try:
        return adapt(proposer, policy)
    except ValueError as error:
        raise Refused(f"spec_lab: {part}: {reason(error)}") from error


def rebuilt(config: DictConfig, target: Any, options: Mapping[str, Any]) -> Any:
    """Build the proposer again, without a policy, with other values of its ``options``.

    Raises:
        ValueError: a value that it cannot have; names the option.
    """
    other = deepcopy(config)
    with open_dict(other):
        for name, value in options.items():
            other.proposer[name] = value
    try:
        return build(other, "proposer", target=target)
    except Refused as error:
        raise ValueError(str(error).removeprefix("spec_lab: ")) from error


def apply_constraint(config: DictConfig, settings: Any, target: Any) -> tuple[Any, Any]:
    """Build the applied constraint and the bytes of the target's tokens; None where the run needs none.

    ``config.constraint`` holds a constraint's own options and those of ``AppliedConstraint``.

    Raises:
        Refused: as in ``build``; parts that do not go together.
    """
    from spec_lab.constrain.applied import AppliedConstraint
    from spec_lab.constrain.load import combine
    from spec_lab.constrain.vocabulary import Vocabulary, text_bytes

    named = part_config(config, "constraint")
    options = {key: named[key] for key in option_names(AppliedConstraint) if key in named}
    further = OmegaConf.masked_copy(named, [str(key) for key in named if key not in options])
    text = {"healing": settings.token_healing, "banned": settings.banned_strings, "at_least": settings.min_new_tokens}
    try:
        needed = not str(named["_target_"]).endswith(".load.none") or any(text.values())
        vocabulary = Vocabulary.of(target) if needed else None
        constraint = build(OmegaConf.create({"constraint": further}), "constraint", vocabulary=vocabulary)
        applied = combine(constraint, vocabulary, options, **text)
        if vocabulary is not None:
            return applied, vocabulary.bytes
        return applied, text_bytes(target) if settings.stop_strings else None
    except WrongOption as error:
        raise Refused(f"spec_lab: {qualified(reason(error), 'constraint', named)}") from error
    except ValueError as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


def option_names(made: type) -> list[str]:
    """The names of a dataclass's options, without the parts it is given."""
    return [field.name for field in fields(made) if field.name != "constraint"]


def build_each(config: DictConfig, group: str, **live: Any) -> dict[str, Any]:
    """What each entry of ``config[group]`` names, by the entry's name; an absent or null group has none.

    Raises:
        Refused: as in ``build``; the group is no mapping.
    """
    named = OmegaConf.select(config, group)
    if named is not None and not OmegaConf.is_dict(named):
        raise Refused(
            f"spec_lab: {group} must be a mapping of names to what is measured, such as {{}}, not {brief(named)}"
        )
    return {name: build(config, f"{group}.{name}", **live) for name in named or {}}


def with_trees(config: DictConfig, trees: Mapping[str, str]) -> DictConfig:
    """Return the config with the trees that the run calibrated when it began, so that a resumed run is not calibrated
    again. They are named as by ``manifest.begun_trees``.
    """
    config = deepcopy(config)
    for name, tree in trees.items():
        arm, dot, part = name.partition(".")
        option = f"{'proposer' if arm == 'speculative' else f'arms.{arm}'}{dot}{part}.tree"
        if OmegaConf.select(config, option) == "calibrated":
            OmegaConf.update(config, option, tree)
    return config


def renamed(option: str) -> str:
    """Why an option has no effect: it has another name now. Empty of an option that was not renamed."""
    for old, new in RENAMED.items():
        if option == old or option.startswith(f"{old}."):
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
        if said := renamed(key):
            raise Refused(f"spec_lab: {said}")
        if key not in options:
            near = get_close_matches(key, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose among {', '.join(sorted(options))}"
            raise Refused(f"spec_lab: there is no option {key}; {hint}")
    for group in ("constraint", "task"):
        for key in config[group] if OmegaConf.is_dict(config.get(group)) else ():
            if said := renamed(f"{group}.{key}"):
                raise Refused(f"spec_lab: {said}")
    try:
        check_values(config, options)
    except WrongOption as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


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


def check_gguf(config: DictConfig) -> None:
    """Refuse parts that require a model of transformers beside a GGUF file as the target, before torch is imported.

    Raises:
        Refused: names the part, and what to set instead.
    """
    if OmegaConf.select(config, "target._target_") != GGUF:
        return
    every = {part: config.get(part) for part in ("task", "sampling")}
    peers = config.get("peers")
    every |= {f"peers.{name}": peer for name, peer in peers.items()} if OmegaConf.is_dict(peers) else {}
    for part, named in every.items():
        begins, why = REQUIRE_TRANSFORMERS[part.partition(".")[0]]
        if OmegaConf.is_dict(named) and str(named.get("_target_", "")).startswith(begins):
            raise Refused(
                f"spec_lab: {part} ({named._target_}) does not support target=gguf: {why}, or set target=zoo with "
                "the folder or hub name of a checkpoint of transformers as target.path"
            )


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
        name = declared.get("name", _chosen(part, target.removesuffix(".load").rpartition(".")[2]))
        if why := misfit(str(name), draws, verifier, _branches(named)):
            raise Refused(f"spec_lab: {part}: {why}")


def _chosen(part: str, otherwise: str) -> str:
    """Return the name of the proposer's config, such as draft_chain; ``otherwise`` outside of a Hydra run."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return str(choices.get(part if part == "proposer" else f"proposer@{part}", otherwise))


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

    plain = sum(getattr(prompt, "template", None) is None for prompt in prompts)
    tokenizer = target.tokenizer
    if not plain or not isinstance(tokenizer, HasTemplate) or not tokenizer.chat_template:
        return ""
    change = "set prompts.template=checkpoint"
    if "template" not in config.prompts:
        change = "choose prompts=chat and a file of messages"
    return (
        f"{plain} of {len(prompts)} prompts are plain text to the target, although its tokenizer has a chat template: "
        f"{change} to send them through it"
    )


def with_written_name(target: Target, path: Any, shown: Mapping[str, Any] | str) -> Target:
    """Return the target under the name that files may hold: not with values of environment variables in its path."""
    name = shown.get("path", path) if isinstance(shown, Mapping) else shown
    return replace(target, name=name) if target.name == path != name else target


def _prepare(config: DictConfig, out: Path, overrides: Sequence[str] | None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Build the task, the lab, its settings, and the config as it is written to files."""
    from spec_lab.cli.drafter_paths import check_drafters
    from spec_lab.results.manifest import begun_trees, digest
    from spec_lab.tasks.lab import Lab, Settings

    work = task(config)
    resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    shown, identity = written(config), digest(resolved)
    given = None if overrides is None else sweep.identifying(overrides)
    scalars = {name: resolved[name] for name in Settings.names()}
    settings = Settings(output_dir=out, overrides=given, config_sha256=identity, **scalars)
    settings.use_threads()
    sampling, verifier = build(config, "sampling"), build(config, "verifier")
    prompts, tracker = build(config, "prompts"), build(config, "tracker")
    check_drawing(config, verifier)
    begun = with_trees(config, begun_trees(out, shown, identity))
    LOG.info("Reading the files of drafters")
    try:
        check_drafters(config)
    except (OSError, ValueError) as error:
        raise Refused(f"spec_lab: {reason(error)}") from error
    LOG.info("Loading target %s", shown["target"].get("path", ""))
    target = with_written_name(
        build(config, "target", cache=REUSED), OmegaConf.select(config, "target.path"), shown["target"]
    )
    sampling = of_checkpoint(sampling, target)
    if said := plain_text(config, prompts, target):
        LOG.warning("%s", said)
    LOG.info("Loading proposer")
    proposer = under_policy(begun, "policy", build(begun, "proposer", target=target), target=target)
    arms = build_each(begun, "arms", target=target)
    peers = build_each(config, "peers", target=target, sampling=sampling, seed=settings.seed)
    verifiers = build_each(config, "verifiers")
    applied, pieces = apply_constraint(config, settings, target)
    lab = Lab(
        target, proposer, verifier, sampling, prompts, tracker, arms, peers, verifiers, applied, pieces,
        partial(rebuilt, begun, target),
    )  # fmt: skip
    return work, lab, settings, shown


def start(config: DictConfig, out: Path, overrides: Sequence[str] | None = None) -> int:
    """Build what the config names, and run it. Returns the exit code; arguments as of ``carry_out``.

    The number of torch's threads is restored at the end: the next run of this process may leave it to torch.
    """
    check_options(config)
    check_gguf(config)
    check_torchrun(config)
    import torch

    threads = torch.get_num_threads()
    try:
        with Status():
            work, lab, settings, shown = _prepare(config, out, overrides)
        with interrupt.Raising():
            return int(work(lab, settings, shown))
    except WrongOption as error:  # of the task, which checks its options with the parts
        of_task = re.match(r"\w*", str(error))[0] in config.task  # type: ignore[index]
        said = qualified(reason(error), "task", config.task) if of_task else reason(error)
        raise Refused(f"spec_lab: {said}") from error
    finally:
        torch.set_num_threads(threads)
