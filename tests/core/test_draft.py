"""Shapes against naive definitions; drafts and their cuts; the published trees."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import WAYS, ComputedOnly, Draft
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.propose import Null

PUBLISHED = json.loads((Path(__file__).parents[2] / "spec_lab" / "propose" / "published_trees.json").read_text())


@st.composite
def shapes(draw: st.DrawFn, roots: int = 4, most: int = 16) -> Shape:
    """Any forest of up to ``roots`` trees, interleaved."""
    count = draw(st.integers(1, roots))
    parents = [draw(st.integers(0, count + node - 1)) for node in range(draw(st.integers(0, most)))]
    return Shape(count, np.array(parents, dtype=np.int64))


def above(shape: Shape, row: int) -> list[int]:
    """The rows from ``row`` up to its root, both included: the naive definition of everything derived."""
    rows = [row]
    while rows[-1] >= shape.roots:
        rows.append(int(shape.parent[rows[-1] - shape.roots]))
    return rows


def choices(shape: Shape) -> set[tuple[int, ...]]:
    """A one-tree shape as tree choices."""
    return {shape.ranks(row) for row in range(1, shape.rows)}


@given(shapes())
def test_every_derived_property_follows_from_the_parents(shape):
    assert shape.rows == shape.roots + shape.nodes
    for row in range(shape.rows):
        line = above(shape, row)
        assert shape.depth[row] == len(line) - 1
        assert shape.root[row] == line[-1]
        assert shape.path(row) == line[-2::-1]
        assert set(np.flatnonzero(shape.ancestors[row])) == set(line)
        family = [c for c in range(shape.roots, shape.rows) if shape.parent[c - shape.roots] == row]
        assert shape.children[row].tolist() == family
        assert [shape.rank[c - shape.roots] for c in family] == list(range(len(family)))
        assert shape.ranks(row) == tuple(shape.rank[r - shape.roots] for r in shape.path(row))


@given(shapes(most=0), st.data())
def test_a_shape_that_grows_level_by_level_is_that_of_its_parents(shape, data):
    leaves = list(range(shape.roots))
    for _ in range(3):
        rows = [row for row in leaves if data.draw(st.booleans())]
        counts = np.array([data.draw(st.integers(0, 3)) for _ in rows], dtype=np.int64)
        before, shape = shape, shape.grown(np.array(rows, dtype=np.int64), counts)
        leaves = list(range(before.rows, shape.rows))
        whole = Shape(shape.roots, shape.parent)
        for name in ("parent", "depth", "rank", "count", "root", "lineage", "table", "places"):
            np.testing.assert_array_equal(getattr(shape, name), getattr(whole, name))
        for mask, expected in zip(shape.tree_masks, whole.tree_masks, strict=True):
            np.testing.assert_array_equal(mask, expected)
        kept, nodes = shape.keep(np.arange(shape.rows) % 3 != 1)
        again, expected_nodes = whole.keep(np.arange(shape.rows) % 3 != 1)
        np.testing.assert_array_equal(nodes, expected_nodes)
        for mask, expected in zip(kept.tree_masks, again.tree_masks, strict=True):
            np.testing.assert_array_equal(mask, expected)


def visited(shape: Shape, row: int) -> list[int]:
    """The rows from ``row`` down, children before their parent, siblings in drawing order."""
    return [*(visit for child in shape.children[row] for visit in visited(shape, int(child))), row]


def around(shape: Shape, row: int) -> list[tuple[int, bool]]:
    """The nodes below ``row``, each as it is entered and as it is left."""
    return [
        visit
        for child in shape.children[row].tolist()
        for visit in ((child, False), *around(shape, child), (child, True))
    ]


@given(shapes())
def test_the_properties_that_verifiers_read_follow_from_the_parents(shape):
    for row in range(shape.rows):
        line = above(shape, row)
        assert shape.lineage[row].tolist() == line + [-1] * (shape.lineage.shape[1] - len(line))
        assert [child for child in shape.table[row].tolist() if child >= 0] == shape.children[row].tolist()
        assert shape.count[row] == len(shape.children[row])
    assert shape.expanded.tolist() == [row for row in range(shape.rows) if len(shape.children[row])]
    assert shape.branches == any(len(children) > 1 for children in shape.children)
    for root in range(shape.roots):
        order = visited(shape, root)
        assert [shape.visit[row] for row in order] == list(range(len(order)))
        assert shape.tours[root] == around(shape, root)
    turn = np.full(shape.rows, -1)  # of roots
    for row in range(shape.roots, shape.rows):
        turn[row] = turn[shape.parent[row - shape.roots]] + 1 + shape.rank[row - shape.roots]
    assert shape.turn.tolist() == turn[shape.roots :].tolist()


@given(shapes(), st.data())
def test_a_schedule_puts_nodes_into_steps_and_parts(shape, data):
    point = np.array(data.draw(st.lists(st.booleans(), min_size=shape.nodes, max_size=shape.nodes)), dtype=bool)
    marked = data.draw(st.booleans())
    for step, plan in ((shape.rank, shape.by_rank), (shape.turn, shape.by_turn)):
        nodes, parents, steps, last, sampled = shape.schedule(step, point) if marked else plan
        is_point = point if marked else np.zeros(shape.nodes, dtype=bool)
        assert parents.tolist() == shape.parent[nodes].tolist() and sorted(nodes.tolist()) == list(range(shape.nodes))
        assert [start for start, *_ in steps] == [0, *(end for *_, end in steps)][: len(steps)]
        final = shape.rank + 1 == shape.count[shape.parent] if shape.nodes else np.zeros(0, dtype=bool)
        for number, (start, a, b, c, end) in enumerate(steps):
            assert sorted(nodes[start:end]) == np.flatnonzero(step == number).tolist()
            for part, is_last, points in (
                (nodes[start:a], 0, 0),
                (nodes[a:b], 0, 1),
                (nodes[b:c], 1, 0),
                (nodes[c:end], 1, 1),
            ):
                assert (final[part] == is_last).all() and (is_point[part] == points).all()
        assert sorted(nodes[last].tolist()) == np.flatnonzero(final).tolist()
        assert not is_point[nodes[last[:sampled]]].any() and is_point[nodes[last[sampled:]]].all()


@given(shapes())
def test_trees_partition_the_rows(shape):
    assert sorted(np.concatenate(shape.trees).tolist()) == list(range(shape.rows))
    for root, rows in enumerate(shape.trees):
        assert rows[0] == root and (shape.root[rows] == root).all() and (np.diff(rows) > 0).all()
        assert shape.places[rows].tolist() == list(range(-1, len(rows) - 1))
        assert shape.tree_depths[root].tolist() == [len(above(shape, row)) - 1 for row in rows]
        assert shape.grid[root].tolist() == [*rows, *[-1] * (shape.grid.shape[1] - len(rows))]


@given(shapes(), st.data())
def test_keep_drops_descendants(shape, data):
    marked = np.array(data.draw(st.lists(st.booleans(), min_size=shape.rows, max_size=shape.rows)))
    before = marked.copy()
    smaller, kept = shape.keep(marked)
    assert (marked == before).all()
    wanted = [
        row - shape.roots
        for row in range(shape.roots, shape.rows)
        if all(marked[r] for r in above(shape, row) if r >= shape.roots)
    ]
    assert kept.tolist() == wanted and smaller.roots == shape.roots
    old = list(range(shape.roots)) + [node + shape.roots for node in wanted]  # old row of each new row
    for node in range(smaller.nodes):
        assert old[smaller.parent[node]] == shape.parent[kept[node]]


@given(shapes(roots=1))
def test_a_tree_holds_its_choices_breadth_first(shape):
    again = tree(tuple(choices(shape)))
    assert choices(again) == choices(shape)
    assert (np.diff(again.depth) >= 0).all()  # breadth first
    for depth in range(1, int(again.depth.max()) + 1):
        level = [again.ranks(row) for row in range(again.rows) if again.depth[row] == depth]
        assert level == sorted(level)


@given(st.lists(shapes(roots=1, most=6), min_size=1, max_size=4))
def test_a_forest_concatenates_trees(trees):
    joined = forest(tuple(trees))
    assert joined.roots == len(trees) and joined.nodes == sum(drafted_tree.nodes for drafted_tree in trees)
    first = len(trees)
    for root, (drafted_tree, rows) in enumerate(zip(trees, joined.trees, strict=True)):
        assert rows.tolist() == [root, *range(first, first + drafted_tree.nodes)]
        first += drafted_tree.nodes
        assert joined.depth[rows].tolist() == drafted_tree.depth.tolist()
        assert [joined.ranks(row) for row in rows] == [drafted_tree.ranks(row) for row in range(drafted_tree.rows)]
        assert (joined.ancestors[np.ix_(rows, rows)] == drafted_tree.ancestors).all()
        assert ((joined.tree_masks[root] == 0) == drafted_tree.ancestors).all()


def test_a_chain_is_one_path():
    assert chain(0).rows == 1
    assert chain(3).depth.tolist() == [0, 1, 2, 3] and chain(3).rank.tolist() == [0, 0, 0]
    assert choices(chain(3)) == {(0,), (0, 0), (0, 0, 0)}


def test_forests_of_the_same_trees_and_what_is_kept_of_a_shape_are_shared():
    first, second = chain(2), chain(3)
    both = forest((first, second))
    assert forest((first, second)) is both and forest((first,)) is first
    marks = np.array([True, True, True, False, True, False, False])
    assert both.keep(marks)[0] is both.keep(marks.copy())[0]


@given(shapes())
def test_levels_hold_every_node_below_its_parent_by_sibling_rank(shape):
    for depth, level in enumerate(shape.levels, start=1):
        assert (np.diff(level.parents) > 0).all() and (shape.depth[level.parents] == depth - 1).all()
        for rank, (nodes, above) in enumerate(level.ranks):
            assert (shape.rank[nodes - shape.roots] == rank).all()
            assert (level.parents[above] == shape.parent[nodes - shape.roots]).all()
    drawn = [row for level in shape.levels for nodes, _ in level.ranks for row in nodes.tolist()]
    assert sorted(drawn) == list(range(shape.roots, shape.rows))


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (((0, 0),), r"\[0, 0\] .*parent \[0\]"),
        (((1,),), r"\[1\] .*rank 0"),
        (((0,), (0, 0), (0, 2)), r"\[0, 2\] .*rank 1"),
        (((-1,),), "sibling"),
        (((0,), (0,)), "distinct"),
        (((),), "distinct"),
    ],
)
def test_paths_that_form_no_tree_are_refused(paths, says):
    with pytest.raises(ValueError, match=says):
        tree(paths)


# Drafts


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Any draft over 5 tokens; rows of q stand in any order."""
    shape = draw(shapes())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    token = torch.from_numpy(rng.integers(0, 5, shape.nodes))
    drawn = draw(st.sampled_from(["iid", "without_replacement", "deterministic", "gumbel", "each"]))
    extra = None
    if draw(st.booleans()):
        above = [draw(st.integers(0, shape.rows + x - 1)) for x in range(draw(st.integers(1, 5)))]
        extra = ComputedOnly(np.array(above), torch.from_numpy(rng.integers(0, 5, len(above))))
    if drawn == "deterministic":
        return Draft(shape, token, computed_only=extra)
    if drawn == "each":
        drawn = rng.integers(0, len(WAYS), shape.nodes).astype(np.int8)
    expanded = rng.permutation(np.unique(shape.parent)).astype(np.int64)
    q_row = np.full(shape.rows, -1)
    q_row[expanded] = np.arange(len(expanded))
    q = torch.from_numpy(rng.dirichlet(np.ones(5), len(expanded)).reshape(-1, 5))
    raced = drawn == "gumbel" if isinstance(drawn, str) else WAYS.index("gumbel") in drawn
    noise = torch.from_numpy(rng.gumbel(size=(len(expanded), 5))) if raced else None
    return Draft(shape, token, drawn, q, q_row, noise, computed_only=extra)


