"""Tables of results on a terminal: what does not fit is left out or continued, and nothing is cut."""

import io

import pytest
from rich.console import Console

from spec_lab.analysis.console import WIDE, show, show_table
from spec_lab.results.result import Cell, DataTable, Result, Section, cell, interval

VALUE = {"mean": 1.5, "low": 1.25, "high": 1.75}


def printed(table: DataTable, width: int, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_table("Title", table, console, verbose)
    text = console.file.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines()) and "…" not in text
    return text


def wide(columns: int) -> DataTable:
    names = [("arm", False), *((f"figure {number}", True) for number in range(columns))]
    return DataTable(names, [[Cell("medusa"), *[cell(VALUE)] * columns]])


@pytest.mark.parametrize(("columns", "intervals", "tables"), [(3, True, 1), (6, False, 1), (20, True, 5)])
def test_intervals_are_left_out_or_columns_continue_where_a_table_does_not_fit(columns, intervals, tables):
    text = printed(wide(columns), 80)
    assert ("1.50 [1.25, 1.75]" in text) is intervals and text.count("medusa") == tables
    assert text.count("1.50") == columns and text.count("continued") == tables - 1


@pytest.mark.parametrize("width", range(60, 100, 4))
def test_every_number_and_word_is_printed_at_any_width(width):
    """As the table of bounds: headings of several words over short numbers, and a last column that just fits."""
    headings = ["level", "tree", "verifier", "open lost: tree", "lost: draft", "own steps", "lost: verifier"]
    numbers = [Cell(f"{1234 + column}.5") for column in range(len(headings))]
    table = DataTable(
        [("verifier", False), *((heading, True) for heading in headings)], [[Cell("traversal"), *numbers]]
    )
    text = printed(table, width)
    assert all(cell.text in text for cell in numbers) and all(word in text for word in " ".join(headings).split())


def test_columns_of_more_are_shown_if_verbose_or_on_a_wide_terminal():
    table = DataTable([("arm", False), ("tau", True), ("cost", True)], [[Cell("a"), cell(2), cell(3)]], more=("cost",))
    assert "3.00" not in printed(table, 80)
    assert all("3.00" in text for text in (printed(table, 80, verbose=True), printed(table, WIDE)))


@pytest.mark.parametrize("verbose", [False, True])
def test_a_result_has_its_verdict_below_its_first_table_and_untrusted_text_as_it_is(verbose):
    console = Console(file=io.StringIO(), width=80)
    table = DataTable([("arm", False)], [[Cell("[red]a\x1b")]])
    arms = Section("Arms", "how", table, notes=["[bold]note"], details=["detail"], failures=["wrong"])
    show(Result("run", "lead", [arms, Section("Figures", "drawn")], ["Verdict: reliable."]), console, verbose)
    text = console.file.getvalue()
    order = ["run: lead\n", "[red]a␛", "how", "Verdict: reliable.", "[bold]note", "detail", "FAILS: wrong", "-v adds"]
    hidden = {"-v adds"} if verbose else {"how", "detail"}
    assert [part for part in order if part in text] == [part for part in order if part not in hidden]
    places = [text.index(part) for part in order if part not in hidden]
    assert places == sorted(places) and "drawn" not in text


@pytest.mark.parametrize("first", [True, False])
def test_a_verdict_stands_before_the_first_table_where_a_result_says_so(first):
    console = Console(file=io.StringIO(), width=80)
    arms = Section("Arms", "", DataTable([("arm", False)], [[Cell("medusa")]]))
    show(Result("run", "lead", [arms], ["Best reading: a."], verdict_first=first), console)
    text = console.file.getvalue()
    assert (text.index("Best reading") < text.index("medusa")) is first and text.count("Best reading") == 1


def test_an_option_is_broken_before_its_value():
    option = "proposer.norm_before_residual=true"
    columns = [("reading", False), ("meaning", False), *((f"figure {number}", True) for number in range(2))]
    row = [Cell(option), Cell("a meaning of many words " * 2), cell(VALUE), cell(VALUE)]
    text = printed(DataTable(columns, [row]), 72)
    assert option not in text and "norm_before_residual" in text and " =true" in text


def test_a_number_has_its_interval_and_what_is_not_known_is_empty():
    assert interval(VALUE) == "1.50 [1.25, 1.75]" and interval(VALUE | {"low": None}) == interval(1.5) == "1.50"
    assert [interval(unknown) for unknown in (None, float("nan"), {"mean": None, "low": 1.0, "high": 2.0})] == [""] * 3
    assert interval({"mean": 0.5, "low": 0.25, "high": 0.75}, ".0f", 1e3) == "500 [250, 750]"
