"""The metric ``my_metric``."""

import pandas as pd

from spec_lab.analysis.metrics import Tables


def my_metric(tables: Tables, arm: str, shortest: int = 1) -> dict[str, pd.Series]:
    """Return the mean number of characters per token of each request's output.

    Args:
        tables: the run's rows.
        arm: key of the arm.
        shortest: tokens of an output; shorter ones have no value.
    """
    rows = tables.requests[tables.requests["arm"] == arm].set_index("request")
    tokens = rows["tokens"].map(len)
    return {"my_metric": (rows["text"].str.len() / tokens)[tokens >= shortest]}
