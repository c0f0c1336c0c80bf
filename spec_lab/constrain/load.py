"""Build constraints from the scalar options of configs, and combine them with the text options of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Literal

from spec_lab.constrain.applied import AppliedConstraint
from spec_lab.constrain.banned import Banned
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.control import ControllerConstraint
from spec_lab.constrain.engines import grammar
from spec_lab.constrain.healing import Healing
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.protocol import Constraint
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.faults import described, location
from spec_lab.core.options import Texts, WrongOption, brief_repr, checked

EngineName = Literal["llguidance", "xgrammar"]


def none(vocabulary: Vocabulary) -> None:
    """Return no constraint."""


@checked
def regex(
    vocabulary: Vocabulary, pattern: str = "", prompt: bool = False, engine: EngineName = "llguidance", **options: Any
) -> Constraint:
    """The output matches a regular expression as a whole.

    Args:
        vocabulary: the target's.
        pattern: a regular expression; empty: each prompt has its own, in its field constraint.
        prompt: whether the matched text begins with the prompt.
        engine: llguidance or xgrammar (an extra).
        options: of the engine, such as llguidance's ``threads`` and ``limits``.

    Raises:
        ValueError: the expression cannot be compiled; an unknown engine or option.
    """
    return _compile(engine, "regex", vocabulary, pattern or None, prompt=prompt, **options)


@checked
def json_schema(
    vocabulary: Vocabulary,
    schema: str | Mapping[str, Any] | None = None,
    path: str | None = None,
    prompt: bool = False,
    engine: EngineName = "llguidance",
    lines: bool = False,
    **options: Any,
) -> Constraint:
    """The output is JSON that fits a schema.

    Args:
        vocabulary: the target's.
        schema: a JSON schema; empty: that of path.
        path: file with the schema; None, and no schema: each prompt has its own, in its field constraint.
        prompt: whether the JSON begins with the prompt.
        engine: llguidance or xgrammar (an extra).
        lines: also JSON Lines: further values of the schema, each on one line.
        options: of the engine, such as llguidance's ``whitespace_flexible``, ``threads`` and ``limits``. With
            ``lines``, options of white space and separators apply to the first value only.

    Raises:
        ValueError: the schema is invalid or cannot be compiled; the file cannot be read; an unknown engine or option;
            ``lines`` with another engine than llguidance.
    """
    if lines and engine != "llguidance":
        raise WrongOption(f"lines=true requires engine=llguidance, not {engine!r}")
    text = schema if isinstance(schema, str) or schema is None else json.dumps(schema)
    if lines:
        options["lines"] = True
    return _compile(engine, "json_schema", vocabulary, text or None, path=path, prompt=prompt, **options)


@checked
def lark(
    vocabulary: Vocabulary,
    grammar: str | None = "",
    path: str | None = None,
    prompt: bool = False,
    engine: Literal["llguidance"] = "llguidance",
    **options: Any,
) -> Constraint:
    """The output follows a context-free grammar in Lark's syntax. Arguments and errors as in ``json_schema``.

    Args:
        grammar: a grammar; empty: that of path.
        path: file with the grammar; None, and no grammar: each prompt has its own, in its field constraint.
        prompt: whether the text begins with the prompt.
        engine: llguidance, the only engine that reads Lark grammars.
    """
    return _compile(engine, "lark", vocabulary, grammar or None, path=path, prompt=prompt, **options)


@checked
def choice(
    vocabulary: Vocabulary,
    choices: Texts = (),
    prompt: bool = False,
    engine: EngineName = "llguidance",
    **options: Any,
) -> Constraint:
    """The output is one of the texts ``choices``. Arguments and errors as in ``regex``.

    Args:
        choices: the texts; empty: each prompt has its own, as a JSON list in its field constraint.
        prompt: whether the texts begin with the prompt.
        engine: llguidance or xgrammar (an extra).
    """
    source = tuple(choices) or None
    return _compile(engine, "choice", vocabulary, source, prompt=prompt, **options)


@checked
def controller(vocabulary: Vocabulary, make: str, options: Mapping[str, Any] | None = None) -> Constraint:
    """The output is steered by a controller of the user's.

    Args:
        vocabulary: the target's.
        make: dotted name of a function of (vocabulary, **options).
        options: its options, such as {choices: [a, b]}.

    Raises:
        ValueError: the name cannot be imported, the function raised an error, or returned something else.
    """
    module, _, name = make.rpartition(".")
    try:
        function = resolve_name(f"{module}:{name}")
    except (Exception, SystemExit) as error:
        message = str(error) if isinstance(error, ImportError | AttributeError) else described(error)
        raise WrongOption(f"make={make} cannot be imported: {message}{location(error, module, skip=1)}") from error
    try:
        made: Any = function(vocabulary, **(options or {}))
    except (Exception, SystemExit) as error:
        where = location(error, module, skip=1)  # of the call itself: it cannot be called so
        message = (
            f"raised {described(error)}{where}" if where else f"cannot be called with (vocabulary, **options): {error}"
        )
        raise WrongOption(f"make={make} {message}") from error
    if not callable(made) and not isinstance(made, Constraint):
        raise WrongOption(
            f"make={make} returned {brief_repr(made)}: it must return a Constraint (derive its class from it), or a "
            "function that makes a controller for each request"
        )
    return made if isinstance(made, Constraint) else ControllerConstraint(made, vocabulary.size, name)


def combine(
    constraint: Constraint | None,
    vocabulary: Vocabulary | None,
    options: Mapping[str, Any],
    healing: bool = False,
    banned: Sequence[str] = (),
    at_least: int = 0,
) -> AppliedConstraint | None:
    """Return a run's constraint together with what its text options add; None where there is none.

    Args:
        constraint: the configured constraint; None for none.
        vocabulary: the target's; may be None where there is no constraint.
        options: of ``AppliedConstraint``, such as placement.
        at_least: number of new tokens before a text may end.

    Raises:
        ValueError: as in ``AppliedConstraint`` and ``Combined``; an invalid option.
    """
    parts = [] if constraint is None else [constraint]
    if healing or banned or at_least:
        if vocabulary is None:
            raise ValueError(
                "token_healing, banned_strings and min_new_tokens require a target whose tokens' bytes are known"
            )
        parts += [Healing(vocabulary.bytes)] if healing else []
        parts += [Banned(tuple(banned), vocabulary.bytes)] if banned else []
        parts += [MinNewTokens(at_least, vocabulary.size)] if at_least else []
    if not parts:
        return None
    if healing and constraint is not None and not constraint.prompt:
        raise ValueError(
            f"token_healing=true makes the output begin with the prompt's last bytes, which '{constraint.name}' does "
            "not allow: set token_healing=false, or constraint.prompt=true if it has that option"
        )
    if len(parts) > (constraint is not None) and options.get("placement", "both") not in ("target", "both"):
        raise ValueError(
            "token_healing, banned_strings and min_new_tokens constrain the output, which "
            f"constraint.placement={options['placement']} does not: set it to target or both, or leave them out"
        )
    return AppliedConstraint(parts[0] if len(parts) == 1 else Combined(parts), **options)


def _compile(engine: str, kind: str, vocabulary: Vocabulary, source: Any, **options: Any) -> Constraint:
    """Return a constraint of a kind, compiled from ``source`` by an engine."""
    load = vars(_engine(engine))[kind]
    unknown = sorted(options.keys() - signature(load).parameters.keys())
    if unknown:
        raise WrongOption(f"{unknown[0]} is not an option of {kind} with engine={engine}")
    made: Constraint = load(vocabulary, source, **options)
    return made


def _engine(name: str) -> ModuleType:
    if name == "llguidance":
        return grammar
    try:
        import_module("xgrammar")
    except ImportError as error:
        raise WrongOption(f"engine=xgrammar requires an extra: pip install 'spec-lab[xgrammar]' ({error})") from error
    return import_module("spec_lab.constrain.engines.xgrammar")
