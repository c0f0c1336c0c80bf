"""Vocabularies, forests of drafts and the simplest oracle for tests of grammars."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from transformers import AutoTokenizer

from spec_lab.cli.main import zoo
from spec_lab.constrain.engines.grammar import Grammar, compiled
from spec_lab.constrain.protocol import ConstraintError, ConstraintState, Masks, allows, unpack, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest

END, A, B, AB, C, ONE, TWO, QUOTE, E1, E2, E = range(11)
TOKENS = [b"<end>", b"a", b"b", b"ab", b"c", b"1", b"2", b'"', b"\xc3", b"\xa9", b"\xc3\xa9"]
TOKENS += [bytes([byte]) for byte in b" ,:{}[]0xyz+()ntrufesl"]


@cache
def toy() -> Vocabulary:
    """A few tokens, among them half a character and two ways to write 'ab' and 'é'."""
    return Vocabulary.plain(TOKENS, END)


@cache
def bundled(padding: int = 0) -> Vocabulary:
    """The bundled target's 4096 tokens, of which 0 ends a text, and padding."""
    tokenizer = AutoTokenizer.from_pretrained(zoo("target"))
    size = len(tokenizer) + padding
    return Vocabulary(size, (0,), from_tokenizer(tokenizer, n_vocab=size, eos_token=[0]))


def request(constraint: str = "", tokens: Sequence[int] = (1,), name: str = "one") -> Request:
    return Request(0, name, tuple(tokens), constraint=constraint)


def allowed(state: ConstraintState) -> np.ndarray:
    """The allowed tokens."""
    return np.flatnonzero(unpack(state.mask(), state.vocabulary))


def after(grammar: Grammar, tokens: Sequence[int], constraint: str = "") -> ConstraintState:
    """A state that has only ever been advanced."""
    state = grammar.start(request(constraint))
    for token in tokens:
        state.advance(token)
    return state


def prefix(grammar: Grammar, rng: np.random.Generator, most: int) -> list[int]:
    """A random beginning of a text, without its end."""
    state, tokens = grammar.start(request()), []
    for _ in range(int(rng.integers(0, most + 1))):
        words = np.setdiff1d(allowed(state), grammar.tokens.ends)
        if not len(words):
            break
        tokens.append(int(rng.choice(words)))
        state.advance(tokens[-1])
    return tokens


def wood(rng: np.random.Generator, roots: int, most: int) -> Shape:
    """A random forest: chains, or trees whose nodes stand in any order."""
    if rng.random() < 0.4:
        return forest(tuple(chain(int(length)) for length in rng.integers(0, most // roots + 2, roots)))
    count = int(rng.integers(0, most + 1))
    return Shape(roots, np.array([rng.integers(0, roots + node) for node in range(count)], dtype=np.int64))


def drafted(states: Sequence[ConstraintState | None], shape: Shape, rng: np.random.Generator, size: int) -> np.ndarray:
    """Tokens for a forest: mostly legal ones, some stop tokens, repeated siblings, and tokens outside the
    vocabulary."""
    at: list[ConstraintState | None] = list(states)
    token = np.zeros(shape.nodes, dtype=np.int64)
    last: dict[int, int] = {}
    for node, parent in enumerate(shape.parent.tolist()):
        state, kind = at[parent], rng.random()
        words = np.zeros(0) if state is None else allowed(state)
        if kind < 0.15 and parent in last:
            token[node] = last[parent]
        elif kind < 0.85 and len(words):
            token[node] = rng.choice(words[:3] if rng.random() < 0.3 else words)
        else:
            token[node] = rng.integers(0, size)
        last[parent] = int(token[node])
        legal = state is not None and allows(state.mask(), int(token[node]))
        at.append(state.fork() if legal else None)
        if legal:
            at[-1].advance(int(token[node]))
    return token


def by_fresh_matchers(
    grammar: Grammar, prefixes: Sequence[Sequence[int] | None], shape: Shape, token: np.ndarray
) -> Masks:
    """The masks of a forest from bare matchers: for every row a new one, which reads everything before it."""
    vocabulary = grammar.tokens
    source = compiled(grammar.kind, grammar.source, grammar.schema_options)
    bits = np.zeros((shape.rows, width(vocabulary.size)), dtype=np.uint32)
    legal = np.zeros(shape.rows, dtype=bool)
    for row in range(shape.rows):
        begun = prefixes[int(shape.root[row])]
        path = [int(token[node - shape.roots]) for node in shape.path(row)]
        if row >= shape.roots:
            parent = int(shape.parent[row - shape.roots])
            legal[row] = legal[parent] and 0 <= path[-1] < vocabulary.size and allows(bits[parent], path[-1])
        else:
            legal[row] = True
        if not legal[row]:
            continue
        if begun is None:
            bits[row] = np.packbits(np.arange(32 * bits.shape[1]) < vocabulary.size, bitorder="little").view(np.uint32)
            continue
        matcher = LLMatcher(vocabulary.engine, source, log_level=0)
        assert matcher.consume_tokens([*begun, *path])
        fill_next_token_bitmask(matcher, bits.view(np.int32), row)
        if matcher.is_error():
            if not matcher.get_error().startswith("NoExtensionBias"):
                raise ConstraintError(matcher.get_error())
            bits[row] = 0
    return Masks(bits, legal, np.zeros(shape.rows, dtype=bool))


def same(masks: Masks, other: Masks) -> bool:
    parts = ("bits", "legal", "barrier")
    return all(np.array_equal(getattr(masks, part), getattr(other, part)) for part in parts)
