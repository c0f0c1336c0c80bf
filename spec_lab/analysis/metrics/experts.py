"""The experts that an arm's forwards read of a mixture of experts, counted and as the formula expects them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.core.roofline import Roofline
from spec_lab.results.writer import Tables


def per_layer(forwards: pd.DataFrame, column: str = "experts") -> np.ndarray:  # [F]
    """Return the mean over layers of a column of counted experts; NaN where it is null or missing."""
    if column not in forwards:
        return np.full(len(forwards), np.nan)
    return np.array([np.mean(layers) if np.ndim(layers) else np.nan for layers in forwards[column]], dtype=float)


def expert_figures(tables: Tables, arm: str, roofline: Roofline | None) -> dict[str, float]:
    """Return means over an arm's forwards after the prefill whose experts were counted; empty where none were.

    Returns:
        ``read``: different experts that a forward reads in a layer, a mean over layers; ``accepted``, ``rejected``:
            those that kept rows and that rejected ones chose; ``rejected_only``: read for rejected rows alone, which is
            ``read`` - ``accepted``; ``rows``: of a forward; ``expected``: by ``ExpertWork.expected`` of as many rows
            (NaN without a roofline); ``effective``: by ``ExpertWork.fitted`` (NaN where no forward has
            two rows); ``forwards``: how many were counted, of ``decoded``.
    """
    forwards = tables.forwards[(tables.forwards["arm"] == arm) & ~tables.forwards["prefill"].astype(bool)]
    counted = forwards[~np.isnan(per_layer(forwards))]
    if not len(counted):
        return {}
    read, accepted, rejected = (per_layer(counted, f"experts{kind}") for kind in ("", "_accepted", "_rejected"))
    key, steps = ["group", "forward"], tables.steps[tables.steps["arm"] == arm]
    each = steps.assign(rows=steps["pending"] + steps["nodes"] + steps["computed_only"]).groupby(key)["rows"].sum()
    rows = each.reindex(pd.MultiIndex.from_frame(counted[key])).to_numpy(dtype=float)
    mixture = None if roofline is None else roofline.work.experts
    figures = {
        "read": read, "accepted": accepted, "rejected": rejected, "rejected_only": read - accepted, "rows": rows,
        "expected": rows * np.nan if mixture is None else mixture.expected(rows),
    }  # fmt: skip
    means = {name: ratio(values.sum(), len(values)) for name, values in figures.items()}
    effective = float("nan") if mixture is None or rows.max() <= 1 else mixture.fitted(rows, read)
    return means | {"effective": effective, "forwards": len(counted), "decoded": len(forwards)}
