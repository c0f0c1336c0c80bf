"""``my_metric`` by hand."""

import pandas as pd

from spec_lab.analysis.metrics import Tables
from spec_lab.cli.new_part.metric.part import my_metric


def test_characters_are_counted_by_request() -> None:
    requests = pd.DataFrame(
        {"arm": ["a", "a", "b"], "request": [0, 1, 0], "text": ["abcd", "", "abc"], "tokens": [[1, 2], [], [1]]}
    )
    (values,) = my_metric(Tables(pd.DataFrame(), pd.DataFrame(), requests), "a").values()
    assert values.to_dict() == {0: 2.0}
