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
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar

from spec_lab.batch import Request
from spec_lab.constrain.state import Masks, Stuck, everything, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.draft import Shape
from spec_lab.options import one_of, whole

KINDS = ("regex", "json_schema", "choice")

CHARACTERS = 100_000
"""Longest source."""

CACHE = 1 << 28
"""Bytes of compiled sources that a constraint keeps."""


class Followed:
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

    def fork(self) -> Followed:
        """An independent copy."""
        other = Followed(self.matcher.fork(), self.vocabulary, self.everything, self.request)
        other._mask = self._mask
        return other

    def advance(self, token: int) -> None:
        """``token`` comes next.

        Raises:
            Stuck: the mask does not allow it.
        """
        if self.ended or not 0 <= token < self.vocabulary or not self.matcher.accept_token(int(token)):
            raise Stuck(f"request '{self.request}': token {token} may not come next")
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
        threads: to compile with.

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

    acts = False

    def __post_init__(self) -> None:
        one_of("constraint.kind", self.kind, KINDS)
        whole("constraint.threads", self.threads)
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
        source: dict[str, Any] = {"source": self.source}
        if self.source is not None and len(self.source) > 200:
            source = {"source_sha256": sha256(self.source.encode()).hexdigest()}
        return {
            "engine": "xgrammar",
            "version": version("xgrammar"),
            "kind": self.kind,
            **source,
            "prompt": self.prompt,
            "schema_options": dict(self.schema_options),
            "lenient": self.lenient,
        }

    def start(self, request: Request) -> Followed:
        """The state where the request's output begins.

        Raises:
            Stuck: the request's own source does not compile; it brings none where it must; its prompt does not follow
                the grammar.
        """
        source = request.constraint or self.source
        if source is None:
            raise Stuck(f"request '{request.name}' brings no {self.kind} of its own, and the constraint has none")
        try:
            matcher = self._matcher(source)
        except ValueError as error:
            raise Stuck(f"request '{request.name}': its {self.kind}: {error}") from None
        if self.prompt:
            text = b"".join(self.tokens.bytes[token] for token in request.tokens)
            if text and not matcher.accept_string(text):
                ending = text.decode("utf-8", "replace")[-60:]
                raise Stuck(f"request '{request.name}': the constrained text cannot begin with its prompt, {ending!r}")
        return Followed(matcher, self.vocabulary, self._everything, request.name)

    def masks(self, states: Sequence[Followed | None], shape: Shape, token: np.ndarray) -> Masks:
        """``by_forks`` of states that this constraint started, each tree walked by the engine."""
        bits = np.zeros((shape.rows, width(self.vocabulary)), dtype=np.uint32)
        known = (token >= 0) & (token < self.vocabulary)
        token = np.where(known, token, 0)
        for head, (state, tree) in enumerate(zip(states, _trees(shape), strict=True)):
            if state is None:
                bits[tree.rows] = self._everything
            elif state.ended or len(tree.rows) == 1:
                bits[head] = state.mask()
            else:
                own = bits if shape.heads == 1 else np.zeros((len(tree.rows), bits.shape[1]), dtype=np.uint32)
                tokens = np.concatenate([[0], token[tree.rows[1:] - shape.heads]])  # the head's is not looked at
                state.matcher.fork().traverse_draft_tree(tree.child, tree.sibling, tokens, own.view(np.int32))
                if own is not bits:
                    bits[tree.rows] = own
        bits &= self._everything
        fits = known & (bits[shape.parent, token >> 5] >> (token & 31).astype(np.uint32) & 1).astype(bool)
        legal = [True] * shape.heads
        for parent, fit in zip(shape.parent.tolist(), fits.tolist(), strict=True):
            legal.append(fit and legal[parent])
        bits[~np.array(legal)] = 0
        return Masks(bits, np.array(legal), np.zeros(shape.rows, dtype=bool))

    @cached_property
    def _everything(self) -> np.ndarray:  # [W]
        return everything(self.vocabulary)

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
                compiled = self._compiler.compile_regex(_pattern(source))
            elif self.kind == "choice":
                compiled = self._compiler.compile_grammar(_either(json.loads(source)))
            else:
                if not self.lenient:
                    _exact(json.loads(source))
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
        if not Followed(matcher, self.vocabulary, self._everything, "").mask().any():
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


