"""Sizes have upper bounds, checked before anything is built: an error names the option."""

import pytest

from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.trees import MAX_DEPTH, MAX_NODES, parse

HUGE = 10**400


@pytest.mark.parametrize(
    "tree",
    [
        "99999999x99999999",
        "2x" * 63 + "2",
        "9" * 5000,
        f"{MAX_NODES + 1}",
        "1x" * MAX_DEPTH + "1",
        " ".join(str(n) for n in range(MAX_NODES + 1)),
        ".".join("0" * (MAX_DEPTH + 1)),
        "0 " + "1" * 5000,
        [[n] for n in range(MAX_NODES + 1)],
        HUGE,
        "x",
        "²x1",
        "0 0",
        "1",
        "0.1",
    ],
    ids=lambda tree: str(tree)[:12] if isinstance(tree, str) else type(tree).__name__,
)
def test_an_invalid_or_too_large_tree_is_refused(tree):
    if tree == "1":
        assert parse(tree) == ((0,),)
        return
    with pytest.raises(ValueError, match=r"^tree") as error:
        parse(tree)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "1025"}, r"tree has"),
    ],
)
def test_the_options_of_a_draft_model_are_checked_before_it_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        DraftModel.load(None, "no/such/checkpoint", **options)
