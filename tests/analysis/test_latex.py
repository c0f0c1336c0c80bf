"""LaTeX tables of sweeps."""

import pandas as pd

from spec_lab.analysis.latex import latex_table

ROW = {"speedup_low": 1.4, "speedup_high": 1.6, "tau_pooled": 2.25, "draft_token_rate": 0.251}


def rows(*extra):
    speculative = [{"arm": "speculative", "proposer_name": "ngram", "speedup": 1.5, **ROW, **more} for more in extra]
    base = [{"arm": "baseline", "proposer_name": "none", "tau_pooled": 1.0, **more} for more in extra]
    return pd.DataFrame([*speculative, *base])


def test_a_row_for_each_run_with_its_varied_options_and_interval():
    table = rows({"run": "a", "proposer.depth": 2, "seed": 3}, {"run": "b", "proposer.depth": 8, "seed": 3})
    text = latex_table(table, ["proposer.depth", "seed"])
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert lines[0] == r"proposer.depth & speed-up [95 \%] & tau & acceptance rate \\"
    assert lines[1:] == [rf"{depth} & 1.50 [1.40, 1.60] & 2.25 & 25.1\% \\" for depth in (2, 8)]


def test_characters_of_options_that_latex_reads_are_escaped():
    table = rows({"run": "a", "prompts.path": "a_b&c"}, {"run": "b", "prompts.path": "50%$x{y}"})
    text = latex_table(table, ["prompts.path"])
    assert r"a\_b\&c" in text and r"50\%\$x\{y\}" in text
