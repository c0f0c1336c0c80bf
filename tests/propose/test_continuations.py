"""Continuations of a place of a text, and texts merged into a tree."""

from spec_lab.propose.continuations import continuation, merged


def test_a_continuation_repeats_at_the_end_of_the_text():
    assert continuation([5, 1, 2, 1, 2], 3, 5) == [1, 2, 1, 2, 1]
    assert continuation([5, 1, 2, 1, 2], 1, 3) == [1, 2, 1]


def test_texts_are_merged_by_their_beginnings():
    assert merged([(1, 2), (1, 3), (1, 2), (4,)], 9) == ([0, 1, 1, 0], [1, 2, 3, 4])


def test_merging_ends_with_the_last_node_that_is_left():
    assert merged([(1, 2), (1, 3), (4,)], 3) == ([0, 1, 1], [1, 2, 3])
    assert merged([(1, 2), (1,), (1, 2), (3,)], 2) == ([0, 1], [1, 2])
    assert merged([], 2) == ([], [])
