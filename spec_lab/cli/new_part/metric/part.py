"""The metric ``my_metric``."""

import pandas as pd

from spec_lab.analysis.metrics import Tables


def my_metric(tables: Tables, arm: str, shortest: int = 1) -> dict[str, pd.Series]:
    """Return the characters of an output's token, of each request.

    Args:
        tables: the run's rows.
        arm: key of the arm.
        shortest: tokens of an output; shorter ones have no value.
    """
    rows = tables.requests[tables.requests["arm"] == arm].set_index("request")
    tokens = rows["tokens"].map(len)
    return {"my_metric": (rows["text"].str.len() / tokens)[tokens >= shortest]}
