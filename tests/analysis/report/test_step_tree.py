"""Why a path ended where it did: what a sentence claims follows from the row, for every kind of verifier."""

import numpy as np
import pytest

from spec_lab.analysis.report.step_tree import Verification, read_tree, reason

NAMES = {1: "foo", 2: "bar", 3: "baz", 4: "qux", 5: "quux"}
TOKEN = Verification("token", True, 1.0)
GREEDY = Verification("token", True, 0.0)


def row(parents=(), tokens=(), path=(), emitted=(), origins=(), **changes) -> dict:
    """A row of ``steps`` as it is read from a table."""
    nodes = len(parents)
    usual = {
        "draft_tokens": tokens, "draft_parents": parents, "draft_p": [0.5] * nodes, "draft_q": [None] * nodes,
        "draft_accept": [0.5] * nodes, "draft_legal": None, "draft_forced": None, "path": path,
        "emitted_tokens": emitted, "emitted_origins": origins, "emitted_p": 0.25, "finish": "",
        "expected_kind": "exact", "empty_residual": False, "taken_back": 0, "forks": 0, "emitted": len(emitted),
        "emitted_kept": len(emitted),
    }  # fmt: skip
    arrays = {name: np.array(value) if isinstance(value, list | tuple) else value for name, value in usual.items()}
    return arrays | changes


def why(step: dict, how: Verification) -> str:
    tree = read_tree(step)
    assert tree is not None
    return reason(step, tree, NAMES.__getitem__, how)


CHAIN = {"parents": [-1, 0], "tokens": [1, 3], "path": [0], "emitted": [1, 2], "origins": ["accepted", "recovered"]}


def test_a_tree_has_its_path_and_its_end():
    tree = read_tree(row([-1, -1, 1, 1], [1, 2, 3, 4], [1, 1], [2, 4, 5], ["accepted", "accepted", "bonus"]))
    assert tree.path == [1, 3] and tree.end == 3 and tree.last == 2
    assert tree.children(1) == [2, 3] and tree.children(-1) == [0, 1]
    assert tree.q == [None] * 4 and tree.illegal == tree.forced == []


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_parents": np.array([0, 0])},  # its own parent
        {"draft_parents": np.array([1, -1])},
        {"draft_parents": np.array([-2, 0])},
        {"draft_p": np.array([0.5])},
        {"path": np.array([1])},
        {"path": np.array([-1])},
        {"path": np.array([0, 0, 0])},
        {"emitted_origins": np.array(["accepted"])},
        {"emitted_tokens": np.array([4, 2])},  # another token than the accepted one
        {"draft_tokens": None},
        {"draft_accept": float("nan")},
        {"draft_parents": np.array([-1, np.nan])},  # nulls
        {"draft_tokens": np.array([1, np.nan])},
        {"emitted_tokens": np.array([1, np.nan])},
    ],
)
def test_columns_that_do_not_fit_together_are_no_tree(changes):
    assert read_tree(row(**CHAIN) | changes) is None


def test_at_temperature_0_the_target_has_another_arg_max():
    said = why(row(**CHAIN, draft_accept=[1.0, 0.0], emitted_p=1.0), GREEDY)
    assert said == "baz was rejected: the target's arg max is bar, the recovered token."


def test_rejection_sampling_compares_p_and_q():
    sampled = {"draft_p": [0.5, 0.02], "draft_q": [0.5, 0.31], "draft_accept": [1.0, 0.02 / 0.31]}
    said = why(row(**CHAIN, **sampled), TOKEN)
    assert "target p 0.02 < draft q 0.31, so its acceptance probability was 0.065" in said
    assert "recovered token bar (target p 0.25) was drawn from the residual" in said


@pytest.mark.parametrize("verifier", ["token", "match", "traversal"])
def test_points_are_accepted_with_their_target_probability(verifier):
    how = Verification(verifier, True, 1.0)
    said = why(row(**CHAIN, draft_p=[0.5, 0.02], draft_accept=[0.5, 0.02]), how)
    assert "its target probability, p 0.02" in said and "draft q" not in said
    several = row([-1, -1], [1, 3], [], [2], ["recovered"], draft_p=[0.3, 0.12], draft_accept=[0.3, 0.12])
    assert "foo and baz were rejected" in why(several, how) and "sum of their target probabilities, 0.42" in why(
        several, how
    )


@pytest.mark.parametrize(("lossless", "named"), [(False, "the lossy verifier typical"), (None, "the verifier")])
def test_of_a_lossy_verifier_only_the_acceptance_probability_is_said(lossless, named):
    sampled = {"draft_p": [0.5, 0.02], "draft_q": [0.5, 0.31], "draft_accept": [1.0, 0.02]}
    said = why(row(**CHAIN, **sampled), Verification("typical", lossless, 1.0))
    assert f"{named} accepts it with probability 0.02" in said
    assert not any(word in said for word in ("residual", "arg max", "draft q", "<", "sampled"))


def test_a_path_to_a_leaf_ends_with_the_bonus_token():
    leaf = {"parents": [-1, 0], "tokens": [1, 3], "path": [0, 0], "emitted": [1, 3, 2]}
    leaf |= {"origins": ["accepted", "accepted", "bonus"]}
    assert why(row(**leaf), TOKEN).startswith("All 2 drafted tokens of the path were accepted")
    assert why(row(**leaf), TOKEN).endswith("The bonus token bar (target p 0.25) was sampled from the target.")
    assert why(row(**leaf, emitted_p=1.0), GREEDY).endswith("The bonus token bar is the target's arg max.")
    cut = row(**leaf, emitted_kept=1, finish="length")
    assert why(cut, TOKEN).endswith("Of 3 emitted tokens 1 were kept, because of max_new_tokens.")
