r"""Grammars compiled by xgrammar: an optional engine that is fast on draft trees and slow to compile.

xgrammar prints on stderr which parts of a source it ignores, and continues. Sources that it would misread are refused
here, so that every text it allows matches the source, with two exceptions. It reads ``\d``, ``\w`` and ``\s`` as ASCII,
and no-break spaces as white space. In JSON strings, and for ``\D``, ``\W`` and ``\S`` within a class, it allows some
bytes that are not UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
import xgrammar

from spec_lab.constrain.engines.dialect import check_exact, either, pattern_for
from spec_lab.constrain.engines.source import MAX_THREADS, as_text, matcher_of, read_source, shown
from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, Masks, full_mask, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import OneOf, Whole, WrongOption, check_fields
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape

KINDS = ("regex", "json_schema", "choice")

MAX_CHARACTERS = 100_000
"""Maximum length of a source."""

CACHE = 1 << 28
"""Bytes of compiled sources that a constraint caches."""


class XGrammarState(ConstraintState):
    """A grammar's state after the tokens of one sequence. See ``ConstraintState``.

    Args:
        matcher: the engine's state; not shared.
        vocabulary: V.
        every_token: ``[W]`` the mask that allows all tokens but padding.
        request: its name, for messages.
    """

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, vocabulary: int, every_token: np.ndarray, request: str
    ) -> None:
        self.matcher, self.vocabulary, self.every_token, self.request = matcher, vocabulary, every_token, request
        self.ended: bool = matcher.is_terminated()
        self._mask: np.ndarray | None = None

    def fork(self) -> XGrammarState:
        """See ``ConstraintState``."""
        other = XGrammarState(self.matcher.fork(), self.vocabulary, self.every_token, self.request)
        other._mask = self._mask
        return other

    def advance(self, token: int) -> None:
        """Consume ``token``.

        Raises:
            ConstraintError: the mask does not allow it.
        """
        if self.ended or not 0 <= token < self.vocabulary or not self.matcher.accept_token(int(token)):
            raise ConstraintError(f"request '{self.request}': token {token} is not allowed next")
        self.ended, self._mask = self.matcher.is_terminated(), None

    def mask(self) -> np.ndarray:  # [W] uint32
        """Return the allowed tokens; a read-only array. After the end no token is allowed."""
        if self._mask is None:
            mask = np.zeros((1, len(self.every_token)), dtype=np.int32)
            if not self.ended and not self.matcher.fill_next_token_bitmask(mask):
                mask[0] = -1  # where every token is allowed, the engine may leave the row unchanged
            self._mask = mask[0].view(np.uint32) & self.every_token  # it sets bits beyond the vocabulary
            self._mask.flags.writeable = False
        return self._mask


@dataclass(frozen=True, eq=False)
class XGrammar(Constraint):
    """A constraint by a grammar, from the text's first token to the end token.

    Args:
        kind: "regex", "json_schema" or "choice".
        source: the pattern, the schema as JSON, or the choices as a JSON list; None: each request brings its own. A
            source that a request brings takes precedence.
        prompt: the text begins with the request's prompt, in which tokens without bytes are ignored.
        schema_options: of the engine's ``compile_json_schema``.
        lenient: let the engine ignore parts of a schema that it does not support, instead of refusing the schema.
        threads: to compile with, at most 64.

    Raises:
        ValueError: the source does not compile, would be misread, or matches no text; an option out of range.
    """

    tokens: Vocabulary
    kind: Annotated[str, OneOf(KINDS)]
    source: str | None = None
    prompt: bool = False
    schema_options: Mapping[str, Any] = field(default_factory=dict)
    lenient: bool = False
    threads: Annotated[int, Whole(1, MAX_THREADS)] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.source is not None:
            try:
                self._matcher(self.source)
            except ValueError as error:
                raise WrongOption(f"{self.kind}: {error}") from None

    @property
    def name(self) -> str:
        """Engine and kind."""
        return f"xgrammar_{self.kind}"

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.tokens.size

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``. The source itself if it is short, otherwise its hash."""
        return {
            "engine": "xgrammar",
            "version": version("xgrammar"),
            "kind": self.kind,
            **shown(self.source),
            "prompt": self.prompt,
            "schema_options": dict(self.schema_options),
            "lenient": self.lenient,
        }

    def start(self, request: Request) -> XGrammarState:
        """Return the state after the prompt.

        Raises:
            ConstraintError: the request's own source does not compile, or it has none and the constraint neither; its
                prompt does not follow the grammar.
        """
        matcher = matcher_of(self.kind, self.source, request, self._matcher)
        if self.prompt:
            text = b"".join(self.tokens.bytes[token] for token in request.tokens)
            if text and not matcher.accept_string(text):
                ending = text.decode("utf-8", "replace")[-60:]
                raise ConstraintError(
                    f"request '{request.name}': the constrained text cannot begin with its prompt, {ending!r}"
                )
        return XGrammarState(matcher, self.vocabulary, self._every_token, request.name)

    def masks(self, states: Sequence[XGrammarState | None], shape: Shape, token: np.ndarray) -> Masks:
        """See ``Constraint``. The engine traverses each tree."""
        bits = np.zeros((shape.rows, width(self.vocabulary)), dtype=np.uint32)
        known = (token >= 0) & (token < self.vocabulary)
        token = np.where(known, token, 0)
        for root, (state, tree) in enumerate(zip(states, _trees(shape), strict=True)):
            if state is None:
                bits[tree.rows] = self._every_token
            elif state.ended or len(tree.rows) == 1:
                bits[root] = state.mask()
            else:
                tree_bits = bits if shape.roots == 1 else np.zeros((len(tree.rows), bits.shape[1]), dtype=np.uint32)
                tokens = np.concatenate([[0], token[tree.rows[1:] - shape.roots]])  # the root's is not read
                state.matcher.fork().traverse_draft_tree(tree.child, tree.sibling, tokens, tree_bits.view(np.int32))
                if tree_bits is not bits:
                    bits[tree.rows] = tree_bits
        bits &= self._every_token
        fits = known & (bits[shape.parent, token >> 5] >> (token & 31).astype(np.uint32) & 1).astype(bool)
        legal = [True] * shape.roots
        for parent, fit in zip(shape.parent.tolist(), fits.tolist(), strict=True):
            legal.append(fit and legal[parent])
        bits[~np.array(legal)] = 0
        return Masks(bits, np.array(legal), np.zeros(shape.rows, dtype=bool))

    @cached_property
    def _every_token(self) -> np.ndarray:  # [W]
        return full_mask(self.vocabulary)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            self.tokens.bytes,  # the engine never allows tokens without bytes
            xgrammar.VocabType.RAW,
            vocab_size=self.vocabulary,
            stop_token_ids=list(self.tokens.ends),
        )
        return xgrammar.GrammarCompiler(info, max_threads=self.threads, cache_limit_bytes=CACHE)

    def _matcher(self, source: str) -> xgrammar.GrammarMatcher:
        """Return a new matcher at the beginning of the text; the compiler caches what it compiles."""
        if len(source) > MAX_CHARACTERS:
            raise ValueError(f"the source has {len(source)} characters, the limit is {MAX_CHARACTERS}: shorten it")
        try:
            source.encode()
            if self.kind == "regex":
                compiled = self._compiler.compile_regex(pattern_for(source))
            elif self.kind == "choice":
                compiled = self._compiler.compile_grammar(either(json.loads(source)))
            else:
                if not self.lenient:
                    check_exact(json.loads(source))
                compiled = self._compiler.compile_json_schema(source, **self.schema_options)
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the source is half of a surrogate pair") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
        except RecursionError:
            raise ValueError("not readable JSON: it is nested too deeply") from None
        except RuntimeError as error:
            raise ValueError(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()[:300]) from None
        matcher = xgrammar.GrammarMatcher(compiled)
        if not XGrammarState(matcher, self.vocabulary, self._every_token, "").mask().any():
            raise ValueError("no text in the tokens of this vocabulary matches it")
        return matcher