@pytest.mark.nightly
@settings(max_examples=150)
@given(drafts(), st.data())
def test_cut_keeps_shallow_nodes_and_their_distributions(draft, data):
    shape = draft.shape
    depth = data.draw(st.lists(st.integers(0, 4), min_size=shape.roots, max_size=shape.roots))
    less = draft.cut(depth)
    wanted = [n for n in range(shape.nodes) if shape.depth[n + shape.roots] <= depth[shape.root[n + shape.roots]]]
    if (draft.computed_shape.depth <= np.array(depth)[draft.computed_shape.root]).all():
        assert less is draft
    assert less.token.tolist() == draft.token[wanted].tolist() and less.codes.tolist() == draft.codes[wanted].tolist()
    assert less.shape.roots == shape.roots
    for new, old in enumerate(wanted):
        assert less.shape.ranks(new + shape.roots) == shape.ranks(old + shape.roots)
        assert less.shape.root[new + shape.roots] == shape.root[old + shape.roots]
    if draft.q is not None:
        assert less.q is draft.q
        assert less.noise is (draft.noise if "gumbel" in less.ways else None)
        for new, old in enumerate(wanted):
            assert less.q_row[less.shape.parent[new]] == draft.q_row[shape.parent[old]]


@settings(max_examples=150)
@given(drafts(), st.data())
def test_rows_that_are_only_computed_are_kept_with_their_parents(draft, data):
    shape, whole = draft.shape, draft.computed_shape
    assert whole.parent[: shape.nodes].tolist() == shape.parent.tolist()
    assert draft.computed_token[: shape.nodes].tolist() == draft.token.tolist()
    marked = np.array(data.draw(st.lists(st.booleans(), min_size=shape.rows, max_size=shape.rows)))
    less, both = draft.keep(marked)
    extra = list(range(shape.rows, whole.rows))
    stays = [row for row in extra if all(marked[r] for r in above(whole, row) if shape.roots <= r < shape.rows)]
    old = [*both, *stays]
    assert less.computed_shape.rows == len(old) and less.shape.rows == len(both)
    for row in range(less.shape.rows, less.computed_shape.rows):
        assert less.computed_token[row - shape.roots] == draft.computed_token[old[row] - shape.roots]
        assert old[less.computed_shape.parent[row - shape.roots]] == whole.parent[old[row] - shape.roots]
    assert draft.acceptable_nodes.tolist() == [len(rows) - 1 for rows in shape.trees]
    counted = draft.acceptable_nodes + draft.computed_only_nodes
    assert counted.tolist() == [len(rows) - 1 for rows in whole.trees]


