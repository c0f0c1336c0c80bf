r"""Constraints by grammar, compiled by xgrammar: an optional engine, fast on trees, slow to compile.

xgrammar says on stderr what it ignores in a source, and goes on. Sources that it would misread are refused here, so
that a text which it lets through is a text of the source, with two exceptions. It reads ``\d``, ``\w`` and ``\s`` as
ASCII, and no-break spaces as white. In JSON strings, and for ``\D``, ``\W`` and ``\S`` within a class, it lets some
bytes through that are no UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import xgrammar

from spec_lab.constrain.engines.dialect import check_exact, either, pattern_for
from spec_lab.constrain.engines.source import MOST_THREADS, as_text, missing, read_source, shown
from spec_lab.constrain.protocol import ConstraintError, Masks, full_mask, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.draft import Shape
from spec_lab.core.options import one_of, whole
from spec_lab.engine.request import Request

KINDS = ("regex", "json_schema", "choice")

CHARACTERS = 100_000
"""Longest source."""

CACHE = 1 << 28
"""Bytes of compiled sources that a constraint keeps."""


class XGrammarState:
    """What a grammar knows after one path of tokens.

    Args:
        matcher: the engine's state, owned by this one.
        vocabulary: V.
        everything: ``[W]`` the mask that allows all tokens, and no padding.
        request: its name, for messages.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: int, everything: np.ndarray, request: str) -> None:
        self.matcher, self.vocabulary, self.everything, self.request = matcher, vocabulary, everything, request
        self.ended: bool = matcher.is_terminated()
        self._mask: np.ndarray | None = None

    def fork(self) -> XGrammarState:
        """An independent copy."""
        other = XGrammarState(self.matcher.fork(), self.vocabulary, self.everything, self.request)
        other._mask = self._mask
        return other

    def advance(self, token: int) -> None:
        """``token`` comes next.

        Raises:
            ConstraintError: the mask does not allow it.
        """
        if self.ended or not 0 <= token < self.vocabulary or not self.matcher.accept_token(int(token)):
            raise ConstraintError(f"request '{self.request}': token {token} may not come next")
        self.ended, self._mask = self.matcher.is_terminated(), None

    def mask(self) -> np.ndarray:  # [W] uint32
        """What may come next; not to be written to. Nothing after the end."""
        if self._mask is None:
            mask = np.zeros((1, len(self.everything)), dtype=np.int32)
            if not self.ended and not self.matcher.fill_next_token_bitmask(mask):
                mask[0] = -1  # where all may come the engine may leave the row as it was
            self._mask = mask[0].view(np.uint32) & self.everything  # it sets bits beyond the vocabulary
            self._mask.flags.writeable = False
        return self._mask

    def action(self) -> None:
        """None: a grammar only says what may come."""
        return None


@dataclass(frozen=True, eq=False)
class XGrammar:
    """A constraint that follows a grammar, from the text's first token to the end token.

    Args:
        tokens: the vocabulary.
        kind: "regex", "json_schema" or "choice".
        source: the pattern, the schema as JSON, or the choices as a JSON list; None: each request brings its own. One
            that a request brings always goes before.
        prompt: the text begins with the request's prompt, in which tokens without bytes count for nothing.
        schema_options: of the engine's ``compile_json_schema``.
        lenient: let the engine ignore what it does not know of in a schema, instead of refusing it.
        threads: to compile with, at most 64.

    Raises:
        ValueError: the source does not compile, would be misread, or no text follows it; an option out of range.
    """

    tokens: Vocabulary
    kind: str
    source: str | None = None
    prompt: bool = False
    schema_options: Mapping[str, Any] = field(default_factory=dict)
    lenient: bool = False
    threads: int = 1

    has_actions = False

    def __post_init__(self) -> None:
        one_of("constraint.kind", self.kind, KINDS)
        whole("constraint.threads", self.threads, most=MOST_THREADS)
        for name, value in (("prompt", self.prompt), ("lenient", self.lenient)):
            if not isinstance(value, bool):
                raise ValueError(f"constraint.{name} must be true or false, not {value!r}")
        if self.source is not None:
            try:
                self._matcher(self.source)
            except ValueError as error:
                raise ValueError(f"constraint.{self.kind}: {error}") from None

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
        """What a record should keep: the source itself where it is short, its hash where it is not."""
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
        """The state where the request's output begins.

        Raises:
            ConstraintError: the request's own source does not compile, or it has none and the constraint neither; its
                prompt does not follow the grammar.
        """
        own = request.constraint or self.source
        if own is None:
            raise missing(self.kind, request)
        try:
            matcher = self._matcher(own)
        except ValueError as error:
            raise ConstraintError(f"request '{request.name}': its {self.kind}: {error}") from None
        if self.prompt:
            text = b"".join(self.tokens.bytes[token] for token in request.tokens)
            if text and not matcher.accept_string(text):
                ending = text.decode("utf-8", "replace")[-60:]
                raise ConstraintError(
                    f"request '{request.name}': the constrained text cannot begin with its prompt, {ending!r}"
                )
        return XGrammarState(matcher, self.vocabulary, self._everything, request.name)

    def masks(self, states: Sequence[XGrammarState | None], shape: Shape, token: np.ndarray) -> Masks:
        """``masks_by_forking`` of states that this constraint started, each tree walked by the engine."""
        bits = np.zeros((shape.rows, width(self.vocabulary)), dtype=np.uint32)
        known = (token >= 0) & (token < self.vocabulary)
        token = np.where(known, token, 0)
        for head, (state, tree) in enumerate(zip(states, _trees(shape), strict=True)):
            if state is None:
                bits[tree.rows] = self._everything
            elif state.ended or len(tree.rows) == 1:
                bits[head] = state.mask()
            else:
                own = bits if shape.roots == 1 else np.zeros((len(tree.rows), bits.shape[1]), dtype=np.uint32)
                tokens = np.concatenate([[0], token[tree.rows[1:] - shape.roots]])  # the head's is not looked at
                state.matcher.fork().traverse_draft_tree(tree.child, tree.sibling, tokens, own.view(np.int32))
                if own is not bits:
                    bits[tree.rows] = own
        bits &= self._everything
        fits = known & (bits[shape.parent, token >> 5] >> (token & 31).astype(np.uint32) & 1).astype(bool)
        legal = [True] * shape.roots
        for parent, fit in zip(shape.parent.tolist(), fits.tolist(), strict=True):
            legal.append(fit and legal[parent])
        bits[~np.array(legal)] = 0
        return Masks(bits, np.array(legal), np.zeros(shape.rows, dtype=bool))

    @cached_property
    def _everything(self) -> np.ndarray:  # [W]
        return full_mask(self.vocabulary)

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            self.tokens.bytes,  # one without bytes is special to the engine, which never allows it
            xgrammar.VocabType.RAW,
            vocab_size=self.vocabulary,
            stop_token_ids=list(self.tokens.ends),
        )
        return xgrammar.GrammarCompiler(info, max_threads=self.threads, cache_limit_bytes=CACHE)

    def _matcher(self, source: str) -> xgrammar.GrammarMatcher:
        """A new engine at the beginning of the text; its compiler keeps what it has compiled."""
        if len(source) > CHARACTERS:
            raise ValueError(f"the source has {len(source)} characters, the limit is {CHARACTERS}: shorten it")
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
            raise ValueError(f"character {error.start} of the source is half a surrogate pair: no text") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from None
        except RecursionError:
            raise ValueError("not JSON that can be read: it is nested too deeply") from None
        except RuntimeError as error:
            raise ValueError(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()[:300]) from None
        matcher = xgrammar.GrammarMatcher(compiled)
        if not XGrammarState(matcher, self.vocabulary, self._everything, "").mask().any():
            raise ValueError("the tokens of this vocabulary spell no text that follows it")
        return matcher


