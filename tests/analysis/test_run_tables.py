"""Tables of sweeps."""

import pandas as pd
import pytest

from spec_lab.analysis.run_tables import published_table

ROW = {
    "speedup_low": 1.4,
    "speedup_high": 1.6,
    "tau_pooled": 2.25,
    "draft_token_rate": 0.251,
    "metrics.distinct_2": 0.5,
}


def test_the_published_table_has_a_row_for_each_run_with_its_varied_options_and_no_baseline():
    varied = [{"run": "a", "proposer.depth": 2, "seed": 3}, {"run": "b", "proposer.depth": 8, "seed": 3}]
    runs = [{"arm": "ngram", "speedup": 1.5, **ROW, **run} for run in varied]
    base = [{"arm": "baseline", "proposer_name": "none", "tau_pooled": 1.0, **run} for run in varied]
    table = published_table(pd.DataFrame(runs + base), ["proposer.depth", "seed"])
    heads = ["proposer.depth", "speed-up [95 %]", "tau", "acceptance rate", "distinct_2 [95 %]"]
    assert [name for name, _ in table.columns] == heads
    assert [[cell.whole for cell in row][:4] for row in table.rows] == [
        [depth, "1.50 [1.40, 1.60]", "2.25", "25.1%"] for depth in ("2", "8")
    ]
    assert all(row[4].whole.startswith("0.5") for row in table.rows), "a metric of the user"


def test_a_sweep_without_these_figures_is_refused():
    with pytest.raises(ValueError, match="none of the figures speedup"):
        published_table(pd.DataFrame([{"run": "a", "arm": "x"}]), [])
