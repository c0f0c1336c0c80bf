"""Figures of counted experts, and the roofline of steps whose experts were counted."""

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.roofline_text import experts_in_words
from spec_lab.core.roofline import ExpertWork, ForwardWork, Roofline
from tests.analysis.metrics.test_roofline import LIMITS, tables

MIXTURE = Roofline(ForwardWork(1000, 10, 5, (), ExpertWork(2, 8, 2, 25.0)), LIMITS)


def counted() -> metrics.Tables:
    """After each prefill a step that was not counted, and one of five rows: 3 and 5 experts in two layers."""
    both = tables()
    columns = {
        "experts": [[8, 8], None, [3, 5]], "experts_accepted": [[8, 8], None, [2, 3]],
        "experts_rejected": [[0, 0], None, [2, 4]],
    }  # fmt: skip
    forwards = both.forwards.assign(**{name: values * 2 for name, values in columns.items()})
    return metrics.Tables(forwards, both.steps, both.requests)


def test_means_are_over_the_steps_after_the_prefill_that_were_counted():
    figures = metrics.expert_figures(counted(), "medusa", MIXTURE)
    assert figures == pytest.approx(
        {"read": 4, "accepted": 2.5, "rejected": 3, "rejected_only": 1.5, "rows": 5, "expected": 8 * (1 - 0.75**5)}
        | {"effective": MIXTURE.work.experts.fitted([5], [4]), "forwards": 2, "decoded": 4}
    )
    assert metrics.expert_figures(tables(), "medusa", MIXTURE) == {}, "an older run, or one without count_experts"
    (line, _) = experts_in_words({"medusa": {"experts": figures}}, MIXTURE)
    assert (
        "reads 4 of 8 experts" in line
        and "1.5 of them" in line
        and f"{figures['expected']:.3g}, and as many among" in line
    )
    single = figures | {"effective": None}
    assert "among" not in experts_in_words({"medusa": {"experts": single}}, MIXTURE)[0]
    share = {"roofline_share": {"mean": 0.1}}
    lines = experts_in_words({"medusa": {"experts": figures}, "early_exit": {"experts": {}, **share}}, MIXTURE)
    assert "not counted: early_exit" in lines[1]
    (line,) = experts_in_words({"medusa": {"experts": {}}}, MIXTURE)
    assert "count_experts=true" in line


def test_the_roofline_reads_what_was_counted_and_else_what_uniform_choices_would():
    steps = metrics.step_bounds(counted(), "medusa", MIXTURE)
    assert steps["memory"].tolist()[:2] == [1.0, (1000 + 50 * (4 - 2)) / 1e3]
    uniform = metrics.step_bounds(tables(), "medusa", MIXTURE)
    assert uniform["memory"].tolist()[1] == pytest.approx((1000 + 50 * (8 * (1 - 0.75**5) - 2)) / 1e3)


def test_lists_that_pandas_reads_as_missing_are_not_counted():
    frame = pd.DataFrame({"experts": [float("nan"), None, [1, 2]]})
    assert metrics.experts.per_layer(frame)[2] == 1.5 and all(pd.isna(metrics.experts.per_layer(frame)[:2]))
