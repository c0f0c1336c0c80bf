"""Prompt lookup against a naive twin, through growth and rewinds."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.propose.continuations import continuation
from spec_lab.propose.ngram import SCAN, Index, Ngram, NgramTree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def naive_matches(tokens, longest, shortest):
    for n in range(longest, shortest - 1, -1):
        if n >= len(tokens):
            continue
        count = 0
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:] and count < SCAN:
                count += 1
                yield end


def naive_continuation(tokens, position, count):
    text = list(tokens)
    for step in range(count):
        text.append(text[position + step])
    return text[len(tokens) :]


def naive_tree(tokens, longest, shortest, depth, nodes):
    """The distinct paths of the trie, in the order in which they were added."""
    paths = []
    for start in naive_matches(tokens, longest, shortest):
        read = naive_continuation(tokens, start, depth)
        for end in range(1, depth + 1):
            if tuple(read[:end]) not in paths and len(paths) < nodes:
                paths.append(tuple(read[:end]))
    return paths


def batch(proposer, *texts):
    """Sequences with these texts, which the proposer has not seen."""
    sequences = [SimpleNamespace(tokens=list(tokens), state=proposer.init(None)) for tokens in texts]
    return SimpleNamespace(sequences=sequences, device=torch.device("cpu"), room=lambda: [99] * len(sequences))


def drafted(proposer, *texts):
    """The draft for new sequences with these texts."""
    return proposer.propose(batch(proposer, *texts))


def paths_of(draft, root=0):
    token = draft.token.tolist()
    rows = draft.shape.trees[root][1:]
    return [tuple(token[row - draft.shape.roots] for row in draft.shape.path(int(row))) for row in rows]


@given(TOKENS, st.lists(st.tuples(st.integers(0, 6), TOKENS), max_size=6), st.integers(1, 4), st.integers(0, 3))
def test_index_follows_growth_and_rewinds(tokens, edits, shortest, more):
    longest = shortest + more
    index = Index(range(longest, shortest - 1, -1))
    for back, new in [(0, []), *edits]:
        tokens = tokens[: max(0, len(tokens) - back)] + new
        tokens = tokens or [1]
        index.follow(tokens)
        assert list(index.matches(tokens)) == list(naive_matches(tokens, longest, shortest))
        fresh = Index(index.lengths)
        fresh.follow(tokens)
        assert {k: v for k, v in index.ends.items() if v} == fresh.ends


@given(TOKENS, st.integers(1, 9), st.integers(1, 3), st.integers(0, 2))
def test_a_chain_continues_from_the_first_match(tokens, depth, shortest, more):
    draft = drafted(Ngram(depth, shortest + more, shortest), tokens)
    first = next(naive_matches(tokens, shortest + more, shortest), None)
    assert draft.token.tolist() == ([] if first is None else naive_continuation(tokens, first, depth))
    assert (draft.shape.parent == range(draft.shape.nodes)).all()


def saxena(tokens, depth, longest, shortest):
    """Prompt lookup as first published: all windows of n tokens from the first one on, the largest n first."""
    for n in range(longest, shortest - 1, -1):
        for begin in range(len(tokens) - n + 1):
            start = begin + n
            if tokens[begin:start] == tokens[-n:] and start + depth <= len(tokens) and start < len(tokens) - n:
                return tokens[start : start + depth]
    return []


@given(
    TOKENS, st.lists(st.tuples(st.integers(0, 6), TOKENS), max_size=3),
    st.integers(1, 9), st.integers(1, 3), st.integers(0, 2),
)  # fmt: skip
def test_the_first_match_is_that_of_the_published_code(tokens, edits, depth, shortest, more):
    proposer = Ngram(depth, shortest + more, shortest, "first")
    asked = batch(proposer, tokens)
    (sequence,) = asked.sequences
    for back, new in [(0, []), *edits]:
        sequence.tokens[:] = sequence.tokens[: max(0, len(sequence.tokens) - back)] + new or [1]
        assert proposer.propose(asked).token.tolist() == saxena(sequence.tokens, depth, shortest + more, shortest)


def test_a_later_match_is_used_only_where_the_recent_one_is_asked_for():
    text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
    assert drafted(Ngram(2, 2, 1), text).token.tolist() == [8, 8]
    assert drafted(Ngram(2, 2, 1, "first"), text).token.tolist() == [7, 7]
    assert drafted(Ngram(9, 2, 1, "first"), text).token.tolist() == []


@given(TOKENS, st.integers(1, 5), st.integers(1, 9), st.integers(1, 2), st.integers(0, 2))
def test_a_tree_merges_the_matches_in_their_order(tokens, depth, nodes, shortest, more):
    draft = drafted(NgramTree(nodes, depth, shortest + more, shortest), tokens)
    expected = naive_tree(tokens, shortest + more, shortest, depth, nodes)
    assert paths_of(draft) == expected
    assert len(set(expected)) == len(expected)  # siblings are distinct


def test_longer_matches_come_first_then_recent_ones():
    text = [1, 2, 3, 9, 2, 3, 8, 5, 3, 7, 1, 2, 3]
    read = [continuation(text, start, 1)[0] for start in naive_matches(text, 3, 1)]
    assert read == [9, 8, 9, 7, 8, 9]
    assert drafted(Ngram(1, 3, 1), text).token.tolist() == [9]
    assert paths_of(drafted(NgramTree(3, 1, 3, 1), text)) == [(9,), (8,), (7,)]


def test_a_batch_is_drafted_as_its_sequences_alone():
    texts = ([1, 2, 1, 2], [4, 5, 6], [7, 7, 7, 8, 7])
    for proposer in (Ngram(3, 2, 1), NgramTree(4, 3, 2, 1)):
        draft = drafted(proposer, *texts)
        for root, text in enumerate(texts):
            assert paths_of(draft, root) == paths_of(drafted(proposer, text))


@pytest.mark.parametrize("proposer", [Ngram(2, 2, 1), NgramTree(6, 3, 2, 1)], ids=lambda proposer: proposer.name)
def test_a_fork_drafts_from_an_index_of_its_own(proposer):
    """It begins as a copy of its origin's; later lookups of one change neither the other's index nor its draft."""
    asked = batch(proposer, [1, 2, 3, 1, 2])
    (sequence,) = asked.sequences
    proposer.propose(asked)
    twin = SimpleNamespace(tokens=[1, 2, 9, 1], state=proposer.fork(sequence.state))
    assert twin.state is not sequence.state and twin.state.ends == sequence.state.ends
    before = deepcopy(sequence.state.ends)
    asked.sequences[:] = [twin]
    assert paths_of(proposer.propose(asked)) == paths_of(drafted(proposer, twin.tokens))
    assert sequence.state.ends == before
    proposer.close(twin.state)
    asked.sequences[:] = [sequence]
    assert paths_of(proposer.propose(asked)) == paths_of(drafted(proposer, sequence.tokens))


@pytest.mark.parametrize(
    ("load", "options", "named"),
    [
        (Ngram.load, {"max_ngram": 1, "min_ngram": 2}, "min_ngram .*2"),
    ],
)
def test_wrong_options_are_named(load, options, named):
    with pytest.raises(ValueError, match=named):
        load(None, **options)
