"""Constraints by grammar, compiled by llguidance: a regex, a JSON schema, a Lark grammar or a list of choices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from spec_lab.constrain.engines.source import MAX_THREADS, as_text, check_numbers, matcher_of, read_source, shown
from spec_lab.constrain.engines.tree_masks import DEAD_END, GrammarState, brief, masks
from spec_lab.constrain.protocol import Constraint, ConstraintError, Masks, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import Count, OneOf, Whole, WrongOption, check_fields, one_of
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape

KINDS = ("regex", "json_schema", "lark", "choice")

LIMITS = {
    "source_characters": 100_000,
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
"""Limits of a grammar: the length of its source, and llguidance's ``LLParserLimits`` for compiling and each step."""


@dataclass(frozen=True, eq=False)
class Grammar(Constraint):
    """A constraint by a grammar, from the text's first token to the end token.

    The mask allows the end token wherever the text may end.

    Args:
        kind: "regex", "json_schema", "lark" or "choice".
        source: the pattern, the schema as JSON, the grammar, or the choices as a JSON list; None: each request brings
            its own. A source that a request brings takes precedence.
        prompt: the text begins with the request's prompt, instead of after it.
        schema_options: llguidance's ``JsonCompileOptions`` for schemas.
        limits: values that replace some of ``LIMITS``.
        threads: at most 64; with more than one, the masks of several chains are computed in parallel.

    Raises:
        ValueError: the source does not compile, or no text matches it; an option out of range. Names the option.
    """

    tokens: Vocabulary
    kind: Annotated[str, OneOf(KINDS)]
    source: str | None = None
    prompt: bool = False
    schema_options: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Count] = field(default_factory=dict)
    threads: Annotated[int, Whole(1, MAX_THREADS)] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.limits:
            one_of("a name in limits", name, tuple(LIMITS))
        if self.tokens.engine.vocab_size != self.tokens.size:
            raise ValueError(
                f"the vocabulary has {self.tokens.size} tokens, its engine {self.tokens.engine.vocab_size}: "
                "build the engine with as many tokens as the target has logits"
            )
        if self.source is not None:
            try:
                self._matcher(self.source)
            except ValueError as error:
                raise WrongOption(f"{self.kind}: {error}") from None

    @property
    def name(self) -> str:
        """The kind."""
        return self.kind

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.tokens.size

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``. The source itself if it is short, otherwise its hash."""
        return {
            "kind": self.kind,
            **shown(self.source),
            "prompt": self.prompt,
            "schema_options": dict(self.schema_options),
            "limits": self._limits,
        }

    def start(self, request: Request) -> GrammarState:
        """Return the state after the prompt. Each request has a matcher of its own.

        Raises:
            ConstraintError: the request's own source does not compile, or it has none and the constraint neither; its
                prompt does not follow the grammar.
        """
        matcher = matcher_of(self.kind, self.source, request, self._matcher)
        if self.prompt:
            self._read(matcher, request)
        return GrammarState(matcher, self.vocabulary, request.name)

    def masks(self, states: Sequence[GrammarState | None], shape: Shape, token: np.ndarray) -> Masks:
        """See ``Constraint``. Tokens of V or more are illegal."""
        return masks(states, shape, token, self.vocabulary, frozenset(self.tokens.ends), self._pool)

    @cached_property
    def _pool(self) -> LLExecutor | None:
        return LLExecutor(self.threads) if self.threads > 1 else None

    @cached_property
    def _limits(self) -> dict[str, int]:
        return LIMITS | dict(self.limits)

    def _matcher(self, source: str) -> LLMatcher:
        """Return a new matcher at the beginning of the text."""
        limits = dict(self._limits)
        longest = limits.pop("source_characters")
        if len(source) > longest:
            raise ValueError(
                f"the source has {len(source)} characters, the limit is {longest}: shorten it, or raise "
                "constraint.limits.source_characters"
            )
        grammar = compiled(self.kind, source, self.schema_options)
        bounds = LLParserLimits(**limits)  # type: ignore[arg-type]
        matcher = LLMatcher(self.tokens.engine, grammar, log_level=0, limits=bounds)
        if matcher.is_error():
            raise ValueError(brief(matcher.get_error()))
        mask = np.zeros(width(self.vocabulary), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            error = matcher.get_error()
            if error.startswith(DEAD_END):
                raise ValueError("no text in the tokens of this vocabulary matches it")
            raise ValueError(brief(error))
        return matcher

    def _read(self, matcher: LLMatcher, request: Request) -> None:
        """Consume the prompt, however it is split into tokens."""
        trial = matcher.deep_copy()  # it stops where the prompt leaves the grammar
        fit = trial.try_consume_tokens(list(request.tokens))
        if trial.is_error() or (fit == len(request.tokens) and not matcher.consume_tokens(list(request.tokens))):
            raise ConstraintError(
                f"request '{request.name}': its prompt: {brief(trial.get_error() or matcher.get_error())}"
            )
        if fit < len(request.tokens):
            text = self.tokens.engine.decode_bytes(list(request.tokens[: fit + 1])).decode("utf-8", "replace")
            raise ConstraintError(
                f"request '{request.name}': its prompt leaves the grammar at token {fit} of {len(request.tokens)}, at "
                f"the end of {text[-60:]!r}"
            )


def compiled(kind: str, source: str, schema_options: Mapping[str, Any]) -> str:
    """Return the source in the engine's own form. The engine finds most errors only when a matcher is made.

    Raises:
        ValueError: the source is not of this kind.
    """
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the source is half of a surrogate pair") from None
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(source)
    try:
        value = json.loads(source)
        if kind == "json_schema":
            check_numbers(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not readable JSON: it is nested too deeply") from None
    if kind == "choice":
        return LLMatcher.grammar_from_regex(_either(value))
    if value is False:
        raise ValueError("the schema false matches no text")
    if value is True:  # the engine applies its options to schemas that are objects only
        source, value = "{}", {}
    elif not isinstance(value, dict):
        raise ValueError(f"a JSON schema must be an object, true or false, not {source[:40]!r}")
    options = dict(schema_options)
    if options.pop("lines", False):
        return LLMatcher.grammar_from_lark(_json_lines(value, options))
    return LLMatcher.grammar_from_json_schema(source, overrides=options)  # type: ignore[arg-type]


ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options for JSON on one line."""


