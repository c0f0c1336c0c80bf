"""The masks of a draft that several proposers grow: each part of a hybrid has a forest, and asks for its own masks."""

import numpy as np
import pytest

from spec_lab.constrain.applied import AppliedConstraint, DraftTreeMasks
from spec_lab.core.shape import chain, forest
from tests.constrain.toys import Table, uneven

CHAIN = forest((chain(1),))
ROOT, NODE = np.array([0]), np.array([1])


def masks(*texts, **options):
    """Masks below roots with these texts."""
    table = Table(uneven)
    states = [table.start(None) for _ in texts]
    for state, text in zip(states, texts, strict=True):
        for token in text:
            state.advance(token)
    return DraftTreeMasks(states, AppliedConstraint(table, "both", **options))


def allowed(of, rows, token=0):
    return np.flatnonzero(of(CHAIN, rows, np.array([token]))[0]).tolist()


def test_a_token_that_is_illegal_in_one_forest_may_be_legal_in_another_at_the_same_row():
    first = masks(())
    (only,) = uneven(())
    wrong = (only + 1) % 4
    second = first.view([0])
    assert allowed(first, ROOT) == [only] and allowed(first, NODE, wrong) == []
    assert allowed(second, ROOT) == [only] and allowed(second, NODE, only) == sorted(uneven((only,)))


def test_a_view_of_some_roots_has_their_masks_in_the_order_given():
    texts = ((), tuple(uneven(())))
    every = masks(*texts)
    for roots in ([0, 1], [1, 0], [1]):
        shape = forest((chain(0),) * len(roots))
        may_follow = every.view(roots)(shape, np.arange(len(roots)), np.empty(0, dtype=np.int64))
        assert [np.flatnonzero(row).tolist() for row in may_follow] == [sorted(uneven(texts[root])) for root in roots]


@pytest.mark.parametrize("budget", [1, 2])
def test_the_budget_is_shared_by_all_views(budget):
    first = masks((), draft_budget=budget)
    (only,) = uneven(())
    assert allowed(first.view([0]), ROOT) == [only]
    assert allowed(first.view([0]), ROOT) == ([only] if budget == 2 else [0, 1, 2, 3]), "without a mask all is allowed"
    assert first.used and first.seconds > 0
