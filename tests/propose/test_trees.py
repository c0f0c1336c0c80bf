"""Trees: their notation, and their growth by Sequoia's recurrence, which equals brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.core.shape import tree
from spec_lab.propose.trees import (
    by_rank,
    depth_of,
    expected_tokens,
    grow,
    parse,
    width_of,
    widths,
    write,
)

ACCEPTANCE = [0.62, 0.11, 0.06, 0.024, 0.02, 0.015, 0.012, 0.006, 0.0045, 0.003, 0.0, 0.003, 0.0015, 0.0, 0.0015]
"""Synthetic: a long tail by rank as measured ones have, with zeros and ranks that are likelier than the previous
one."""


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


def sequoia(accuracy, nodes):
    """The best tree of every size, by Sequoia's recurrence (2402.12374, section 4.1): the oracle of ``grow``.

    Accuracies by rank may differ by depth. With p_b at depth d, T_d(m, b) the expected tokens of the best tree of m
    nodes whose root, at depth d, has b children, and T_d(m) its maximum over b::

        T_d(1, 0) = 1
        T_d(m, b) = max over y of  T_d(y, b - 1) + p_b T_{d+1}(m - y)

    Args:
        accuracy: one list of p_b per depth; its length bounds the tree's depth.
        nodes: largest size, without the root.

    Returns:
        tokens ``[nodes + 1]``: expected tokens of the best tree of 0, 1, .. nodes nodes (-inf: there is none of
        that size); and these trees.
    """
    size = nodes + 1  # of a tree with its root
    best = np.full((len(accuracy) + 1, size + 1), -np.inf)  # T_d(m)
    best[-1, 1] = 1.0
    children = np.zeros(best.shape, dtype=np.int64)  # arg max over b
    splits = []  # arg max over y, [m, b] for each depth
    for depth in reversed(range(len(accuracy))):
        p = accuracy[depth]
        tokens = np.full((size + 1, len(p) + 1), -np.inf)  # T_d(m, b)
        tokens[1, 0] = 1.0
        split = np.zeros(tokens.shape, dtype=np.int64)
        for b in range(1, len(p) + 1):
            for m in range(2, size + 1):
                below = best[depth + 1, m - 1 : 0 : -1]
                options = np.where(np.isfinite(below), tokens[1:m, b - 1] + p[b - 1] * np.maximum(below, 0), -np.inf)
                split[m, b] = 1 + int(options.argmax())
                tokens[m, b] = options.max()
        children[depth], best[depth] = tokens.argmax(1), tokens.max(1)
        splits.append(split)
    splits.reverse()

    def collect(depth, m, above):
        paths = []
        for b in range(int(children[depth, m]), 0, -1):
            y = int(splits[depth][m, b])
            child = (*above, b - 1)
            paths += [child, *collect(depth + 1, m - y, child)]
            m = y
        return paths

    reachable = [m for m in range(1, size + 1) if np.isfinite(best[0, m])]
    trees = {m: parse(collect(0, m, ())) if m > 1 else () for m in reachable}
    return best[0, 1:], [trees.get(m, ()) for m in range(1, size + 1)]


def test_widths_and_paths_are_read_and_written():
    assert parse("2x1") == ((0,), (1,), (0, 0), (1, 0)) == parse("0 1 1.0 0.0") == parse([[0], [0, 0], [1], [1, 0]])
    assert parse("3") == parse(3) == ((0,), (1,), (2,))
    assert parse("0") == ((0,),)
    assert parse(write(widths([3, 2, 1]))) == widths([3, 2, 1])
    assert (depth_of(widths([3, 2, 1])), width_of(widths([3, 2, 1])), len(widths([3, 2, 1]))) == (3, 3, 15)
    assert (depth_of(()), width_of(())) == (0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("big", "widths"),
        ("", "widths"),
        ("0x2", "widths"),
        ("0 -1", "widths"),
        ("0 0.1", r"\[0, 1\] .*sibling"),
        ("0 1.0", r"\[1, 0\] .*parent"),
        ("0 0", "distinct"),
    ],
)
def test_an_invalid_tree_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_published_trees_have_names_and_near_names_are_listed():
    assert len(parse("vicuna_7b_stage1")) == 63 and depth_of(parse(" eagle_mc_sim_7b_63 ")) == 5
    with pytest.raises(ValueError, match=r"tree: .*vicuna_7b_stage1, .*not 'vicuna_7b_stage3'") as error:
        parse("vicuna_7b_stage3")
    assert "zephyr" not in str(error.value)
    with pytest.raises(ValueError, match=r"tree: .*zephyr_stage2\), not 'calibratd'"):
        parse("calibratd")


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
        assert tokens[nodes] == pytest.approx(max(expected_tokens(candidate, value) for candidate in every), abs=1e-12)
        assert len(trees[nodes]) == nodes
        assert expected_tokens(trees[nodes], value) == pytest.approx(tokens[nodes], abs=1e-12)


@given(ACCURACY)
def test_growth_equals_the_recurrence_where_ranks_decrease(accuracy):
    accuracy = [sorted(row, reverse=True) + [0.0] * (3 - len(row)) for row in accuracy]
    tokens, _ = sequoia(accuracy, 8)
    grown = grow(by_rank(accuracy), 8, len(accuracy), 3)
    for nodes in range(1, len(grown) + 1):
        assert 1 + sum(value for _, value in grown[:nodes]) == pytest.approx(tokens[nodes], abs=1e-12)
        tree(tuple(path for path, _ in grown[:nodes]))  # every prefix is a tree


def test_a_long_tailed_acceptance_vector():
    p = ACCEPTANCE
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


@pytest.mark.parametrize(
    "text",
    [
        "1025", "99999x99999", "x".join(["2"] * 60), "9" * 5000, "x".join(["1"] * 257), "0 " * 600_000,
        " ".join(".".join("0" * depth) for depth in range(1, 258)), " ".join(map(str, range(1025))),
    ],
)  # fmt: skip
def test_trees_too_large_to_verify_are_refused_at_once(text):
    with pytest.raises(ValueError, match=r"tree .*at most (1024|256) "):
        parse(text)
