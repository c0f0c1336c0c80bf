"""Distributions of outputs, on examples by hand: V = 2, p = (3/4, 1/4), then (1/2, 1/2) after 0 and (1, 0) after 1."""

import numpy as np
import pytest

from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import Instance
from spec_lab.tasks.certify.outputs import StepOutputs, first_difference, total_variation

P = [np.array([[0.75, 0.25]]), np.array([[0.5, 0.5], [1.0, 0.0]]), np.full((4, 2), 0.5)]


def outputs(longest=2, **texts):
    """``outputs(_0=0.75, _10=0.25)``: the output is exactly 0 with probability 3/4 and 1 0 with 1/4."""
    collected = StepOutputs(2, longest)
    for text, mass in texts.items():
        digits = text.removeprefix("_")
        collected.exactly[len(digits)][int(digits or "0", 2)] = mass
    return collected


# One step ------------------------------------------------------------------------------------------------------------


def test_a_shorter_output_is_extended_with_exact_samples():
    step = outputs(_0=0.75, _10=0.25)
    assert step.extended(P).tolist() == [0.375, 0.375, 0.25, 0.0]
    assert step.mass == 1.0
    assert step.tv(P) == 0.0
    assert step.first_failure(P) is None


def test_a_longer_output_is_cut():
    step = outputs(_0=0.75, _10=0.2, _11=0.05)
    assert step.extended(P, 1).tolist() == [0.75, 0.25]
    assert step.tv(P, 1) == 0.0
    assert step.tv(P) == pytest.approx(0.05)


def test_the_fault_is_found_where_it_lies():
    first = outputs(_0=0.5, _10=0.5)
    assert first.tv(P) == 0.25
    assert first.first_failure(P) == "after [] token 0 has probability 0.5, not 0.75"
    second = outputs(_0=0.75, _11=0.25)
    assert (second.tv(P, 1), second.tv(P)) == (0.0, 0.25)
    assert second.first_failure(P) == "after [1] token 0 has probability 0, not 0.25"
    third = outputs(longest=3, _00=0.375, _010=0.375, _1=0.25)
    assert third.first_failure(P) == "after [0, 1] token 0 has probability 0.375, not 0.1875"


def test_a_step_may_end_earlier_or_later_only_regardless_of_what_would_have_followed():
    """It stops after 0 exactly when 1 would have been drawn next: each token is right, the step is not."""
    biased = outputs(_0=0.375, _00=0.375, _10=0.25)
    assert biased.first_failure(P) == "after [0] token 0 has probability 0.375, not 0.1875"
    assert biased.tv(P) == pytest.approx(0.1875)


def test_mass_that_is_missing_or_nan_is_found():
    less = outputs(_0=0.75)
    assert (less.mass, less.tv(P)) == (0.75, 0.125)
    assert less.first_failure(P) is not None
    broken = outputs(_0=0.75, _10=np.nan, _11=0.25)
    assert "nan" in broken.first_failure(P)


# Whole requests ------------------------------------------------------------------------------------------------------


def finished(**texts):
    """``finished(_0_stop=0.75)``: one sequence, 0 with a stop token at its end, has probability 3/4."""
    masses = {}
    for name, mass in texts.items():
        _, digits, finish = name.split("_")
        masses[((tuple(map(int, digits)), finish),)] = mass
    return masses


class Toy:
    """The probabilities above for a target over four tokens, of which two occur."""

    v = 4

    def probabilities(self, length):
        p = np.zeros((4**length, 4))
        p[:, 0] = 1.0
        for number, row in enumerate(P[length]):
            digits = f"{number:b}".zfill(length)[:length]
            p[int(digits, 4) if digits else 0, :2] = row
        return p, p


def test_autoregressive_decoding_ends_at_its_length():
    assert truth(Instance(Toy(), "1", 2)) == pytest.approx(
        finished(_00_length=0.375, _01_length=0.375, _10_length=0.25)
    )


def test_autoregressive_decoding_ends_with_a_stop_token_which_it_keeps():
    expected = truth(Instance(Toy(), "1", 3, frozenset({1})))
    assert expected == pytest.approx(finished(_1_stop=0.25, _01_stop=0.375, _000_length=0.1875, _001_stop=0.1875))
    assert truth(Instance(Toy(), "1", 3, frozenset({0, 1}))) == pytest.approx(finished(_0_stop=0.75, _1_stop=0.25))


EXPECTED = finished(_00_length=0.375, _01_length=0.375, _10_length=0.25)


def test_the_shortest_text_with_another_probability_is_named():
    other = finished(_00_length=0.375, _01_length=0.375, _10_length=0.125, _11_length=0.125)
    assert total_variation(other, EXPECTED) == 0.125
    assert first_difference(other, EXPECTED) in (
        "outputs begin with [1, 0] with probability 0.125, not 0.25",
        "outputs begin with [1, 1] with probability 0.125, not 0",
    )
    assert total_variation(EXPECTED, EXPECTED) == 0.0 and first_difference(EXPECTED, EXPECTED) is None


def test_of_differences_of_one_length_the_largest_is_named():
    outcomes = finished(_0_length=0.7, _1_length=0.2, _2_length=0.1)
    assert first_difference(outcomes, finished(_0_length=0.75, _1_length=0.25)) == (
        "outputs begin with [2] with probability 0.1, not 0"
    )


def test_a_text_that_ends_early_is_found():
    """Length bias: every token has the target's distribution, as if an empty residual had ended the text."""
    step, early = outputs(_0=0.75, _10=0.25), finished(_0_length=0.75, _10_length=0.25)
    assert step.tv(P) == 0.0 and step.first_failure(P) is None  # right for one step
    assert total_variation(early, EXPECTED) == 0.75
    assert first_difference(early, EXPECTED) == "outputs are exactly [0] (length) with probability 0.75, not 0"


def test_a_text_that_runs_past_its_stop_token_is_found():
    stopped = finished(_0_stop=0.75, _10_stop=0.25)
    assert first_difference(EXPECTED, stopped) == "outputs are exactly [0] (stop) with probability 0, not 0.75"


def test_outputs_with_forks_are_compared_whole():
    forks = {(((0,), "length"), ((1, 0), "stop")): 1.0}
    assert first_difference(forks, forks) is None
    assert first_difference(forks, {(((0,), "length"), ((1, 1), "stop")): 1.0}) in (
        "outputs are exactly [0] (length) and [1, 0] (stop) with probability 1, not 0",
        "outputs are exactly [0] (length) and [1, 1] (stop) with probability 0, not 1",
    )
