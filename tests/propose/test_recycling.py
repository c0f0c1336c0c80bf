"""Token recycling against a naive twin, its table through steps, forks and requests, and what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.decode.proposer import Observation
from spec_lab.propose.recycling import Recycling
from spec_lab.propose.trees import parse
from spec_lab.verify import Token, Traversal
from tests.propose.lab import COLD, PROMPTS, WARM, decode, emitted, path_tokens, requests
from tests.tiny import VOCABULARY

V = 6
TREE = parse("0 1 2 0.0 0.1 1.0 1.1 0.0.0 1.1.0")


def sequence(tokens, state=None):
    return SimpleNamespace(tokens=list(tokens), state=state)


def drafted(proposer, *texts):
    sequences = [sequence(text, proposer.init(None)) for text in texts]
    batch = SimpleNamespace(sequences=sequences, device="cpu", room=lambda: [99] * len(texts))
    return proposer.propose(batch)


def observe(proposer, rows, top_k, state=None):
    proposer.observe([Observation(sequence([0], state), 0, [0], rows=rows, top_k=np.array(top_k))])


def naive(table, last, tree):
    """The tokens of all paths of the tree that are known."""
    by_path = {(): last}
    for path in sorted(tree, key=lambda ranks: (len(ranks), ranks)):
        if path[:-1] in by_path and by_path[path[:-1]] in table:
            by_path[path] = table[by_path[path[:-1]]][path[-1]]
    return {path: token for path, token in by_path.items() if path}


def of_draft(draft, tree):
    """The tokens below each node, from its root."""
    return sorted(tuple(path_tokens(draft, row)) for row in draft.shape.trees[tree][1:].tolist())


@given(
    st.lists(st.tuples(st.integers(0, V - 1), st.permutations(range(V))), max_size=12),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=3),
)
def test_children_are_the_last_likeliest_tokens_of_their_parent_s_token(seen, ends):
    proposer = Recycling(V, TREE)
    for token, order in seen:
        observe(proposer, [token], [order[:3]])
    table = {token: order[:3] for token, order in seen}
    draft = drafted(proposer, *([0, end] for end in ends))
    for tree, end in enumerate(ends):
        expected = naive(table, end, TREE)
        paths = [tuple(expected[path[: depth + 1]] for depth in range(len(path))) for path in expected]
        assert of_draft(draft, tree) == sorted(paths)


def test_nothing_is_drafted_before_anything_was_computed():
    assert drafted(Recycling(V, TREE), [1], [2, 3]).shape.nodes == 0


def test_of_two_rows_of_a_token_the_later_one_counts_and_parts_of_prompts_have_none():
    proposer = Recycling(V, parse("2"))
    observe(proposer, [3, 4, 3], [[0, 1], [5, 5], [2, 0]])
    proposer.observe([Observation(sequence([1]), 0, [1, 2])])
    assert of_draft(drafted(proposer, [3]), 0) == [(0,), (2,)]
    assert drafted(proposer, [1]).shape.nodes == 0


def test_a_shared_table_serves_all_requests_until_it_is_forgotten():
    proposer = Recycling(V, parse("1"))
    observe(proposer, [3], [[2]])
    assert proposer.shared_store and drafted(proposer, [3]).token.tolist() == [2]
    proposer.forget()
    assert drafted(proposer, [3]).shape.nodes == 0


def test_a_table_of_a_request_is_its_own_and_a_fork_s():
    proposer = Recycling(V, parse("1"), "request")
    mine, other = proposer.init(None), proposer.init(None)
    observe(proposer, [3], [[2]], mine)
    copy = proposer.fork(mine)
    observe(proposer, [3], [[5]], copy)
    assert (mine[3, 0], copy[3, 0], other[3, 0]) == (2, 5, -1)
    assert proposer.shared_store == ""


def test_the_published_tree_has_80_nodes_in_6_levels():
    tree = parse("token_recycling_80")
    levels = [sum(len(path) == depth for path in tree) for depth in range(1, 8)]
    leaves = [path for path in tree if not any(other[:-1] == path for other in tree)]
    assert levels == [8, 21, 25, 15, 8, 3, 0] and len(leaves) == 40


@pytest.mark.parametrize("scope", ["run", "request"])
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
def test_greedy_output_is_the_target_s_and_drafts_are_accepted(target, truth, verifier, scope):
    group, steps = decode(target, Recycling(VOCABULARY, parse("3x2x1"), scope), requests(), verifier)
    assert emitted(group) == truth
    assert all(step.draft.shape.nodes == 0 for step in steps[:1]) and any(step.draft.shape.nodes for step in steps[1:])


def test_the_table_holds_the_target_s_likeliest_tokens_of_rejected_rows_too(target):
    proposer = Recycling(VOCABULARY, parse("3x2"))
    _, steps = decode(target, proposer, requests(WARM, prompts=PROMPTS[:1]))
    drafts = {int(token) for step in steps for token in step.draft.token}
    accepted = {token for step in steps for done in step.committed for token, _, _ in done.tokens}
    rejected = drafts - accepted
    assert rejected and all((proposer._shared[token] >= 0).all() for token in rejected)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tree": "9x1"}, "9 wide"), ({"tree": "2", "scope": "all"}, "scope"), ({"tree": "0.0"}, "tree")],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Recycling.load(SimpleNamespace(vocabulary=V), **options)


def test_cold_and_warm_requests_share_a_batch(target):
    wanted = [*requests(COLD)[:1], *requests(WARM)[1:]]
    group, _ = decode(target, Recycling(VOCABULARY, parse("2x2")), wanted)
    assert [len(text) for text in emitted(group)] == [20, 20, 20]
