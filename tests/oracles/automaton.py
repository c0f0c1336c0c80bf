"""A grammar engine in plain Python, the oracle of the package's engines: a language as an automaton over bytes.

It reads a subset of regular expressions, choices, JSON schemas and Lark grammars. It never forces a token: a token is
allowed if its bytes can be completed to a text of the language, in any tokenization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from spec_lab.constrain.engines.source import read_source, shown
from spec_lab.constrain.protocol import ConstraintError, mask_of
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import one_of, whole
from spec_lab.core.request import Request
from tests.oracles import languages
from tests.oracles.nfa import STATES, Language

KEPT = 10_000
"""Most states of a deterministic automaton that are kept, unless the caller says otherwise."""

Set = frozenset[int]
"""A state of the deterministic automaton: a set of states of the language's own, closed and never empty."""


class Trie:
    """The tokens of a vocabulary by their bytes. Node 0 is the root; tokens without bytes are left out.

    ``children[node]`` lists (byte, node); ``tokens[node]`` are those whose bytes lead there.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        found: list[dict[int, int]] = [{}]
        self.tokens: list[list[int]] = [[]]
        for token, data in enumerate(tokens):
            node = 0
            for byte in data:
                if byte not in found[node]:
                    found[node][byte] = len(found)
                    found.append({})
                    self.tokens.append([])
                node = found[node][byte]
            if data:
                self.tokens[node].append(token)
        self.children = [tuple(node.items()) for node in found]


class _Full(Exception):
    """One mask needs more states than may be kept."""


class Reader:
    """A language made deterministic as far as it is read, and the masks of a vocabulary in it.

    Everything kept can be computed again. When ``limit`` states are kept they are dropped, so that whether a text can
    continue never depends on what else has been read.

    Args:
        language: what is read.
        vocabulary: its tokens.
        trie: of the vocabulary.
        limit: most states kept.
    """

    def __init__(self, language: Language, vocabulary: Vocabulary, trie: Trie, limit: int) -> None:
        self.language, self.vocabulary, self.trie, self.limit = language, vocabulary, trie, limit
        self.start = language.closure(frozenset([0]))
        self.rows: dict[Set, list[Set | None]] = {}
        self.masks: dict[Set, np.ndarray] = {}
        self.sets: dict[Set, Set] = {}  # so that equal states are one object

    def run(self, at: Set, data: bytes) -> Set | None:
        """The state after these bytes; None where no text continues so."""
        for byte in data:
            to = (self.rows.get(at) or self.language.row(at))[byte]
            if to is None:
                return None
            at = to
        return at

    def mask(self, at: Set) -> np.ndarray:  # [W]
        """The allowed tokens.

        Raises:
            _Full: this mask alone needs more states than may be kept.
        """
        if at not in self.masks:
            try:
                found = self._allowed(at)
            except _Full:
                for kept in (self.rows, self.masks, self.sets):
                    kept.clear()
                found = self._allowed(at)
            mask = mask_of(found, self.vocabulary.size)
            mask.flags.writeable = False
            self.masks[at] = mask
        return self.masks[at]

    def _allowed(self, at: Set) -> list[int]:
        children, tokens, rows = self.trie.children, self.trie.tokens, self.rows
        found = list(self.vocabulary.ends) if self.language.accept in at else []
        ahead = [(0, at)]
        while ahead:
            node, here = ahead.pop()
            row = rows.get(here) or self._row(here)
            for byte, child in children[node]:
                to = row[byte]
                if to is not None:
                    found += tokens[child]
                    if children[child]:
                        ahead.append((child, to))
        return found

    def _row(self, at: Set) -> list[Set | None]:
        row = self.language.row(at)
        one = {to: self.sets.setdefault(to, to) for to in {at, *row} if to is not None}
        if len(self.sets) > self.limit:
            raise _Full(
                f"one mask of the constraint needs more than {self.limit} states of its automaton; make it simpler, or "
                "use llguidance"
            )
        self.rows[one[at]] = [None if to is None else one[to] for to in row]
        return self.rows[one[at]]


class Walked:
    """The state after one path of tokens.

    Args:
        reader: reads the request's language.
        at: where in it the path has led.
        request: its name, for messages.
        ended: whether the last token ended the text.
    """

    def __init__(self, reader: Reader, at: Set, request: str, ended: bool = False) -> None:
        self.reader, self.at, self.request, self.ended = reader, at, request, ended

    def fork(self) -> Walked:
        """An independent copy."""
        return Walked(self.reader, self.at, self.request, self.ended)

    def advance(self, token: int) -> None:
        """Append ``token``, which the mask allows.

        Raises:
            ConstraintError: the mask does not allow it.
        """
        reader = self.reader
        data = reader.vocabulary.bytes[token]
        to = reader.run(self.at, data) if data and not self.ended else None
        ends = token in reader.vocabulary.ends and reader.language.accept in self.at and not self.ended
        if to is None and not ends:
            raise ConstraintError(f"request '{self.request}': token {token} ({data!r}) may not come next")
        self.at, self.ended = to or self.at, ends

    def mask(self) -> np.ndarray:  # [W]
        """The allowed tokens, read-only: none after the end, and none where no token fits.

        Raises:
            ConstraintError: the mask needs more states than may be kept.
        """
        try:
            return mask_of([], self.reader.vocabulary.size) if self.ended else self.reader.mask(self.at)
        except _Full as error:
            raise ConstraintError(f"request '{self.request}': {error}") from None

    def action(self) -> None:
        """None: a language only masks."""
        return None


class Automaton:
    """Constrains requests to the texts of a language. See ``Constraint``.

    Args:
        kind: "regex", "choice", "json_schema" or "lark": how sources are read.
        source: that of all requests without one of their own; empty where each brings its own.
        tokens: the target's vocabulary.
        prompt: the constrained text begins with the request's prompt, in which tokens without bytes count for nothing.
        states: most states of a language's own automaton.
        kept: most states kept of each made deterministic.

    Raises:
        ValueError: an option of the wrong type or range, or a source that is not in the subset, with the reason.
    """

    has_actions = False

    def __init__(
        self, kind: str, source: Any, tokens: Vocabulary, prompt: bool = False, states: int = STATES, kept: int = KEPT
    ) -> None:
        self.read = KINDS[one_of("constraint.kind", kind, tuple(KINDS))]
        if not isinstance(prompt, bool):
            raise ValueError(f"constraint.prompt must be true or false, not {prompt!r}")
        self.kind, self.tokens, self.prompt = kind, tokens, prompt
        self.states, self.kept = whole("constraint.states", states), whole("constraint.kept", kept)
        self.name = kind
        self.vocabulary = tokens.size
        self.trie = Trie(tokens.bytes)
        self.source = source or None
        self.reader = self._reader(source) if source else None
        self.own: WeakValueDictionary[str, Reader] = WeakValueDictionary()  # of sources of live requests

    def start(self, request: Request) -> Walked:
        """See ``Constraint``."""
        reader = self.reader
        try:
            if request.constraint:
                reader = self.own.get(request.constraint) or self._reader(request.constraint)
                self.own[request.constraint] = reader
        except ValueError as error:
            raise ConstraintError(f"request '{request.name}': {error}") from error
        if reader is None:
            raise ConstraintError(f"request '{request.name}' has no {self.kind} of its own")
        at: Set | None = reader.start
        if self.prompt:
            at = reader.run(reader.start, b"".join(self.tokens.bytes[token] for token in request.tokens))
        if at is None:
            raise ConstraintError(f"request '{request.name}': the constrained text cannot begin with its prompt")
        return Walked(reader, at, request.name)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the manifest."""
        size = None if self.reader is None else self.reader.language.size
        return {
            "engine": "automaton",
            "kind": self.kind,
            **shown(self.source),
            "prompt": self.prompt,
            "automaton_states": size,
        }

    def _reader(self, source: Any) -> Reader:
        return Reader(self.read(source, self.states), self.tokens, self.trie, self.kept)


