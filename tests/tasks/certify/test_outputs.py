"""Laws of outputs, on examples done by hand: V = 2, p = (3/4, 1/4), then (1/2, 1/2) after 0 and 0 after 1."""

import numpy as np
import pytest

from spec_lab.tasks.certify.outputs import Outputs, autoregressive

LAWS = [np.array([[0.75, 0.25]]), np.array([[0.5, 0.5], [1.0, 0.0]]), np.full((4, 2), 0.5)]


def outputs(longest=2, **texts):
    """``outputs(_0=0.75, _10=0.25)``: the output is exactly 0 with probability 3/4 and 1 0 with 1/4."""
    found = Outputs(2, longest)
    for text, mass in texts.items():
        digits = text.removeprefix("_")
        found.exactly[len(digits)][int(digits or "0", 2)] = mass
    return found


def test_a_shorter_output_goes_on_with_exact_samples():
    step = outputs(_0=0.75, _10=0.25)
    assert step.extended(LAWS).tolist() == [0.375, 0.375, 0.25, 0.0]
    assert step.mass == 1.0
    assert step.tv(LAWS) == 0.0
    assert step.first_failure(LAWS) is None


def test_a_longer_output_is_cut():
    step = outputs(_0=0.75, _10=0.2, _11=0.05)
    assert step.extended(LAWS, 1).tolist() == [0.75, 0.25]
    assert step.tv(LAWS, 1) == 0.0
    assert step.tv(LAWS) == pytest.approx(0.05)


def test_the_fault_is_found_where_it_lies():
    first = outputs(_0=0.5, _10=0.5)
    assert first.tv(LAWS) == 0.25
    assert first.first_failure(LAWS) == "after [] token 0 has probability 0.5, not 0.75"
    second = outputs(_0=0.75, _11=0.25)
    assert (second.tv(LAWS, 1), second.tv(LAWS)) == (0.0, 0.25)
    assert second.first_failure(LAWS) == "after [1] token 0 has probability 0, not 0.25"
    third = outputs(longest=3, _00=0.375, _010=0.375, _1=0.25)
    assert third.first_failure(LAWS) == "after [0, 1] token 0 has probability 0.375, not 0.1875"


def test_a_step_may_end_earlier_or_later_only_regardless_of_what_would_have_followed():
    """It stops after 0 exactly when 1 would have been drawn next: every token has its law, the step has not."""
    biased = outputs(_0=0.375, _00=0.375, _10=0.25)
    assert biased.first_failure(LAWS) == "after [0] token 0 has probability 0.375, not 0.1875"
    assert biased.tv(LAWS) == pytest.approx(0.1875)


def test_mass_that_is_missing_or_nan_is_found():
    less = outputs(_0=0.75)
    assert (less.mass, less.tv(LAWS)) == (0.75, 0.125)
    assert less.first_failure(LAWS) is not None
    broken = outputs(_0=0.75, _10=np.nan, _11=0.25)
    assert "nan" in broken.first_failure(LAWS)
    assert broken.first_difference(autoregressive(LAWS, 2, 2)) is not None


def test_autoregressive_decoding():
    assert autoregressive(LAWS, 2, 2).exactly[2].tolist() == [0.375, 0.375, 0.25, 0.0]
    assert [part.sum() for part in autoregressive(LAWS, 2, 2).exactly] == [0.0, 0.0, 1.0]
    assert autoregressive(LAWS, 0, 2).exactly[0].tolist() == [1.0]


def test_autoregressive_decoding_ends_with_a_stop_token_which_it_keeps():
    found = autoregressive(LAWS, 3, 2, frozenset({1}))
    assert found.exactly[0].tolist() == [0.0]
    assert found.exactly[1].tolist() == [0.0, 0.25]
    assert found.exactly[2].tolist() == [0.0, 0.375, 0.0, 0.0]
    assert found.exactly[3].tolist() == [0.1875, 0.1875] + [0.0] * 6
    assert found.mass == 1.0
    both = autoregressive(LAWS, 3, 2, frozenset({0, 1}))
    assert both.exactly[1].tolist() == [0.75, 0.25] and both.mass == 1.0


def test_distance_and_first_difference_of_whole_outputs():
    truth = autoregressive(LAWS, 2, 2)
    other = outputs(_00=0.375, _01=0.375, _10=0.125, _11=0.125)
    assert other.distance(truth) == 0.125
    assert other.first_difference(truth) == "outputs begin with [1, 0] with probability 0.125, not 0.25"
    assert truth.distance(truth) == 0.0 and truth.first_difference(truth) is None


def test_a_text_that_ends_early_in_silence_is_found():
    """Length bias: all that is there follows the law, as if an empty residual had ended the text."""
    truth, silent = autoregressive(LAWS, 2, 2), outputs(_0=0.75, _10=0.25)
    assert silent.tv(LAWS) == 0.0 and silent.first_failure(LAWS) is None  # of a step it would be right
    assert silent.distance(truth) == 0.75
    assert silent.first_difference(truth) == "outputs are exactly [0] with probability 0.75, not 0"


def test_a_text_that_runs_past_its_stop_token_is_found():
    truth = autoregressive(LAWS, 2, 2, frozenset({0}))
    assert autoregressive(LAWS, 2, 2).first_difference(truth) == (
        "outputs are exactly [0] with probability 0, not 0.75"
    )