@dataclass(frozen=True)
class _Tree:
    """One tree of a forest as the engine wants it.

    Args:
        rows: ``[n]`` of the forest, the head first.
        child: ``[n]`` each one's first child, by its place among ``rows``; -1 for none.
        sibling: ``[n]`` each one's next sibling.
    """

    rows: np.ndarray  # [n]
    child: np.ndarray  # [n]
    sibling: np.ndarray  # [n]


@lru_cache(maxsize=256)
def _trees(shape: Shape) -> list[_Tree]:
    found = []
    for rows in shape.trees:
        place = {int(row): at for at, row in enumerate(rows)}
        child, sibling = np.full(len(rows), -1, dtype=np.int64), np.full(len(rows), -1, dtype=np.int64)
        for row, at in place.items():
            below = [place[int(one)] for one in shape.children[row]]
            child[at] = below[0] if below else -1
            sibling[below[:-1]] = below[1:]
        found.append(_Tree(rows, child, sibling))
    return found


def regex(vocabulary: Vocabulary, pattern: str = "", prompt: bool = False, threads: int = 1) -> XGrammar:
    """All of the text matches ``pattern``, in the syntax that Python and Rust's regex crate share.

    Without a pattern each request brings its own; so it is with the other kinds. See ``XGrammar`` for the options.
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
    """The text is JSON of a schema, its properties in the order of the schema.

    Args:
        vocabulary: see ``XGrammar``, as of the options not named here.
        schema: the schema, or
        path: the file it stands in.
        whitespace_flexible: white space may stand wherever JSON allows it inside the text; False: nowhere.
        strict: no properties and items but those the schema speaks of; False: others too, and these may name a property
            again.

    Raises:
        ValueError: both schema and path; a file that cannot be read; otherwise as ``XGrammar``.
    """
    for name, value in (("whitespace_flexible", whitespace_flexible), ("strict", strict)):
        if not isinstance(value, bool):
            raise ValueError(f"constraint.{name} must be true or false, not {value!r}")
    given = json.dumps(dict(schema)) if isinstance(schema, Mapping) else schema
    found = as_text("schema", read_source("schema", given or None, path))
    options = {"any_whitespace": whitespace_flexible, "strict_mode": strict, "separators": (",", ":")}
    return XGrammar(vocabulary, "json_schema", found or None, prompt, options, lenient, threads)


def choice(vocabulary: Vocabulary, choices: Sequence[str] = (), prompt: bool = False, threads: int = 1) -> XGrammar:
    """The text is one of ``choices``, to the letter."""
    listed = json.dumps(list(choices), ensure_ascii=False) if choices else None
    return XGrammar(vocabulary, "choice", listed, prompt, threads=threads)


def lark(vocabulary: Vocabulary, grammar: str = "", path: str | None = None, prompt: bool = False) -> XGrammar:
    """Not here.

    Raises:
        ValueError: always; says which engine reads Lark.
    """
    raise ValueError("constraint.engine=xgrammar takes no Lark grammar: use engine=llguidance")
