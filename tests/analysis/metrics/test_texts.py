"""Figures of the outputs' texts."""

import math

import pandas as pd
import pytest

from spec_lab.analysis import metrics


def test_8grams_repeat_within_one_output_and_are_pooled_over_all():
    assert metrics.repeated_8gram_share([list(range(20))]) == 0.0
    # 16 tokens hold nine 8-grams; a loop of period 4 shows 4 new ones, the other 5 repeat
    assert metrics.repeated_8gram_share([[1, 2, 3, 4] * 4]) == pytest.approx(5 / 9)
    # pooled: one more output with two 8-grams, both new although the first output has them
    assert metrics.repeated_8gram_share([[1, 2, 3, 4] * 4, [1, 2, 3, 4] * 2 + [1]]) == pytest.approx(5 / 11)
    assert math.isnan(metrics.repeated_8gram_share([[1, 2, 3]]))


def test_answers_that_the_limit_ended_and_those_that_a_later_turn_continues():
    rows = [("a", 1, "length"), ("a", 2, "length"), ("b", 1, "stop"), ("b", 2, "stop"), ("c", 1, "length")]
    table = pd.DataFrame(rows, columns=["conversation", "turn", "finish"])
    assert metrics.cut_answers(table) == {"answers": 5, "cut": 3, "continued": 1}


def test_outputs_are_identical_where_all_tokens_are(requests):
    requests["tokens"] = [[1, 2], [3], [1, 2], [3, 4], [5], [6], [5], [6]]
    assert metrics.identical_outputs(requests, "medusa") == pytest.approx(3 / 4)
