"""Sizes have upper bounds, checked before anything is built: an error names the option."""

import pytest

from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.ngram import LONGEST, Ngram, NgramTree
from spec_lab.propose.trees import MOST_DEPTH, MOST_NODES, depth_of, parse

HUGE = 10**400


@pytest.mark.parametrize(
    "tree",
    [
        "99999999x99999999",
        "2x" * 63 + "2",
        "9" * 5000,
        f"{MOST_NODES + 1}",
        "1x" * MOST_DEPTH + "1",
        " ".join(str(n) for n in range(MOST_NODES + 1)),
        ".".join("0" * (MOST_DEPTH + 1)),
        "0 " + "1" * 5000,
        [[n] for n in range(MOST_NODES + 1)],
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
    with pytest.raises(ValueError, match=r"^proposer\.tree") as error:
        parse(tree)
    assert len(str(error.value)) < 400


def test_the_largest_trees_are_read():
    assert len(parse(str(MOST_NODES))) == MOST_NODES
    assert depth_of(parse("x".join("1" * MOST_DEPTH))) == MOST_DEPTH


@pytest.mark.parametrize("load", [Ngram.load, NgramTree.load])
@pytest.mark.parametrize("option", ["depth", "nodes", "max_ngram", "min_ngram"])
@pytest.mark.parametrize("value", [HUGE, 10**9, 0, -1, 2.0, "4", None, True])
def test_the_sizes_of_the_ngram_proposers_are_bounded(load, option, value):
    if option == "nodes" and load is Ngram.load:
        return
    with pytest.raises(ValueError, match=rf"proposer\.{option}"):
        load(None, **{option: value})


def test_the_largest_ngram_is_looked_up():
    assert Ngram.load(None, max_ngram=LONGEST).max_ngram == LONGEST


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": HUGE}, r"proposer\.depth .*at most 256"),
        ({"depth": 257}, r"proposer\.depth .*at most 256"),
        ({"tree": "1025"}, r"proposer\.tree has"),
        ({"depth": 2, "temperature": 1e7}, r"proposer\.temperature "),
        ({"depth": 2, "confidence": 2}, r"proposer\.confidence "),
    ],
)
def test_the_options_of_a_draft_model_are_checked_before_it_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        DraftModel.load(None, "no/such/checkpoint", **options)
