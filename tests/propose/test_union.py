"""The union of proposers: deterministic trees merged, sampled nodes beside them, each part as it is alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.core.draft import DETERMINISTIC
from spec_lab.core.draft import Draft as CoreDraft
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.decode.proposer import Proposer, Requires
from spec_lab.propose.continuations import Trie
from spec_lab.propose.hybrid import join
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.union import Excluding, Union
from spec_lab.verify import Token, Traversal
from tests.propose.lab import COLD, PROMPTS, WARM, batch_of, decode, draft_model, emitted, path_tokens, requests

TREE = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=8).map(
    lambda nodes: ([min(above, n) for n, (above, _) in enumerate(nodes)], [token for _, token in nodes])
)


NOTHING = Requires()


class Fixed(Proposer):
    """Drafts the same chain everywhere, and keeps what it observes."""

    drawn, branches = "deterministic", False

    def __init__(self, *tokens, requires=NOTHING):
        self.tokens, self.nodes, self.requires, self.name = tokens, len(tokens), requires, "fixed"
        self.seen = []

    def init(self, request):
        return []

    def propose(self, batch):
        count = len(batch.sequences)
        return CoreDraft(forest((chain(self.nodes),) * count), torch.tensor(self.tokens * count, dtype=torch.long))

    def observe(self, observed):
        self.seen += observed
        for observation in observed:
            observation.sequence.state.append(observation)


def union(*parts, nodes=None, **options):
    return Union.load(None, {f"p{n}": part for n, part in enumerate(parts)}, nodes, **options)


def paths(draft, tree):
    return [tuple(path_tokens(draft, row)) for row in draft.shape.trees[tree][1:].tolist()]


def of_tree(parent, token):
    """The paths of a tree that a Trie merges."""
    every = [()]
    for above, picked in zip(parent, token, strict=True):
        every.append((*every[above], picked))
    return every[1:]


@given(st.lists(TREE, max_size=4), st.integers(1, 12))
def test_a_trie_has_each_path_once_and_says_where_each_node_is(trees, most):
    trie = Trie()
    expected = []
    for parent, token in trees:
        nodes = trie.add(parent, token, most)
        for path in of_tree(parent, token):
            if path not in expected and path[:-1] in [(), *expected] and len(expected) < most:
                expected.append(path)
        complete = all(path in expected for path in of_tree(parent, token))
        assert (nodes is not None) == complete
        if nodes is not None:
            merged = of_tree(trie.parent, trie.token)
            assert [merged[node] for node in nodes] == of_tree(parent, token)
    assert of_tree(trie.parent, trie.token) == expected


def test_equal_tokens_are_drafted_once_and_the_last_part_s_nodes_are_dropped_first(target):
    both = union(Fixed(1, 2, 3), Fixed(1, 2, 4), Fixed(5))
    batch = batch_of(target, requests(), both)
    draft = both.propose(batch)
    assert draft.ways == {"deterministic"}
    for tree in range(len(PROMPTS)):
        assert paths(draft, tree) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)]
    fewer = union(Fixed(1, 2, 3), Fixed(1, 2, 4), Fixed(5), nodes=4)
    assert paths(fewer.propose(batch_of(target, requests(), fewer)), 0) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4)]


def test_merged_nodes_have_the_probability_that_a_part_states_of_them(target):
    def stated(proposer):
        draft = proposer.propose(replace(batch_of(target, requests(WARM), proposer), recorded=True))
        assert draft.greedy_q.shape == draft.token.shape
        rows = draft.shape.trees[0][1:]
        of_tree = draft.greedy_q[torch.from_numpy(rows - draft.shape.roots)]
        return dict(zip(paths(draft, 0), of_tree.tolist(), strict=True))

    alone = stated(draft_model("1x1", "deterministic"))
    first = min(alone, key=len)[0]
    parts = Fixed(first, 0), draft_model("1x1", "deterministic"), draft_model("2x1", "without_replacement")
    merged = stated(union(*parts))
    assert len(merged) > len(alone) + 1 and alone.keys() < merged.keys()
    assert all(np.isnan(q) for path, q in merged.items() if path not in alone)
    assert {path: merged[path] for path in alone} == pytest.approx(alone)


def test_sampled_nodes_stand_behind_the_points_and_never_repeat_one_at_the_root(target):
    both = union(Fixed(1, 2), Fixed(3), draft_model("4x1", "without_replacement"))
    draft = both.propose(batch_of(target, requests(WARM), both))
    for tree, rows in enumerate(draft.shape.trees):
        ways = draft.codes[rows[1:] - draft.shape.roots]
        assert (ways[:3] == DETERMINISTIC).all() and (ways[3:] != DETERMINISTIC).all()
        assert paths(draft, tree)[:3] == [(1,), (1, 2), (3,)]
        below_root = [path[0] for path in paths(draft, tree)[3:] if len(path) == 1]
        assert not {*below_root} & {1, 3}
        assert draft.q[draft.q_row[tree]][[1, 3]].tolist() == [0, 0]
        assert draft.q[draft.q_row[tree]].sum() == pytest.approx(1)
    kept = union(Fixed(1, 2), draft_model("1x1"), exclude=False)
    draft = kept.propose(batch_of(target, requests(WARM), kept))
    assert (draft.q[draft.q_row[0]][1] > 0).item()


def test_a_draft_model_at_temperature_0_is_merged_as_points_are(target):
    alone = draft_model("1x1x1")
    chain_of = paths(alone.propose(batch_of(target, requests(COLD), alone)), 0)
    both = union(Fixed(chain_of[0][0], 0), draft_model("1x1x1"))
    draft = both.propose(batch_of(target, requests(COLD), both))
    assert draft.ways == {"deterministic"}
    assert paths(draft, 0) == [(chain_of[0][0],), (chain_of[0][0], 0), *chain_of[1:]]


@pytest.mark.each_value
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("drawn", ["iid", "deterministic"])
def test_greedy_output_is_the_target_s(target, truth, verifier, drawn):
    tree = "1x1x1" if drawn == "iid" else "2x1"
    group, _ = decode(target, union(NgramTree(6, 3, 3, 1), Ngram(4, 2, 1), draft_model(tree, drawn)), requests())
    assert emitted(group) == truth


def test_parts_observe_their_own_rows_as_if_they_were_alone(target):
    wants = Requires(hidden=(1,), top_k=2), Requires(hidden=(2, 1), logits=True), Requires()
    parts = [Fixed(1, 2, requires=wants[0]), Fixed(1, 3, requires=wants[1]), Fixed(4, requires=wants[2])]
    alone = [Fixed(*part.tokens, requires=part.requires) for part in parts]
    decode(target, union(*parts), requests(new=8))
    for part, single in zip(parts, alone, strict=True):
        decode(target, single, requests(new=8))
        mine = {(observation.sequence.request.id, observation.start): observation for observation in part.seen}
        compared = 0
        for other in single.seen:
            observation = mine.get((other.sequence.request.id, other.start))
            if observation is None:
                continue  # another part's accepted tokens led past this position
            assert [*observation.rows] == [*other.rows]
            for a, b in (
                (observation.logits, other.logits),
                (observation.top_k, other.top_k),
                (observation.hidden, other.hidden),
            ):
                assert (a is None) == (b is None)
                if a is not None:
                    width = min(len(a), len(b))
                    np.testing.assert_allclose(a[:width], b[:width], atol=1e-9)
            compared += 1
        assert compared >= 3


def test_rows_are_not_handed_on_where_the_step_cut_the_draft(target):
    part = Fixed(1, 2, 3, requires=Requires(top_k=1))
    decode(replace(target, context=12), union(part, Fixed(2)), requests(new=8))
    cut = [observation for observation in part.seen if not observation.rows and not observation.accepted]
    assert cut and all(len(observation.rows) in (0, 4) for observation in part.seen)


def test_forks_and_rewinds_reach_every_part(target):
    calls = []

    class Notes(Fixed):
        def fork(self, state):
            calls.append("fork")
            return [*state, "forked"]

        def rewind(self, state, length):
            calls.append(("rewind", length))

        def close(self, state):
            calls.append("close")

    both = union(Notes(1), Notes(2))
    state = both.init(None)
    copy = both.fork(state)
    assert copy.each == [["forked"], ["forked"]] and state.each == [[], []]
    both.rewind(copy, 3)
    both.close(copy)
    assert calls == ["fork"] * 2 + [("rewind", 3)] * 2 + ["close"] * 2


def test_excluding_masks_only_roots_and_keeps_a_constraint_s_mask():
    def even(shape, rows, token):
        allowed = np.zeros((len(rows), 6), dtype=bool)
        allowed[:, ::2] = True
        return allowed

    even.forces = True
    shape = Shape(2, np.array([0, 1]))
    allowed = Excluding(even, [[2], [0, 4]], 6)(shape, np.array([0, 1, 2]), np.array([2, 3]))
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[0, 4], [2], [0, 2, 4]]
    assert Excluding(even, [[], []], 6).forces and not Excluding(None, [[], []], 6).forces


def test_joined_drafts_keep_trees_tokens_and_distributions(target):
    drafter, other = draft_model("2x1", "without_replacement"), draft_model("1x1", "iid")
    batch = batch_of(target, requests(WARM), drafter)
    first = drafter.propose(replace(batch, sequences=batch.sequences[:2]))
    last = batch_of(target, requests(WARM), other)
    second = other.propose(replace(last, sequences=last.sequences[2:]))
    joined, places = join(batch, [first, second], [[1, 0], [2]])
    assert paths(joined, 1) == paths(first, 0) and paths(joined, 0) == paths(first, 1)
    assert paths(joined, 2) == paths(second, 0)
    assert torch.equal(joined.q[joined.q_row[2]], second.q[second.q_row[0]])
    assert torch.equal(joined.q[joined.q_row[1]], first.q[first.q_row[0]])
    assert places == [[[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1]]]


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([Fixed(1)], {}, "at least two"),
        ([draft_model("1"), draft_model("1x1")], {}, "p0, p1 sample"),
        ([Fixed(1), draft_model("1x1", "gumbel")], {}, "gumbel"),
        ([Fixed(1), draft_model("1x1x1")], {"nodes": 2}, "nodes is 2, but part p1 samples 3"),
    ],
)
def test_parts_that_cannot_be_united_are_refused(parts, options, message):
    with pytest.raises(ValueError, match=message):
        union(*parts, **options)


def test_what_parts_declare_is_declared_together():
    both = union(Fixed(1, requires=Requires(hidden=(2,), top_k=3)), draft_model("2x1", "without_replacement"))
    assert both.requires == Requires(hidden=(2,), top_k=3)
    assert (
        both.draws == {"deterministic", "without_replacement"} and both.drawn == "without_replacement" and both.branches
    )
    assert both.part_facts["p1"]["drawn"] == "without_replacement"
