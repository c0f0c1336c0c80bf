"""The names of a run's figures on Weights & Biases."""

import math

from spec_lab.analysis.tracking import headline

INTERVAL = {"mean": 2.0, "low": 1.5, "high": 2.5}
ARM = {"tau_pooled": 3.0, "draft_token_rate": 0.5, "time_to_first_token": 0.1, "time_per_output_token": 0.01}


def test_figures_have_common_names_and_intervals_their_ends():
    summary = {**ARM, "speedup": INTERVAL, "intervals": {"tau_pooled": {"mean": 3.0, "low": 2.0, "high": 4.0}}}
    assert headline.figures(summary) == {
        "tau": 3.0, "tau/low": 2.0, "tau/high": 4.0, "acceptance_rate": 0.5, "ttft": 0.1, "tpot": 0.01,
        "speedup": 2.0, "speedup/low": 1.5, "speedup/high": 2.5,
    }  # fmt: skip


def test_other_arms_have_their_key_as_prefix_and_the_main_one_none():
    arms = {"medusa": ARM, "baseline": {"tau_pooled": 1.0}, "ngram": {"tau_pooled": 2.0}}
    numbers = headline.figures({**ARM, "baseline_overhead": 0.1, "arms": arms})
    assert (numbers["tau"], numbers["baseline/tau"], numbers["ngram/tau"]) == (3.0, 1.0, 2.0)
    assert not [name for name in numbers if name.startswith(("medusa", "baseline_"))]


def test_lists_are_numbered_and_bounded_and_only_single_values_are_shown():
    numbers = headline.figures(
        {
            "survival": [0.5] * 99, "nan": math.nan, "none": None, "lossless": True, "rows": [{"a": 1}],
            "target": "/absolute/models/toy", "finish": {"length": 3}, "text": "x" * 9999, "errors": ["secret"],
        }
    )  # fmt: skip
    assert [name for name in numbers if name.startswith("survival")] == [f"survival/{k}" for k in range(1, 17)]
    assert numbers["lossless"] is True and numbers["finish/length"] == 3 and numbers["target"] == "models/toy"
    assert len(numbers["text"]) == 500
    assert not {"nan", "none", "rows", "errors", "errors/1"} & numbers.keys()
