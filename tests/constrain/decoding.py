"""Simulated decoding: states that live over many steps, drafts below them, every mask against a new matcher's."""

from collections.abc import Callable, Sequence

import numpy as np

from spec_lab.constrain.engines.grammar import Grammar
from spec_lab.constrain.protocol import ConstraintError, ConstraintState, Masks, allows, unpack
from spec_lab.core.shape import Shape
from tests.constrain.parts import after, allowed, by_fresh_matchers, request, wood

STRUCTURE = frozenset('{}[]()":,;=+*')

MasksOf = Callable[[Sequence[ConstraintState | None], Shape, np.ndarray], Masks]


def closed(properties: dict, optional: tuple[str, ...] = ()) -> dict:
    """A schema of objects with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
LINKED_LIST = {
    "$defs": {"t": closed({"v": DIGIT, "n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}})},
    "$ref": "#/$defs/t",
}
TREE = {
    "$defs": {"t": closed({"k": {"enum": ["leaf", "node"]}, "c": {"type": "array", "items": {"$ref": "#/$defs/t"}}})},
    "$ref": "#/$defs/t",
}
NESTED_ARRAYS = {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": DIGIT}}}


def likely(words: np.ndarray, spelled: list[bytes], rng: np.random.Generator) -> int:
    """One of these tokens, with a preference for structure: uniform draws lead into long strings and white space."""
    if rng.random() < 0.5:
        structure = [word for word in words.tolist() if STRUCTURE & set(spelled[word].decode("utf-8", "replace"))]
        words = np.array(structure) if structure else words
    groups = {spelled[word][:1]: word for word in rng.permutation(words).tolist()}  # one token for each first byte
    return int(rng.choice(list(groups.values())))


def drafted(states: Sequence[ConstraintState], shape: Shape, rng: np.random.Generator, grammar: Grammar) -> np.ndarray:
    """Tokens for a forest, one in ten illegal; ``states`` are only forked."""
    ends, at = list(grammar.tokens.ends), [state.fork() for state in states]
    token = np.zeros(shape.nodes, dtype=np.int64)
    for node, parent in enumerate(shape.parent.tolist()):
        above = at[parent]
        words = np.zeros(0, dtype=np.int64) if above is None else allowed(above)
        if rng.random() < 0.97 and len(others := np.setdiff1d(words, ends)):
            words = others
        legal = len(words) > 0 and rng.random() < 0.9
        token[node] = likely(words, grammar.tokens.bytes, rng) if legal else rng.integers(0, grammar.vocabulary)
        legal = above is not None and allows(above.mask(), int(token[node]))
        at.append(above.fork() if legal else None)
        if legal:
            at[-1].advance(int(token[node]))
    return token


def by_new_states(grammar: Grammar, texts: Sequence[Sequence[int]], shape: Shape, token: np.ndarray) -> Masks:
    """The masks of a forest, each from a new state that reads everything before it."""
    states = [after(grammar, text) for text in texts]
    bits = np.stack([state.mask() for state in states] + [np.zeros_like(states[0].mask())] * shape.nodes)
    legal = np.array([True] * len(texts) + [False] * shape.nodes)
    for row, parent in enumerate(shape.parent.tolist(), start=len(texts)):
        legal[row] = legal[parent] and allows(bits[parent], int(token[row - len(texts)]))
        if legal[row]:
            path = [int(token[node - len(texts)]) for node in shape.path(row)]
            bits[row] = after(grammar, [*texts[int(shape.root[row])], *path]).mask()
    return Masks(bits, legal, np.zeros(shape.rows, dtype=bool))


def wrong_rows(
    grammar: Grammar,
    rng: np.random.Generator,
    rows: int,
    steps: int = 40,
    masks: MasksOf | None = None,
    fresh_masks: Callable[..., Masks] = by_fresh_matchers,
) -> list[str]:
    """The texts after which a draft's mask differs from that of a new matcher that has read only these tokens.

    Args:
        grammar: with a source of its own.
        rng: random choices.
        rows: least number of compared rows.
        steps: most steps of a state; in each step it drafts, and part of a path is committed.
        masks: in place of the grammar's own.
        fresh_masks: the masks to compare with.
    """
    masks, spelled, ends = masks or grammar.masks, grammar.tokens.bytes, set(grammar.tokens.ends)
    seen, wrong = 0, []
    while seen < rows:
        roots = int(rng.integers(1, 4))
        states = [grammar.start(request()) for _ in range(roots)]
        plain = [grammar.start(request()) for _ in range(roots)]  # these never draft
        texts: list[list[int]] = [[] for _ in range(roots)]
        for _ in range(steps):
            shape = wood(rng, len(states), 12 * len(states))
            token = drafted(plain, shape, rng, grammar)
            row_masks, fresh = masks(states, shape, token), fresh_masks(grammar, texts, shape, token)
            seen += shape.rows
            paths = [[int(token[node - shape.roots]) for node in shape.path(row)] for row in range(shape.rows)]
            for row in np.flatnonzero(
                (row_masks.bits != fresh.bits).any(-1) | (row_masks.legal != fresh.legal)
            ).tolist():
                text = texts[int(shape.root[row])] + paths[row]
                wrong.append(repr(b"".join(spelled[token] for token in text)))
            alive = []
            for root in range(len(states)):
                row = int(rng.choice(np.flatnonzero(fresh.legal & (shape.root == root))))
                words = np.setdiff1d(np.flatnonzero(unpack(fresh.bits[row], grammar.vocabulary)), list(ends))
                if ends & set(paths[row]) or not len(words):
                    continue
                committed = [*paths[row], likely(words, spelled, rng)]
                try:
                    for accepted in committed:
                        plain[root].advance(accepted)
                        states[root].advance(accepted)
                except ConstraintError as error:
                    wrong.append(str(error))
                    continue
                texts[root] += committed
                alive.append(root)
            if not alive:
                break
            states, plain, texts = ([some[root] for root in alive] for some in (states, plain, texts))
    return wrong
