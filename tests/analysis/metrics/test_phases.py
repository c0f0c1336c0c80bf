"""Where decode time goes."""

import math

import pytest

from spec_lab.analysis import metrics


def test_decode_time_begins_after_the_prefill_and_its_phases_add_up(forwards):
    assert metrics.decode_seconds(forwards, "medusa") == pytest.approx(6.0)
    phases = metrics.phase_seconds(forwards, "medusa")
    assert list(phases) == list(metrics.PHASES)
    assert sum(phases.values()) == pytest.approx(6.0)
    expected = {
        "propose_forward": 0.7, "propose_rest": 0.3, "mask_wait": 0.0, "target_forward": 2.8, "target_rest": 0.3,
        "probabilities": 0.5, "verify": 0.2, "commit": 0.2, "between": 1.0,
    }  # fmt: skip
    assert phases == pytest.approx(expected)


def test_overhead_is_what_is_spent_outside_the_module_calls(forwards):
    assert metrics.overhead(forwards, "medusa") == pytest.approx(1 - 3.5 / 6)
    assert math.isnan(metrics.overhead(forwards, "baseline"))
