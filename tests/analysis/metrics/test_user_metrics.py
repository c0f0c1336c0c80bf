"""Metrics of a user's own: what they may return, and what is refused, by the name of the part and of the value."""

import math

import pandas as pd
import pytest

from spec_lab.analysis.metrics import Tables, own_metrics, returned_names
from spec_lab.analysis.metrics.intervals import interval
from spec_lab.analysis.metrics.texts import distinct
from spec_lab.core.options import WrongOption

ARMS = ("medusa", "baseline")
REQUESTS = pd.DataFrame(
    [
        {"arm": arm, "request": request, "group": request // 2, "finish": "length", "tokens": [request, 1, request, 1]}
        for arm in ARMS
        for request in range(16)
    ]
)
TABLES = Tables(pd.DataFrame(), pd.DataFrame(), REQUESTS)


def by_request(tables, arm):
    return {"squares": pd.Series([float(n * n) for n in range(16)], range(16)), "count": 16} if len(arm) else {}


def test_values_by_request_have_a_mean_with_an_interval_over_groups_and_a_number_has_none():
    values = own_metrics({"mine": by_request}, TABLES, ARMS)
    assert values.failures == [] and list(values.figures) == list(ARMS)
    means = [(n * n + (n + 1) ** 2) / 2 for n in range(0, 16, 2)]  # of the groups, which have equal sizes
    assert values.figures["baseline"]["squares"] == pytest.approx(interval(means)._asdict())
    count = values.figures["medusa"]["count"]
    assert count["mean"] == 16 and math.isnan(count["low"]) and math.isnan(count["high"])
    rows = pd.DataFrame(values.rows)
    assert len(rows) == len(ARMS) * (16 + 1) and rows.loc[rows["metric"] == "count", "request"].tolist() == [-1, -1]


def test_groups_in_which_a_request_broke_are_left_out_as_of_all_figures():
    requests = REQUESTS.assign(finish=["nan", *["length"] * (len(REQUESTS) - 1)])  # the first of group 0

    def numbers(tables, arm):
        chosen = tables.requests[tables.requests["arm"] == arm].set_index("request")
        return {"number": chosen.index.to_series(), "count": len(chosen)}

    values = own_metrics({"mine": numbers}, Tables(pd.DataFrame(), pd.DataFrame(), requests), ARMS)
    for arm in ARMS:
        assert (
            values.figures[arm]["count"]["mean"] == 14
            and values.figures[arm]["number"]["mean"] == sum(range(2, 16)) / 14
        )


def series(*values, index=None):
    return pd.Series(values, range(len(values)) if index is None else index)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"a-b": 1}, ["'a-b'"]),
        ({3: 1}, ["3"]),
        ({"tau_pooled": 1}, ["tau_pooled"]),
        ({"tau": 1}, ["tau"]),
        ({"speed_low": 1}, ["speed_low", "_low"]),
        ({"x": math.nan}, ["x is nan"]),
        ({"x": math.inf}, ["x is inf"]),
        ({"x": "much"}, ["x", "str"]),
        ({"x": True}, ["x", "bool"]),
        ({"x": series("much")}, ["x"]),
        ({"x": 10**400}, ["x is inf"]),
        ({"x": series(10**400)}, ["x", "real numbers"]),
        ({"x": 1j}, ["x", "complex"]),
        ({"x": series(1j)}, ["x", "real numbers"]),
        ({"x": series(1.0, math.nan)}, ["x is nan for request 1"]),
        ({"x": series(1.0, index=[99])}, ["x", "99"]),
        ({"x": series(1.0, 2.0, index=[3, 3])}, ["x", "request 3"]),
        ({"x": series()}, ["x has no request"]),
        ([1.0], ["list"]),
    ],
)
def test_a_wrong_value_costs_only_itself_and_names_part_and_value(returned, words):
    good = dict(returned) | {"good": 1.0} if isinstance(returned, dict) else returned
    values = own_metrics({"mine": lambda tables, arm: good, "other": lambda tables, arm: {"fine": 2}}, TABLES, ARMS)
    (message,) = values.failures
    assert message.startswith("metrics.mine") and all(word in message for word in words)
    assert "medusa, baseline" in message
    assert list(values.figures["baseline"]) == ["good"] * isinstance(returned, dict) + ["fine"]


def test_an_error_names_part_place_and_the_column_that_was_meant():
    def wrong(tables, arm):
        return {"x": tables.requests["tokenz"].sum()}

    values = own_metrics({"mine": wrong}, TABLES, ["baseline"])
    (message,) = values.failures
    assert message.startswith("metrics.mine raised KeyError") and f"{__file__}:" in message
    assert "'tokenz'" in message and "requests has 'tokens'" in message and values.rows == []


def test_two_metrics_cannot_share_a_name_nor_change_the_tables():
    def changing(tables, arm):
        tables.requests["request"] = 0
        return {"x": 1}

    values = own_metrics({"mine": changing, "other": changing}, TABLES, ["baseline"])
    assert values.figures["baseline"]["x"]["mean"] == 1 and "another metric" in values.failures[0]
    assert TABLES.requests["request"].nunique() == 16


def test_names_are_known_and_checked_without_rows():
    def later(tables, arm):
        return {"x": tables.requests["tokens"].iloc[0]}

    assert returned_names({"mine": distinct}) == ["distinct_2"]
    assert returned_names({"mine": distinct, "other": later}) is None
    for wrong in ({"tau_pooled": 1}, [1]):
        with pytest.raises(WrongOption, match="^metrics.mine"):
            returned_names({"mine": lambda tables, arm, wrong=wrong: wrong})


def test_distinct_counts_n_grams_within_each_output():
    requests = pd.DataFrame({"arm": "a", "request": [0, 1, 2, 2], "tokens": [[1, 2, 1, 2], [5], [1, 1, 1], [1, 2]]})
    (values,) = distinct(Tables(requests, requests, requests), "a").values()
    assert values.to_dict() == {0: 2 / 3, 2: 2 / 3}