@dataclass(frozen=True)
class _TreeRows:
    """One tree of a forest in the engine's form.

    Args:
        rows: ``[n]`` of the forest, the root first.
        child: ``[n]`` the index in ``rows`` of each row's first child; -1 for none.
        sibling: ``[n]`` the index in ``rows`` of each row's next sibling; -1 for none.
    """

    rows: np.ndarray  # [n]
    child: np.ndarray  # [n]
    sibling: np.ndarray  # [n]


def _trees(shape: Shape) -> list[_TreeRows]:
    """Return the trees of a forest in the engine's form."""
    node = np.argsort(shape.parent, kind="stable")  # grouped by parent, siblings in drawing order
    row, parent = node + shape.roots, shape.parent[node]
    same = parent[1:] == parent[:-1]
    child, sibling = np.full((2, shape.rows), -1, dtype=np.int64)
    sibling[row[:-1][same]] = row[1:][same]
    first = np.concatenate([np.ones(min(1, len(row)), dtype=bool), ~same])
    child[parent[first]] = row[first]
    index = np.append(shape.places + 1, -1)  # of each row within its tree; last, of the row -1
    return [_TreeRows(rows, index[child[rows]], index[sibling[rows]]) for rows in shape.trees]


def regex(vocabulary: Vocabulary, pattern: str = "", prompt: bool = False, threads: int = 1) -> XGrammar:
    """The whole text matches ``pattern``, in the syntax that Python and Rust's regex crate share.

    Without a pattern each request brings its own; the same holds for the other kinds. See ``XGrammar`` for the options.
    """
    return XGrammar(vocabulary, "regex", as_text("pattern", pattern) or None, prompt, threads=threads)