KINDS: dict[str, Callable[[Any, int], Language]] = {
    "regex": languages.regex,
    "choice": languages.choice,
    "json_schema": languages.json_schema,
    "lark": languages.lark,
}


def regex(vocabulary: Vocabulary, pattern: str | None = None, prompt: bool = False) -> Automaton:
    """Texts that match a whole pattern; see ``languages.regex``. Without one each request brings its own.

    Raises:
        ValueError: the pattern is not in the subset, with the reason.
    """
    return Automaton("regex", pattern, vocabulary, prompt)


def choice(vocabulary: Vocabulary, choices: str | Sequence[str] | None = None, prompt: bool = False) -> Automaton:
    """Exactly these texts; as one string, a JSON list of them. Without any each request brings its own.

    Raises:
        ValueError: no texts, or too many.
    """
    return Automaton("choice", choices, vocabulary, prompt)


def json_schema(
    vocabulary: Vocabulary,
    schema: str | Mapping[str, Any] | None = None,
    path: str | None = None,
    prompt: bool = False,
    whitespace_flexible: bool = False,
) -> Automaton:
    """JSON texts without whitespace that satisfy a schema, or the one in a file; see ``languages.json_schema``.

    Raises:
        ValueError: the schema is not in the subset; whitespace is requested; with the reason.
    """
    if whitespace_flexible:
        raise ValueError("constraint.whitespace_flexible must be false: the automaton knows no whitespace")
    return Automaton("json_schema", read_source("schema", schema or None, path), vocabulary, prompt)


def lark(
    vocabulary: Vocabulary, grammar: str | None = None, path: str | None = None, prompt: bool = False
) -> Automaton:
    """Texts of a grammar whose rules are not recursive, or of the one in a file; ``languages.lark`` says which.

    Raises:
        ValueError: the grammar is not in the subset, with the reason.
    """
    return Automaton("lark", read_source("grammar", grammar or None, path), vocabulary, prompt)
