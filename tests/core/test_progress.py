"""Progress on a terminal and in a log."""

import io
import re
import sys
from threading import Event

import pytest

from spec_lab.core import progress
from spec_lab.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def log(monkeypatch):
    """Make standard error a file, with a short time between lines; return it and an event that each line sets."""

    def start():
        monkeypatch.setattr(sys, "stderr", file := io.StringIO())
        monkeypatch.setattr(progress, "SECONDS", 0.001)
        printed, plain = Event(), Progress.print_line
        monkeypatch.setattr(Progress, "print_line", lambda bar: plain(bar) or printed.set())
        return file, printed

    return start


def test_a_log_has_a_line_with_what_is_done_of_how_much_the_rate_and_the_time_left(log):
    file, printed = log()
    with Progress(total=8, desc="run", unit="prompt") as bar:
        bar.update(2)
        bar.set_postfix_str("13 tokens/s")
        printed.clear()
        assert printed.wait(60)
    line = file.getvalue().splitlines()[-1]
    assert re.fullmatch(r"run: 2/8 prompts, .*prompt.*, [\d:]+ elapsed, [\d:]+ left, 13 tokens/s", line), line


def test_without_a_total_no_time_left_is_printed(log):
    file, printed = log()
    with Progress(desc="check", unit="reading") as bar:
        bar.update(1)
        printed.clear()
        assert printed.wait(60)
    line = file.getvalue().splitlines()[-1]
    assert re.fullmatch(r"check: 1 readings, .*reading.*, [\d:]+ elapsed", line), line


def test_units_of_an_earlier_run_are_done_and_do_not_count_for_the_rate():
    with Progress(total=8) as bar:
        bar.tick(6, kept=True)
        bar.tick(1)
        state = bar.format_dict
    assert (state["n"], state["n"] - state["initial"]) == (7, 1)


@pytest.mark.parametrize("done", [8.4, 12])
def test_more_work_than_expected_leaves_no_negative_time(log, done):
    file, printed = log()
    with Progress(total=8, desc="run", unit="part") as bar:
        bar.update(done)
        printed.clear()
        assert printed.wait(60)
    assert re.search(r"run: 8/8 parts, .* 00:00 left", file.getvalue()) and "-" not in file.getvalue()


def test_short_work_leaves_nothing_in_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    for _ in Progress(range(3), desc="short"):
        pass
    assert file.getvalue() == ""


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Progress(total=2, desc="run", unit="prompt") as bar:
        bar.update(2)
    assert bar.repeated is None and "100%" in screen.getvalue()


class Bar(Progress):
    """A bar of a terminal of 80 columns."""

    def __init__(self, **options):
        super().__init__(ncols=80, file=Terminal(), **options)


def test_what_stands_behind_a_bar_is_cut_so_that_the_bar_keeps_its_columns(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Bar(total=8, desc="custom", unit="answer") as bar:
        bar.update(4)
        bar.set_postfix_str("draft_chain " * 9)
        line = str(bar)
    assert len(line) == 80 and "|#####     |" in line.replace("█", "#") and line.endswith("…]")


def test_seconds_are_whole_and_have_no_rate(log, monkeypatch):
    file, printed = log()
    with Progress(total=240, desc="run", unit="second", clock=True) as bar:
        bar.update(42.0196)
        printed.clear()
        assert printed.wait(60)
    assert file.getvalue().splitlines()[-1] == "run: 42/240 seconds"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Bar(total=240, desc="run", clock=True) as bar:
        bar.update(42.0196)
        assert str(bar).endswith("| 42/240 seconds")
