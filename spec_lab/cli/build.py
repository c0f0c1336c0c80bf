"""From a config to the parts that it names: every refusal is one line that says which option is wrong."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from spec_lab.cli.bundled import conf
from spec_lab.cli.declarations import qualified
from spec_lab.cli.refusals import Refused, fault, reason
from spec_lab.core.faults import causes
from spec_lab.core.options import WrongOption, brief, brief_repr
from spec_lab.core.protocols import Part, WrongValue, check_declared, required

if TYPE_CHECKING:
    from spec_lab.models.target import Target

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
"""Required types of the attributes of each part (``core.protocols.Declared``)."""

NOTHING = ("spec_lab.constrain.load.none", "spec_lab.policy.none")
"""Functions that return no part."""


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
    """Return the function that ``config.task`` names, with its scalar arguments.

    It does the task's work when called with the lab, its settings and the config. Errors as in ``function``.
    """
    return function(config, "task", 3)


def function(config: DictConfig, part: str, arguments: int) -> Any:
    """Return the function that ``config[part]`` names, with its scalar arguments.

    Args:
        arguments: how many others it is called with, by position.

    Raises:
        Refused: there is no such thing; an option that it does not have; names it.
    """
    named = part_config(config, part)
    for key in sorted(OmegaConf.missing_keys(named)):
        raise Refused(f"spec_lab: {key} has no default: give {key}=... on the command line")
    try:
        made = instantiate(named, _partial_=True, _convert_="all")
        inspect.signature(made.func).bind(*[None] * arguments, **made.keywords)
    except (Exception, SystemExit) as error:
        message = fault(error, str(named["_target_"]))
        raise Refused(f"spec_lab: {part}{'.' if message.startswith('_target_=') else ': '}{message}") from error
    return made


def own_metrics(config: DictConfig) -> dict[str, Any]:
    """Return the functions that the entries of ``config.metrics`` name, by the entry's name.

    Raises:
        Refused: as in ``function``; a name that the value of a metric cannot have.
    """
    from spec_lab.analysis.metrics import returned_names

    functions = {str(name): function(config, f"metrics.{name}", 2) for name in config.get("metrics") or {}}
    try:
        returned_names(functions)
    except WrongOption as error:
        raise Refused(f"spec_lab: {reason(error)}") from error
    return functions


def build(config: DictConfig, part: str, group: str = "", **live: Any) -> Any:
    """Call what ``config[part]`` names with its scalar arguments and with those live objects that its signature names.

    Live objects go in by call: Hydra would turn those that are dataclasses into configs. The ``parts`` of a hybrid are
    built first. The ``inner`` proposer of another is loaded by it, for the target that it passes; its inner
    ``verifier`` is built first.

    Args:
        group: names its contract; empty: the first word of ``part``.

    Raises:
        Refused: what went wrong, with the part where it did; if a file is at fault, with the part's path.
    """
    named = part_config(config, part)
    configured: dict[str, Any] = {}
    if OmegaConf.is_dict(named.get("parts")):  # of a hybrid, which are built first
        configured["parts"] = build_each(config, f"{part}.parts", **live)
        named = without(named, "parts")
    if OmegaConf.is_dict(named.get("inner")):

        def inner(target: Target) -> Any:
            return build(config, f"{part}.inner", target=target)

        configured |= {"inner": inner, "verifier": build(config, f"{part}.verifier", "verifier")}
        named = without(named, "inner", "verifier")
    with_policy = part.partition(".")[0] in ("proposer", "arms") and "policy" in named
    if with_policy:
        named = without(named, "policy")
    group = group or part.partition(".")[0]
    group = {"arms": "proposer", "verifiers": "verifier"}.get(group, group)
    try:
        factory = instantiate(named, _partial_=True, _convert_="all")
        made = factory(**arguments(factory, live, configured, str(named._target_)))
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


def arguments(
    factory: Callable[..., Any], live: Mapping[str, Any], configured: Mapping[str, Any], target: str
) -> dict[str, Any]:
    """Return the arguments of a factory: ``configured``, and those live objects that its signature names; all where it
    accepts any name, or where its signature is not known.

    Raises:
        TypeError: it requires an argument that is none of them and has no value in its config; names it.
    """
    every = {**live, **configured}
    try:
        named = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return every
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return every
    for name, parameter in named.items():
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if required and name not in every:
            raise TypeError(
                f"_target_={target}: {name} is required and has no value: give it in the YAML file, or a default; live "
                f"objects that can be named are {', '.join(every) or 'none for this part'}"
            )
    return {**{name: value for name, value in live.items() if name in named}, **configured}


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

    The files are those that it was built from before: hub names are not looked up again.

    Raises:
        ValueError: a value that it cannot have; names the option.
    """
    from spec_lab.models.hub import cached_folder

    other = deepcopy(config)
    with open_dict(other):
        path, revision = other.proposer.get("path"), other.proposer.get("revision")
        if isinstance(path, str) and (folder := cached_folder(path, revision)) != path:
            other.proposer.path, other.proposer.revision = folder, None
        for name, value in options.items():
            other.proposer[name] = value
    try:
        return build(other, "proposer", target=target)
    except Refused as error:
        raise ValueError(str(error).removeprefix("spec_lab: ")) from error