_PIECE = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|\[\^?|\(\?:?|\{[0-9,]*\d{7}|&&|--|~~|.", re.DOTALL
)

_HALVES = r"\U0000d800-\U0000dfff"
_NEGATED = {".": r"\n", r"\D": r"\d", r"\W": r"\w", r"\S": r"\s"}


def _pattern(pattern: str, quoted: bool = False) -> str:
    """The pattern in words that the engine reads as Python and Rust do.

    Its own dot takes line feeds too, and all that it negates outside of a class takes halves of surrogate pairs.

    Args:
        pattern: a regular expression.
        quoted: it stands for the inside of a JSON string, where the engine escapes nothing.

    Raises:
        ValueError: it would be misread; names the character.
    """
    given, opened = [], -1  # where the class began that is open
    for match in _PIECE.finditer(pattern):
        piece, at = match[0], match.start()
        code, inside, first, bad = piece[1:2], opened >= 0, at == opened, False
        if piece[0] == "\\":
            if code in "xuU" and len(piece) > 2:  # the engine goes on for up to eight hexadecimal digits
                piece = f"\\U{int(piece[2:], 16):08x}"
            else:
                bad = code.isalnum() and code not in "dDwWsSnrtvf"
            bad = bad or (first and pattern[at - 1] == "[" and piece in ("\\^", "\\U0000005e"))
            bad = bad or (quoted and code in '\\"nrtvfxuU')
        elif inside:
            bad = piece[0] == "[" or piece in ("&&", "--", "~~") or (piece == "]" and first)
            opened = -1 if piece == "]" else opened
        elif piece[0] == "[":
            opened = match.end()
            piece += _HALVES if piece == "[^" and not quoted else ""
        else:
            bad = (piece == "^" and at > 0) or (piece == "$" and match.end() < len(pattern))
            bad = bad or piece == "(?" or (piece[0] == "{" and len(piece) > 1)
        if bad or (quoted and (piece == '"' or piece < " ")):
            where = " in a schema" if quoted else ""
            raise ValueError(f"xgrammar would misread {match[0]!r} at character {at} of {pattern[:60]!r}{where}")
        if not quoted and not inside and piece in _NEGATED:
            piece = f"[^{_NEGATED[piece]}{_HALVES}]"
        given.append(piece)
    return "".join(given)


def _either(choices: Any) -> str:
    """A grammar of these strings and no others.

    Raises:
        ValueError: not a list of one or more strings.
    """
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ValueError(f"choices must be a list of one or more strings, not {str(choices)[:60]}")
    spelt = ("".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in one) for one in choices)
    return "root ::= " + " | ".join(f'"{one}"' for one in spelt)


_BESIDE = set("$comment $defs $id $schema default definitions deprecated description examples readOnly title".split())
_BOUNDS = set("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_KEYWORDS: Mapping[str, set[str]] = {
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS,
    "string": {"pattern", "format"},  # lengths let raw control characters in
    "array": set("items prefixItems minItems maxItems".split()),
    "object": set("properties required additionalProperties minProperties maxProperties".split()),
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _exact(schema: Any, where: str = "#") -> None:
    """Check that the engine takes a schema for what it says; that it is a schema the engine checks itself.

    Raises:
        ValueError: it would misread a part; names it.
    """
    if not isinstance(schema, dict):
        return
    keys = set(schema) - _BESIDE
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else list(types)
    alone = next((key for key in ("$ref", "enum", "const", "anyOf", "allOf") if key in keys), "")
    known = {alone} if alone else {"type"}.union(*(_KEYWORDS.get(kind, set()) for kind in types))
    if alone in ("enum", "const"):
        values = schema["enum"] if alone == "enum" else [schema["const"]]
        found = {_TYPES.get(type(value), "null") for value in values}
        known |= {"type"} if not found - {*types, *(["integer"] if "number" in types else [])} else set()
    elif alone == "$ref":
        known -= set() if str(schema["$ref"]).startswith("#") else {"$ref"}
    elif alone == "allOf":
        known -= set() if len(schema["allOf"]) == 1 else {"allOf"}
    elif not keys - known:
        known -= {"required"} if set(schema.get("required", [])) - set(schema.get("properties", {})) else set()
        others = schema.get("additionalProperties", False) is not False and schema.get("properties")
        known -= {"additionalProperties"} if others else set()  # they may spell a property's name in escapes
        known -= {"format"} if "pattern" in keys else set()
        known -= {"multipleOf"} if keys & _BOUNDS else set()
    if keys - known:
        raise ValueError(
            f"xgrammar would misread {', '.join(sorted(keys - known))} at {where} of the schema: write it in another "
            "way, use engine=llguidance, or let it with lenient=true"
        )
    if "pattern" in keys:
        _pattern(schema["pattern"], quoted=True)
    for key in keys & {"anyOf", "allOf", "prefixItems"}:
        for place, one in enumerate(schema[key]):
            _exact(one, f"{where}/{key}/{place}")
    for key in keys & {"items", "additionalProperties"}:
        _exact(schema[key], f"{where}/{key}")
    for key in set(schema) & {"properties", "$defs", "definitions"}:
        for name, one in schema[key].items():
            _exact(one, f"{where}/{key}/{name}")


def regex(vocabulary: Vocabulary, pattern: str = "", prompt: bool = False, threads: int = 1) -> XGrammar:
    """All of the text matches ``pattern``, in the syntax that Python and Rust's regex crate share.

    Without a pattern each request brings its own; so it is with the other kinds. See ``XGrammar`` for the options.
    """
    return XGrammar(vocabulary, "regex", _text("pattern", pattern), prompt, threads=threads)


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
    source = json.dumps(dict(schema)) if isinstance(schema, Mapping) else schema
    if source and path is not None:
        raise ValueError("give constraint.schema or constraint.path, not both")
    if path is not None:
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"constraint.path={path} cannot be read: {error}") from None
    options = {"any_whitespace": whitespace_flexible, "strict_mode": strict, "separators": (",", ":")}
    return XGrammar(vocabulary, "json_schema", _text("schema", source), prompt, options, lenient, threads)


def choice(vocabulary: Vocabulary, choices: Sequence[str] = (), prompt: bool = False, threads: int = 1) -> XGrammar:
    """The text is one of ``choices``, to the letter."""
    source = json.dumps(list(choices), ensure_ascii=False) if choices else None
    return XGrammar(vocabulary, "choice", source, prompt, threads=threads)


def lark(vocabulary: Vocabulary, grammar: str = "", path: str | None = None, prompt: bool = False) -> XGrammar:
    """Not here.

    Raises:
        ValueError: always; says which engine reads Lark.
    """
    raise ValueError(
        "constraint.engine=xgrammar takes no Lark grammar: use engine=llguidance, or engine=automaton for small ones"
    )


def _text(name: str, text: Any) -> str | None:
    if text is not None and not isinstance(text, str):
        raise ValueError(f"constraint.{name} must be text, not {text!r}: put it in quotes")
    return text or None
