"""Trees: how they are written, how they grow, and Sequoia's recurrence against brute force."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.draft import tree
from spec_lab.propose.trees import (
    by_rank,
    depth_of,
    expected_tokens,
    fastest,
    grow,
    parse,
    sequoia,
    width_of,
    widths,
    write,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def all_trees(nodes, depth, ranks):
    """Every tree of so many nodes, by brute force."""

    def forests(count, levels, rank):  # children from this rank on
        if count == 0:
            yield ()
        if count == 0 or levels == 0 or rank == ranks:
            return
        for below in range(count):
            for inner, rest in product(forests(below, levels - 1, 0), forests(count - 1 - below, levels, rank + 1)):
                yield ((rank,), *((rank, *path) for path in inner), *rest)

    return list(forests(nodes, depth, 0))


def test_widths_and_paths_are_read_and_written():
    assert parse("2x1") == ((0,), (1,), (0, 0), (1, 0)) == parse("0 1 1.0 0.0") == parse([[0], [0, 0], [1], [1, 0]])
    assert parse("3") == parse(3) == ((0,), (1,), (2,))
    assert parse("0") == ((0,),)
    assert parse(write(widths([3, 2, 1]))) == widths([3, 2, 1])
    assert (depth_of(widths([3, 2, 1])), width_of(widths([3, 2, 1])), len(widths([3, 2, 1]))) == (3, 3, 15)
    assert (depth_of(()), width_of(())) == (0, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("big", "widths"),
        ("", "widths"),
        ("0x2", "widths"),
        ("0 -1", "widths"),
        ("0 0.1", r"\[0, 1\] has no earlier sibling"),
        ("0 1.0", r"\[1, 0\] has no parent"),
        ("0 0", "distinct"),
    ],
)
def test_what_is_no_tree_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


ACCURACY = st.lists(st.lists(st.floats(0, 0.3), min_size=1, max_size=3), min_size=1, max_size=3)


@given(ACCURACY)
def test_recurrence_equals_brute_force(accuracy):
    accuracy = [row + [0.0] * (3 - len(row)) for row in accuracy]
    tokens, trees = sequoia(accuracy, 5)
    value = by_rank(accuracy)
    for nodes in range(6):
        every = all_trees(nodes, len(accuracy), 3)
        if not every:
            assert tokens[nodes] == -np.inf
            continue
        assert tokens[nodes] == pytest.approx(max(expected_tokens(one, value) for one in every), abs=1e-12)
        assert len(trees[nodes]) == nodes
        assert expected_tokens(trees[nodes], value) == pytest.approx(tokens[nodes], abs=1e-12)


@given(ACCURACY)
def test_growth_is_the_recurrence_where_ranks_fall(accuracy):
    accuracy = [sorted(row, reverse=True) + [0.0] * (3 - len(row)) for row in accuracy]
    tokens, _ = sequoia(accuracy, 8)
    grown = grow(by_rank(accuracy), 8, len(accuracy), 3)
    for nodes in range(1, len(grown) + 1):
        assert 1 + sum(value for _, value in grown[:nodes]) == pytest.approx(tokens[nodes], abs=1e-12)
        tree(tuple(path for path, _ in grown[:nodes]))  # every prefix is a tree


def test_published_acceptance_vector():
    file = SHARED / "sequoia_acceptance.json"
    if not file.exists():
        pytest.skip("shared data is absent")
    p = json.loads(file.read_text())["values"][1:-1]
    tokens, trees = sequoia([p] * 10, 64)
    assert tokens[1] == pytest.approx(1 + p[0])
    assert tokens[3] == pytest.approx(1 + p[0] + p[0] ** 2 + p[0] ** 3)
    assert (np.diff(tokens) > 0).all()
    assert expected_tokens(trees[64], by_rank([p] * 10)) == pytest.approx(tokens[64])
    # A chain of any length gives fewer than 1 / (1 - p_1); branching gives more, depth bounds it.
    assert 1 / (1 - p[0]) < tokens[64] < 1 / (1 - sum(p))
    shallow, _ = sequoia([p] * 3, 64)
    assert shallow[64] < tokens[64]
    # Ranks that differ by depth: a depth that never accepts ends the tree above it.
    cut, trees = sequoia([p, [0.0], p], 8)
    assert cut[8] == pytest.approx(1 + sum(p[:8]))


def test_fastest_weighs_tokens_against_seconds():
    grown = grow(by_rank([[0.6, 0.2], [0.5, 0.1]]), 6, 2, 2)
    values = [value for _, value in grown]
    assert values == pytest.approx([0.6, 0.3, 0.2, 0.1, 0.06, 0.02])
    assert fastest(grown, lambda n: 1.0) == (parse([path for path, _ in grown]), pytest.approx(1 + sum(values)))
    assert fastest(grown, lambda n: 1.0 + n) == (((0,),), pytest.approx(1.6))
    choices, tokens = fastest(grown, lambda n: 1.0 + 0.1 * n)
    best = max((1 + sum(values[:n])) / (1 + 0.1 * n) for n in range(1, 7))
    assert tokens / (1 + 0.1 * len(choices)) == pytest.approx(best)