def build_mode(config: DictConfig, target: Any, mode: Any) -> Any:
    """Build the proposer of a mode, under its policy.

    Args:
        config: of the run; options that refer to others are resolved in it.
        mode: a ``tasks.recommend.modes.SpeculativeMode``.

    Raises:
        ValueError: it cannot be built, for this target or at all; says why.
    """
    other = mode_config(config, mode)
    try:
        return under_policy(other, "policy", build(other, "proposer", target=target), target=target)
    except (Refused, WrongOption) as error:
        raise ValueError(str(error).removeprefix("spec_lab: ")) from error


def mode_config(config: DictConfig, mode: Any) -> DictConfig:
    """Return the config of a run with the proposer and the policy of a mode. Arguments as in ``build_mode``.

    Raises:
        ValueError: there is no such proposer or policy, or an option that has no default is left out.
    """
    other = deepcopy(config)
    options = dict(mode.options)
    chosen = {slot: dict(part) for slot, part in options.pop("parts", {}).items()}
    with open_dict(other):
        other.proposer = _option("proposer", mode.proposer, options)
        other.policy = _option("policy", mode.policy, mode.policy_options)
        if chosen:
            other.proposer.parts = {
                slot: _option("proposer", part.pop("proposer"), part) for slot, part in chosen.items()
            }
    for part in ("proposer", "policy"):
        for key in sorted(OmegaConf.missing_keys(other[part])):
            raise ValueError(f"{part}.{key} has no default: name it with the drafter")
    return other


def _option(group: str, name: str, options: Mapping[str, Any]) -> DictConfig:
    """Return the config of a file of ``conf/`` with other values of its options."""
    file = Path(conf(), group, f"{name}.yaml")
    if not file.is_file():
        names = ", ".join(sorted(each.stem for each in file.parent.glob("*.yaml")))
        raise ValueError(f"{name} is not an option of conf/{group}; the options are {names}")
    read: Any = OmegaConf.load(file)
    read.pop("defaults", None)
    return OmegaConf.merge(read, dict(options))  # type: ignore[return-value]


def apply_constraint(
    config: DictConfig, settings: Any, target: Any, known: Callable[[], Any] | None = None
) -> tuple[Any, Any]:
    """Build the applied constraint and the bytes of the target's tokens; None where the run needs none.

    ``config.constraint`` holds a constraint's own options and those of ``AppliedConstraint``.

    Args:
        known: returns the vocabulary; None: the target's.

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
        vocabulary = (known() if known else Vocabulary.of(target)) if needed else None
        constraint = build(OmegaConf.create({"constraint": further}), "constraint", vocabulary=vocabulary)
        applied = combine(constraint, vocabulary, options, **text)
        if vocabulary is not None:
            return applied, vocabulary.bytes
        return applied, text_bytes(target) if settings.stop_strings and target is not None else None
    except WrongOption as error:
        raise Refused(f"spec_lab: {qualified(reason(error), 'constraint', named)}") from error
    except ValueError as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


def option_names(made: type) -> list[str]:
    """The names of a dataclass's options, without the parts it is given."""
    return [field.name for field in fields(made) if field.name != "constraint"]


def build_each(config: DictConfig, group: str, **live: Any) -> dict[str, Any]:
    """Build the part that each entry of ``config[group]`` names, by the entry's name; an absent or null group has none.

    Raises:
        Refused: as in ``build``; the group is no mapping.
    """
    named = OmegaConf.select(config, group)
    if named is not None and not OmegaConf.is_dict(named):
        raise Refused(
            f"spec_lab: {group} must be a mapping of names to what is measured, such as {{}}, not {brief(named)}"
        )
    return {name: build(config, f"{group}.{name}", **live) for name in named or {}}