def _json_lines(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a Lark grammar of one JSON value, or of several as JSON Lines; ``options`` apply to the first value."""
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise ValueError(f"x-guidance in a schema must be an object, not {str(guidance)[:40]!r}")
    inline = {name: value for name, value in options.items() if name != "whitespace_pattern"} | ONE_LINE
    first, further = (json.dumps({**schema, "x-guidance": guidance | added}) for added in (dict(options), inline))
    return f'start: value ("\\n" line)* "\\n"?\nvalue: %json {first}\nline: %json {further}\n'


def _either(choices: Any) -> str:
    """Return a regex of these strings and no others: one lexeme, since grammars of many rules compile slowly."""
    if not isinstance(choices, list) or not choices:
        raise ValueError(f"choices must be a list of one or more strings, not {str(choices)[:40]}")
    for number, text in enumerate(choices):
        if not isinstance(text, str):
            raise ValueError(f"choice {number} is {text!r}, not a string: put it in quotes")
    if len(set(choices)) < len(choices):
        twice = next(text for number, text in enumerate(choices) if text in choices[:number])
        raise ValueError(f"the choice {twice[:60]!r} occurs twice")
    return "|".join(
        "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text) for text in choices
    )


def regex(
    vocabulary: Vocabulary,
    pattern: str | None = None,
    prompt: bool = False,
    limits: Mapping[str, int] | None = None,
    threads: int = 1,
) -> Grammar:
    """The whole text matches ``pattern``, in the syntax of Rust's regex crate.

    Without a pattern each request brings its own; the same holds for the other kinds. See ``Grammar`` for the options.
    """
    return Grammar(vocabulary, "regex", as_text("pattern", pattern), prompt, {}, limits or {}, threads)


def json_schema(
    vocabulary: Vocabulary,
    schema: str | None = None,
    path: str | None = None,
    prompt: bool = False,
    whitespace_flexible: bool = True,
    whitespace_pattern: str | None = None,
    item_separator: str | None = None,
    key_separator: str | None = None,
    lenient: bool = False,
    lines: bool = False,
    limits: Mapping[str, int] | None = None,
    threads: int = 1,
) -> Grammar:
    """The text is JSON that fits a schema, given as JSON or as a file.

    Args:
        vocabulary: see ``Grammar``, also for the options that are not described here.
        whitespace_flexible: white space may stand wherever JSON allows it; False: nowhere.
        whitespace_pattern: a regex of the white space allowed.
        item_separator: a regex between items, otherwise a comma.
        key_separator: a regex between key and value, otherwise a colon.
        lenient: ignore parts of a schema that the engine does not support, instead of refusing the schema.
        lines: allow further values of the schema after the first, each on one line, and a final line feed.

    Raises:
        ValueError: both schema and path; a file that cannot be read; otherwise as ``Grammar``.
    """
    options = {
        "whitespace_flexible": whitespace_flexible,
        "whitespace_pattern": whitespace_pattern,
        "item_separator": item_separator,
        "key_separator": key_separator,
        "lenient": lenient,
        "lines": lines or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    source = as_text("schema", read_source("schema", schema, path))
    return Grammar(vocabulary, "json_schema", source, prompt, given, limits or {}, threads)


def lark(
    vocabulary: Vocabulary,
    grammar: str | None = None,
    path: str | None = None,
    prompt: bool = False,
    limits: Mapping[str, int] | None = None,
    threads: int = 1,
) -> Grammar:
    """The text follows a grammar in llguidance's dialect of Lark, given as text or as a file.

    Raises:
        ValueError: both grammar and path; a file that cannot be read; otherwise as ``Grammar``.
    """
    source = as_text("grammar", read_source("grammar", grammar, path))
    return Grammar(vocabulary, "lark", source, prompt, {}, limits or {}, threads)


def choice(
    vocabulary: Vocabulary,
    choices: Sequence[str] | None = None,
    prompt: bool = False,
    limits: Mapping[str, int] | None = None,
    threads: int = 1,
) -> Grammar:
    """The text is exactly one of ``choices``."""
    source = None if choices is None else json.dumps(list(choices), ensure_ascii=False)
    return Grammar(vocabulary, "choice", source, prompt, {}, limits or {}, threads)
