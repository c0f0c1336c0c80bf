"""Constraints from scalar options, as configs give them, and what the text options of a run add to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from spec_lab.constrain.applied import AppliedConstraint
from spec_lab.constrain.banned import Banned
from spec_lab.constrain.control import Controlled
from spec_lab.constrain.engines import grammar
from spec_lab.constrain.healing import Healing
from spec_lab.constrain.lengths import AtLeast
from spec_lab.constrain.protocol import Constraint
from spec_lab.constrain.together import Together
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import brief, one_of, strings, whole

ENGINES = ("llguidance", "xgrammar")


def none(vocabulary: Vocabulary) -> None:
    """Nothing binds."""


def regex(
    vocabulary: Vocabulary, pattern: str = "", prompt: bool = False, engine: str = "llguidance", **options: Any
) -> Constraint:
    """The output matches a regular expression as a whole.

    Args:
        vocabulary: the target's.
        pattern: the expression; empty where every prompt brings its own.
        prompt: whether the matched text begins with the prompt.
        engine: "llguidance", or "xgrammar", an optional extra.
        options: of the engine, such as llguidance's ``threads`` and ``limits``.

    Raises:
        ValueError: an expression that cannot be compiled, an unknown engine.
    """
    return _compile(engine, "regex", vocabulary, pattern or None, prompt=prompt, **options)


def json_schema(
    vocabulary: Vocabulary,
    schema: str | Mapping[str, Any] | None = None,
    path: str | None = None,
    prompt: bool = False,
    engine: str = "llguidance",
    lines: bool = False,
    **options: Any,
) -> Constraint:
    """The output is JSON that fits a schema.

    Args:
        vocabulary: the target's.
        schema: the schema; empty where every prompt brings its own, or
        path: the file it stands in, a regular file of at most 16 MiB.
        prompt: as in ``regex``.
        engine: as in ``regex``.
        lines: also allow JSON Lines: after the first value, further values of the schema, each on one line, and a last
            line feed. Requires the engine llguidance.
        options: of the engine, such as llguidance's ``whitespace_flexible``, ``threads`` and ``limits``. With
            ``lines``, those of white space and separators apply to the first value only.

    Raises:
        ValueError: a schema that is none or cannot be compiled, an unknown engine, ``lines`` with another engine.
        OSError: no such file.
    """
    if not isinstance(lines, bool):
        raise ValueError(f"constraint.lines must be true or false, not {brief(lines)}")
    if lines and engine != "llguidance":
        raise ValueError(f"constraint.lines=true requires constraint.engine=llguidance, not {engine!r}")
    text = schema if isinstance(schema, str) or schema is None else json.dumps(schema)
    if lines:
        options["lines"] = True
    return _compile(engine, "json_schema", vocabulary, text or None, path=path, prompt=prompt, **options)


def lark(
    vocabulary: Vocabulary,
    grammar: str = "",
    path: str | None = None,
    prompt: bool = False,
    engine: str = "llguidance",
    **options: Any,
) -> Constraint:
    """The output follows a context-free grammar in Lark's syntax. Arguments and errors as in ``json_schema``."""
    return _compile(engine, "lark", vocabulary, grammar or None, path=path, prompt=prompt, **options)


def choice(
    vocabulary: Vocabulary,
    choices: Sequence[str] = (),
    prompt: bool = False,
    engine: str = "llguidance",
    **options: Any,
) -> Constraint:
    """The output is one of some texts. Arguments and errors as in ``regex``."""
    source = strings("constraint.choices", choices) or None
    return _compile(engine, "choice", vocabulary, source, prompt=prompt, **options)


def controller(vocabulary: Vocabulary, make: str, options: Mapping[str, Any] | None = None) -> Constraint:
    """The output is steered by a controller of one's own.

    Args:
        vocabulary: the target's.
        make: dotted name of a function that, given the vocabulary and the options, returns a constraint
            (``Controlled``), or what makes a controller for each request.
        options: for it.

    Raises:
        ValueError: nothing of that name.
    """
    module, _, name = make.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"constraint.make={make} names nothing that can be imported: {error}") from error
    try:
        made: Any = found(vocabulary, **(options or {}))
    except TypeError as error:
        raise ValueError(f"constraint.make={make} cannot be called with (vocabulary, **options): {error}") from error
    return made if hasattr(made, "start") else Controlled(made, vocabulary.size, name)


def together(
    constraint: Constraint | None,
    vocabulary: Vocabulary | None,
    options: Mapping[str, Any],
    healing: bool = False,
    banned: Sequence[str] = (),
    at_least: int = 0,
) -> AppliedConstraint | None:
    """What binds a run: the constraint, and what its text options add; None where nothing does.

    Args:
        constraint: None for none.
        vocabulary: the target's; may be None where nothing binds.
        options: of ``AppliedConstraint``: placement and the like.
        healing: whether prompts are healed.
        banned: strings that never appear.
        at_least: tokens before a text may end.

    Raises:
        ValueError: see ``AppliedConstraint`` and ``Together``; options of the wrong kind.
    """
    parts = [] if constraint is None else [constraint]
    whole("min_new_tokens", at_least, 0)
    strings("banned_strings", banned)
    if healing or banned or at_least:
        if vocabulary is None:
            raise ValueError(
                "token_healing, banned_strings and min_new_tokens need a target whose tokens' bytes are known"
            )
        parts += [Healing(vocabulary.bytes)] if healing else []
        parts += [Banned(tuple(banned), vocabulary.bytes)] if banned else []
        parts += [AtLeast(at_least, vocabulary.size)] if at_least else []
    if not parts:
        return None
    if healing and constraint is not None and not getattr(constraint, "prompt", False):
        raise ValueError(
            f"token_healing=true lets the output begin with the prompt's last bytes, which '{constraint.name}' does "
            "not expect: set token_healing=false, or constraint.prompt=true where it has that option"
        )
    if len(parts) > (constraint is not None) and options.get("placement", "both") not in ("target", "both"):
        raise ValueError(
            "token_healing, banned_strings and min_new_tokens bind the output, which "
            f"constraint.placement={options['placement']} leaves alone: set it to target or both, or leave them out"
        )
    return AppliedConstraint(parts[0] if len(parts) == 1 else Together(parts), **options)


def _compile(engine: str, kind: str, vocabulary: Vocabulary, source: Any, **options: Any) -> Constraint:
    """``source`` by an engine.

    Raises:
        ValueError: an unknown engine, an option it does not know, a source that does not compile.
    """
    load = getattr(_engine(engine), kind)
    unknown = sorted(options.keys() - signature(load).parameters.keys())
    if unknown:
        raise ValueError(f"constraint.{unknown[0]} is no option of {kind} with the engine {engine}")
    made: Constraint = load(vocabulary, source, **options)
    return made


def _engine(name: str) -> ModuleType:
    if one_of("constraint.engine", name, ENGINES) == "llguidance":
        return grammar
    try:
        import_module("xgrammar")
    except ImportError as error:
        raise ValueError(
            f"constraint.engine=xgrammar needs the extra of that name: pip install 'spec-lab[xgrammar]' ({error})"
        ) from error
    return import_module("spec_lab.constrain.engines.xgrammar")
