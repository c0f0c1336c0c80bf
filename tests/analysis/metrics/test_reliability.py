"""Calibration of predicted probabilities, by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.reliability import reliability

NONE = float("nan")


def test_figures_of_outcomes():
    """Two events of four: of the four pairs of event and non-event two are in order and one is a tie."""
    facts = reliability(np.array([0.9, 0.5, 0.5, 0.1, NONE]), np.array([1.0, 1.0, 0.0, 0.0, 1.0]), "agreed")
    assert facts["brier"] == pytest.approx((0.01 + 0.25 + 0.25 + 0.01) / 4)
    assert facts["auroc"] == pytest.approx(3.5 / 4)
    assert facts["ece"] == pytest.approx((0.1 + 2 * 0.0 + 0.1) / 4)
    assert (facts["confidence"], facts["agreed"]) == (0.5, 0.5)
    assert math.isnan(reliability(np.array([0.2, 0.3]), np.ones(2), "agreed")["auroc"]), "nothing did not happen"
    assert reliability(np.array([NONE]), np.ones(1), "agreed") is None


def test_an_exact_probability_stands_for_many_outcomes():
    """Every outcome of two tokens, by its probability: what is expected of the figure is what the exact ones give."""
    predicted, exact = np.array([0.8, 0.3]), np.array([0.75, 0.25])
    first_alone, second_alone = 0.75 * 0.75, 0.25 * 0.25  # one event, one non-event; otherwise there is no pair
    facts = reliability(predicted, exact, "accepted")
    assert facts["auroc"] == pytest.approx(first_alone / (first_alone + second_alone))
    brier = [p * (c - 1) ** 2 + (1 - p) * c**2 for c, p in zip(predicted, exact, strict=True)]
    assert facts["brier"] == pytest.approx(np.mean(brier))


def test_what_a_drafter_states_is_compared_with_the_exact_acceptance_of_its_nodes(chain):
    assert metrics.confidence(chain) == {}
    steps = pd.DataFrame({
        "draft_confidence": [[0.9, 0.25], None, [], [0.95, 0.05]], "draft_q": [[None, 1.0], [1.0], [], [0.5, 0.5]],
        "draft_accept": [[0.5, None], [1.0], [], [0.75, 0.0]], "draft_forced": [None, [True], [], [False, False]],
    })  # fmt: skip
    facts = metrics.confidence(steps)
    assert facts["head"]["ece"] == pytest.approx((2 * abs(0.925 - 0.625) + 0.05) / 3)
    assert facts["head"]["accepted"] == pytest.approx(1.25 / 3)
    assert [entry["tokens"] for entry in facts["head"]["bins"]] == [1, 2]
    assert [entry["tokens"] for entry in facts["draft"]["bins"]] == [2], "a forced token is left out"


def test_likeliest_tokens_are_calibrated_where_one_hot_draft_distributions_state_nothing():
    steps = pd.DataFrame({"draft_q": [[1.0, 1.0]], "draft_accept": [[1.0, 0.0]]})
    assert metrics.confidence(steps) == {}
    facts = metrics.confidence(steps.assign(draft_greedy_q=[[0.75, 0.5]]))
    assert facts.keys() == {"greedy"} and facts["greedy"]["auroc"] == 1.0
    assert facts["greedy"]["brier"] == pytest.approx((0.25**2 + 0.5**2) / 2)
