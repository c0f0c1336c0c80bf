"""The prefixes of valid outputs and their potential, against every text of up to a few tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from spec_lab.constrain import ConstraintError
from spec_lab.constrain.engines.grammar import regex
from spec_lab.constrain.potential import (
    END,
    Potential,
    PotentialState,
    Prefixes,
    TooManyPrefixes,
    explore,
    log_potential,
)
from spec_lab.constrain.protocol import Constraint, allows, unpack
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request
from spec_lab.tasks.certify.instances import PIECES
from spec_lab.tasks.certify.toy_models import RandomToy, code
from tests.constrain.toys import At, Table, uneven

REQUEST = Request(0, "one", (0,))


def words(*texts: tuple[int, ...]) -> Callable[[tuple[int, ...]], list[int]]:
    """Return a function with the tokens that these texts allow after a prefix."""
    return lambda text: sorted({valid[len(text)] for valid in texts if valid[: len(text)] == text and valid != text})


@dataclass(frozen=True)
class Cliffs(Table):
    """A table that raises where nothing is allowed: after advancing by a token, or only when it is asked for a mask."""

    at: str = "mask"

    def start(self, request):
        return Cliff(self, ())


class Cliff(At):
    def fork(self):
        return Cliff(self.table, self.text)

    def advance(self, token):
        super().advance(token)
        self.check("advance")

    def mask(self):
        self.check("mask")
        return super().mask()

    def check(self, at):
        if self.table.at == at and not self.table.allowed(self.text):
            raise ConstraintError("nothing is allowed here")


DEAD_END = words((0, 1, 3), (0, 2, 0), (1, 3), (2, 2, 2, 2, 3), (1, 0, 1))
"""Token 3 ends a text: of the paths two lead nowhere, and another one is longer than four tokens."""

CASES: dict[str, tuple[Constraint, int, int, int]] = {  # V, the token that ends a text, most tokens
    "uneven": (Table(uneven), 4, 3, 4),
    "everything": (Table(lambda _: range(4)), 4, 3, 3),
    "dead ends": (Table(DEAD_END), 4, 3, 4),
    "dead ends that raise": (Cliffs(DEAD_END), 4, 3, 4),
    "tokens that raise": (Cliffs(DEAD_END, at="advance"), 4, 3, 4),
    "a longer limit": (Table(DEAD_END), 4, 3, 5),
    "one token": (Table(lambda text: (0, 3) if text else (1, 3)), 4, 3, 1),
    "regex": (regex(Vocabulary.plain(PIECES, 4), "(ab|c)(a|b|c)*b|a[bc]"), 5, 4, 5),
}

TOYS = {v: RandomToy(5, v=v, plain=True) for v in (4, 5)}


def is_valid(constraint: Constraint, text: tuple[int, ...], stop: int) -> bool:
    """Whether a text ends with its only stop token and is allowed token by token."""
    if text[-1] != stop or stop in text[:-1]:
        return False
    state = constraint.start(REQUEST)
    try:
        for token in text[:-1]:
            if not allows(state.mask(), token):
                return False
            state.advance(token)
        return bool(allows(state.mask(), stop))
    except ConstraintError:
        return False


def valid_texts(name: str) -> list[tuple[int, ...]]:
    constraint, v, stop, length = CASES[name]
    texts = [text for count in range(1, length + 1) for text in product(range(v), repeat=count)]
    return [text for text in texts if is_valid(constraint, text, stop)]


def prefixes(name: str, most: int = 10_000) -> Prefixes:
    constraint, v, stop, length = CASES[name]
    return explore(constraint.start(REQUEST), frozenset({stop}), v, length, most)


def log_p(name: str, tree: Prefixes) -> list[np.ndarray]:
    return [np.log(after(name, text)[tokens]) for text, tokens in zip(tree.texts, tree.tokens, strict=True)]


def after(name: str, text: tuple[int, ...]) -> np.ndarray:
    """p after a text."""
    toy = TOYS[CASES[name][1]]
    return toy.probabilities(len(text))[0][code(text, toy.v)]


def probability(name: str, text: tuple[int, ...], start: int = 0) -> float:
    """The probability of a text given its first ``start`` tokens."""
    return float(np.prod([after(name, text[:n])[text[n]] for n in range(start, len(text))]))


@pytest.mark.parametrize("name", CASES)
def test_the_prefixes_are_those_of_all_valid_texts(name):
    valid, tree = valid_texts(name), prefixes(name)
    assert valid
    assert list(tree.texts) == sorted({text[:end] for text in valid for end in range(len(text))}, key=by_length)
    constraint, v, _, _ = CASES[name]
    for node, text in enumerate(tree.texts):
        onward = sorted({valid_text[len(text)] for valid_text in valid if valid_text[: len(text)] == text})
        assert tree.tokens[node].tolist() == onward
        assert np.flatnonzero(unpack(tree.masks[node], v)).tolist() == onward
        state = constraint.start(REQUEST)
        for token in text:
            state.advance(token)
        assert tree.allowed[node].tolist() == np.flatnonzero(unpack(state.mask(), v)).tolist()
    outputs = [(*tree.texts[node], int(tree.tokens[node][index])) for node, index in tree.outputs]
    assert sorted(outputs) == sorted(valid)


def by_length(text: tuple[int, ...]) -> tuple:
    return len(text), text


@pytest.mark.parametrize("name", CASES)
def test_the_potential_is_the_probability_of_a_valid_completion(name):
    valid, tree = valid_texts(name), prefixes(name)
    h = np.exp(log_potential(tree, log_p(name, tree)))
    for node, text in enumerate(tree.texts):
        brute = sum(probability(name, valid_text, len(text)) for valid_text in valid if valid_text[: len(text)] == text)
        assert h[node] == pytest.approx(brute, abs=1e-15, rel=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_the_product_of_tilted_probabilities_is_the_conditional_distribution(name):
    valid, tree = valid_texts(name), prefixes(name)
    potential = Potential(tree, log_potential(tree, log_p(name, tree)))
    total = sum(probability(name, text) for text in valid)
    for text in valid:
        state, product_of = PotentialState(potential), 1.0
        for number, token in enumerate(text):
            tokens, weight = state.potential()
            assert weight.max() == 1 and weight.min() > 0
            tilted = after(name, text[:number])[tokens] * weight
            product_of *= float(tilted[tokens.tolist().index(token)] / tilted.sum())
            if number + 1 < len(text):
                state.advance(token)
        assert product_of == pytest.approx(probability(name, text) / total, abs=1e-15)


def test_probabilities_too_small_for_a_float_keep_their_ratio():
    tree = prefixes("everything")
    log_h = log_potential(tree, [values - 2000 for values in log_p("everything", tree)])
    (_, weight) = Potential(tree, log_h).weights[0]
    assert log_h[0] < -2000 and weight[3] == 1 and weight[:3].max() == 0  # longer texts are e**2000 times less likely
    (_, weight) = Potential(tree, log_h).weights[1]
    assert weight[3] == 1


def test_the_number_of_prefixes_is_limited():
    assert len(prefixes("everything")) == 1 + 3 + 9
    assert len(prefixes("everything", most=13)) == 13
    with pytest.raises(TooManyPrefixes, match="more than 12 prefixes"):
        prefixes("everything", most=12)


def test_a_large_vocabulary_is_not_explored_beyond_the_limit():
    asked = []

    def allowed(text):
        asked.append(text)
        return range(40_000)

    with pytest.raises(TooManyPrefixes):
        explore(Table(allowed, 50_000).start(REQUEST), frozenset({3}), 50_000, 8, 20)
    assert len(asked) < 100


def test_a_state_forks_and_refuses_tokens_that_lead_nowhere():
    tree = prefixes("dead ends")
    state = PotentialState(Potential(tree, log_potential(tree, log_p("dead ends", tree))))
    fork = state.fork()
    fork.advance(0)
    assert np.flatnonzero(unpack(fork.mask(), 4)).tolist() == [1] and fork.action() is None
    assert np.flatnonzero(unpack(state.mask(), 4)).tolist() == [0, 1]
    with pytest.raises(ConstraintError, match="no valid output goes on after token 2"):
        fork.advance(2)
    fork.advance(1)
    assert tree.children[fork.node].tolist() == [END]
    with pytest.raises(ConstraintError, match="after token 3"):
        fork.advance(3)
