"""LaTeX tables."""

from spec_lab.analysis.latex import latex
from spec_lab.results.result import Cell, DataTable


def test_a_row_for_each_run_with_intervals():
    rows = [[Cell(depth), Cell("1.50", 1.5, "[1.40, 1.60]"), Cell("25.1%", 0.251)] for depth in ("2", "8")]
    text = latex(DataTable([("proposer.depth", False), ("speed-up [95 %]", True), ("acceptance rate", True)], rows))
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert lines[0] == r"proposer.depth & speed-up [95 \%] & acceptance rate \\"
    assert lines[1:] == [rf"{depth} & 1.50 [1.40, 1.60] & 25.1\% \\" for depth in (2, 8)]
    assert r"\begin{tabular}{lrr}" in text


def test_characters_of_options_that_latex_reads_are_escaped():
    text = latex(DataTable([("prompts.path", False)], [[Cell("a_b&c")], [Cell("50%$x{y}")]]))
    assert r"a\_b\&c" in text and r"50\%\$x\{y\}" in text