def test_the_null_proposer_drafts_the_same_forest_again_for_as_many_sequences():
    class Batch:
        sequences, device = [None, None], torch.device("cpu")

    null = Null()
    assert null.propose(Batch()) is null.propose(Batch()) and null.propose(Batch()).shape.roots == 2


def test_a_draft_whose_parts_do_not_fit_is_refused():
    q, q_row, token = torch.full((1, 4), 0.25), np.array([0, -1]), torch.tensor([1])
    with pytest.raises(ValueError, match="2 tokens .*1 nodes"):
        Draft(chain(1), torch.tensor([1, 2]))
    for drawn, rows in (
        ("deterministic", (q, q_row)),
        ("iid", (None, None)),
        ("without_replacement", (q, None)),
        ("iid", (None, q_row)),
    ):
        with pytest.raises(ValueError, match="q_row"):
            Draft(chain(1), token, drawn, *rows)
    for drawn, noise in (("gumbel", None), ("iid", torch.zeros(1, 4))):
        with pytest.raises(ValueError, match="noise"):
            Draft(chain(1), token, drawn, q, q_row, noise)


# Published trees


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees_keep_their_choices(name):
    paths = [tuple(map(int, path.split("."))) for path in PUBLISHED[name]["paths"].split()]
    shape = tree(tuple(paths))
    assert shape.nodes == len(paths) and choices(shape) == set(paths)
    assert shape.depth.max() == max(map(len, paths))
    assert shape.ancestors.sum() == shape.rows + sum(map(len, paths))
    two = forest((shape, chain(2)))
    assert {two.ranks(row) for row in two.trees[0][1:]} == set(paths)
