"""Depths of look-ups that follow from measured costs."""

import json
import logging

import numpy as np
import pytest

from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.pld_plus import PldPlus
from spec_lab.propose.step_costs import StepCosts
from tests.propose.lab import decode, requests


@pytest.fixture
def costs(monkeypatch, tmp_path):
    """Give the function that sets the seconds of a step by its draft tokens; list the proposers that are timed."""
    monkeypatch.setenv("SPEC_LAB_CACHE", str(tmp_path))
    timed = []

    def set_to(seconds):
        def time_steps(target, proposers, tokens, batch_size, sampling):
            timed.extend(proposers.values())
            taken = {size: seconds(size) for size in proposers}
            return StepCosts(taken, dict.fromkeys(taken, 0.0), 10)

        monkeypatch.setattr("spec_lab.propose.calibrate.time_steps", time_steps)
        return timed

    return set_to


def tokens(depth, acceptance):
    return sum(acceptance**level for level in range(depth + 1))


@pytest.mark.parametrize("per_row", [0.02, 0.2, 0.35])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("make", [Ngram, NgramTree, PldPlus])
def test_the_depth_is_that_of_the_most_expected_tokens_per_second(target, costs, per_row, acceptance, make):
    """Of those within two hundredths of it the largest, as calibrated trees."""
    costs(lambda size: 1 + per_row * size)
    depth = make.load(target, depth="auto", acceptance=acceptance).depth
    rates = [tokens(depth, acceptance) / (1 + per_row * depth) for depth in range(17)]
    assert rates[depth] >= 0.98 * max(rates)
    assert depth >= int(np.argmax(rates))


def test_the_manifest_states_the_depth_and_why(target, costs):
    costs(lambda size: 1 + 0.2 * size)
    proposer = Ngram.load(target, depth="auto")
    chosen = json.loads(json.dumps(dict(proposer.facts)))["auto_depth"]
    assert (chosen["depth"], chosen["acceptance"], chosen["batch_size"]) == (proposer.depth, 0.7, 1)
    assert chosen["expected_tokens"] == pytest.approx(tokens(proposer.depth, 0.7))
    assert chosen["step_seconds"]["4"] == pytest.approx(1.8)
    assert "auto_depth" not in Ngram.load(target, depth=4).facts


@pytest.mark.parametrize("make", [Ngram, NgramTree, PldPlus])
def test_nothing_is_drafted_where_no_depth_pays(target, costs, caplog, make):
    costs(lambda size: 1 + 0.8 * size)
    with caplog.at_level(logging.WARNING):
        proposer = make.load(target, depth="auto")
    assert proposer.depth == 0
    assert "no depth of a look-up is faster" in caplog.text and "proposer.acceptance" in caplog.text
    _, steps = decode(target, proposer, requests())
    assert not any(step.draft.shape.nodes for step in steps)


def test_all_look_ups_share_the_costs_of_chains(target, costs):
    timed = costs(lambda size: 1 + 0.1 * size)
    Ngram.load(target, depth="auto")
    assert [proposer.nodes for proposer in timed] == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16]
    NgramTree.load(target, depth="auto", acceptance=0.9)
    assert len(timed) == 12, "read from the cache"


@pytest.mark.nightly
def test_steps_of_chains_are_timed(target, monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("spec_lab.propose.step_costs.PASSES", 1)
    chosen = Ngram.load(target, depth="auto").facts["auto_depth"]
    assert chosen["step_seconds"][0] > 0 and 0 <= chosen["depth"] <= 16