def json_schema(
    vocabulary: Vocabulary,
    schema: str | Mapping[str, Any] = "",
    path: str | None = None,
    prompt: bool = False,
    whitespace_flexible: bool = True,
    strict: bool = True,
    lenient: bool = False,
    threads: int = 1,
) -> XGrammar:
    """The text is JSON that fits a schema, with its properties in the order of the schema.

    Args:
        vocabulary: see ``XGrammar``, also for the options that are not described here.
        schema: the schema.
        path: a file that holds the schema instead.
        whitespace_flexible: white space is allowed wherever JSON allows it inside the text; False: nowhere.
        strict: only properties and items that the schema names; False: others too, and these may repeat a property.

    Raises:
        ValueError: both schema and path; a file that cannot be read; otherwise as ``XGrammar``.
    """
    for name, value in (("whitespace_flexible", whitespace_flexible), ("strict", strict)):
        if not isinstance(value, bool):
            raise WrongOption(f"{name} must be true or false, not {value!r}")
    given = json.dumps(dict(schema)) if isinstance(schema, Mapping) else schema
    source = as_text("schema", read_source("schema", given or None, path))
    options = {"any_whitespace": whitespace_flexible, "strict_mode": strict, "separators": (",", ":")}
    return XGrammar(vocabulary, "json_schema", source or None, prompt, options, lenient, threads)


def choice(vocabulary: Vocabulary, choices: Sequence[str] = (), prompt: bool = False, threads: int = 1) -> XGrammar:
    """The text is exactly one of ``choices``."""
    listed = json.dumps(list(choices), ensure_ascii=False) if choices else None
    return XGrammar(vocabulary, "choice", listed, prompt, threads=threads)


def lark(vocabulary: Vocabulary, grammar: str = "", path: str | None = None, prompt: bool = False) -> XGrammar:
    """Refuse Lark grammars, which this engine does not support.

    Raises:
        ValueError: always.
    """
    raise WrongOption("engine=xgrammar does not support Lark grammars: use engine=llguidance")
